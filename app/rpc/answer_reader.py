"""The reading half of a connection: answers in the order of their questions, straight into the memory that waits."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import numpy as np

from app.errors import ProtocolError
from app.rpc.outbox import now
from app.rpc.protocol import AnswerParser

if TYPE_CHECKING:
    from app.rpc.dispatcher import Dispatcher

#: Answers of this size and more are received straight into memory of their own.
DIRECT_BYTES = 2048


class AnswerReader:
    """Reads on a thread of its own until the connection ends, and declares it lost when the worker breaks a rule or a
    deadline. Shares the dispatcher's lock and its queue of expected answers.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._sock = dispatcher.sock
        self._lock = dispatcher.lock
        self._pending = dispatcher.pending
        self._timeouts = dispatcher.timeouts
        self._counters = dispatcher.counters
        self._parser = AnswerParser()
        self._parser.understands_notices = dispatcher.peer.is_tandem
        self._received_at = now()
        self.thread = threading.Thread(target=self._read, name=f"rpc-read-{dispatcher.endpoint}", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        parser = self._parser
        try:
            while True:
                parser.received(self._receive(parser.space()))
                while parser.buffered and self._deliver():
                    pass
        except (OSError, ProtocolError, EOFError) as error:
            self._dispatcher.lose(cause_of(error))

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
            self._counters.received_bytes += n
            return n

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
        with self._lock:
            answer = self._pending[0] if self._pending else None
        if answer is None:
            if self._parser.understands_notices and self._parser.begin("no question", 1, 0) is None:
                return False
            raise ProtocolError("the worker sent bytes that nobody asked for")
        size = self._parser.begin(answer.command, answer.least, answer.most)
        if size is None:
            return False
        wanted = answer.future.set_running_or_notify_cancel()
        body = self._body(answer.into if wanted else None, size)
        with self._lock:
            if (lost := self._dispatcher.lost) is not None:  # whoever lost it has failed this answer too
                raise EOFError(lost.cause)
            self._pending.popleft()
        self._counters.answered(self._received_at - answer.written_at)
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


def cause_of(error: BaseException) -> str:
    """What to tell of an error that ended a connection."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
