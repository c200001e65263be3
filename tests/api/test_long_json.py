"""Long bodies are read as short ones are, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from app.api import body
from app.api.body import parse_json
from app.api.long_json import DEEPEST, RUN_CHARS, parse_long
from tests.api.support import CHAT, COMPLETIONS, HI, is_error

RIGHT = [
    "{}", "[]", "0", "-1.5e3", '""', "true", "null", " [ 1 , 2 ] ",
    '{"a": [1, {"b": []}], "c": "\\u00e9\\n\\ud83d\\ude42"}', "1e999",
    '[1, 2, "x", 3, [4, 5.5], {}, null]', '{"a": 1, "a": 2}', "[" * DEEPEST + "]" * DEEPEST, "[-0, 1E2, 0.5]",
    "[" + "1," * RUN_CHARS + "2]", '"漢🙂"', "[[1,2],[3,4]]", "[1, 2, true]", "\ufeff[1]",
]  # fmt: skip
WRONG = [
    "", "{", "[", "[1", "[1,", "[1,]", "[,1]", "[1 2]", '{"a"}', '{"a":}', '{"a":1,}', "{1:2}", "01", "1.", ".5", "+1",
    "1e", "-", "NaN", "[Infinity]", "-Infinity", "nul", "[1] 2", '"a', '"\\x"', '"\n"', '"\\ud800"',
    "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "[01, 2]", "[1.,2]", "[1,,2]", "[1, 2,, 3]", "'a'", "[--1,2]",
]  # fmt: skip


@pytest.mark.parametrize("text", RIGHT, ids=lambda text: text[:20])
def test_reads_what_the_short_way_reads(text: str) -> None:
    data = text.encode()
    assert repr(parse_long(data.removeprefix(b"\xef\xbb\xbf"))) == repr(parse_json(data))


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:20])
def test_refuses_what_the_short_way_refuses(text: str) -> None:
    for parse in (parse_json, parse_long):
        with pytest.raises(json.JSONDecodeError):
            parse(text.encode())


def test_broken_bytes() -> None:
    with pytest.raises(json.JSONDecodeError, match="byte 2"):
        parse_long(b'["\xff"]')


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 5)
    if kind < 5:
        return [rng.randrange(-99, 99), rng.random() * 1e6, 'a "b"\\\n漢🙂', None, rng.random() < 0.5][kind]
    if kind < 7:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    return {str(i): random_value(rng, depth - 1) for i in range(rng.randrange(5))}


def test_random_values_and_random_damage() -> None:
    rng = random.Random(1)
    for _ in range(200):
        value = random_value(rng, 4)
        for text in (json.dumps(value), json.dumps(value, indent=1, ensure_ascii=False)):
            assert parse_long(text.encode()) == value
            at = rng.randrange(len(text))
            damaged = (text[:at] + rng.choice('{}[],:"0e-x ') + text[at + 1 :]).encode()
            assert outcome(parse_long, damaged) == outcome(parse_json, damaged), damaged


def outcome(parse: Any, data: bytes) -> str:
    try:
        return repr(parse(data))
    except json.JSONDecodeError:
        return "refused"


async def test_the_loop_goes_on_while_a_long_body_is_read(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body is read on another thread, which gives way at every value; here it waits for the loop to turn."""
    loop, turned = asyncio.get_running_loop(), []

    def waiting(data: bytes) -> Any:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)
        turned.append(len(data))
        return parse_long(data)

    monkeypatch.setattr(body, "parse_long", waiting)
    long = {"messages": HI, "metadata": {"k": "x" * body.AT_ONCE_BYTES}}
    assert (await client.post(CHAT, json=long)).status_code == 200 and len(turned) == 1
    assert (await client.post(CHAT, json={"messages": HI})).status_code == 200 and len(turned) == 1
    is_error(await client.post(CHAT, content=b"[" * (body.AT_ONCE_BYTES + 1)), 400, None, "invalid_json")
    ids = {"prompt": [65] * body.AT_ONCE_BYTES}
    is_error(await client.post(COMPLETIONS, json=ids), 400, "prompt")
