"""`hf:` models against a small hub of our own: choice of files, resuming, and everything that can be wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from app import hub
from app.errors import ConfigError, ModelError
from tests.fakes.http import http_server, send

CONTENT = bytes(range(256)) * 1000


@dataclass
class Hub:
    """What the server has, and how it misbehaves.

    `cut_bytes`: every answer ends after so many. `ranges`: whether it can begin in the middle.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    status: int = 200
    ranges: bool = True
    cut_bytes: int | None = None
    lie_sha256: str | None = None
    lie_size: int | None = None
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        path = request.path.partition("?")[0]
        self.seen.append((path, request.headers.get("range")))
        if self.status != 200:
            send(request, self.status, b"{}")
        elif path == "/api/models/org/repo":
            send(request, 200, json.dumps(self._listing()).encode())
        else:
            self._send_file(request, self.files[path.removeprefix("/org/repo/resolve/c0ffee/")])

    def _listing(self) -> dict[str, object]:
        siblings = [{"rfilename": "README.md", "size": 1}]
        for name, content in self.files.items():
            sha256 = self.lie_sha256 or hashlib.sha256(content).hexdigest()
            size = self.lie_size or len(content)
            siblings.append({"rfilename": name, "size": size, "lfs": {"sha256": sha256, "size": size}})
        return {"sha": "c0ffee", "siblings": siblings}

    def _send_file(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        wanted = request.headers.get("range")
        headers = {}
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            headers["content_range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content = content[start:]
        request.send_response(206 if headers else 200)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("content-length", str(len(content)))
        request.end_headers()
        request.wfile.write(content[: self.cut_bytes])


@pytest.fixture
def server() -> Iterator[Hub]:
    made = Hub()
    with http_server(made.answer) as url:
        made.url = url
        yield made


def fetch(server: Hub, cache: Path, reference: str = "hf:org/repo") -> Path:
    return hub.fetch(reference, cache, endpoint=server.url, pause_s=0)


def test_the_usual_quant_is_taken_and_not_fetched_twice(server: Hub, tmp_path: Path) -> None:
    server.files = {"m-Q8_0.gguf": b"8", "m-Q4_K_M.gguf": CONTENT, "mmproj-Q4_K_M.gguf": b"eyes"}
    place = fetch(server, tmp_path)
    assert place == tmp_path / "hub" / "org" / "repo" / "m-Q4_K_M.gguf"
    assert place.read_bytes() == CONTENT
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    server.seen.clear()
    assert fetch(server, tmp_path) == place
    assert [path for path, _ in server.seen] == ["/api/models/org/repo"]


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        ("Q8_0", "m-Q8_0.gguf"),
        ("q4_k_s", "m.Q4_K_S.gguf"),
        ("Q4_K", "m-Q4_K.gguf"),
        ("f16", "sub/m-F16.gguf"),
    ],
)
def test_a_quant_is_matched_as_a_whole_word(server: Hub, tmp_path: Path, quant: str, expected: str) -> None:
    names = ["m-Q8_0.gguf", "m.Q4_K_S.gguf", "m-Q4_K_M.gguf", "m-Q4_K.gguf", "sub/m-F16.gguf", "m-BF16.gguf"]
    server.files = {name: name.encode() for name in names}
    assert fetch(server, tmp_path, f"hf:org/repo:{quant}").read_bytes() == expected.encode()


def test_all_shards_come_and_the_first_is_named(server: Hub, tmp_path: Path) -> None:
    server.files = {f"m-Q4_K_M-0000{i}-of-00003.gguf": str(i).encode() for i in (2, 3, 1)}
    place = fetch(server, tmp_path)
    assert place.read_bytes() == b"1"
    assert sorted(path.read_bytes() for path in place.parent.iterdir()) == [b"1", b"2", b"3"]


def test_a_broken_transfer_is_continued(server: Hub, tmp_path: Path) -> None:
    server.files = {"m.gguf": CONTENT}
    server.cut_bytes = 100_000
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert [asked for _, asked in server.seen[1:]] == [None, "bytes=100000-", "bytes=200000-"]


