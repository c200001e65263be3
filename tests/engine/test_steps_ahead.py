"""Answers are the same whether decode steps are submitted ahead of their tokens or not, whoever comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.engine.device import Device
from app.engine.devices.numpy import NumpyDevice
from app.engine.engine import Engine
from app.engine.ggml import GGMLType
from app.engine.request import (
    Constraint,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenInfo,
)
from tests.fakes.crowd import ONE, answers, crowd, local, mixed, serving
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import collect, finished, open_engine, request, text_of
from tests.fakes.splits import SPLITS
from tests.fakes.watched import Watched, go_ahead, watched

WAIT_S = 30.0
PROMPT = np.random.default_rng(11).integers(33, 120, 40).tolist()
PLACES: dict[str, Callable[[ExitStack], list[Device]]] = {"one": ONE, "two": local(2), "local and remote": mixed}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ahead") / "tiny.gguf"
    return write_tiny_llama(path, TinyLlama.of_type(GGMLType.Q4_1, n_layers=3, n_heads=2, n_kv_heads=1))


@pytest.fixture(params=["one", "two", "local and remote"])
def place(request: pytest.FixtureRequest) -> Callable[[ExitStack], list[Device]]:
    return PLACES[request.param]


Both = Callable[[Callable[[Engine], object]], object]


@pytest.fixture
def both(model: Path, place: Callable[[ExitStack], list[Device]], monkeypatch: pytest.MonkeyPatch) -> Both:
    """What a scene gives, with steps ahead and without: the same."""

    def run(scene: Callable[[Engine], object]) -> object:
        seen = []
        for always in (False, True):
            go_ahead(monkeypatch, always)
            with serving(model, place, executor=Watched) as engine:
                seen.append(scene(engine))
                assert (watched(engine).n_ahead > 0) == always
        assert seen[0] == seen[1]
        return seen[1]

    return run


KINDS: dict[str, dict[str, object]] = {
    "greedy": {"sampling": SamplingParams(temperature=0.0, ignore_eos=True, n_logprobs=3)},
    "until it ends": {"sampling": SamplingParams(temperature=1.5, seed=3, top_k=0, n_logprobs=0)},
    "seeded": {"sampling": SamplingParams(temperature=1.2, seed=5, top_k=30, ignore_eos=True, n_logprobs=0)},
    "of all": {"sampling": SamplingParams(temperature=1.2, seed=6, top_k=0, min_p=0.02, ignore_eos=True)},
    "penalties": {
        "sampling": SamplingParams(
            temperature=0.0, repeat_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.2, ignore_eos=True
        )
    },
    "seeded penalties": {
        "sampling": SamplingParams(temperature=0.9, seed=1, top_k=5, repeat_penalty=1.4, repeat_last_n=7)
    },
    "dry": {"sampling": SamplingParams(temperature=0.0, dry_multiplier=0.9, ignore_eos=True)},
    "mirostat": {"sampling": SamplingParams(temperature=1.0, seed=2, mirostat=2, ignore_eos=True)},
    "bias": {"sampling": SamplingParams(temperature=0.0, logit_bias={70: 3.0, 71: -9.0, 80: -np.inf})},
    "grammar": {"constraint": Constraint(kind="regex", source="([a-f]{2,5}[0-9]){3,9}")},
    "schema": {
        "constraint": Constraint(kind="json_schema", source='{"type": "array", "items": {"type": "integer"}}'),
        "sampling": SamplingParams(temperature=1.0, seed=4),
    },
    "scored": {"prompt_logprobs": True, "sampling": SamplingParams(temperature=0.0, n_logprobs=1)},
}


def of_all_kinds(max_tokens: int = 24) -> list[GenerateRequest]:
    return [request(name, PROMPT[number:], max_tokens, **fields) for number, (name, fields) in enumerate(KINDS.items())]


def told(events: Sequence[Event]) -> tuple[str, list[TokenInfo], FinishReason, str | None, int, tuple[TokenInfo, ...]]:
    """All that an answer says but its times and what was cached."""
    end = finished(events)
    infos = [info for event in events if isinstance(event, Delta) for info in event.tokens]
    return text_of(events), infos, end.reason, end.stop_string, end.completion_tokens, end.prompt_logprobs


def all_at_once(engine: Engine, wanted: Sequence[GenerateRequest]) -> dict[str, object]:
    async def scene() -> dict[str, object]:
        events = await asyncio.wait_for(asyncio.gather(*(collect(engine, one) for one in wanted)), 4 * WAIT_S)
        return {one.id: told(got) for one, got in zip(wanted, events, strict=True)}

    return asyncio.run(scene())


def test_every_way_to_draw_gives_the_same_answer(both: Both) -> None:
    found = both(lambda engine: all_at_once(engine, of_all_kinds()))
    assert isinstance(found, dict) and {len(infos) for _, infos, *_ in found.values()} - {24}, "some end early"


def test_a_crowd_gets_the_same_bytes(both: Both) -> None:
    both(lambda engine: [answers(engine, crowd()) for _ in range(2)])


def test_stop_strings_end_answers_in_the_same_place(both: Both) -> None:
    def scene(engine: Engine) -> object:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        whole = text_of(asyncio.run(collect(engine, request("whole", PROMPT, 30, sampling=sampling))))
        stops = [whole[at : at + 2] for at in (3, 9, 15)]
        wanted = [request(f"r{i}", PROMPT, 30, sampling=sampling, stop=(stop,)) for i, stop in enumerate(stops)]
        return stops, all_at_once(engine, wanted)

    both(scene)


def test_requests_that_join_and_leave_get_the_same_answers(both: Both) -> None:
    """Each starts when the one before has its third token, so always in the middle of others."""

    async def one_after_the_other(engine: Engine, wanted: Sequence[GenerateRequest]) -> list[object]:
        go = [asyncio.Event() for _ in wanted]
        go[0].set()

        async def one(number: int) -> object:
            await go[number].wait()
            events, n_tokens = [], 0
            async for event in engine.submit(wanted[number]):
                events.append(event)
                n_tokens += len(event.tokens) if isinstance(event, Delta) else 0
                if (n_tokens >= 3 or isinstance(event, Finished)) and number + 1 < len(go):
                    go[number + 1].set()
            return told(events)

        return await asyncio.wait_for(asyncio.gather(*(one(number) for number in range(len(wanted)))), 4 * WAIT_S)

    wanted = [replace(one, max_tokens=5 + 7 * number % 23) for number, one in enumerate(of_all_kinds())]
    both(lambda engine: asyncio.run(one_after_the_other(engine, wanted)))


def test_aborts_in_the_middle_leave_the_others_alone(both: Both) -> None:
    """What an aborted one was told is the beginning of what it would have been told."""

    def scene(engine: Engine) -> object:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        wanted = [request(f"r{i}", PROMPT[i:], 30, sampling=sampling) for i in range(6)]
        whole = all_at_once(engine, wanted)

        async def some(one: GenerateRequest, n_most: int) -> object:
            stream, infos = engine.submit(one), []
            async for event in stream:
                infos += event.tokens if isinstance(event, Delta) else ()
                if len(infos) >= n_most:
                    stream.abort()
            return infos

        async def scene() -> list[object]:
            limits = [2, 99, 7, 99, 11, 99]
            runs = [some(one, n_most) for one, n_most in zip(wanted, limits, strict=True)]
            return await asyncio.wait_for(asyncio.gather(*runs), 4 * WAIT_S)

        for one, infos in zip(wanted, asyncio.run(scene()), strict=True):
            told_whole = whole[one.id]
            assert isinstance(told_whole, tuple) and isinstance(infos, list)
            assert infos == told_whole[1][: len(infos)] and len(infos) >= 2
        assert engine.counters()["requests_in_flight"] == 0
        return whole

    both(scene)


@pytest.fixture
def engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    go_ahead(monkeypatch, always=True)
    with serving(model, executor=Watched) as made:
        yield made


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 10])
def test_an_answer_that_ends_by_its_length_costs_no_step_in_vain(engine: Engine, n_tokens: int) -> None:
    """The first step follows a prompt, which nobody overtakes; the last token leads to none."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    asyncio.run(collect(engine, request("a", PROMPT, n_tokens, sampling=sampling)))
    assert engine.counters()["decode_rows_total"] == n_tokens - 1
    assert watched(engine).n_ahead == max(0, n_tokens - 2)


