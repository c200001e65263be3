"""What the HTTP surface adds to a bare server-sent-events loop of starlette: `python -m bench.api`.

Both run under uvicorn in a process of their own, fed by the same engine that only counts; the clients run in another.
First as many streams as fit, as fast as they go: tokens per second. Then fewer streams at a steady pace: how long after
the engine's step each token arrives. Times are of one machine's monotonic clock, so they compare between processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from app.api.app import create_app
from app.api.half_close import HalfCloseProtocol
from app.api.options import ApiOptions
from app.api.stream import json_string
from app.engine.request import Delta, Finished, FinishReason, GenerateRequest, Started, Timings, TokenInfo
from app.engine.service import Embedding, ModelInfo, Phase, ServiceStatus, SlotInfo
from app.engine.stream import EventStream
from app.engine.text.templates import ChatTemplate
from tests.fakes.engine import CHATML, FakeTokenizer

PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Load:
    """How many streams of how many tokens, and seconds between the engine's steps; 0: as fast as they are taken."""

    n_streams: int
    n_tokens: int
    step_s: float


class CountingEngine:
    """Gives every stream one token per step, all at once, as an engine does. A token's text is when it was made."""

    info = ModelInfo(
        name="count",
        alias="count",
        path="",
        architecture="none",
        created_unix=0,
        n_params=0,
        size_bytes=0,
        n_vocab=260,
        n_embd=1,
        n_ctx_train=1 << 20,
        n_ctx=1 << 20,
        n_slots=1,
        file_type="",
    )

    def __init__(self, load: Load) -> None:
        self.tokenizer: Any = FakeTokenizer()
        self.template = ChatTemplate(CHATML, "<s>", "</s>")
        self._load = load
        self._streams: list[EventStream] = []
        self._step = 0

    def prepare(self, request: GenerateRequest) -> None:
        """There is nothing to refuse."""

    def submit(self, request: GenerateRequest) -> EventStream:
        stream = EventStream(request.id, lambda _: None)
        stream.put(Started(prompt_tokens=len(request.prompt), cached_tokens=0))
        self._streams.append(stream)
        if len(self._streams) == self._load.n_streams:
            self._step = 0
            stream.loop.call_later(0.5, self._next)
        return stream

    def _next(self) -> None:
        """One step: the time is taken once, before anything of it is delivered."""
        loop = asyncio.get_running_loop()
        self._step += 1
        delta = Delta(text=f"{time.monotonic_ns()};", tokens=(TokenInfo(token=65, piece=b"A"),))
        for stream in self._streams:
            stream.put(delta)
        if self._step < self._load.n_tokens:
            loop.call_later(self._load.step_s, self._next) if self._load.step_s else loop.call_soon(self._next)
            return
        ending = Finished(
            reason=FinishReason.LENGTH,
            stop_string=None,
            prompt_tokens=1,
            cached_tokens=0,
            completion_tokens=self._step,
            timings=Timings(),
        )
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.put(ending)

    def status(self) -> ServiceStatus:
        return ServiceStatus(phase=Phase.READY)

    def abort(self, request_id: str) -> bool:
        return False

    def slots(self) -> Sequence[SlotInfo]:
        return ()

    def counters(self) -> Mapping[str, float]:
        return {}

    async def embed(self, prompt: Sequence[int], pooling: str) -> Embedding:
        return Embedding(vector=(1.0,), n_tokens=len(prompt))


def ours(load: Load) -> ASGIApp:
    """The real thing."""
    return create_app(CountingEngine(load), ApiOptions())


def bare(load: Load) -> ASGIApp:
    """As little as starlette can do for the same bytes: no schemas, no template, chunks that only lack their text."""
    engine = CountingEngine(load)
    head = {"id": "chatcmpl-" + "0" * 32, "object": "chat.completion.chunk", "created": 1, "model": "count"}
    before = 'data: {"system_fingerprint":"tandem-0",' + json.dumps(head)[1:-1] + ',"choices":[{"index":0,"delta":'
    after = ',"logprobs":null,"finish_reason":null}]}\n\n'

    async def chat(request: Request) -> StreamingResponse:
        await request.json()
        stream = engine.submit(GenerateRequest(id="x", prompt=(1,)))

        async def events() -> AsyncIterator[str]:
            async for event in stream:
                if isinstance(event, Delta):
                    yield f'{before}{{"content":{json_string(event.text)}}}{after}'
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(routes=[Route(PATH, chat, methods=["POST"])])


APPS: Mapping[str, Callable[[Load], ASGIApp]] = {"bare": bare, "ours": ours}


