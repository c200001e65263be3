"""The reading half of a connection: answers in the order of their questions, straight into the memory that waits.

Whoever waits for an answer reads the connection itself, as long as nobody else does: handing the answer over from
another thread would cost two changes of thread. A thread of the reader's own looks after everything that nobody waits
for, and rests while others read.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from app.errors import ProtocolError
from app.rpc.outbox import Answer, now
from app.rpc.protocol import AnswerParser
from app.rpc.short_waits import ShortWaits
from app.rpc.wire import ANSWER_HEADER

if TYPE_CHECKING:
    from app.rpc.dispatcher import Dispatcher

#: Answers of this size and more are received straight into memory of their own.
DIRECT_BYTES = 2048

#: Answers up to this size get their memory before they come. It is touched then, or the first bytes would wait for it.
AHEAD_BYTES = 16 << 20
PAGE_BYTES = 4096

#: So many answers in a row must be read by who waits for them before the reader's own thread rests, and so long it
#: rests before it looks whether that is still so. An answer that nobody waits for may come late by that much, once.
RESTS_AFTER, REST_S = 4, 0.02


class AnswerReader:
    """Reads until the connection ends, and declares it lost when the worker breaks a rule or a deadline.

    Shares the dispatcher's lock and its queue of expected answers. `_reading` is held by the one thread that reads.
    """

    def __init__(self, dispatcher: Dispatcher, tick_s: float) -> None:
        self._dispatcher = dispatcher
        self._sock = dispatcher.sock
        self._short_waits = ShortWaits(self._sock)
        self._tick_s = tick_s
        self._lock = dispatcher.lock
        self._pending = dispatcher.pending
        self._timeouts = dispatcher.timeouts
        self._counters = dispatcher.counters
        self._parser = AnswerParser()
        self._parser.understands_notices = dispatcher.peer.is_tandem
        self._received_at = now()
        self._reading = threading.Lock()
        #: Who reads for an answer of its own, and how often that was so since the reader's thread last had to.
        self._waiter: int | None = None
        self._n_waiters = 0
        self._rests = False
        self._rouse = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"rpc-read-{dispatcher.endpoint}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def read_for(self, future: Future[Any]) -> None:
        """Read until a future of this connection is done, unless somebody else reads. Raises nothing."""
        if not self._reading.acquire(blocking=False):
            return
        self._waiter = threading.get_ident()
        self._n_waiters += 1
        try:
            while not future.done():
                self._take()
        except (OSError, ProtocolError, EOFError) as error:
            self._dispatcher.lose(cause_of(error))
        finally:
            self._waiter = None
            self._reading.release()
            if self._rests and self._pending:
                self._rouse.set()

    def end(self) -> None:
        """Wait until nobody reads any more, for after the connection was lost. Also from a callback of an answer."""
        self._rouse.set()
        if threading.current_thread() is self._thread:
            return
        self._thread.join()
        if self._waiter != threading.get_ident():
            with self._reading:
                pass

    # -- the reader's own thread ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        try:
            while self._dispatcher.lost is None:
                if self._n_waiters >= RESTS_AFTER:
                    self._rest()
                    continue
                arrived = bool(poll.poll(self._tick_s * 1000))
                if not self._reading.acquire(blocking=False):
                    self._rest()
                    continue
                try:
                    self._look_after(arrived)
                finally:
                    self._reading.release()
        except (OSError, ProtocolError, EOFError) as error:
            self._dispatcher.lose(cause_of(error))

    def _look_after(self, arrived: bool) -> None:
        if not arrived:
            self._check_deadlines()
            return
        try:
            n = self._sock.recv_into(self._parser.space(), 0, socket.MSG_DONTWAIT)
        except BlockingIOError:  # a waiter was faster
            return
        self._n_waiters = 0
        self._count(n)
        self._understand(n)

    def _rest(self) -> None:
        """Leave the connection to those who wait for its answers, until they leave some behind or do not come back."""
        seen = self._n_waiters
        self._rests = True
        abandoned = self._waiter is None and bool(self._pending)
        if not abandoned:
            abandoned = self._rouse.wait(REST_S) or (self._waiter is None and self._n_waiters == seen)
        self._rests = False
        self._rouse.clear()
        if abandoned:
            self._n_waiters = 0

    # -- whoever reads ----------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Wait for bytes and deliver what is whole."""
        answer = self._expected()
        if answer is not None and answer.into is None and DIRECT_BYTES <= answer.least == answer.most <= AHEAD_BYTES:
            self._take_bulk(answer)
        else:
            self._understand(self._receive(self._parser.space()))

    def _take_bulk(self, answer: Answer) -> None:
        """Wait for an answer whose size is known, with memory at hand in which it can come in one piece."""
        parser = self._parser
        head = parser.space()
        if parser.buffered:  # the beginning of a header: rare
            self._understand(self._receive(head))
            return
        head, body = head[: ANSWER_HEADER.size], _touched(answer.least)
        n = self._receive(head, body, flags=socket.MSG_WAITALL)
        parser.received(min(n, len(head)))
        n -= min(n, len(head))
        if parser.begin(answer.command, answer.least, answer.most) is None:
            parser.feed(body[:n])
            self._understand(0)
            return
        parser.passed(n)
        wanted = answer.future.set_running_or_notify_cancel()
        self._fill(body, n)
        self._resolve(answer, body, wanted)

    def _understand(self, n: int) -> None:
        parser = self._parser
        parser.received(n)
        while parser.buffered and self._deliver():
            pass

    def _expected(self) -> Answer | None:
        with self._lock:
            return self._pending[0] if self._pending else None

    def _receive(self, *spaces: memoryview, flags: int = 0) -> int:
        """Wait for an answer to begin; with MSG_WAITALL for all there is room for, as a rule."""
        return self._wait(partial(self._short_waits.receive, *spaces, flags=flags))

    def _wait(self, receive: Callable[[], int]) -> int:
        """Receive something, with an eye on deadlines. Raises EOFError, OSError."""
        while True:
            try:
                n = receive()
            except BlockingIOError:  # one tick without a byte
                self._check_deadlines()
                continue
            self._count(n)
            return n

    def _count(self, n: int) -> None:
        if n == 0:
            raise EOFError("the worker closed the connection")
        self._received_at = now()
        self._counters.received_bytes += n

    def _check_deadlines(self) -> None:
        """Called tick by tick while nothing arrives."""
        if (lost := self._dispatcher.lost) is not None:
            raise EOFError(lost.cause)
        at, idle_s, answer_s = now(), self._timeouts.idle_s, self._timeouts.answer_s
        if (self._parser.buffered or self._parser.payload_left) and at - self._received_at > idle_s:
            raise TimeoutError(f"an answer stopped in the middle for {idle_s:g} s")
        with self._lock:
            head = self._pending[0] if self._pending else None
        if head is not None and at - max(head.written_at, self._received_at) > answer_s:
            raise TimeoutError(f"no answer to {head.command} within {answer_s:g} s")

    def _deliver(self) -> bool:
        """Handle one answer if its beginning is there."""
        answer = self._expected()
        if answer is None:
            if self._parser.understands_notices and self._parser.begin("no question", 1, 0) is None:
                return False
            raise ProtocolError("the worker sent bytes that nobody asked for")
        size = self._parser.begin(answer.command, answer.least, answer.most)
        if size is None:
            return False
        wanted = answer.future.set_running_or_notify_cancel()
        self._resolve(answer, self._body(answer.into if wanted else None, size), wanted)
        return True

    def _resolve(self, answer: Answer, body: memoryview, wanted: bool) -> None:
        with self._lock:
            if (lost := self._dispatcher.lost) is not None:  # whoever lost it has failed this answer too
                raise EOFError(lost.cause)
            self._pending.popleft()
        self._counters.answered(self._received_at - answer.written_at)
        if wanted:
            answer.future.set_result(body if answer.decode is None else answer.decode(body))

    def _body(self, into: memoryview | None, size: int) -> memoryview:
        """An answer's body: in the caller's memory, or in memory of its own that nobody will overwrite."""
        parser = self._parser
        if into is None and size < DIRECT_BYTES:
            while (view := parser.take_body(size)) is None:
                parser.received(self._receive(parser.space()))
            return memoryview(bytes(view))
        target = np.empty(size, np.uint8).data if into is None else into
        part = parser.take_payload(size)
        target[: len(part)] = part
        self._fill(target, len(part))
        return target

    def _fill(self, target: memoryview, at: int) -> None:
        """Receive the rest of a body into its place."""
        while at < len(target):
            n = self._wait(partial(self._sock.recv_into, target[at:], 0, socket.MSG_WAITALL))
            self._parser.passed(n)
            at += n


def _touched(size: int) -> memoryview:
    """Memory whose pages are there."""
    memory = np.empty(size, np.uint8)
    memory[::PAGE_BYTES] = 0
    return memory.data


def cause_of(error: BaseException) -> str:
    """What to tell of an error that ended a connection."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
