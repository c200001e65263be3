"""The command line from the outside: what reaches the functions behind it, exit codes, one line per error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import app
from app import __version__, cli
from app.errors import ConfigError, ModelError
from app.settings import DevicesSettings, ServeSettings, WorkerSettings

Seen = list[tuple[str, Any]]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seen]:
    """Puts a bootstrap of its own behind the command line; returns what it was asked."""

    def install(outcome: int | BaseException = 0) -> Seen:
        seen: Seen = []
        fake = types.ModuleType("app.bootstrap")

        def answer(name: str) -> Callable[[Any], int]:
            def called(settings: Any) -> int:
                seen.append((name, settings))
                if isinstance(outcome, BaseException):
                    raise outcome
                return outcome

            return called

        for name in ("serve", "worker", "plan", "devices"):
            setattr(fake, name, answer(name))
        monkeypatch.setitem(sys.modules, "app.bootstrap", fake)
        monkeypatch.setattr(app, "bootstrap", fake, raising=False)
        return seen

    return install


@pytest.mark.parametrize(
    ("arguments", "name", "settings"),
    [
        ("serve", "serve", ServeSettings()),
        ("serve m.gguf -ts 3,1 -ngl 99 -np 2 -fa on --jinja", "serve", ServeSettings(
            model="m.gguf", tensor_split=(3.0, 1.0), n_gpu_layers="99", parallel=2, flash_attn="on")),
        ("serve -m m.gguf -dev CPU,RPC0 --rpc a:1,b:2 -ub 64 -b 128", "serve", ServeSettings(
            model="m.gguf", device=("CPU", "RPC0"), rpc=("a:1", "b:2"), ubatch_size=64, batch_size=128)),
        ("serve -hf o/r --no-cache-prompt -ctk Q8_0 -to 3", "serve", ServeSettings(
            hf_repo="o/r", cache_prompt=False, cache_type_k="q8_0", timeout=3.0)),
        ("serve --plan -t4", "plan", ServeSettings(plan=True, threads=4)),
        ("worker -H 0.0.0.0 -p 0 -v -v", "worker", WorkerSettings(host="0.0.0.0", port=0, verbose=2)),
        ("worker --mem 512 --max-message 8 --model-dir / --cache-dir c --cache-size 2", "worker", WorkerSettings(
            mem=512 << 20, max_message=8, model_dir=Path("/"), cache_dir=Path("c"), cache_size=2 << 30)),
        ("devices --rpc a:1", "devices", DevicesSettings(rpc=("a:1",))),
        (f"devices --rpc a:1 --rpc-token-file {__file__}", "devices", DevicesSettings(
            rpc=("a:1",), rpc_token_file=Path(__file__))),
        (f"serve --rpc-token-file {__file__}", "serve", ServeSettings(rpc_token_file=Path(__file__))),
        (f"worker --rpc-token-file {__file__}", "worker", WorkerSettings(rpc_token_file=Path(__file__))),
        (f"worker --token-file {__file__}", "worker", WorkerSettings(rpc_token_file=Path(__file__))),
    ],
)  # fmt: skip
def test_what_reaches_the_functions(behind: Callable[..., Seen], arguments: str, name: str, settings: object) -> None:
    seen = behind()
    assert cli.run(arguments.split()) == 0
    assert seen == [(name, settings)]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "tandem: no command; see tandem --help"),
        ("fly", "tandem: no such command 'fly'"),
        ("serve --mteal", "tandem: no such option: --mteal"),
        ("serve --port", "tandem: option '--port' requires an argument"),
        ("serve --port x", "tandem: --port: 'x' is not a whole number"),
        ("serve a b", "tandem: got unexpected extra argument"),
        ("serve a -m b", "tandem: the argument MODEL and --model say the same thing"),
        ("worker --rpc-token-file /no/such/file", "tandem: --rpc-token-file: there is no file /no/such/file"),
        ("worker --cache-size 5", "tandem: --cache-size is the size of --cache-dir, and none is named"),
        ("serve --rpc http://a:1", "tandem: --rpc: 'http://a:1' has a scheme; write host:port alone"),
        ("worker --protocol 5.1", "tandem: --protocol: '5.1' is unknown; use 7.0 or 6.0"),
        ("pull nothing", "tandem: no model is called 'nothing'; known names: smollm2"),
    ],
)
def test_usage_errors(behind: Callable[..., Seen], capsys: Any, arguments: str, line: str) -> None:
    seen = behind()
    assert cli.run(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(line)
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert seen == []


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("no"), 2, "tandem: no\n"),
        (ModelError("broken\nfile"), 1, "tandem: broken file\n"),
        (OSError(98, "Address already in use"), 1, "tandem: [Errno 98] Address already in use\n"),
        (MemoryError(), 1, "tandem: MemoryError\n"),
        (KeyError("x"), 1, "tandem: internal error: KeyError: 'x'; -v -v shows where\n"),
        (KeyboardInterrupt(), 0, ""),
    ],
)
def test_failures(behind: Callable[..., Seen], capsys: Any, error: BaseException, code: int, line: str) -> None:
    behind(error)
    assert cli.run(["serve"]) == code
    assert capsys.readouterr().err == line


def test_tracebacks_when_asked_for(behind: Callable[..., Seen], capsys: Any) -> None:
    behind(ModelError("broken"))
    assert cli.run(["serve", "-v", "-v"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_code_of_the_function_is_the_exit_code(behind: Callable[..., Seen]) -> None:
    behind(3)
    assert cli.run(["devices"]) == 3


def test_an_interrupted_command_that_is_no_server(behind: Callable[..., Seen]) -> None:
    behind(KeyboardInterrupt())
    assert cli.run(["devices"]) == 130


def test_version(capsys: Any) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("command", ["serve", "worker", "devices", "chat", "pull"])
def test_help(capsys: Any, command: str) -> None:
    assert cli.run([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert "TANDEM_CTX_SIZE" in told
    assert not re.search(r"\[(True|False)\]", told)


_WAITING_SERVER = """
import signal, sys, types, app
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs, and so tests in one, without
fake = types.ModuleType("app.bootstrap")
def wait(settings):
    print("up", flush=True)
    while True:
        signal.pause()
fake.serve = fake.worker = wait
sys.modules["app.bootstrap"] = app.bootstrap = fake
from app import cli
sys.argv = ["tandem", "{command}"]
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_signal_is_a_good_end(command: str, number: signal.Signals) -> None:
    script = _WAITING_SERVER.replace("{command}", command)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, b"")
