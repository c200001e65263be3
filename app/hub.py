"""Models from the Hugging Face hub: `hf:org/repo[:quant]`, over https, resumable, checked by size and sha256."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from app.errors import ConfigError, ModelError
from app.progress import Advance, transfer
from app.settings import hub_endpoint, hub_token

log = logging.getLogger(__name__)

#: Tried in this order when the reference names no quant.
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q8_0", "BF16", "F16", "F32")

#: A transfer ends after this many breaks in a row that brought less than `_PROGRESS_BYTES` each.
_TRIES = 5
_PROGRESS_BYTES = 1 << 20
_PAUSE_S = 1.0

_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class Reference:
    """A repository on the hub, and which of its files is meant; `quant` None: the hub's usual choice."""

    repo: str
    quant: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        found = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?::([\w.-]+))?", text)
        if found is None:
            raise ConfigError(f"{text!r} is not hf:org/repo or hf:org/repo:quant")
        return cls(found[1], found[2])


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of one commit of a repository. `sha256` None: the hub does not say."""

    url: str
    name: str
    size_bytes: int
    sha256: str | None


def fetch(reference: str, cache: Path, *, endpoint: str | None = None, pause_s: float = _PAUSE_S) -> Path:
    """The model's file (the first shard of a split) below `cache`; what is there already is not fetched again.

    Raises ConfigError for a reference that makes no sense, ModelError for everything that goes wrong on the way.
    """
    wanted = Reference.parse(reference)
    token = hub_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    folder = cache / "hub" / wanted.repo
    with httpx.Client(headers=headers, timeout=_TIMEOUT, follow_redirects=True) as client:
        try:
            listing = _list(client, wanted, endpoint or hub_endpoint())
        except Unreachable:
            if (local := _choose_local(wanted, folder)) is None:
                raise
            log.warning("the hub cannot be reached; using %s from an earlier pull", local)
            return local
        files = _choose(wanted, listing)
        places = [folder / file.name for file in files]
        for file, place in zip(files, places, strict=True):
            if not (place.is_file() and place.stat().st_size == file.size_bytes):
                _fetch_file(client, file, place, pause_s)
    return places[0]


class Unreachable(ModelError):
    """The hub did not answer."""


def _choose_local(wanted: Reference, folder: Path) -> Path | None:
    """What an earlier pull left, None if that is nothing."""
    there = sorted(folder.rglob("*.gguf"))
    files = [RemoteFile("", str(path.relative_to(folder)), path.stat().st_size, None) for path in there]
    return folder / _choose(wanted, files)[0].name if files else None


def _list(client: httpx.Client, wanted: Reference, endpoint: str) -> list[RemoteFile]:
    """The GGUF files of the repository's newest commit."""
    url = f"{endpoint}/api/models/{wanted.repo}"
    try:
        answer = client.get(url, params={"blobs": "true"})
        answer.raise_for_status()
        listing = answer.json()
        base = f"{endpoint}/{wanted.repo}/resolve/{listing['sha']}"
        found = [item for item in listing["siblings"] if item["rfilename"].endswith(".gguf")]
        return [_remote_file(base, item) for item in found]
    except httpx.HTTPStatusError as error:
        raise ModelError(_refusal(wanted, error.response.status_code)) from error
    except httpx.HTTPError as error:
        raise Unreachable(f"cannot reach {url}: {_reason(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{url} answered something that is no listing of a repository: {error!r}") from error


def _remote_file(base: str, item: dict[str, Any]) -> RemoteFile:
    name = str(item["rfilename"])
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"a file is called {name!r}")
    sha256 = (item.get("lfs") or {}).get("sha256")
    return RemoteFile(f"{base}/{name}", name, int(item["size"]), str(sha256) if sha256 else None)


def _refusal(wanted: Reference, status: int) -> str:
    if status in (401, 403):
        return f"the hub does not give {wanted.repo} to everyone (status {status}); accept its terms and set HF_TOKEN"
    if status == 404:
        return f"the hub has no repository {wanted.repo}; check the name"
    return f"the hub answered status {status} for {wanted.repo}; try again later"


