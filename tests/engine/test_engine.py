"""The step loop over a real tiny model: answers, reuse, refusals, aborts, and every way to fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from app.engine.answer import Answer
from app.engine.device import Device, Handle
from app.engine.devices.numpy import NumpyDevice
from app.engine.engine import Engine
from app.engine.executor import Executor
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.request import Delta, FinishReason, Progress, SamplingParams, TokenInfo
from app.engine.service import Phase, ServiceStatus
from app.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DeviceLost,
    InternalError,
    InvalidParameter,
    NotReady,
    QueueFull,
    RouteLost,
)
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import collect, finished, open_engine, request, started, text_of, tokens_of
from tests.fakes.stack import Stack

PROMPT = np.random.default_rng(11).integers(33, 120, 90).tolist()
OpenEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("engine") / "tiny.gguf", TinyLlama(GGMLType.Q8_0))


@pytest.fixture
def open_(model: Path) -> Iterator[OpenEngine]:
    opened: list[Engine] = []
    devices: list[Device] = []

    def open_one(n_devices: int = 1, device: Device | None = None, **sizes: object) -> Engine:
        mine = [device] if device is not None else [NumpyDevice(f"D{i}") for i in range(n_devices)]
        devices.extend(mine)
        opened.append(open_engine(model, mine, **sizes))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()
        engine.check_integrity()
    for device in devices:
        device.close()


def test_greedy_answers_are_the_model_s_own(model: Path, open_: OpenEngine) -> None:
    stack = Stack(GGUFFile.open(model), [NumpyDevice("S")], cache_type=GGMLType.F16, n_cells=512, max_tokens=64)
    want, _ = stack.greedy(PROMPT, 10)
    stack.close()
    for n_devices in (1, 2):
        events = asyncio.run(collect(open_(n_devices), request("a", PROMPT, 10)))
        n_told = len(tokens_of(events))
        assert tokens_of(events) == want[:n_told]
        ending = finished(events)
        assert ending.completion_tokens in (n_told, n_told + 1)  # an end-of-generation token is counted, not told
        assert ending.prompt_tokens == 90 and started(events).cached_tokens == 0


def test_a_second_request_reuses_the_prefix_and_answers_the_same(open_: OpenEngine) -> None:
    engine = open_()
    first = asyncio.run(collect(engine, request("a", PROMPT)))
    second = asyncio.run(collect(engine, request("b", PROMPT)))
    assert finished(second).cached_tokens == len(PROMPT) - 1
    assert tokens_of(second) == tokens_of(first)
    cold = asyncio.run(collect(engine, request("c", PROMPT, cache_prompt=False)))
    assert finished(cold).cached_tokens == 0 and tokens_of(cold) == tokens_of(first)


def test_seeded_answers_repeat_and_seeds_differ(open_: OpenEngine) -> None:
    engine = open_()

    def answer(id_: str, seed: int | None) -> list[int]:
        sampling = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed, ignore_eos=True)
        return tokens_of(asyncio.run(collect(engine, request(id_, PROMPT, 12, sampling=sampling))))

    assert answer("a", 5) == answer("b", 5)
    assert answer("c", 6) != answer("d", 5)
    assert answer("e", None) != answer("f", None)


def test_requests_run_side_by_side(open_: OpenEngine) -> None:
    engine = open_(n_slots=3, ctx_size=1024)

    async def crowd() -> list[list[int]]:
        wanted = [request(f"r{i}", PROMPT[i:], 6) for i in range(6)]
        return [tokens_of(events) for events in await asyncio.gather(*(collect(engine, r) for r in wanted))]

    answers = asyncio.run(crowd())
    assert all(answers) and engine.counters()["requests_total"] == 6


def test_progress_is_told_when_asked(open_: OpenEngine) -> None:
    events = asyncio.run(collect(open_(n_ubatch=32), request("a", PROMPT, 2, report_progress=True)))
    seen = [event.processed_tokens for event in events if isinstance(event, Progress)]
    assert seen == sorted(seen) and seen[-1] == len(PROMPT) and len(seen) >= 3
    kinds = [type(event) for event in events]
    assert kinds.index(Delta) > max(at for at, kind in enumerate(kinds) if kind is Progress)


def test_over_two_stages_a_prompt_goes_in_chunks_that_overlap(open_: OpenEngine) -> None:
    prompt = [*PROMPT, *PROMPT[:38]]
    n_ubatches = []
    for n_devices in (1, 2):
        engine = open_(n_devices, n_ubatch=128, max_in_flight=n_devices + 1)
        asyncio.run(collect(engine, request("a", prompt, 1)))
        n_ubatches.append(engine.counters()["ubatches_total"])
    assert n_ubatches[0] == 1 and n_ubatches[1] > 1


def test_prompt_logprobs_cover_every_token_and_ignore_chunking(open_: OpenEngine) -> None:
    sampling = SamplingParams(temperature=0.0, n_logprobs=2)
    got = []
    for n_ubatch in (64, 16):
        wanted = request("a", PROMPT[:40], 1, prompt_logprobs=True, sampling=sampling)
        got.append(finished(asyncio.run(collect(open_(n_ubatch=n_ubatch), wanted))).prompt_logprobs)
    assert [info.token for info in got[0]] == PROMPT[:40]
    assert got[0][0].logprob is None and all(info.logprob is not None and info.logprob <= 0 for info in got[0][1:])
    assert all(len(info.top) == 2 for info in got[0][1:])
    for one, other in zip(got[0][1:], got[1][1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_a_full_context_ends_with_length(open_: OpenEngine) -> None:
    engine = open_(ctx_size=256, n_slots=1)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    events = asyncio.run(collect(engine, request("a", (PROMPT * 3)[:200], None, sampling=sampling)))
    assert finished(events).reason is FinishReason.LENGTH
    assert 200 + finished(events).completion_tokens in (256, 257)
    with pytest.raises(ContextLengthExceeded, match="256 tokens"):
        asyncio.run(collect(engine, request("b", (PROMPT * 3)[:256])))


def test_stop_strings_end_the_answer(open_: OpenEngine) -> None:
    engine = open_()
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    whole = text_of(asyncio.run(collect(engine, request("a", PROMPT, 24, sampling=sampling))))
    stop = whole[len(whole) // 2 :][:2]
    events = asyncio.run(collect(engine, request("b", PROMPT, 24, sampling=sampling, stop=(stop,))))
    assert text_of(events) == whole[: whole.index(stop)]
    assert (finished(events).reason, finished(events).stop_string) == (FinishReason.STOP, stop)


def test_a_wrong_parameter_is_refused_at_once(open_: OpenEngine) -> None:
    engine = open_()
    wrong = request("a", PROMPT, sampling=SamplingParams(logit_bias={10**6: 1.0}))

    async def submit() -> None:
        engine.submit(wrong)

    with pytest.raises(InvalidParameter, match="1000000"):
        asyncio.run(submit())
    assert asyncio.run(collect(engine, request("b", PROMPT, 2)))


class Gated(NumpyDevice):
    """Runs nothing until its gate is opened."""

    def __init__(self) -> None:
        super().__init__("G")
        self.open = threading.Event()

    def run(self, handle: object) -> None:
        self._lane.submit(self.open.wait)
        super().run(handle)  # type: ignore[arg-type]


def test_what_was_prepared_is_not_done_again_at_submit(open_: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_()
    dry = SamplingParams(temperature=0.0, dry_multiplier=0.5, dry_sequence_breakers=("ab", "x" * 64))
    engine.prepare(dry)
    engine.prepare(dry)

    def refuse(*_: object, **__: object) -> bytes:
        raise AssertionError("submit went through the vocabulary")

    async def run() -> str:
        with monkeypatch.context() as patch:
            patch.setattr("app.engine.sampling.find_breakers", refuse)
            stream = engine.submit(request("r", PROMPT, sampling=dry, max_tokens=3))
        return text_of([event async for event in stream])

    assert asyncio.run(run())


def test_a_full_queue_refuses_and_aborts_free_their_places(open_: OpenEngine) -> None:
    device = Gated()
    engine = open_(device=device, n_slots=1, max_queue=1)

    async def scene() -> None:
        running, waiting = engine.submit(request("run", PROMPT)), engine.submit(request("wait", PROMPT[::-1]))
        with pytest.raises(QueueFull, match="2 requests") as refused:
            engine.submit(request("more", PROMPT))
        assert refused.value.retry_after_s > 0
        waiting.abort()
        assert finished([event async for event in waiting]).reason is FinishReason.ABORT
        running.abort()
        assert finished([event async for event in running]).reason is FinishReason.ABORT
        device.open.set()
        assert tokens_of(await collect(engine, request("after", PROMPT)))

    asyncio.run(scene())
    assert engine.counters()["requests_in_flight"] == 0


def test_a_deadline_ends_a_request(open_: OpenEngine) -> None:
    device = Gated()
    engine = open_(device=device)
    with pytest.raises(DeadlineExceeded, match="longer than the 0.05 s it may take"):
        asyncio.run(collect(engine, request("late", PROMPT, deadline_s=0.05)))
    device.open.set()
    assert engine.counters()["requests_in_flight"] == 0


class Losable(NumpyDevice):
    """Is lost when told to: every later run fails, as does everything asked of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.lost = False
        self.lost_at_once = False
        self.held = threading.Event()
        self.held.set()
        self.on_lost: list[Callable[[DeviceLost], None]] = []

    def watch(self, on_lost: Callable[[DeviceLost], None]) -> None:
        self.on_lost.append(on_lost)

    def run(self, handle: object) -> None:
        if self.lost_at_once:
            self._raise()
        if self.lost:
            self._lane.submit(self._raise)
        super().run(handle)  # type: ignore[arg-type]

    def _raise(self) -> None:
        assert self.held.wait(10)
        raise DeviceLost(self.name, "the cable was pulled", command="GRAPH_COMPUTE")


