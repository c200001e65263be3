"""One connection to one worker: commands from any thread go out in order, answers come back in order.

Whoever submits a command while nothing else is being written sends it in its own thread, without blocking; what the
socket does not take at once is left to a writer thread. Whoever waits for an answer reads the connection meanwhile, and
a reader thread does when nobody waits, large answers straight into the caller's memory; so two large transfers in
opposite directions cannot deadlock. Small commands that wait together leave in one system call; payloads leave as views
of their source.

When the connection is lost, everything pending and everything submitted later fails with DeviceLost.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from app.engine.connection import ConnectionStats
from app.errors import DeviceLost
from app.rpc.answer_reader import AnswerReader, cause_of
from app.rpc.awaited import Awaited
from app.rpc.counters import Counters
from app.rpc.endpoint import Timeouts
from app.rpc.handshake import Peer
from app.rpc.messages import Request
from app.rpc.outbox import Answer, Batch, Entry, LaneState, Outbox, now, settle
from app.rpc.protocol import encode
from app.rpc.sockets import TICK_S, set_ticks
from app.rpc.specs import answer_range

#: The most bytes a submitting thread sends by itself; more would hold it up for longer than waking a thread costs.
INLINE_BYTES = 128 << 10

#: Connections of this process, by which their numbers can be told apart in metrics.
_numbers = itertools.count(1)


class Dispatcher:
    """Owns a greeted socket. `close` it in the end; it may be called from any thread and more than once."""

    def __init__(self, sock: socket.socket, peer: Peer, endpoint: str, timeouts: Timeouts) -> None:
        self.endpoint = endpoint
        self.number = next(_numbers)
        self.peer = peer
        self.counters = Counters()
        self.sock = sock
        self.timeouts = timeouts
        self.lock = threading.Lock()
        self._outbox = Outbox()
        self.pending: deque[Answer] = deque()
        self._lost: DeviceLost | None = None
        self._watchers: list[Callable[[DeviceLost], None]] = []
        #: Whether some thread is the one that writes. It alone takes from the outbox.
        self._writing = False
        self._handed_over: tuple[Batch, int] | None = None
        #: The command that is being written, if that takes more than one system call.
        self._current: str | None = None
        self._writer_wakes = threading.Condition(self.lock)
        self._writer: threading.Thread | None = None
        tick_s = min(TICK_S, timeouts.answer_s / 4, timeouts.idle_s / 4)
        set_ticks(sock, tick_s)
        self._reader = AnswerReader(self, tick_s)
        self._reader.start()

    @property
    def lost(self) -> DeviceLost | None:
        """Why the connection is gone, or None."""
        return self._lost

    @property
    def is_awaited(self) -> bool:
        """Whether answers or commands are on their way: a question asked now is answered behind them."""
        with self.lock:
            return bool(self.pending) or len(self._outbox) > 0

    def ask(
        self,
        request: Request,
        *,
        tail: memoryview | None = None,
        into: memoryview | None = None,
        gate: Future[Any] | None = None,
        lane: LaneState | None = None,
        surfaces: bool = False,
        sent: Future[None] | None = None,
    ) -> Future[Any]:
        """Queue a command that answers. The future's value is the answer's message, or its bytes.

        `tail` is the open end of a command; `sent` resolves when the command has left. `surfaces`: fail with the lane's
        error, if there is one, when the command's turn comes. A waiter that cancels its future keeps its place; the
        answer is thrown away.
        """
        spec = self.peer.specs[request.command]
        least, most = answer_range(spec, request)
        future: Awaited[Any] = self.awaited()
        decode = None if spec.answer is None else spec.answer.unpack
        answer = Answer(request.command.name, least, most, future, into, decode)
        tail_bytes = 0 if tail is None else len(tail)
        frame = encode(request, self.peer.version, tail_bytes)
        name = request.command.name
        entry = Entry(name, frame, tail, tail_bytes, gate, sent, answer=answer, lane=lane, surfaces=surfaces)
        self.submit(entry)
        return future

    def awaited(self) -> Awaited[Any]:
        """A future for an answer of this connection. Who waits for it reads the connection meanwhile."""
        return Awaited(self._reader.read_for)

    def tell(
        self,
        request: Request,
        payload: memoryview | None = None,
        *,
        payload_bytes: int | None = None,
        gate: Future[Any] | None = None,
        lane: LaneState | None = None,
        sent: Future[None] | None = None,
    ) -> None:
        """Queue a command without an answer. With a gate, `payload_bytes` is the size its value will have."""
        n_bytes = payload_bytes if payload_bytes is not None else 0 if payload is None else len(payload)
        frame = encode(request, self.peer.version, n_bytes)
        self.submit(Entry(request.command.name, frame, payload, n_bytes, gate, sent, lane=lane))

    def submit(self, entry: Entry) -> None:
        """Queue a command that is encoded already. Raises DeviceLost at once when the connection is gone."""
        with self.lock:
            if self._lost is not None:
                raise self._lost_with(entry.command) from self._lost
            self._count(entry)
            at_once = not self._writing and not len(self._outbox) and self._is_short(entry)
            mine = at_once or self._claim_writing()
            if at_once:
                self._writing = True
                if entry.answer is not None:
                    entry.answer.written(now())
                    self.pending.append(entry.answer)
            else:
                self._outbox.put(entry)
        if entry.gate is not None:
            entry.gate.add_done_callback(self._gate_opened)
        if at_once:
            self._send_at_once(entry)
        elif mine:
            self._send_inline()

    def stats(self) -> ConnectionStats:
        """A snapshot of the counters."""
        with self.lock:
            c = self.counters
            return ConnectionStats(
                number=self.number,
                endpoint=self.endpoint,
                is_up=self._lost is None,
                commands=dict(c.commands),
                sent_bytes=c.sent_bytes,
                received_bytes=c.received_bytes,
                answers=c.answers,
                round_trip_s=c.round_trip_s,
                round_trips=tuple(c.round_trips),
                queued=len(self._outbox),
                in_flight=len(self.pending),
            )

    def watch(self, on_lost: Callable[[DeviceLost], None]) -> None:
        """Have `on_lost` called once when the connection is lost; at once if it is. Hanging up ourselves is no loss."""
        with self.lock:
            lost = self._lost
            if lost is None:
                self._watchers.append(on_lost)
        if lost is not None:
            on_lost(lost)

    def close(self) -> None:
        """Hang up. What is pending fails with DeviceLost."""
        with self.lock:
            self._watchers.clear()
        self.lose("the connection was closed by this side")
        self._reader.end()
        if self._writer is not None and self._writer is not threading.current_thread():
            self._writer.join()
        self.sock.close()

    # -- writing --------------------------------------------------------------------------------------------------

    def _count(self, entry: Entry) -> None:
        self.counters.commands[entry.command] += 1
        for rider in entry.riders:
            self.counters.commands[rider] += 1

    @staticmethod
    def _is_short(entry: Entry) -> bool:
        """Whether a command is one small buffer that nothing stands in the way of."""
        blocked = entry.gate is not None or (entry.surfaces and entry.lane is not None and entry.lane.error is not None)
        return not blocked and entry.payload is None and len(entry.frame) <= INLINE_BYTES

    def _send_at_once(self, entry: Entry) -> None:
        """The shortest way out, for a command that found nothing in front of it."""
        try:
            sent = self.sock.send(entry.frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose_batch(Batch([entry]), error)
            return
        if sent != len(entry.frame):
            self._hand_over(Batch([entry], [entry.frame], len(entry.frame)), sent)
            return
        self.counters.sent_bytes += sent
        if entry.sent is not None:
            settle(entry.sent)
        with self.lock:
            if not len(self._outbox):
                self._writing = False
                return
        self._send_inline()

    def _claim_writing(self) -> bool:
        """Become the one that writes, if nobody is. The lock is held."""
        if self._writing:
            return False
        self._writing = True
        return True

    def _gate_opened(self, gate: Future[Any]) -> None:
        del gate
        with self.lock:
            mine = self._lost is None and self._claim_writing()
        if mine:
            self._send_inline()

    def _next_batch(self) -> Batch | None:
        """The next thing to write; None gives the writing up."""
        with self.lock:
            batch = None if self._lost is not None else self._outbox.next_batch(self.pending)
            if batch is None:
                self._writing = False
            else:
                at = now()
                for entry in batch.entries:
                    if entry.answer is not None:
                        entry.answer.written(at)
        return batch

    def _send_inline(self) -> None:
        """Send as much as the socket takes without blocking; leave the rest to the writer thread."""
        while (batch := self._next_batch()) is not None:
            self._settle(batch)
            sent = 0
            if batch.n_bytes <= INLINE_BYTES:
                try:
                    sent = self.sock.sendmsg(batch.buffers, (), socket.MSG_DONTWAIT) if batch.buffers else 0
                except BlockingIOError:
                    sent = 0
                except OSError as error:
                    self._lose_batch(batch, error)
                    return
            if sent == batch.n_bytes:
                self._sent(batch)
            else:
                self._hand_over(batch, sent)
                return

    def _hand_over(self, batch: Batch, sent: int) -> None:
        with self.lock:
            self._handed_over = (batch, sent)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name=f"rpc-write-{self.endpoint}", daemon=True)
                self._writer.start()
            self._writer_wakes.notify()

    def _write(self) -> None:
        """The writer thread: goes on where an inline send stopped, until the outbox is empty or waits for a gate."""
        while True:
            with self.lock:
                while self._handed_over is None and self._lost is None:
                    self._writer_wakes.wait()
                if self._handed_over is None:
                    return
                (batch, sent), self._handed_over = self._handed_over, None
            while True:
                self._current = batch.entries[-1].command if batch.entries else None
                try:
                    self._send_all(batch, sent)
                except OSError as error:
                    self._lose_batch(batch, error)
                    return
                self._current = None
                self._sent(batch)
                following = self._next_batch()
                if following is None:
                    break
                self._settle(following)
                batch, sent = following, 0

    def _send_all(self, batch: Batch, sent: int) -> None:
        """Send the rest of a batch, blocking. Raises OSError."""
        buffers = _skip(batch.buffers, sent)
        moved_at = now()
        while buffers:
            try:
                n = self.sock.sendmsg(buffers)
            except BlockingIOError:  # one tick without progress
                if self._lost is not None or now() - moved_at > self.timeouts.answer_s:
                    raise TimeoutError(f"the worker took no bytes for {self.timeouts.answer_s:g} s") from None
                continue
            moved_at = now()
            buffers = _skip(buffers, n)

    def _sent(self, batch: Batch) -> None:
        """Everything of a batch has left this process."""
        self.counters.sent_bytes += batch.n_bytes
        for entry in batch.entries:
            if entry.sent is not None:
                settle(entry.sent)

    @staticmethod
    def _settle(batch: Batch) -> None:
        """Resolve what will not be sent."""
        for entry, error in batch.failed:
            entry.fail(error)
        for entry in batch.skipped:
            if entry.sent is not None:
                settle(entry.sent)
            if entry.answer is not None:
                settle(entry.answer.future)

    # -- losing ---------------------------------------------------------------------------------------------------

    def _lose_batch(self, batch: Batch, error: OSError) -> None:
        self.lose(cause_of(error))
        for entry in batch.entries:
            entry.fail(self._lost_with(entry.command))

    def _lost_with(self, command: str) -> DeviceLost:
        """The loss, for a command that had not left: what was in flight says more of it than what was to follow."""
        assert self._lost is not None
        return DeviceLost(self.endpoint, self._lost.cause, command=self._lost.command or command)

    def _in_flight(self) -> str | None:
        """The command that a worker was at when it went, as far as one can tell from here. The lock is held."""
        if self.pending:
            return self.pending[0].command
        return self._current

    def lose(self, cause: str) -> None:
        """Declare the connection lost and fail everything, once. The first cause is the one that is told."""
        with self.lock:
            if self._lost is not None:
                return
            lost = self._lost = DeviceLost(self.endpoint, cause, command=self._in_flight())
            watchers, self._watchers = self._watchers, []
            entries = self._outbox.drain()
            answers = list(self.pending)
            self.pending.clear()
            handed_over, self._handed_over = self._handed_over, None
            self._writer_wakes.notify()
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # already down, which is what is wanted
            pass
        for answer in answers:
            settle(answer.future, error=DeviceLost(self.endpoint, cause, command=answer.command))
        for entry in [*(handed_over[0].entries if handed_over else ()), *entries]:
            entry.fail(self._lost_with(entry.command))
        for on_lost in watchers:
            on_lost(lost)


def _skip(buffers: list[Any], n: int) -> list[Any]:
    """What is left of `buffers` after their first `n` bytes."""
    for i, buffer in enumerate(buffers):
        if n < len(buffer):
            return [memoryview(buffer)[n:], *buffers[i + 1 :]] if n else buffers[i:]
        n -= len(buffer)
    return []
