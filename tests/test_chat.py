"""The terminal chat, through a pipe, against a small server that speaks the protocol."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest

from app import chat, cli
from app.errors import TandemError
from app.settings import ChatSettings
from tests.fakes.http import http_server, send


@dataclass
class Server:
    """Streams `pieces` for every question; `tail` is what follows them."""

    pieces: tuple[str, ...] = ("Pa", "ris", ".")
    tail: str = "data: [DONE]\n\n"
    status: int = 200
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        self.keys.append(request.headers.get("authorization"))
        if request.path == "/v1/models":
            send(request, 200, b'{"data": [{"id": "toy"}]}')
            return
        self.bodies.append(json.loads(body))
        if self.status != 200:
            send(request, self.status, b'{"error": {"message": "the queue is full"}}')
            return
        deltas: list[dict[str, Any]] = [{"role": "assistant"}, *({"content": piece} for piece in self.pieces)]
        events = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas]
        send(request, 200, (": comment\n\n" + "".join(events) + self.tail).encode(), content_type="text/event-stream")


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with http_server(made.answer) as url:
        made.url = url
        yield made


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_conversation_remembers(server: Server, typed: Callable[[str], None], capsys: Any) -> None:
    typed("What is the capital of France?\n\nSure?\n/quit\nnot asked\n")
    settings = ChatSettings(url=server.url, system="Be brief.", max_tokens=9, temperature=0.0, key="k")
    assert chat.chat(settings) == 0
    assert capsys.readouterr().out == "Paris.\nParis.\n"
    system = {"role": "system", "content": "Be brief."}
    first = {"role": "user", "content": "What is the capital of France?"}
    then = [{"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Sure?"}]
    assert [body["messages"] for body in server.bodies] == [[system, first], [system, first, *then]]
    assert server.bodies[0] | {"messages": 0} == {"messages": 0, "stream": True, "max_tokens": 9, "temperature": 0.0}
    assert set(server.keys) == {"Bearer k"}


def test_clear_forgets(server: Server, typed: Callable[[str], None]) -> None:
    typed("one\n/clear\ntwo\n")
    assert chat.chat(ChatSettings(url=server.url)) == 0
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "two"}]


def test_a_stopped_answer_is_kept_as_far_as_it_came(server: Server) -> None:
    def show(text: str) -> None:
        shown.append(text)
        if text == "ris":
            raise KeyboardInterrupt

    shown: list[str] = []
    lines = iter(["question", None])
    with chat.httpx.Client(base_url=server.url + "/v1/") as http:
        talk = chat.Conversation(chat.Client(http), lambda: next(lines), show, lambda error: None, [])
        talk.run()
    assert shown == ["Pa", "ris", " ...", "\n"]
    assert talk.messages[-1] == {"role": "assistant", "content": "Paris"}


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("", "closed the stream before the answer was complete"),
        ('data: {"error": {"message": "worker lost"}}\n\n', "the server broke off: worker lost"),
        ("data: {\n\n", "an event that is no JSON"),
    ],
)
def test_broken_answers(server: Server, typed: Callable[[str], None], capsys: Any, tail: str, message: str) -> None:
    typed("question\n")
    server.tail = tail
    with pytest.raises(TandemError, match=message):
        chat.chat(ChatSettings(url=server.url))
    assert capsys.readouterr().out == "Paris."


def test_a_refusal_is_one_line(server: Server, typed: Callable[[str], None], capsys: Any) -> None:
    typed("question\n")
    server.status = 429
    assert cli.run(["chat", server.url]) == 1
    assert capsys.readouterr().err == "tandem: the server answered status 429: the queue is full\n"


def test_a_failed_turn_is_forgotten(server: Server) -> None:
    errors: list[str] = []
    server.status = 503
    lines = iter(["one", "two", None])
    with chat.httpx.Client(base_url=server.url + "/v1/") as http:
        talk = chat.Conversation(
            chat.Client(http), lambda: next(lines), lambda text: None, lambda e: errors.append(str(e)), []
        )
        talk.run()
    assert len(errors) == 2
    assert talk.messages == []


def test_nobody_there(capsys: Any) -> None:
    assert cli.run(["chat", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tandem: no answer from http://127.0.0.1:1/v1/: ")
    assert error.endswith("is `tandem serve` running there?\n")


@pytest.mark.parametrize("url", ["host:1", "http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_every_way_to_name_the_server(url: str) -> None:
    assert chat._base_url(url) == "http://host:1/v1/"


def test_the_model_s_name_stands_as_it_is(capsys: Any) -> None:
    with httpx.Client(base_url="http://[::1]:80") as http:
        chat._on_terminal(chat.Client(http), "tiny[bold]")
    assert "tiny[bold] at http://[::1]" in capsys.readouterr().out
