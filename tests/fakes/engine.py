"""A service without a model: scripted answers, gates that hold them, failures, loading, lost devices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from app.engine.connection import ConnectionStats
from app.engine.grammar import Grammars
from app.engine.ranking import Ranking
from app.engine.request import (
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Progress,
    SamplingParams,
    Started,
    Timings,
    TokenInfo,
    TokenLogprob,
)
from app.engine.service import Embedding, ModelInfo, Phase, ServiceStatus, SlotInfo
from app.engine.text.templates import ChatTemplate
from app.errors import ContextLengthExceeded, DeviceLost, NotReady, QueueFull

BOS, EOS, IM_START, IM_END, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE = range(256, 263)
SPECIAL = {
    BOS: b"<s>",
    EOS: b"</s>",
    IM_START: b"<|im_start|>",
    IM_END: b"<|im_end|>",
    FIM_PREFIX: b"<|fim_prefix|>",
    FIM_SUFFIX: b"<|fim_suffix|>",
    FIM_MIDDLE: b"<|fim_middle|>",
}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeTokenizer:
    """One token per byte, and a few special ones."""

    vocab_size = 256 + len(SPECIAL)
    bos = BOS
    eos = EOS
    eog = frozenset({EOS, IM_END})
    add_bos = True
    add_eos = False
    fim = SimpleNamespace(
        prefix=FIM_PREFIX, suffix=FIM_SUFFIX, middle=FIM_MIDDLE, padding=None, repository=None, separator=None
    )

    def encode(self, text: str | bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        tokens = [BOS] if add_special else []
        at = 0
        while at < len(data):
            found = next((t for t, s in SPECIAL.items() if data.startswith(s, at)), None) if parse_special else None
            tokens.append(data[at] if found is None else found)
            at += 1 if found is None else len(SPECIAL[found])
        return tokens

    def fewest_tokens(self, text: str | bytes) -> int:
        """The longest token has 14 characters."""
        return -(-len(text) // 14)

    def fragments(self, text: str, *, parse_special: bool) -> list[str | int]:
        """Single bytes as text, special tokens as ids."""
        tokens = self.encode(text, add_special=False, parse_special=parse_special)
        return [token if token in SPECIAL else chr(token) for token in tokens]

    def is_control(self, token: int) -> bool:
        return token in SPECIAL

    def token_id(self, text: str) -> int | None:
        return next((token for token, special in SPECIAL.items() if special.decode() == text), None)

    def show_always(self, texts: Iterable[str]) -> None:
        """All its tags are bytes, which show anyway."""

    def piece(self, token: int, *, show_special: bool) -> bytes:
        if token in SPECIAL:
            return SPECIAL[token] if show_special else b""
        return bytes([token])

    def decode(self, tokens: Sequence[int], *, show_special: bool = False) -> str:
        return b"".join(self.piece(t, show_special=show_special) for t in tokens).decode("utf-8", "replace")


class Gate:
    """Holds every token back while closed. May be used from any thread once the loop is known."""

    def __init__(self) -> None:
        self._open = True
        self._permits = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def close(self) -> None:
        """Hold back all that follows."""
        self._call(self._do_close)

    def open(self) -> None:
        self._call(self._do_open)

    def step(self, n: int = 1) -> None:
        """Let `n` tokens through."""
        self._call(lambda: self._do_step(n))

    def _call(self, work: Callable[[], None]) -> None:
        if self._loop is None or self._loop.is_closed():
            work()
        else:
            self._loop.call_soon_threadsafe(work)

    def _do_close(self) -> None:
        self._open = False
        self._permits = 0

    def _do_open(self) -> None:
        self._open = True
        self._wake()

    def _do_step(self, n: int) -> None:
        self._permits += n
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def pass_one(self, aborted: asyncio.Future[None]) -> None:
        """Wait for the gate or for the abort, whichever comes first."""
        self._loop = asyncio.get_running_loop()
        while not (self._open or self._permits or aborted.done()):
            waiter = self._loop.create_future()
            self._waiters.add(waiter)
            await asyncio.wait((waiter, aborted), return_when=asyncio.FIRST_COMPLETED)
        if not self._open and self._permits:
            self._permits -= 1


Reply = Callable[[GenerateRequest], str | bytes | Sequence[int]]


def default_reply(request: GenerateRequest) -> str:
    """Depends on the seed when there is one and the temperature is not zero, so that choices can differ."""
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.seed is None:
        return "Hello from the fake engine."
    return f"Answer {sampling.seed} from the fake engine."


def echo_reply(request: GenerateRequest) -> Sequence[int]:
    """The prompt again."""
    return request.prompt


@dataclass
class FakeStream:
    """One request's events."""

    engine: FakeEngine
    request: GenerateRequest
    aborted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: bool = False

    @property
    def request_id(self) -> str:
        return self.request.id

    def abort(self) -> None:
        if not self.ended:
            self.ended = True
            self.aborted.set_result(None)
            self.engine.note_abort(self.request.id)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events()

    async def _events(self) -> AsyncIterator[Event]:
        try:
            async for event in self.engine.play(self.request, self.aborted):
                yield event
        except Exception:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self.engine.note_end(self.request.id)


