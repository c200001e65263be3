"""One connection to one worker: commands from any thread go out in order, answers come back in order.

Whoever submits a command while nothing else is being written sends it in its own thread, without blocking; what the
socket does not take at once is left to a writer thread. A reader thread receives all the while, large answers straight
into the caller's memory, so two large transfers in opposite directions cannot deadlock. Small commands that wait
together leave in one system call; payloads leave as views of their source.

When the connection is lost, everything pending and everything submitted later fails with DeviceLost.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from app.errors import DeviceLost, ProtocolError
from app.rpc.counters import ConnectionStats, Counters
from app.rpc.endpoint import Timeouts
from app.rpc.handshake import Peer
from app.rpc.messages import Request, answer_range
from app.rpc.outbox import Answer, Batch, Entry, LaneState, Outbox, now, settle
from app.rpc.protocol import AnswerParser, encode
from app.rpc.sockets import TICK_S, set_ticks

log = logging.getLogger(__name__)

#: The most bytes a submitting thread sends by itself; more would hold it up for longer than waking a thread costs.
INLINE_BYTES = 128 << 10

#: Answers of this size and more are received straight into memory of their own.
DIRECT_BYTES = 2048


class Dispatcher:
    """Owns a greeted socket. `close` it in the end; it may be called from any thread and more than once."""

    def __init__(self, sock: socket.socket, peer: Peer, endpoint: str, timeouts: Timeouts) -> None:
        self.endpoint = endpoint
        self.peer = peer
        self.counters = Counters()
        self._sock = sock
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._outbox = Outbox()
        self._pending: deque[Answer] = deque()
        self._lost: DeviceLost | None = None
        self._watchers: list[Callable[[DeviceLost], None]] = []
        #: Whether some thread is the one that writes. It alone takes from the outbox.
        self._writing = False
        self._handed_over: tuple[Batch, int] | None = None
        self._writer_wakes = threading.Condition(self._lock)
        self._writer: threading.Thread | None = None
        self._received_at = now()
        set_ticks(sock, min(TICK_S, timeouts.answer_s / 4, timeouts.idle_s / 4))
        self._parser = AnswerParser()
        self._parser.understands_notices = peer.is_tandem
        self._reader = threading.Thread(target=self._read, name=f"rpc-read-{endpoint}", daemon=True)
        self._reader.start()

    @property
    def lost(self) -> DeviceLost | None:
        """Why the connection is gone, or None."""
        return self._lost

    def ask(
        self,
        request: Request,
        *,
        tail: memoryview | None = None,
        into: memoryview | None = None,
        gate: Future[Any] | None = None,
        lane: LaneState | None = None,
        surfaces: bool = False,
    ) -> Future[Any]:
        """Queue a command that answers. The future's value is the answer's message, or its bytes.

        `tail` is the open end of a graph command. `surfaces`: fail with the lane's error, if there is one, when the
        command's turn comes. A waiter that cancels its future keeps its place; the answer is thrown away.
        """
        spec = self.peer.specs[request.command]
        least, most = answer_range(spec, request)
        future: Future[Any] = Future()
        decode = None if spec.answer is None else spec.answer.unpack
        answer = Answer(request.command.name, least, most, future, into, decode)
        tail_bytes = 0 if tail is None else len(tail)
        frame = encode(request, self.peer.version, tail_bytes)
        entry = Entry(request.command.name, frame, tail, tail_bytes, gate, answer=answer, lane=lane, surfaces=surfaces)
        self.submit(entry)
        return future

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
        with self._lock:
            if self._lost is not None:
                raise DeviceLost(self.endpoint, self._lost.cause, command=entry.command) from self._lost
            self._count(entry)
            at_once = not self._writing and not len(self._outbox) and self._is_short(entry)
            mine = at_once or self._claim_writing()
            if at_once:
                self._writing = True
                if entry.answer is not None:
                    entry.answer.written_at = now()
                    self._pending.append(entry.answer)
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
        with self._lock:
            c = self.counters
            return ConnectionStats(
                endpoint=self.endpoint,
                commands=dict(c.commands),
                sent_bytes=c.sent_bytes,
                received_bytes=c.received_bytes,
                answers=c.answers,
                round_trip_s=c.round_trip_s,
                round_trips=tuple(c.round_trips),
                queued=len(self._outbox),
                in_flight=len(self._pending),
            )

    def watch(self, on_lost: Callable[[DeviceLost], None]) -> None:
        """Have `on_lost` called once when the connection is lost; at once if it is. Hanging up ourselves is no loss."""
        with self._lock:
            lost = self._lost
            if lost is None:
                self._watchers.append(on_lost)
        if lost is not None:
            on_lost(lost)

    def fail(self, cause: str) -> None:
        """Declare the connection lost: a heartbeat was missed, or its owner gives up."""
        self._lose(cause)

    def close(self) -> None:
        """Hang up. What is pending fails with DeviceLost."""
        with self._lock:
            self._watchers.clear()
        self._lose("the connection was closed by this side")
        for thread in (self._reader, self._writer):
            if thread is not None and thread is not threading.current_thread():
                thread.join()
        self._sock.close()

    # -- writing --------------------------------------------------------------------------------------------------

    def _count(self, entry: Entry) -> None:
        self.counters.commands[entry.command] += 1
        if entry.riders:
            self.counters.commands["SET_TENSOR"] += entry.riders

    @staticmethod
    def _is_short(entry: Entry) -> bool:
        """Whether a command is one small buffer that nothing stands in the way of."""
        blocked = entry.gate is not None or (entry.surfaces and entry.lane is not None and entry.lane.error is not None)
        return not blocked and entry.payload is None and len(entry.frame) <= INLINE_BYTES

    def _send_at_once(self, entry: Entry) -> None:
        """The shortest way out, for a command that found nothing in front of it."""
        try:
            sent = self._sock.send(entry.frame, socket.MSG_DONTWAIT)
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
        with self._lock:
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
        with self._lock:
            mine = self._lost is None and self._claim_writing()
        if mine:
            self._send_inline()

    def _next_batch(self) -> Batch | None:
        """The next thing to write; None gives the writing up."""
        with self._lock:
            batch = None if self._lost is not None else self._outbox.next_batch(self._pending)
            if batch is None:
                self._writing = False
            else:
                at = now()
                for entry in batch.entries:
                    if entry.answer is not None:
                        entry.answer.written_at = at
        return batch

    def _send_inline(self) -> None:
        """Send as much as the socket takes without blocking; leave the rest to the writer thread."""
        while (batch := self._next_batch()) is not None:
            self._settle(batch)
            sent = 0
            if batch.n_bytes <= INLINE_BYTES:
                try:
                    sent = self._sock.sendmsg(batch.buffers, (), socket.MSG_DONTWAIT) if batch.buffers else 0
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
        with self._lock:
            self._handed_over = (batch, sent)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name=f"rpc-write-{self.endpoint}", daemon=True)
                self._writer.start()
            self._writer_wakes.notify()

    def _write(self) -> None:
        """The writer thread: goes on where an inline send stopped, until the outbox is empty or waits for a gate."""
        while True:
            with self._lock:
                while self._handed_over is None and self._lost is None:
                    self._writer_wakes.wait()
                if self._handed_over is None:
                    return
                (batch, sent), self._handed_over = self._handed_over, None
            while True:
                try:
                    self._send_all(batch, sent)
                except OSError as error:
                    self._lose_batch(batch, error)
                    return
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
                n = self._sock.sendmsg(buffers)
            except BlockingIOError:  # one tick without progress
                if self._lost is not None or now() - moved_at > self._timeouts.answer_s:
                    raise TimeoutError(f"the worker took no bytes for {self._timeouts.answer_s:g} s") from None
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

    # -- reading --------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        parser = self._parser
        try:
            while True:
                parser.received(self._receive(parser.space()))
                while parser.buffered and self._deliver():
                    pass
        except (OSError, ProtocolError, EOFError) as error:
            self._lose(_cause(error))

    def _receive(self, space: memoryview, flags: int = 0) -> int:
        """Receive something; with MSG_WAITALL all of `space`, unless a tick passes in the middle.

        Raises EOFError, OSError.
        """
        while True:
            try:
                n = self._sock.recv_into(space, 0, flags)
            except BlockingIOError:  # one tick without a byte
                self._check_deadlines()
                continue
            if n == 0:
                raise EOFError("the worker closed the connection")
            self._received_at = now()
            self.counters.received_bytes += n
            return n

    def _check_deadlines(self) -> None:
        """Called tick by tick while nothing arrives."""
        if self._lost is not None:
            raise EOFError(self._lost.cause)
        at = now()
        parser = self._parser
        if (parser.buffered or parser.payload_left) and at - self._received_at > self._timeouts.idle_s:
            raise TimeoutError(f"an answer stopped in the middle for {self._timeouts.idle_s:g} s")
        with self._lock:
            head = self._pending[0] if self._pending else None
        if head is not None and at - max(head.written_at, self._received_at) > self._timeouts.answer_s:
            raise TimeoutError(f"no answer to {head.command} within {self._timeouts.answer_s:g} s")

    def _deliver(self) -> bool:
        """Handle one answer if its beginning is there."""
        with self._lock:
            if not self._pending:
                raise ProtocolError("the worker sent bytes that nobody asked for")
            answer = self._pending[0]
        size = self._parser.begin(answer.command, answer.least, answer.most)
        if size is None:
            return False
        wanted = answer.future.set_running_or_notify_cancel()
        body = self._body(answer.into if wanted else None, size)
        with self._lock:
            if self._lost is not None:  # whoever lost it has failed this answer too
                raise EOFError(self._lost.cause)
            self._pending.popleft()
        self.counters.answered(self._received_at - answer.written_at)
        if wanted:
            answer.future.set_result(body if answer.decode is None else answer.decode(body))
        return True

    def _body(self, into: memoryview | None, size: int) -> memoryview:
        """An answer's body: in the caller's memory, or in memory of its own that nobody will overwrite."""
        parser = self._parser
        if into is None and size < DIRECT_BYTES:
            while (view := parser.take_body(size)) is None:
                parser.received(self._receive(parser.space()))
            return memoryview(bytes(view))
        target = np.empty(size, np.uint8).data if into is None else into
        at = 0
        while at < size:
            part = parser.take_payload(size - at)
            if part:
                target[at : at + len(part)] = part
                at += len(part)
            else:
                n = self._receive(target[at:size], socket.MSG_WAITALL)
                parser.passed(n)
                at += n
        return target

    # -- losing ---------------------------------------------------------------------------------------------------

    def _lose_batch(self, batch: Batch, error: OSError) -> None:
        self._lose(_cause(error))
        cause = self._lost.cause if self._lost is not None else _cause(error)
        for entry in batch.entries:
            entry.fail(DeviceLost(self.endpoint, cause, command=entry.command))

    def _lose(self, cause: str) -> None:
        """Fail everything, once. The first cause is the one that is told."""
        with self._lock:
            if self._lost is not None:
                return
            lost = self._lost = DeviceLost(self.endpoint, cause)
            watchers, self._watchers = self._watchers, []
            entries = self._outbox.drain()
            answers = list(self._pending)
            self._pending.clear()
            handed_over, self._handed_over = self._handed_over, None
            self._writer_wakes.notify()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # already down, which is what is wanted
            pass
        for answer in answers:
            settle(answer.future, error=DeviceLost(self.endpoint, cause, command=answer.command))
        for entry in [*(handed_over[0].entries if handed_over else ()), *entries]:
            entry.fail(DeviceLost(self.endpoint, cause, command=entry.command))
        for on_lost in watchers:
            on_lost(lost)


def _skip(buffers: list[Any], n: int) -> list[Any]:
    """What is left of `buffers` after their first `n` bytes."""
    for i, buffer in enumerate(buffers):
        if n < len(buffer):
            return [memoryview(buffer)[n:], *buffers[i + 1 :]] if n else buffers[i:]
        n -= len(buffer)
    return []


def _cause(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
