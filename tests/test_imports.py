"""The import directions of the house: every arrow between rooms is checked, and pure rooms stay pure."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]

#: Room -> what of `app` it may import. The first room that holds a module decides; `app.x` covers all below it.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "app.units": (),
    "app.errors": ("app.units",),
    "app.logs": (),
    "app.options": ("app.errors",),
    "app.settings": ("app.errors", "app.options"),
    "app.progress": (),
    "app.hub": ("app.errors", "app.progress", "app.settings"),
    "app.models_store": ("app.errors", "app.hub", "app.settings"),
    "app.bootstrap": ("app",),
    "app.fleet": ("app.engine", "app.rpc", "app.errors", "app.logs"),
    "app.recovery": ("app.engine", "app.rpc", "app.fleet", "app.errors", "app.logs"),
    "app.report": ("app.engine", "app.units"),
    "app.http_server": ("app.errors", "app.logs"),
    "app.listening": ("app.errors", "app.logs"),
    "app.cli": ("app",),
    "app.chat": ("app.errors", "app.settings"),
    "app.local": ("app.errors", "app.logs", "app.models_store", "app.settings"),
    "app.__main__": ("app.cli",),
    "app.engine": ("app.engine", "app.errors", "app.logs", "app.units"),
    "app.api": ("app.api", "app.engine", "app.errors", "app.logs"),
    "app.rpc": (
        "app.rpc",
        "app.errors",
        "app.logs",
        "app.engine.connection",
        "app.engine.device",
        "app.engine.program",
        "app.engine.route",
        "app.engine.rows",
        "app.engine.graph",
        "app.engine.ggml",
        "app.engine.gguf",
        "app.engine.lane",
        "app.engine.mask",
        "app.engine.opcheck",
        "app.engine.kernels.hash",
    ),
}

PURE = ("app.engine.serving", "app.engine.text", "app.engine.graph", "app.engine.placement", "app.engine.plan")

#: Sockets, threads, processes, clocks, event loops, devices: what a pure room must be given, if it needs it at all.
IMPURE = frozenset(
    "asyncio anyio concurrent cupy httpx http multiprocessing queue select selectors signal socket ssl subprocess "
    "threading time urllib uvicorn".split()
)

#: The pure modules that handle logits or token arrays; everywhere else in the pure rooms numpy is a smell.
NUMPY_ALLOWED = ("app.engine.serving", "app.engine.text")

#: Environment variables are read in one place, so that an unknown or bad one can be refused there.
READS_ENVIRONMENT = ("app.settings", "app.options")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module. `lazy` if a function body holds the statement."""

    module: str
    line: int
    lazy: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((REPO / "app").rglob("*.py"))}


def imports_of(tree: ast.AST, *, lazy: bool = False) -> Iterator[Import]:
    """Every import statement. `from app.a import b` is `app.a.b` where that is a module, else `app.a`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield Import(name if name in MODULES else base, node.lineno, lazy)
        yield from imports_of(node, lazy=lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def wrong_arrows(module: str, source: str) -> list[str]:
    """One line per import of `module` that the tables above forbid."""
    room = next((room for room in MAY_IMPORT if within(module, (room,))), None)
    found = []
    for imported in imports_of(ast.parse(source)):
        top = imported.module.partition(".")[0]
        where = f"{module}:{imported.line} imports {imported.module}"
        if top == "":
            found.append(f"{where}: imports are absolute here")
        elif top == "app" and room is not None and not within(imported.module, (*MAY_IMPORT[room], module)):
            found.append(f"{where}: {room} may import {', '.join(MAY_IMPORT[room]) or 'nothing of app'}")
        elif within(module, PURE) and top in IMPURE:
            found.append(f"{where}: this room is pure")
        elif within(module, PURE) and top == "numpy" and not within(module, NUMPY_ALLOWED):
            found.append(f"{where}: this module plans, it does not compute")
        elif top == "cupy" and not imported.lazy:
            found.append(f"{where}: cupy is imported lazily, so that a machine without a GPU can start")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_arrows(module: str) -> None:
    assert wrong_arrows(module, MODULES[module].read_text()) == []


def test_every_module_has_a_room() -> None:
    assert [name for name in MODULES if name != "app" and not within(name, tuple(MAY_IMPORT))] == []


def test_cupy_is_imported_in_one_file() -> None:
    importers = {
        name
        for name, path in MODULES.items()
        for imported in imports_of(ast.parse(path.read_text()))
        if imported.module.partition(".")[0] == "cupy"
    }
    assert len(importers) <= 1, importers


@pytest.mark.parametrize("module", MODULES)
def test_environment_is_read_in_one_place(module: str) -> None:
    names = {"environ", "environb", "getenv"}
    found = [
        f"{module}:{node.lineno}"
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Attribute) and node.attr in names
    ]
    assert module in READS_ENVIRONMENT or found == []


@pytest.mark.parametrize("module", [name for name in MODULES if not name.endswith("__main__")])
def test_every_module_imports_without_a_gpu(module: str) -> None:
    importlib.import_module(module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("app.api.chat", "from app.rpc import wire"),
        ("app.rpc.device", "import app.api.schemas"),
        ("app.rpc.worker", "from app.engine import engine"),
        ("app.engine.engine", "from app.api.app import create_app"),
        ("app.engine.executor", "def f():\n    from app.rpc.device import RpcDevice"),
        ("app.engine.serving.scheduler", "import threading"),
        ("app.engine.text.stop", "from time import monotonic"),
        ("app.engine.placement", "import numpy as np"),
        ("app.engine.devices.cuda", "import cupy"),
        ("app.engine.plan", "from . import graph"),
        ("app.errors", "import app.logs"),
    ],
)
def test_a_wrong_arrow_is_seen(module: str, source: str) -> None:
    assert len(wrong_arrows(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("app.api.chat", "from app.engine.service import InferenceService"),
        ("app.rpc.device", "from app.engine.device import Device"),
        ("app.engine.devices.cuda", "def f():\n    import cupy"),
        ("app.engine.serving.sampler", "import numpy as np"),
        ("app.bootstrap", "import app.rpc, app.api, threading"),
    ],
)
def test_a_right_arrow_passes(module: str, source: str) -> None:
    assert wrong_arrows(module, source) == []