class FakeEngine:
    """An InferenceService for tests of the API.

    `reply` makes the answer of a request. `gate` holds tokens back. `fail_with` is raised after `fail_after` tokens.
    `capacity` bounds the requests running at once: above it, QueueFull.
    """

    def __init__(
        self,
        *,
        reply: Reply = default_reply,
        template: str = CHATML,
        n_ctx: int = 4096,
        capacity: int = 1000,
        phase: Phase = Phase.READY,
    ) -> None:
        self.reply = reply
        self.gate = Gate()
        self.capacity = capacity
        self.fail_with: Exception | None = None
        self.fail_after = 0
        self.cached_tokens = 0
        self.connected: list[ConnectionStats] = []
        self.requests: list[GenerateRequest] = []
        self.prepared: list[tuple[SamplingParams, threading.Thread]] = []
        self.running: dict[str, FakeStream] = {}
        self.aborted_ids: list[str] = []
        self.abort_seen = threading.Event()
        self.started = threading.Event()
        self._changed = threading.Condition()
        self.tokenizer: Any = FakeTokenizer()
        self.template = ChatTemplate(template, "<s>", "</s>")
        self.grammars = Grammars(self.tokenizer)
        self.ranking: Ranking | None = None
        self._status = ServiceStatus(phase=phase)
        self.info = ModelInfo(
            name="fake-model",
            alias="fake",
            path="/models/fake.gguf",
            architecture="llama",
            created_unix=1_700_000_000,
            n_params=1000,
            size_bytes=4000,
            n_vocab=self.tokenizer.vocab_size,
            n_embd=8,
            n_ctx_train=2 * n_ctx,
            n_ctx=n_ctx,
            n_slots=4,
            n_held=110,
            file_type="F32",
            devices=("CPU",),
        )

    def reset(self) -> None:
        """Back to how it was made, for the next test of a shared server. Waits for what still runs."""
        self.gate.open()
        self.idle()
        self.capacity, self.fail_with, self.fail_after, self.cached_tokens = 1000, None, 0, 0
        self.requests.clear()
        self.prepared.clear()
        self.aborted_ids.clear()
        self.abort_seen.clear()
        self.started.clear()
        self._status = ServiceStatus(phase=Phase.READY)

    def set_status(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)

    def status(self) -> ServiceStatus:
        return self._status

    def prepare(self, sampling: SamplingParams) -> None:
        self.prepared.append((sampling, threading.current_thread()))

    def submit(self, request: GenerateRequest) -> FakeStream:
        if self._status.phase is Phase.DEGRADED:
            raise DeviceLost(self._status.lost_devices[0], "connection closed")
        if self._status.phase is not Phase.READY:
            raise NotReady(f"the server is {self._status.phase}", retry_after_s=2.5)
        if len(self.running) >= self.capacity:
            raise QueueFull(f"{self.capacity} requests are waiting", retry_after_s=3)
        if len(request.prompt) >= self.info.n_ctx:
            raise ContextLengthExceeded(len(request.prompt), self.info.n_ctx)
        self.requests.append(request)
        stream = FakeStream(self, request)
        self.running[request.id] = stream
        return stream

    def abort(self, request_id: str) -> bool:
        stream = self.running.get(request_id)
        if stream is not None:
            stream.abort()
        return stream is not None

    def note_abort(self, request_id: str) -> None:
        self.aborted_ids.append(request_id)
        self.note_end(request_id)
        self.abort_seen.set()

    def note_end(self, request_id: str) -> None:
        with self._changed:
            self.running.pop(request_id, None)
            self._changed.notify_all()

    def idle(self, *, timeout_s: float = 10.0) -> bool:
        """Wait, on another thread than the loop's, until nothing runs."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.running, timeout_s)

    def slots(self) -> Sequence[SlotInfo]:
        busy = list(self.running)
        return [
            SlotInfo(
                id=i,
                busy=i < len(busy),
                request_id=busy[i] if i < len(busy) else None,
                n_prompt=0,
                n_cached=0,
                n_processed=0,
                n_decoded=0,
            )
            for i in range(self.info.n_slots)
        ]

    def counters(self) -> Mapping[str, float]:
        return {"requests_total": float(len(self.requests))}

    def connections(self) -> Sequence[ConnectionStats]:
        return self.connected

    async def embed(self, prompt: Sequence[int], pooling: str) -> Embedding:
        if self.fail_with is not None:
            raise self.fail_with
        spread = [float(prompt[i % len(prompt)] + i) for i in range(self.info.n_embd)]
        return Embedding(vector=tuple(spread if pooling == "mean" else reversed(spread)), n_tokens=len(prompt))

    async def play(self, request: GenerateRequest, aborted: asyncio.Future[None]) -> AsyncIterator[Event]:
        """The events of one request."""
        n_prompt = len(request.prompt)
        cached = min(self.cached_tokens, n_prompt - 1)
        self.started.set()
        yield Started(prompt_tokens=n_prompt, cached_tokens=cached)
        if request.report_progress:
            for done in (n_prompt // 2, n_prompt):
                yield Progress(
                    prompt_tokens=n_prompt, cached_tokens=cached, processed_tokens=done, elapsed_ms=float(done)
                )
        answer = Answer.of(self.reply(request), request, n_ctx=self.info.n_ctx)
        for i, token in enumerate(answer.tokens):
            await self.gate.pass_one(aborted)
            if aborted.done():
                yield self._end(request, FinishReason.ABORT, None, cached, i)
                return
            if self.fail_with is not None and i >= self.fail_after:
                raise self.fail_with
            yield Delta(text=answer.texts[i], tokens=(self._info(token, request),))
        if self.fail_with is not None:
            raise self.fail_with
        yield self._end(request, answer.reason, answer.stop_string, cached, len(answer.tokens))

    def _info(self, token: int, request: GenerateRequest) -> TokenInfo:
        n = request.sampling.n_logprobs
        piece = self.tokenizer.piece(token, show_special=True)
        if n is None:
            return TokenInfo(token=token, piece=piece)
        top = tuple(TokenLogprob((token + i) % 256, -0.5 - i) for i in range(n))
        return TokenInfo(token=token, piece=piece, logprob=-0.5, top=top)

    def _end(
        self, request: GenerateRequest, reason: FinishReason, stop: str | None, cached: int, n_out: int
    ) -> Finished:
        n_prompt = len(request.prompt)
        echoed: tuple[TokenInfo, ...] = ()
        if request.prompt_logprobs:
            first = TokenInfo(token=request.prompt[0], piece=self.tokenizer.piece(request.prompt[0], show_special=True))
            echoed = (first, *(self._info(token, request) for token in request.prompt[1:]))
        return Finished(
            reason=reason,
            stop_string=stop,
            prompt_tokens=n_prompt,
            cached_tokens=cached,
            completion_tokens=n_out,
            timings=Timings(
                cache_n=cached, prompt_n=n_prompt - cached, prompt_ms=2.0, predicted_n=n_out, predicted_ms=4.0
            ),
            prompt_logprobs=echoed,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gets: tokens, the text each of them completes, and why it ends."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    reason: FinishReason
    stop_string: str | None

    @classmethod
    def of(cls, reply: str | bytes | Sequence[int], request: GenerateRequest, *, n_ctx: int) -> Answer:
        data = reply.encode() if isinstance(reply, str) else bytes(token for token in reply if token < 256)
        reason, stop_string = FinishReason.STOP, None
        room = n_ctx - len(request.prompt)
        limit = room if request.max_tokens is None else min(room, request.max_tokens)
        if len(data) > limit:
            data, reason = data[:limit], FinishReason.LENGTH
        found = [(at, stop) for stop in request.stop if (at := data.find(stop.encode())) >= 0]
        if found:
            at, stop_string = min(found)
            data, reason = data[:at], FinishReason.STOP
        texts, pending = [], b""
        for i in range(len(data)):
            pending += data[i : i + 1]
            try:
                texts.append(pending.decode())
                pending = b""
            except UnicodeDecodeError:
                texts.append("")
        if pending:
            texts[-1] += pending.decode("utf-8", "replace")
        return cls(tuple(data), tuple(texts), reason, stop_string)
