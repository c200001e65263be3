"""`tandem chat`: a conversation with a running server in the terminal, or line by line through a pipe."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from app.errors import TandemError
from app.settings import ChatSettings

#: A long prompt may be silent for long; the server's comments keep the stream alive.
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)

_HELP = "/clear forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer"

Message = dict[str, str]


class ChatError(TandemError):
    """The server cannot be reached or refused; the message says why."""


@dataclass(slots=True)
class Client:
    """One server, as the chat needs it. `http` has the base URL and the key."""

    http: httpx.Client
    parameters: dict[str, Any] = field(default_factory=dict)

    def model(self) -> str:
        """The name of the model that answers."""
        try:
            answer = self.http.get("models")
            _raise_refusal(answer)
            return str(answer.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ChatError(f"{self.http.base_url} does not answer like an OpenAI-compatible server") from error

    def answer(self, messages: list[Message]) -> Generator[str, None, None]:
        """The answer's text, piece by piece. Closing the iterator stops the server's work on it."""
        body = {"messages": messages, "stream": True, **self.parameters}
        try:
            with self.http.stream("POST", "chat/completions", json=body) as answer:
                if answer.is_error:
                    answer.read()
                _raise_refusal(answer)
                for event in _events(answer.iter_lines()):
                    if text := _text_of(event):
                        yield text
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.HTTPError) -> ChatError:
        reason = str(error) or type(error).__name__
        return ChatError(f"no answer from {self.http.base_url}: {reason}; is `tandem serve` running there?")


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event up to [DONE]. Raises ChatError for an error event or a broken stream."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ChatError(f"the server sent an event that is no JSON: {data[:80]!r}") from error
        if "error" in event:
            raise ChatError(_error_message(event, "the server broke off"))
        yield event
    raise ChatError("the server closed the stream before the answer was complete")


def _text_of(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return str(delta.get("content") or "")


def _raise_refusal(answer: httpx.Response) -> None:
    if answer.is_error:
        try:
            body = answer.json()
        except ValueError:
            body = None
        raise ChatError(_error_message(body, f"the server answered status {answer.status_code}"))


def _error_message(body: Any, otherwise: str) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return f"{otherwise}: {message}" if message else otherwise


@dataclass(slots=True)
class Conversation:
    """What was said so far, and where it is shown. `ask` returns the next line, or None at the end."""

    client: Client
    ask: Callable[[], str | None]
    show: Callable[[str], None]
    fail: Callable[[ChatError], None]
    messages: list[Message]
    system: list[Message] = field(default_factory=list)

    def run(self) -> None:
        """Until /quit or the end of input."""
        while (line := self.ask()) is not None:
            match line.strip():
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/clear":
                    self.messages.clear()
                case "/help":
                    self.show(f"{_HELP}\n")
                case said:
                    self._turn(said)

    def _turn(self, said: str) -> None:
        """One question and its answer. A failed turn is forgotten, a stopped one keeps what was said."""
        self.messages.append({"role": "user", "content": said})
        pieces: list[str] = []
        stream = self.client.answer([*self.system, *self.messages])
        try:
            with contextlib.closing(stream):
                for piece in stream:
                    pieces.append(piece)
                    self.show(piece)
        except KeyboardInterrupt:
            self.show(" ...")
        except ChatError as error:
            self.messages.pop()
            self.fail(error)
            return
        self.show("\n")
        self.messages.append({"role": "assistant", "content": "".join(pieces)})


def chat(settings: ChatSettings) -> int:
    """Talk until the user has had enough. Returns the exit code."""
    headers = {"authorization": f"Bearer {settings.key}"} if settings.key else {}
    with httpx.Client(base_url=_base_url(settings.url), headers=headers, timeout=_TIMEOUT) as http:
        client = Client(http, _parameters(settings))
        model = client.model()
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        talk = _on_terminal(client, model) if interactive else _through_pipe(client)
        if settings.system:
            talk.system.append({"role": "system", "content": settings.system})
        try:
            talk.run()
        except KeyboardInterrupt:
            print()
    return 0


def _base_url(url: str) -> str:
    """`host:port`, a server's URL or its /v1, as the base of our paths."""
    full = url if "://" in url else f"http://{url}"
    return f"{full.rstrip('/').removesuffix('/v1')}/v1/"


def _parameters(settings: ChatSettings) -> dict[str, Any]:
    given = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
    return {name: value for name, value in given.items() if value is not None}


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _on_terminal(client: Client, model: str) -> Conversation:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (editing and history for input())
    console = Console(highlight=False)
    console.print(f"[bold]{escape(model)}[/] at {escape(str(client.http.base_url))}", _HELP, sep="\n", style="dim")

    def ask() -> str | None:
        try:
            return console.input("[bold green]>[/] ")
        except EOFError:
            print()
            return None

    def fail(error: ChatError) -> None:
        console.print(f"{error}", style="red", markup=False)

    return Conversation(client, ask, _write, fail, [])


def _through_pipe(client: Client) -> Conversation:
    """Every line of stdin is one message; a refusal ends it all."""

    def fail(error: ChatError) -> None:
        raise error

    return Conversation(client, lambda: sys.stdin.readline() or None, _write, fail, [])