async def ready(engine: Engine) -> None:
    while engine.status().phase is not Phase.READY:
        await asyncio.sleep(0.01)


def test_a_lost_device_fails_its_requests_and_comes_back(open_: OpenEngine) -> None:
    device = Losable("far")
    back = threading.Event()

    def recover(executor: Executor, lost: DeviceLost, tell: object) -> Executor:
        assert lost.endpoint == "far"
        assert back.wait(10)
        return executor

    engine = open_(device=device, recovery=recover)
    want = tokens_of(asyncio.run(collect(engine, request("before", PROMPT))))
    device.lost = True
    with pytest.raises(DeviceLost, match="cable"):
        asyncio.run(collect(engine, request("during", PROMPT)))
    assert engine.status().phase is Phase.DEGRADED and engine.status().lost_devices == ("far",)
    with pytest.raises(DeviceLost, match="serves again"):
        asyncio.run(collect(engine, request("refused", PROMPT)))
    device.lost = False
    back.set()

    asyncio.run(asyncio.wait_for(ready(engine), 10))
    again = asyncio.run(collect(engine, request("after", PROMPT)))
    assert tokens_of(again) == want and finished(again).cached_tokens == 0


def test_the_status_tells_of_the_latest_attempt_and_of_workers_alone(open_: OpenEngine) -> None:
    device = Losable("b:2")
    seen: list[ServiceStatus] = []

    def recover(executor: Executor, lost: DeviceLost, tell: Callable[[str], None]) -> Executor:
        def note() -> None:
            seen.append(engine.status())

        engine._post(note)
        device.on_lost[0](DeviceLost("b:2", "the cable was pulled"))
        engine._post(note)
        device.on_lost[0](RouteLost("a:1", "b:2"))
        tell("it has no room")
        engine._post(note)
        return executor

    engine = open_(device=device, recovery=recover)
    device.on_lost[0](RouteLost("a:1", "b:2"))

    async def until_back() -> None:
        while len(seen) < 3:
            await asyncio.sleep(0.01)
        await ready(engine)

    asyncio.run(asyncio.wait_for(until_back(), 10))
    assert [status.lost_devices for status in seen] == [("a:1", "b:2"), ("b:2",), ("b:2",)]
    assert "worker to worker" in seen[0].detail
    assert [status.detail for status in seen[1:]] == ["the cable was pulled", "it has no room"]