def test_a_later_pull_continues_an_earlier_one(server: Hub, tmp_path: Path) -> None:
    server.files = {"m.gguf": CONTENT}
    server.cut_bytes = 10
    with pytest.raises(ModelError, match="broke off 5 times.*run the same command again"):
        fetch(server, tmp_path)
    server.cut_bytes = None
    server.seen.clear()
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert [asked for _, asked in server.seen[1:]] == ["bytes=50-"]


def test_a_server_that_cannot_continue_sends_all_again(server: Hub, tmp_path: Path) -> None:
    server.files = {"m.gguf": CONTENT}
    server.ranges = False
    part = tmp_path / "hub" / "org" / "repo" / "m.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"something else")
    assert fetch(server, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("rest", [b"x" * len(CONTENT), b"x" * (len(CONTENT) + 1)])
def test_a_bad_rest_of_an_earlier_pull_does_not_become_the_model(server: Hub, tmp_path: Path, rest: bytes) -> None:
    server.files = {"m.gguf": CONTENT}
    part = tmp_path / "hub" / "org" / "repo" / "m.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(rest)
    if len(rest) == len(CONTENT):
        with pytest.raises(ModelError, match="has sha256"):
            fetch(server, tmp_path)
    assert fetch(server, tmp_path).read_bytes() == CONTENT


def test_content_that_does_not_hash_right_is_refused(server: Hub, tmp_path: Path) -> None:
    server.files = {"m.gguf": CONTENT}
    server.lie_sha256 = "0" * 64
    with pytest.raises(ModelError, match="the hub promised 0000"):
        fetch(server, tmp_path)
    assert list((tmp_path / "hub" / "org" / "repo").iterdir()) == []


def test_content_of_another_size_is_refused(server: Hub, tmp_path: Path) -> None:
    server.files = {"m.gguf": CONTENT}
    server.lie_size = len(CONTENT) + 5
    with pytest.raises(ModelError, match=r"came with 256000 bytes, the hub promised 256005"):
        fetch(server, tmp_path)


@pytest.mark.parametrize(
    ("status", "message"), [(404, "no repository org/repo"), (401, "HF_TOKEN"), (500, "status 500")]
)
def test_refusals(server: Hub, tmp_path: Path, status: int, message: str) -> None:
    server.status = status
    with pytest.raises(ModelError, match=message):
        fetch(server, tmp_path)


def test_a_listing_cannot_write_outside_its_folder(server: Hub, tmp_path: Path) -> None:
    server.files = {"../../../evil.gguf": b"x"}
    with pytest.raises(ModelError, match="no listing"):
        fetch(server, tmp_path)


@pytest.mark.parametrize(
    ("files", "reference", "message"),
    [
        ({}, "hf:org/repo", "no GGUF file for any quant; its GGUF files: none"),
        ({"m-Q8_0.gguf": b""}, "hf:org/repo:Q4_0", "no GGUF file for Q4_0; its GGUF files: m-Q8_0.gguf"),
        ({"m-00001-of-00002.gguf": b""}, "hf:org/repo", "has 1 of the 2 shards"),
    ],
)
def test_nothing_to_choose(server: Hub, tmp_path: Path, files: dict[str, bytes], reference: str, message: str) -> None:
    server.files = files
    with pytest.raises(ModelError, match=message):
        fetch(server, tmp_path, reference)


@pytest.mark.parametrize("reference", ["hf:", "hf:org", "hf:a/b/c", "hf:a/b:", "hf:../b:c d"])
def test_references_that_make_no_sense(tmp_path: Path, reference: str) -> None:
    with pytest.raises(ConfigError, match="is not hf:org/repo"):
        hub.fetch(reference, tmp_path)


def test_without_the_hub_an_earlier_pull_serves(server: Hub, tmp_path: Path) -> None:
    server.files = {"m-Q4_0.gguf": CONTENT}
    place = fetch(server, tmp_path)
    gone = "http://127.0.0.1:1"
    assert hub.fetch("hf:org/repo:Q4_0", tmp_path, endpoint=gone) == place
    with pytest.raises(ModelError, match="cannot reach"):
        hub.fetch("hf:org/other", tmp_path, endpoint=gone)
