"""The command line: settings in, one function called, one line and an exit code out.

Exit codes: 0 done or asked to stop, 1 the work failed, 2 the command line or the settings make no sense.
"""

from __future__ import annotations

import inspect
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from app import __version__, logs
from app.errors import ConfigError, TandemError
from app.options import Option, options_of, parse
from app.settings import (
    ALL_SETTINGS,
    ChatSettings,
    CommonSettings,
    DevicesSettings,
    PullSettings,
    ServeSettings,
    WorkerSettings,
)

S = TypeVar("S", bound=CommonSettings)

#: The root of what Typer raises about a command line. Typer brings its own click or uses the installed one, by version.
_UsageError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

#: What a shell reports for a program that SIGINT ended.
_INTERRUPTED = 130

_EPILOG = (
    "Every flag has a twin in the environment (--ctx-size: TANDEM_CTX_SIZE) and in the file of --config "
    "(ctx-size, in the command's table). The command line wins, then the environment, then the file."
)

app = typer.Typer(
    name="tandem",
    help="One OpenAI-compatible endpoint, one model, any number of devices below it.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> NoReturn:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Do what the arguments say; returns the exit code. Every error ends as one line on stderr."""
    try:
        code = app(args=list(arguments), prog_name="tandem", standalone_mode=False)
    except _UsageError as error:
        message = getattr(error, "message", str(error))
        return _complain(f"{message[:1].lower()}{message[1:].rstrip('.')}; see tandem --help", code=2)
    except ConfigError as error:
        return _complain(str(error), code=2)
    except (TandemError, OSError, MemoryError) as error:
        return _complain(str(error) or type(error).__name__, code=1)
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except Exception as error:
        return _complain(f"internal error: {type(error).__name__}: {error}; -v -v shows where", code=1)
    return code if isinstance(code, int) else 0


def _complain(message: str, *, code: int) -> int:
    print("tandem:", *message.split(), file=sys.stderr)
    return code


def _command(name: str, settings_class: type[S], help: str) -> Callable[[Callable[[S], int]], Callable[[S], int]]:
    """Register a function of one settings object as a command that takes all flags of its class."""

    def register(action: Callable[[S], int]) -> Callable[[S], int]:
        options = options_of(settings_class)

        def command(**given: Any) -> int:
            settings = parse(settings_class, _typed(options, given), table=name, known=ALL_SETTINGS)
            logs.setup(as_json=settings.log_json, verbose=settings.verbose)
            try:
                return action(settings)
            except Exception:
                if settings.verbose > 1:
                    traceback.print_exc()
                raise

        parameters = [parameter for item in options for parameter in _parameters(item)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name, help=help, epilog=_EPILOG)(command)
        return action

    return register


def _parameters(item: Option) -> list[inspect.Parameter]:
    """The parameters Typer sees for one option: all default to None, so that what was typed can be told apart."""
    shown = _shown_default(item)
    help = f"{item.help} \\[{shown}]" if shown else item.help
    details: dict[str, Any] = {"help": help, "rich_help_panel": item.panel, "show_default": False}
    flags = list(item.flags)
    kind: Any = str | None
    if item.off_flag is not None:
        kind = bool | None
        flags[-1] += f"/{item.off_flag}" if item.off_flag else ""
    elif item.counts:
        kind = int | None
        details["count"] = True
    else:
        details["metavar"] = item.metavar
    option = typer.Option(*flags, **details)
    keyword = inspect.Parameter.KEYWORD_ONLY
    made = [inspect.Parameter(item.name, keyword, default=None, annotation=Annotated[kind, option])]
    if item.positional:
        argument = typer.Argument(metavar=item.positional, help=help, show_default=False)
        name = _positional_name(item)
        made.append(inspect.Parameter(name, keyword, default=None, annotation=Annotated[str | None, argument]))
    return made


def _positional_name(item: Option) -> str:
    return f"{item.name}_argument"


def _shown_default(item: Option) -> str:
    if item.off_flag is not None:
        return "on" if item.default else ""
    if item.counts or item.default is None or item.default == ():
        return ""
    if isinstance(item.default, bool):
        return str(int(item.default))
    return ",".join(item.default) if isinstance(item.default, tuple) else str(item.default)


def _typed(options: Sequence[Option], given: dict[str, Any]) -> dict[str, str]:
    """What was typed, as text by field name."""
    typed = {}
    for item in options:
        value, argument = given[item.name], given.get(_positional_name(item))
        if value is not None and argument is not None:
            raise ConfigError(f"the argument {item.positional} and {item.flag} say the same thing; give one of them")
        value = argument if value is None else value
        if value is not None and not (item.counts and value == 0):
            typed[item.name] = str(value)
    return typed


def _until_stopped(serve: Callable[[], int]) -> int:
    """Run a server; SIGINT and SIGTERM end it, and that is success."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return serve()
    except KeyboardInterrupt:
        return 0


@_command("serve", ServeSettings, "Serve a model over HTTP.")
def _serve(settings: ServeSettings) -> int:
    from app import bootstrap

    if settings.plan:
        return bootstrap.plan(settings)
    return _until_stopped(lambda: bootstrap.serve(settings))


@_command("worker", WorkerSettings, "Serve this machine's devices to another machine's server.")
def _worker(settings: WorkerSettings) -> int:
    from app import bootstrap

    return _until_stopped(lambda: bootstrap.worker(settings))


@_command("devices", DevicesSettings, "Show local devices, and those of workers.")
def _devices(settings: DevicesSettings) -> int:
    from app import bootstrap

    return bootstrap.devices(settings)


@_command("chat", ChatSettings, "Talk to a running server.")
def _chat(settings: ChatSettings) -> int:
    from app.chat import chat

    return chat(settings)


@_command("pull", PullSettings, "Fetch a model into the cache.")
def _pull(settings: PullSettings) -> int:
    from app import models_store

    print(models_store.fetch(settings.name))
    return 0


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise ConfigError("no command; see tandem --help")