def test_an_answer_that_stops_costs_one_step_in_vain_and_the_cache_has_it(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    whole = text_of(asyncio.run(collect(engine, request("a", PROMPT, 20, sampling=sampling, cache_prompt=False))))
    before = engine.counters()["decode_rows_total"]
    events = asyncio.run(collect(engine, request("b", PROMPT, 20, sampling=sampling, stop=(whole[8:10],))))
    n_drawn = finished(events).completion_tokens
    assert n_drawn < 20 and engine.counters()["decode_rows_total"] - before == n_drawn
    infos = [info.token for event in events if isinstance(event, Delta) for info in event.tokens]
    again = asyncio.run(collect(engine, request("c", PROMPT + infos + [50, 51], 3)))
    assert finished(again).cached_tokens >= len(PROMPT) + len(infos) - 1
    cold = asyncio.run(collect(engine, request("d", PROMPT + infos + [50, 51], 3, cache_prompt=False)))
    assert told(again) == told(cold)


def test_a_full_context_ends_answers_in_the_same_place(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for always in (False, True):
        go_ahead(monkeypatch, always)
        with serving(model, ctx_size=128, n_slots=1, executor=Watched) as engine:
            sampling = SamplingParams(temperature=0.0, ignore_eos=True)
            found.append(told(asyncio.run(collect(engine, request("a", PROMPT, None, sampling=sampling)))))
            assert watched(engine).n_ahead == (found[-1][4] - 2) * always
    assert found[0] == found[1] and found[0][2] is FinishReason.LENGTH


def test_preemption_in_the_middle_changes_no_answer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growing = [replace(one, max_tokens=110) for one in crowd(5, seed=3, longest=30)]
    found = []
    for always in (False, True):
        go_ahead(monkeypatch, always)
        with serving(model, ctx_size=512, n_ubatch=48, executor=Watched) as engine:
            found.append([answers(engine, growing[:: (-1) ** round_]) for round_ in range(2)])
            assert engine.counters()["preemptions_total"] > 0 and (watched(engine).n_ahead > 0) == always
    assert found[0] == found[1]


@pytest.mark.parametrize("split", ["one worker", "two workers", "two workers as stock 7.0"])
def test_new_shapes_are_prepared_while_a_step_waits_for_its_tokens(
    model: Path, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparing asks the worker things and waits for the answers, on the very thread that brings the tokens."""
    go_ahead(monkeypatch, always=True)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    with ExitStack() as stack:
        devices = SPLITS[split](stack)
        assert not any(isinstance(device, NumpyDevice) for device in devices)
        engine = open_engine(model, devices, n_slots=4, ctx_size=1024, executor=Watched)
        stack.callback(engine.close)

        async def scene() -> None:
            long = asyncio.create_task(collect(engine, request("long", PROMPT, 80, sampling=sampling)))
            for number, n_prompt in enumerate((3, 6, 14, 30)):
                n_ahead = watched(engine).n_ahead
                while watched(engine).n_ahead < n_ahead + 2 and not long.done():
                    await asyncio.sleep(0)
                short = request(f"s{number}", PROMPT[:n_prompt], 3, sampling=sampling, cache_prompt=False)
                assert finished(await collect(engine, short)).completion_tokens == 3
            assert finished(await long).completion_tokens == 80

        asyncio.run(asyncio.wait_for(scene(), 4 * WAIT_S))