def _choose(wanted: Reference, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The file of the wanted quant, or all its shards in order."""
    models = sorted((file for file in files if "mmproj" not in file.name.lower()), key=lambda file: file.name)
    for quant in [wanted.quant] if wanted.quant else _PREFERRED:
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", re.IGNORECASE)
        if matching := [file for file in models if pattern.search(file.name)]:
            return _shards(wanted, matching)
    if wanted.quant is None and models:
        return _shards(wanted, models)
    names = ", ".join(file.name for file in models) or "none"
    raise ModelError(f"{wanted.repo} has no GGUF file for {wanted.quant or 'any quant'}; its GGUF files: {names}")


def _shards(wanted: Reference, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    first = files[0]
    shard = _SHARD.search(first.name)
    if shard is None:
        return [first]
    stem = first.name[: shard.start()]
    together = [file for file in files if file.name.startswith(stem) and _SHARD.search(file.name, len(stem))]
    if len(together) != int(shard[2]):
        raise ModelError(f"{wanted.repo} has {len(together)} of the {int(shard[2])} shards of {stem}")
    return together


def _fetch_file(client: httpx.Client, file: RemoteFile, place: Path, pause_s: float) -> None:
    """Fetch into a .part file, taking up what is there; only a whole and sound file gets its name."""
    part = place.with_name(place.name + ".part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with transfer(f"pulling {place.name}", file.size_bytes, done_bytes=_size(part)) as advance:
            _with_tries(client, file, part, advance, pause_s)
        _check(file, part)
        os.replace(part, place)
    except OSError as error:
        raise ModelError(f"cannot keep {place.name} in {place.parent}: {error}") from error


def _with_tries(client: httpx.Client, file: RemoteFile, part: Path, advance: Advance, pause_s: float) -> None:
    """Take the transfer up again where it broke off, as long as it gets on."""
    failed = 0
    while failed < _TRIES:
        before_bytes = _size(part)
        try:
            return _continue(client, file, part, advance)
        except httpx.HTTPStatusError as error:
            raise ModelError(f"the hub answered status {error.response.status_code} for {file.name}") from error
        except httpx.HTTPError as error:
            reason = _reason(error)
        failed = 0 if _size(part) - before_bytes >= _PROGRESS_BYTES else failed + 1
        time.sleep(pause_s)
    raise ModelError(
        f"the transfer of {file.name} broke off {_TRIES} times in a row, last: {reason}; "
        f"what came is kept, run the same command again"
    )


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _continue(client: httpx.Client, file: RemoteFile, part: Path, advance: Advance) -> None:
    """Append what is missing. A server that cannot continue sends everything, and we begin anew."""
    have_bytes = _size(part)
    if have_bytes == file.size_bytes:
        return
    if have_bytes > file.size_bytes:
        part.unlink()
        advance(-have_bytes)
        have_bytes = 0
    headers = {"accept-encoding": "identity"} | ({"range": f"bytes={have_bytes}-"} if have_bytes else {})
    with client.stream("GET", file.url, headers=headers) as answer:
        answer.raise_for_status()
        continues = answer.headers.get("content-range", "").startswith(f"bytes {have_bytes}-")
        if have_bytes and not continues:
            advance(-have_bytes)
        with part.open("ab" if have_bytes and continues else "wb") as out:
            for chunk in answer.iter_bytes():  # as it comes: asked for pieces of a size, httpx drops a broken last one
                out.write(chunk)
                advance(len(chunk))


def _check(file: RemoteFile, part: Path) -> None:
    """Raises ModelError, and removes the file, if it is not what the hub promised."""
    got_bytes = part.stat().st_size
    if got_bytes != file.size_bytes:
        part.unlink()
        raise ModelError(f"{file.name} came with {got_bytes} bytes, the hub promised {file.size_bytes}; try again")
    if file.sha256 is None:
        return
    with part.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != file.sha256:
        part.unlink()
        raise ModelError(f"{file.name} has sha256 {digest}, the hub promised {file.sha256}; try again")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
