"""The engine: requests in, events out, and the one thread that owns all serving state in between.

Callers (event loops) put submissions and aborts into an inbox. The thread takes them, keeps the lanes filled with
ubatches, and turns logits into tokens as ubatches finish. Everything a step produced reaches its event loop with one
wake-up. Nothing here speaks HTTP, and nothing knows whether a device is local.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from app.engine.connection import ConnectionStats
from app.engine.constraint import Constrainer
from app.engine.executor import Running
from app.engine.grammar import Grammars
from app.engine.live import LiveRequest
from app.engine.overlap import Overlap
from app.engine.parts import EngineParts
from app.engine.pooling import PoolingRequest, pooled_request
from app.engine.request import Embedded, FinishReason, GenerateRequest, SamplingParams
from app.engine.rows import WHOLE, Row, RowWish
from app.engine.sampling import SamplerFactory
from app.engine.service import Embedding, Phase, ServiceStatus, SlotInfo
from app.engine.serving.scheduler import Scheduler
from app.engine.serving.types import Choice, Ended, Output, OutputKind, Ubatch
from app.engine.standing import Standing
from app.engine.stream import EventStream, Outbox
from app.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DeviceLost,
    InternalError,
    NotReady,
    QueueFull,
    TandemError,
)

log = logging.getLogger(__name__)


class Engine:
    """One context, one KV cache, one slot map. Implements `InferenceService`."""

    def __init__(self, parts: EngineParts, clock: Callable[[], float] = time.monotonic) -> None:
        self.info = parts.info
        self.tokenizer = parts.tokenizer
        self.template = parts.template
        self.grammars = parts.grammars or Grammars(parts.tokenizer)
        self.ranking = parts.ranking
        self._config = parts.config
        self._samplers = SamplerFactory(parts.tokenizer, parts.info.n_vocab)
        self._constrainer = Constrainer(parts.tokenizer, self.grammars)
        self._scheduler = Scheduler(parts.config)
        self._standing = Standing(parts.executor, parts.recovery, post=self._post, fail_all=self._fail_all)
        self._overlap = Overlap(parts.executor.sizes, parts.max_in_flight, parts.trace)
        self._clock = clock
        self._live: dict[str, LiveRequest | PoolingRequest] = {}
        self._running: deque[Running] = deque()
        self._outbox = Outbox()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._n_open = 0
        self._open_lock = threading.Lock()
        self._stopping = False
        self._n_predicted = 0
        #: Requests that ended together: because a device was lost, and for another reason.
        self._n_ended = {"lost": 0, "failed": 0}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._standing.watch_devices()

    # -- called from event loops -----------------------------------------------------------------------------------

    def status(self) -> ServiceStatus:
        return self._standing.status

    def prepare(self, sampling: SamplingParams) -> None:
        """Do beforehand what would hold up `submit`; see `InferenceService.prepare`."""
        self._samplers.prepare(sampling)

    def submit(self, request: GenerateRequest) -> EventStream:
        """Admit a request or say at once why not; see `InferenceService.submit`."""
        self._check_ready()
        if len(request.prompt) >= self._config.n_ctx:
            raise ContextLengthExceeded(len(request.prompt), self._config.n_ctx)
        sampler = self._samplers.make(request)
        constraint = self._constrainer.make(request)
        self._admit()
        stream = EventStream(request.id, self.abort)
        live = LiveRequest(request, stream, sampler, self.tokenizer, self._clock(), constraint)
        self._post(lambda: self._add(live))
        return stream

    async def embed(self, prompt: Sequence[int], pooling: str) -> Embedding:
        """Pooled hidden states of a prompt; see `InferenceService.embed`."""
        self._check_ready()
        request = pooled_request(prompt, pooling, self._config.n_ctx)
        self._admit()
        stream = EventStream(request.id, self.abort)
        live = PoolingRequest(request, stream, self.info.n_embd, self._clock())
        self._post(lambda: self._add(live))
        try:
            async for event in stream:
                if isinstance(event, Embedded):
                    return Embedding(vector=event.vector, n_tokens=event.prompt_tokens)
        finally:
            stream.abort()
        raise InternalError("a pooled request ended without its vector")

    def abort(self, request_id: str) -> bool:
        """Ask for an abort; True if the request was running when asked."""
        known = request_id in self._live
        self._post(lambda: self._abort(request_id))
        return known

    def slots(self) -> Sequence[SlotInfo]:
        return self._scheduler.slots()

    def counters(self) -> Mapping[str, float]:
        return {
            **self._scheduler.counters(),
            **self._overlap.counters(),
            "tokens_predicted_total": float(self._n_predicted),
            "device_losses_total": float(self._standing.n_losses),
            "programs_prepared_total": float(self._standing.executor.n_prepared),
            "requests_in_flight": float(self._n_open),
            **{f"requests_{how}_total": float(n) for how, n in self._n_ended.items()},
        }

    def connections(self) -> Sequence[ConnectionStats]:
        """What the connections to remote devices did; see `InferenceService.connections`."""
        found = (stage.device.connection for stage in self._standing.executor.stages)
        return list({stats.number: stats for stats in found if stats is not None}.values())

    def check_integrity(self) -> None:
        """Verify the serving state's invariants. Only when the engine is closed or idle."""
        self._scheduler.check_integrity()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Stop admitting, give running requests `drain_s` seconds, end the rest, and stop the thread."""
        self._standing.drain()
        deadline = self._clock() + drain_s
        while self._n_open and self._clock() < deadline and self._thread.is_alive():
            self._thread.join(0.05)
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self._constrainer.close()

    def _check_ready(self) -> None:
        status = self._standing.status
        if status.phase is Phase.DEGRADED:
            lost = ", ".join(status.lost_devices)
            raise DeviceLost(lost, f"{status.detail}; the server serves again as soon as it is back")
        if status.phase is not Phase.READY:
            raise NotReady(f"the server is {status.phase.value}, try again later", retry_after_s=1.0)

    def _admit(self) -> None:
        with self._open_lock:
            limit = self._config.n_slots + self._config.max_queue
            if self._n_open >= limit:
                raise QueueFull(
                    f"{self._n_open} requests are running or waiting, and this server holds {limit}; try again later",
                    retry_after_s=1.0,
                )
            self._n_open += 1

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake.set()

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._wake.clear()
                self._step()
                self._outbox.flush()
                if self._is_idle():
                    self._wake.wait(self._idle_timeout_s())
            except DeviceLost as error:  # heard while a ubatch was submitted: no bug
                self._standing.on_error(error)
            except Exception as error:  # nobody may ever wait on a dead loop: fail the requests and go on
                log.exception("the step loop failed")
                self._fail_all(InternalError(f"the engine failed: {error!r}; this is a bug"))
                self._standing.executor.forget_inputs()  # it may have been in the middle of writing them
        self._fail_all(NotReady("the server is shutting down"))

    def _step(self) -> None:
        has_news = bool(self._inbox)
        while self._inbox:
            self._inbox.popleft()()
        for ended in self._scheduler.expire(self._clock()):
            self._end_late(ended)
            has_news = True
        if has_news and self._standing.can_compute:  # else there is no more to submit than there was
            self._fill_lanes()
        if self._running and self._running[0].done.done():  # one at a time: devices may be faster than this thread
            self._take(self._running.popleft())
            self._fill_lanes()
        self._overlap.learn(is_idle=not self._running)

    def _is_idle(self) -> bool:
        if self._inbox or self._stopping:
            return False
        return not self._running or not self._running[0].done.done()

    def _idle_timeout_s(self) -> float | None:
        """How long to sleep at most: to the next deadline, if any request has one."""
        deadlines = [live.deadline_s for live in self._live.values() if live.deadline_s is not None]
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None

    def _fill_lanes(self) -> None:
        """Submit what can be computed now; with nothing of that left, the next step of what will be taken next.

        Nothing is submitted behind a step that lacks its tokens: it could not begin sooner, and a question that a new
        shape brings up would be answered behind that step, for which it is this thread that has to do something.
        """
        n_stages = len(self._standing.executor.stages)
        if self._running and self._running[-1].lacks_tokens:
            return
        while self._overlap.has_room(n_stages, self._running):
            demand = self._scheduler.demand()
            if not demand.is_scheduled:
                budget = self._overlap.budget(n_stages, demand, self._running)
                ubatch = self._scheduler.schedule(self._clock(), budget)
                if ubatch is not None:
                    self._submit(ubatch)
                    continue
            if self._overlap.goes_ahead(n_stages, demand, self._running):
                ubatch = self._scheduler.schedule_ahead(self._running[0].ubatch)
                if ubatch is not None:
                    self._submit(ubatch)
            return

    def _submit(self, ubatch: Ubatch) -> None:
        hidden = self._live.get(ubatch.sequences[0].request_id)
        n_ahead = int(ubatch.follows is not None)
        wishes = [self._wish(output, n_ahead) for output in ubatch.outputs]
        running = self._standing.executor.submit(ubatch, wishes, hidden=isinstance(hidden, PoolingRequest))
        self._running.append(running)
        running.done.add_done_callback(self._on_done)
        self._announce(ubatch)

    def _wish(self, output: Output, n_ahead: int) -> RowWish:
        live = self._live.get(output.request_id)
        is_drawn_from = isinstance(live, LiveRequest) and output.kind is OutputKind.SAMPLE
        return live.wish(n_ahead) if isinstance(live, LiveRequest) and is_drawn_from else WHOLE

    def _on_done(self, _: Future[Any]) -> None:
        self._wake.set()

    def _announce(self, ubatch: Ubatch) -> None:
        for request_id in ubatch.started:
            live, report = self._live.get(request_id), self._scheduler.report(request_id)
            if live is not None and report is not None:
                self._outbox.put(live.stream, live.start(report, self._clock()))

    def _take(self, running: Running) -> None:
        """A ubatch has run: draw tokens, commit them, tell the streams."""
        try:
            rows = running.rows()
        except TandemError as error:
            self._standing.on_error(error)
            return
        self._overlap.note(running, self._clock(), self._standing.executor.n_prepared)
        self._report_progress(running.ubatch)
        choices: dict[str, Choice] = {}
        wanted = {output.row for output in self._scheduler.live_samples(running.ubatch)}
        for output, row in zip(running.ubatch.outputs, rows, strict=True):
            live = self._live.get(output.request_id)
            choice = None if live is None else self._use_row_safely(live, output, row, is_wanted=output.row in wanted)
            if choice is not None:
                choices[output.request_id] = choice
        self._fill_follower(running.ubatch, choices)
        for ended in self._scheduler.commit(running.ubatch, choices, self._clock()):
            self._end(ended)

    def _fill_follower(self, ubatch: Ubatch, choices: Mapping[str, Choice]) -> None:
        """Let the step run that was submitted ahead of these tokens, before all else that they lead to."""
        if not self._running or self._running[-1].ubatch.follows != ubatch.id:
            return
        running = self._running[-1]
        found = [choices.get(output.request_id) for output in running.ubatch.outputs]
        tokens = [0 if choice is None or choice.stop else choice.token for choice in found]
        self._standing.executor.fill(running, tokens)
        if len(self._running) == 1:
            os.sched_yield()  # it may have to wait for this very core, whichever others are free

    def _use_row_safely(
        self, live: LiveRequest | PoolingRequest, output: Output, row: Row, *, is_wanted: bool
    ) -> Choice | None:
        """As `_use_row`; whatever goes wrong with one request's row ends that request and no other."""
        try:
            return self._use_row(live, output, row, is_wanted=is_wanted)
        except TandemError as error:
            self._end_one(live, error)
        except Exception as error:
            log.exception("request %s failed", live.request.id)
            self._end_one(live, InternalError(f"the request failed: {error!r}; this is a bug"))
        return None

    def _end_one(self, live: LiveRequest | PoolingRequest, error: TandemError) -> None:
        self._live.pop(live.request.id, None)
        self._scheduler.abort(live.request.id)
        self._close_stream(live, error)

    def _use_row(
        self, live: LiveRequest | PoolingRequest, output: Output, row: Row, *, is_wanted: bool
    ) -> Choice | None:
        """Give one output row to its request; the token it led to, if it is one to draw from."""
        if isinstance(live, PoolingRequest):
            is_last = output.kind is OutputKind.SAMPLE
            live.add(row.values, is_last=is_last)
            return Choice(0, stop=True) if is_last and is_wanted else None
        if output.kind is OutputKind.PROMPT_LOGPROB:
            live.add_prompt_logprob(row, output.target)
            return None
        return self._draw(live, row, output.position) if is_wanted else None

    def _draw(self, live: LiveRequest, row: Row, position: int) -> Choice:
        token, delta = live.draw(row, position, self._clock())
        self._n_predicted += 1
        if delta is not None:
            self._outbox.put(live.stream, delta)
        return Choice(token, stop=live.answer.finish_reason is FinishReason.STOP)

    def _report_progress(self, ubatch: Ubatch) -> None:
        """Tell prompts how far this ubatch brought them, before any token it led to."""
        for sequence in ubatch.sequences:
            live = self._live.get(sequence.request_id)
            if not isinstance(live, LiveRequest) or sequence.is_decode or not live.request.report_progress:
                continue
            report = self._scheduler.report(sequence.request_id)
            if report is not None:
                n_processed = min(sequence.n_visible, report.prompt_tokens)
                self._outbox.put(live.stream, live.progress(report, n_processed, self._clock()))

    # -- beginnings and endings ------------------------------------------------------------------------------------

    def _add(self, live: LiveRequest | PoolingRequest) -> None:
        try:
            self._scheduler.add(live.request, live.submitted_s)
        except TandemError as error:
            self._close_stream(live, error)
        else:
            self._live[live.request.id] = live

    def _abort(self, request_id: str) -> None:
        ended = self._scheduler.abort(request_id)
        if ended is not None:
            self._end(ended)

    def _end(self, ended: Ended) -> None:
        live = self._live.pop(ended.request_id, None)
        if live is None:
            return
        for event in live.finish(ended, self._clock()):
            self._outbox.put(live.stream, event)
        self._release()

    def _end_late(self, ended: Ended) -> None:
        live = self._live.pop(ended.request_id, None)
        if live is not None:
            limit_s = live.request.deadline_s
            self._close_stream(live, DeadlineExceeded(f"the request took longer than the {limit_s:g} s it may take"))

    def _close_stream(self, live: LiveRequest | PoolingRequest, error: TandemError) -> None:
        self._outbox.put(live.stream, error)
        self._release()

    def _release(self) -> None:
        with self._open_lock:
            self._n_open -= 1

    def _fail_all(self, error: TandemError) -> None:
        """End every request with this error. What is in flight is forgotten; lanes finish it on their own."""
        while self._inbox:
            self._inbox.popleft()()
        for running in self._running:
            if running.lacks_tokens:  # lanes that still work go on with what was submitted, or they would wait for ever
                self._standing.executor.fill(running, [0] * running.ubatch.n_tokens)
        self._running.clear()
        self._scheduler.fail_all()
        live, self._live = list(self._live.values()), {}
        self._n_ended["lost" if isinstance(error, DeviceLost) else "failed"] += len(live)
        for request in live:
            self._close_stream(request, error)
        self._outbox.flush()
