"""From a model file to answers over HTTP: how files are cut, refused and read, and what their metadata mean."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app import bootstrap, fleet
from app.api.app import create_app
from app.api.options import ApiOptions
from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import GGMLType
from app.engine.gguf.layout import ValueType
from app.engine.gguf.reader import GGUFFile
from app.engine.gguf.writer import TensorData, Typed, write_gguf, write_split_gguf
from app.engine.text.tokenizer import Tokenizer
from app.errors import FormatError, ModelError, UnsupportedModel
from app.settings import ServeSettings
from tests.api.support import CHAT, COMPLETIONS, joined, stream
from tests.fakes.gguf import SPECIALS, TinyLlama, byte_alphabet, write_tiny_llama
from tests.fakes.serving import open_engine
from tests.support import goldens_dir

BOS_TEXT = SPECIALS[0]
TINY = TinyLlama(GGMLType.F16, n_layers=1)
GREEDY = {"temperature": 0, "ignore_eos": True}


@asynccontextmanager
async def serving(path: Path, n_devices: int = 1, **sizes: Any) -> AsyncIterator[httpx.AsyncClient]:
    devices = [NumpyDevice(f"D{i}") for i in range(n_devices)]
    engine = open_engine(path, devices, **{"ctx_size": 1024, "n_slots": 4, **sizes})
    transport = httpx.ASGITransport(create_app(engine, ApiOptions()))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            yield client
    finally:
        engine.close()
        for device in devices:
            device.close()


async def answer(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


async def text_of(path: Path, n_devices: int = 1) -> tuple[str, list[float]]:
    """A greedy answer and the log-probabilities of its tokens."""
    async with serving(path, n_devices) as client:
        told = await answer(client, COMPLETIONS, prompt="A B C", max_tokens=12, logprobs=0, **GREEDY)
    choice = told["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


# --- files in several parts ---


async def test_a_split_model_answers_as_the_whole_one(tmp_path: Path) -> None:
    tensors = TINY.tensors()
    groups = [tensors[:2], tensors[2:7], tensors[7:]]
    first, *_ = write_split_gguf(tmp_path, "t", TINY.metadata(), groups)
    (single,) = write_split_gguf(tmp_path, "one", TINY.metadata(), [tensors])
    want = await text_of(write_tiny_llama(tmp_path / "whole.gguf", TINY))
    assert await text_of(first) == want
    assert await text_of(first, n_devices=2) == want
    assert await text_of(single) == want


def test_a_directory_of_parts_is_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = write_split_gguf(tmp_path, "t", TINY.metadata(), [TINY.tensors()[:3], TINY.tensors()[3:]])
    assert bootstrap.plan(ServeSettings(model=str(tmp_path), ctx_size=512, device=("NUMPY",))) == 0
    assert "1 layers" in capsys.readouterr().out
    write_tiny_llama(tmp_path / "another.gguf", TINY)
    with pytest.raises(ModelError, match=f"holds several models: another.gguf, {parts[0].name}; name one"):
        bootstrap.plan(ServeSettings(model=str(tmp_path)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="holds no model file"):
        bootstrap.plan(ServeSettings(model=str(tmp_path / "empty")))


# --- files that are wrong ---


def without_tensor(path: Path) -> None:
    write_gguf(path, TINY.metadata(), [t for t in TINY.tensors() if t.name != "blk.0.ffn_up.weight"])


def with_transposed_tensor(path: Path) -> None:
    turned = {t.name: replace(t, dims=t.dims[::-1]) if t.name == "blk.0.ffn_up.weight" else t for t in TINY.tensors()}
    write_gguf(path, TINY.metadata(), list(turned.values()))


def of_unknown_architecture(path: Path) -> None:
    write_gguf(path, {**TINY.metadata(), "general.architecture": "zzz"}, TINY.tensors())


def cut(path: Path) -> None:
    path.write_bytes(write_tiny_llama(path, TINY).read_bytes()[:-1000])


def a_page(path: Path) -> None:
    path.write_text("<html>not found</html>")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (without_tensor, FormatError, "missing tensor 'blk.0.ffn_up.weight'"),
        (with_transposed_tensor, FormatError, "'blk.0.ffn_up.weight' has shape"),
        (of_unknown_architecture, UnsupportedModel, "architecture 'zzz' is not supported"),
        (cut, FormatError, "truncated"),
        (a_page, FormatError, "not a GGUF file"),
    ],
)
def test_a_wrong_file_is_refused_before_any_device_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
    error: type[ModelError],
    words: str,
) -> None:
    monkeypatch.setattr(fleet, "open_devices", lambda *_: pytest.fail("a worker was asked"))
    make(tmp_path / "model.gguf")
    started = time.process_time()
    with pytest.raises(error, match=f"model.gguf: .*{words}"):
        bootstrap.serve(ServeSettings(model=str(tmp_path / "model.gguf"), rpc=("127.0.0.1:1",)))
    assert time.process_time() - started < 2


def test_an_honest_file_with_much_metadata_is_ready_in_time(tmp_path: Path) -> None:
    """300,000 tokens and as many merges, from the file to a tokenizer."""
    letters = byte_alphabet()
    made = [f"{a}{b}{c}" for a in letters for b in letters for c in letters[:6]][:299_700]
    tokens = [*letters, *{f"{a}{b}" for a in letters[:180] for b in letters[:180]}]
    tokens = list(dict.fromkeys([*tokens, *made]))[:299_997]
    merges = [f"{token[:-1]} {token[-1]}" for token in tokens[256:]]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, *SPECIALS],
        "tokenizer.ggml.token_type": Typed(ValueType.INT32, [1] * len(tokens) + [3] * len(SPECIALS)),
        "tokenizer.ggml.merges": merges,
    }
    path = write_gguf(tmp_path / "large.gguf", metadata, [TensorData("t", GGMLType.F32, (1,), bytes(4))])
    started = time.process_time()
    tokenizer = Tokenizer.from_metadata(GGUFFile.open(path).metadata)
    assert tokenizer.encode("some words<|im_end|>", add_special=False, parse_special=True)[-1] == len(tokens) + 2
    assert time.process_time() - started < 3
    assert tokenizer.vocab_size > 290_000


# --- what metadata mean ---


def with_keys(path: Path, changes: Mapping[str, Any]) -> Path:
    """The tiny model; None removes a key."""
    metadata = {key: value for key, value in {**TINY.metadata(), **changes}.items() if value is not None}
    return write_gguf(path, metadata, TINY.tensors())


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("opening", ["{{ bos_token }}", BOS_TEXT, ""])
async def test_bos_stands_exactly_once_where_either_side_wants_it(
    tmp_path: Path, add_bos: bool | None, opening: str
) -> None:
    template = opening + "U{{ messages[0].content }}"
    keys = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.chat_template": template}
    async with serving(with_keys(tmp_path / "model.gguf", keys)) as client:

        async def n_prompt(path: str, **body: Any) -> int:
            n: int = (await answer(client, path, max_tokens=1, **body))["usage"]["prompt_tokens"]
            return n

        assert await n_prompt(CHAT, messages=[{"role": "user", "content": "a"}]) == 2 + bool(add_bos or opening)
        assert await n_prompt(COMPLETIONS, prompt="a") == 1 + bool(add_bos)
        assert await n_prompt(COMPLETIONS, prompt=f"{BOS_TEXT}a") == 2
        bos = (await client.post("/tokenize", json={"content": BOS_TEXT})).json()["tokens"][0]
        assert await n_prompt(COMPLETIONS, prompt=[bos, bos, 5]) == 3  # taken as they are


async def test_an_own_head_counts_and_a_tied_one_is_sent_where_it_is_needed(tmp_path: Path) -> None:
    tied = TinyLlama(GGMLType.F16, n_layers=2, tied=True)
    table = next(t for t in tied.tensors() if t.name == "token_embd.weight")
    copied = [*tied.tensors(), replace(table, name="output.weight")]
    want = await text_of(write_tiny_llama(tmp_path / "tied.gguf", tied))
    copy = write_gguf(tmp_path / "copy.gguf", tied.metadata(), copied)
    assert await text_of(copy) == want
    assert await text_of(tmp_path / "tied.gguf", n_devices=2) == want
    own = TinyLlama(GGMLType.F16, n_layers=2, seed=9)
    other = next(t for t in own.tensors() if t.name == "output.weight")
    different = write_gguf(tmp_path / "own.gguf", tied.metadata(), [*tied.tensors(), other])
    assert await text_of(different) != want


# --- characters over several tokens ---


async def test_a_cut_inside_a_character_reads_the_same_streamed_and_whole(tmp_path: Path) -> None:
    """A random model says random bytes: nearly every cut falls into a character that is not whole, or never will be."""
    async with serving(write_tiny_llama(tmp_path / "model.gguf", TINY)) as client:
        for n in range(1, 13):
            body = {"prompt": "Repeat: 🦙 世界 é\n", "max_tokens": n, "seed": n, "temperature": 1.5, "ignore_eos": True}
            whole = (await answer(client, COMPLETIONS, logprobs=1, return_tokens=True, **body))["choices"][0]
            events = await stream(client, COMPLETIONS, body)
            parts = "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"])
            assert parts == whole["text"]
            assert whole["finish_reason"] == "length"
            assert len(whole["logprobs"]["tokens"]) == n


# --- recurrent state ---


async def test_a_chat_with_a_hybrid_reuses_what_came_before_the_answer() -> None:
    """The answer comes back as text that tokenizes in another way: what is before it is still good."""
    path = goldens_dir() / "models" / "qwen35-mtp-Q5_K_M.gguf"
    messages = [{"role": "system", "content": "be brief " * 20}, {"role": "user", "content": "what is a llama?"}]
    async with serving(path, ctx_size=2048) as client:
        first = await answer(client, CHAT, messages=messages, max_tokens=6, **GREEDY)
        opened = await n_tokens(client, messages)
        reply = first["choices"][0]["message"]
        messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "and a yak?"}]
        second = await answer(client, CHAT, messages=messages, max_tokens=6, **GREEDY)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert opened <= cached < second["usage"]["prompt_tokens"]
        cold = await answer(client, CHAT, messages=messages, max_tokens=6, cache_prompt=False, **GREEDY)
        assert second["choices"][0]["message"]["content"] == cold["choices"][0]["message"]["content"]
        events = await stream(client, CHAT, {"messages": messages, "max_tokens": 6, **GREEDY})
        assert joined(events) == cold["choices"][0]["message"]["content"]


async def n_tokens(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> int:
    """Tokens of a conversation before the turn that answers it."""
    body = {"messages": messages, "add_generation_prompt": False}
    prompt = (await client.post("/apply-template", json=body)).json()["prompt"]
    told = await client.post("/tokenize", json={"content": prompt, "parse_special": True})
    return len(told.json()["tokens"])
