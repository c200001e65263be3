"""`make serve`: workers and a server split over them, as processes of this machine that start and end together.

The children have sessions of their own, so Ctrl-C reaches this process alone, and it stops them in order: the server
first, which drains, then the workers it needed. Should this process be killed, the kernel ends the children.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app import models_store
from app.errors import TandemError
from app.settings import DEFAULT_MODEL

_HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Grace:
    """Seconds that things may take: a worker to listen, a child to end after SIGTERM (a server drains for 30)."""

    start_s: float = 60.0
    stop_s: float = 40.0


@dataclass(frozen=True, slots=True)
class Worker:
    """The command that starts a worker, and the port it will listen on."""

    command: Sequence[str]
    port: int


class ChildEnded(TandemError):
    """A child ended that should not have; it said why itself. `code` is what it left."""

    def __init__(self, what: str, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"{what} {how}")
        self.code = code


class Stop:
    """SIGINT, SIGTERM or SIGHUP asks for the end; a second one insists on it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._hear)

    def _hear(self) -> None:
        (self.insisted if self.asked.is_set() else self.asked).set()


@dataclass(frozen=True, slots=True)
class Child:
    """A running process; `ended` is its exit code to be."""

    name: str
    process: Process
    ended: asyncio.Task[int]

    @classmethod
    async def start(cls, name: str, command: Sequence[str]) -> Child:
        process = await asyncio.create_subprocess_exec(*command, start_new_session=True, preexec_fn=_end_with_parent)
        return cls(name, process, asyncio.create_task(process.wait(), name=name))

    async def end(self, stop: Stop, within_s: float) -> None:
        """SIGTERM; SIGKILL when that is not heard, or when somebody insists."""
        if self.ended.done():
            return
        self.process.terminate()
        insisted = asyncio.create_task(stop.insisted.wait())
        await asyncio.wait({self.ended, insisted}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        insisted.cancel()
        if not self.ended.done():
            self.process.kill()
        await self.ended


def _end_with_parent() -> None:
    """In the child: have the kernel send SIGTERM when the parent is gone. Linux alone has such a call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def run(workers: Sequence[Worker], server: Sequence[str], grace: Grace | None = None) -> int:
    """Start the workers, then the server; wait for a signal or for the first child to end; stop what still runs.

    Returns 0 after a signal. Raises ChildEnded if a child ended by itself.
    """
    grace = grace or Grace()
    stop = Stop()
    children: list[Child] = []
    try:
        for number, worker in enumerate(workers):
            children.append(await Child.start(f"worker {number}", worker.command))
        listening = asyncio.gather(*(_listening(worker.port, grace.start_s) for worker in workers))
        if await _until(listening, stop, children):
            children.append(await Child.start("the server", server))
            await _until(asyncio.Future(), stop, children)
        print("stopping; Ctrl-C again to stop at once", file=sys.stderr, flush=True)
        return 0
    finally:
        for child in reversed(children):  # the server started last and goes first
            await child.end(stop, grace.stop_s)


async def _until(ready: asyncio.Future[Any], stop: Stop, children: Sequence[Child]) -> bool:
    """True once `ready` is done, False when asked to stop. Raises ChildEnded when a child ends before that."""
    asked = asyncio.ensure_future(stop.asked.wait())
    waiting: set[asyncio.Future[Any]] = {ready, asked, *(child.ended for child in children)}
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if asked in done:
        ready.cancel()
        return False
    asked.cancel()
    for child in children:
        if child.ended in done:
            ready.cancel()
            raise ChildEnded(child.name, child.ended.result())
    try:
        await ready
    except TimeoutError:
        raise TandemError("a worker did not begin to listen in time; see what it says above") from None
    return True


async def _listening(port: int, within_s: float) -> None:
    """Return once something accepts connections on the port. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                _, writer = await asyncio.open_connection(_HOST, port)
            except OSError:
                await asyncio.sleep(_POLL_S)
            else:
                writer.close()
                return


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now. All are held while they are chosen, so they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((_HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _commands(n_workers: int, serve_arguments: Sequence[str]) -> tuple[list[Worker], list[str]]:
    tandem = [sys.executable, "-m", "app"]
    threads = str(max(1, (os.cpu_count() or 1) // n_workers))
    workers = [
        Worker([*tandem, "worker", "--host", _HOST, "--port", str(port), "--threads", threads], port)
        for port in _free_ports(n_workers)
    ]
    endpoints = ",".join(f"{_HOST}:{worker.port}" for worker in workers)
    return workers, [*tandem, "serve", "--rpc", endpoints, *serve_arguments]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, pull the default model unless another is named, run; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m app.local", description="A server and its workers on this machine."
    )
    parser.add_argument("--workers", type=int, default=2, choices=range(1, 65), metavar="N")
    parser.add_argument("serve", nargs="*", metavar="ARGUMENT", help="for `tandem serve`, after --")
    given = parser.parse_args(arguments)
    try:
        models_store.pull(DEFAULT_MODEL)
        return asyncio.run(run(*_commands(given.workers, given.serve)))
    except ChildEnded as ended:
        print(f"make serve: {ended}; everything is stopped", file=sys.stderr)
        return ended.code if ended.code > 0 else 1
    except (TandemError, OSError) as error:
        print(f"make serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