def serve(name: str, load: Load, listener: socket.socket) -> None:
    """Runs in a process of its own until it is terminated."""
    raise_file_limit()
    config = uvicorn.Config(APPS[name](load), log_config=None, access_log=False, http=HalfCloseProtocol, loop="uvloop")
    uvicorn.Server(config).run(sockets=[listener])


@dataclass(frozen=True, slots=True)
class Result:
    """Tokens per second over all streams, how long tokens took to arrive, processor time of the server per token."""

    tokens_per_s: float
    delays_ms: Sequence[float]
    cpu_us: float = 0.0

    def percentile(self, percent: int) -> float:
        return statistics.quantiles(self.delays_ms, n=100)[percent - 1]


class Client(asyncio.Protocol):
    """One stream: notes when each piece arrives and the times it carries."""

    def __init__(self, delays_ns: list[int], keep_delays: bool) -> None:
        self.first_ns = self.last_ns = 0
        self.done = asyncio.get_running_loop().create_future()
        self._delays_ns = delays_ns
        self._keep = keep_delays
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        if b'"content":"' in data and b';"' in data:
            self.first_ns = self.first_ns or now_ns
            if self._keep:
                self._note(data, now_ns)
        if b"[DONE]" in self._tail + data and not self.done.done():
            self.last_ns = now_ns
            self.done.set_result(None)
        self._tail = data[-8:]

    def _note(self, data: bytes, now_ns: int) -> None:
        for part in data.split(b'"content":"')[1:]:
            made, mark, _ = part.partition(b";")
            if mark and made.isdigit():
                self._delays_ns.append(now_ns - int(made))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the stream ended early"))


async def clients(port: int, load: Load) -> Result:
    """Open all streams and read them to their ends."""
    loop = asyncio.get_running_loop()
    delays_ns: list[int] = []
    opened = []
    for _ in range(load.n_streams):
        opened.append(await loop.create_connection(lambda: Client(delays_ns, bool(load.step_s)), "127.0.0.1", port))
    await asyncio.gather(*(client.done for _, client in opened))
    for transport, _ in opened:
        transport.close()
    first_ns = min(client.first_ns for _, client in opened)
    last_ns = max(client.last_ns for _, client in opened)
    n_tokens = load.n_streams * load.n_tokens
    return Result(n_tokens / (last_ns - first_ns) * 1e9, [delay / 1e6 for delay in delays_ns])


def run_clients(port: int, load: Load, answer: Connection) -> None:
    import uvloop

    raise_file_limit()
    answer.send(uvloop.run(clients(port, load)))


def measure(name: str, load: Load) -> Result:
    """One run: a fresh server, a fresh client process."""
    processes = multiprocessing.get_context("fork")
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    receiver, sender = processes.Pipe(duplex=False)
    server = processes.Process(target=serve, args=(name, load, listener), daemon=True)
    client = processes.Process(target=run_clients, args=(listener.getsockname()[1], load, sender), daemon=True)
    server.start()
    client.start()
    sender.close()
    try:
        result = receiver.recv()
        assert isinstance(result, Result)
        cpu_us = 1e6 * cpu_seconds(server.pid or 0) / (load.n_streams * load.n_tokens)
    finally:
        for process in (client, server):
            process.terminate()
            process.join()
        listener.close()
    return replace(result, cpu_us=cpu_us)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, its start included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def best_of(runs: int, load: Load) -> dict[str, list[Result]]:
    """Runs of both, taking turns."""
    results: dict[str, list[Result]] = {name: [] for name in APPS}
    for _ in range(runs):
        for name in APPS:
            results[name].append(measure(name, load))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--paced-streams", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()

    fast = best_of(args.runs, Load(args.streams, args.tokens, 0.0))
    rates = {name: max(result.tokens_per_s for result in results) for name, results in fast.items()}
    print(f"{args.streams} streams of {args.tokens} tokens, best of {args.runs}")
    for name, rate in rates.items():
        cpu_us = min(result.cpu_us for result in fast[name])
        print(
            f"  {name:<5} {rate:9.0f} tokens/s  {rate / rates['bare']:5.2f}x  {cpu_us:6.1f} us of processor per token"
        )

    paced = best_of(args.runs, Load(args.paced_streams, args.tokens, args.step_ms / 1e3))
    print(
        f"{args.paced_streams} streams, a step every {args.step_ms:g} ms, delay of a token in ms, best of {args.runs}"
    )
    lows = {}
    for name, results in paced.items():
        p50, p99 = (min(result.percentile(percent) for result in results) for percent in (50, 99))
        lows[name] = p99
        print(f"  {name:<5} p50 {p50:7.2f}  p99 {p99:7.2f}  {p99 / lows['bare']:5.2f}x")


if __name__ == "__main__":
    main()