def test_a_loss_heard_while_a_ubatch_is_submitted_is_no_bug(
    open_: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    device = Losable("far")
    engine = open_(device=device, recovery=lambda executor, lost, tell: executor)
    device.lost_at_once = True
    with pytest.raises(DeviceLost, match="cable"):
        asyncio.run(collect(engine, request("during", PROMPT)))
    device.lost_at_once = False
    asyncio.run(asyncio.wait_for(ready(engine), 10))
    assert finished(asyncio.run(collect(engine, request("after", PROMPT))))
    assert "Traceback" not in caplog.text


def test_a_loss_while_draining_ends_requests_too(open_: OpenEngine) -> None:
    device = Losable("far")
    engine = open_(device=device, recovery=lambda executor, lost, tell: executor)

    device.held.clear()
    device.lost = True

    async def close_and_lose() -> None:
        running = asyncio.create_task(collect(engine, request("last", PROMPT)))
        await asyncio.sleep(0)  # it is submitted
        closing = asyncio.create_task(asyncio.to_thread(engine.close, drain_s=30.0))
        while engine.status().phase is not Phase.DRAINING:
            await asyncio.sleep(0)
        device.held.set()
        with pytest.raises(DeviceLost, match="cable"):
            await running
        await closing

    asyncio.run(asyncio.wait_for(close_and_lose(), 10))


def test_an_idle_engine_hears_of_a_loss(open_: OpenEngine) -> None:
    device = Losable("far")
    recovered = threading.Event()

    def recover(executor: Executor, lost: DeviceLost, tell: object) -> Executor:
        recovered.set()
        return executor

    engine = open_(device=device, recovery=recover)
    device.on_lost[0](DeviceLost("far", "the cable was pulled"))
    assert recovered.wait(10)
    asyncio.run(asyncio.wait_for(ready(engine), 10))
    assert len(device.on_lost) == 2
    assert engine.counters()["device_losses_total"] == 1


class Buggy(NumpyDevice):
    """Fails in the engine's own thread, as a bug of ours would."""

    broken = False

    def run(self, handle: Handle) -> None:
        if self.broken:
            raise KeyError("a bug")
        super().run(handle)


def test_a_bug_fails_the_requests_but_not_the_engine(open_: OpenEngine) -> None:
    device = Buggy("B")
    engine = open_(device=device)
    device.broken = True
    with pytest.raises(InternalError, match="a bug"):
        asyncio.run(collect(engine, request("a", PROMPT)))
    device.broken = False
    assert tokens_of(asyncio.run(collect(engine, request("b", PROMPT))))


def test_closing_ends_what_is_running(open_: OpenEngine) -> None:
    device = Gated()
    engine = open_(device=device)

    async def scene() -> None:
        stream = engine.submit(request("a", PROMPT))
        await asyncio.to_thread(engine.close)
        with pytest.raises(NotReady, match="shutting down"):
            async for event in stream:
                assert not isinstance(event, Delta)
        with pytest.raises(NotReady):
            engine.submit(request("b", PROMPT))

    asyncio.run(scene())
    device.open.set()


def test_embeddings_are_the_pooled_hidden_states_beside_running_requests(model: Path, open_: OpenEngine) -> None:
    stack = Stack(GGUFFile.open(model), [NumpyDevice("S")], cache_type=GGMLType.F16, n_cells=512, max_tokens=64)
    hidden = stack.feed(PROMPT, every=True, hidden=True)
    stack.close()
    engine = open_(2, n_slots=3, ctx_size=1024)

    async def scene() -> None:
        answer, mean, last = await asyncio.gather(
            collect(engine, request("a", PROMPT[::-1], 10)), engine.embed(PROMPT, "mean"), engine.embed(PROMPT, "last")
        )
        assert mean.n_tokens == last.n_tokens == len(PROMPT)
        assert np.allclose(mean.vector, hidden.mean(0), atol=2e-3)
        assert np.allclose(last.vector, hidden[-1], atol=2e-3)
        assert tokens_of(answer) == tokens_of(await collect(engine, request("b", PROMPT[::-1], 10)))
        with pytest.raises(InvalidParameter, match="cls"):
            await engine.embed(PROMPT, "cls")
        with pytest.raises(ContextLengthExceeded):
            await engine.embed(PROMPT * 40, "mean")

    asyncio.run(scene())
    assert engine.counters()["requests_in_flight"] == 0


def test_a_bug_in_one_request_s_text_ends_that_request_alone(
    open_: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Answer, info: TokenInfo) -> Delta | None:
        if self.n_tokens == 1 and self.stops == ("break",):
            raise ZeroDivisionError("a bug")
        return push(self, info)

    push = Answer.push
    monkeypatch.setattr(Answer, "push", broken)
    engine = open_(n_slots=2)

    async def scene() -> None:
        bad, good = await asyncio.gather(
            collect(engine, request("bad", PROMPT, stop=("break",))),
            collect(engine, request("good", PROMPT[::-1])),
            return_exceptions=True,
        )
        assert isinstance(bad, InternalError) and "a bug" in str(bad)
        assert not isinstance(good, BaseException) and tokens_of(good)

    asyncio.run(scene())
    assert engine.counters()["requests_in_flight"] == 0


def test_draining_lets_running_requests_finish_and_admits_no_more(open_: OpenEngine) -> None:
    device = Gated()
    engine = open_(device=device)

    async def scene() -> None:
        stream = engine.submit(request("a", PROMPT))
        closing = asyncio.create_task(asyncio.to_thread(engine.close, drain_s=30.0))
        while engine.status().phase is not Phase.DRAINING:
            await asyncio.sleep(0.001)
        with pytest.raises(NotReady):
            engine.submit(request("b", PROMPT))
        device.open.set()
        assert tokens_of([event async for event in stream])
        await closing

    asyncio.run(scene())
