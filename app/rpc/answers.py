"""A worker's answers to one client, in the order of its questions.

What is known at once is sent at once, by the session itself. Bytes that a device is still computing wait on a thread of
their own, with everything behind them, so that the session goes on to receive the input of the next computation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from app.rpc.client_socket import ClientSocket

#: What inputs and answers of one client may take of this machine's memory while they wait for a device.
STAGING_BYTES = 64 << 20


#: So many answers may wait; then the session waits, and with it the client.
MAX_WAITING = 256


class Staging:
    """Memory in which bulk data waits, kept for the next of the same size. Thread-safe."""

    def __init__(self, limit_bytes: int = STAGING_BYTES) -> None:
        self._left_bytes = limit_bytes
        self._free: dict[int, list[memoryview]] = {}
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> memoryview | None:
        """Memory of this size until it is given back; None when too much is out already."""
        with self._lock:
            if size_bytes > self._left_bytes:
                return None
            self._left_bytes -= size_bytes
            kept = self._free.get(size_bytes)
            if kept:
                return kept.pop()
            self._free.clear()  # sizes change rarely: what is kept never exceeds the limit by much
        return memoryview(bytearray(size_bytes))

    def give(self, piece: memoryview) -> None:
        with self._lock:
            self._left_bytes += len(piece)
            self._free.setdefault(len(piece), []).append(piece)


class Answers:
    """The sending half of a session. `send` and `send_later` are for the session's thread alone.

    `check` raises when nothing may be answered any more; `on_error` is told, on the other thread, why answers ended.
    """

    def __init__(
        self, socket: ClientSocket, check: Callable[[], None], on_error: Callable[[BaseException], None]
    ) -> None:
        self._socket = socket
        self._check = check
        self._on_error = on_error
        self._waiting: deque[Callable[[], None]] = deque()
        #: An answer that leaves in front of the next one.
        self._held: Callable[[], bytes | bytearray] | None = None
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def are_sent(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def send(self, *buffers: bytes | bytearray | memoryview) -> None:
        """Send an answer, or queue it behind those that wait; `buffers` must stay as they are."""
        if self._held is not None:
            buffers = (self._take_held(), *buffers)
        if self._waiting:  # nobody else adds any: without one there is nothing to wait for
            with self._wake:
                self._wait_for_room()
                if self._waiting:
                    self._waiting.append(lambda: self._socket.send(*buffers))
                    return
        self._socket.send(*buffers)

    def hold(self, make: Callable[[], bytes | bytearray]) -> None:
        """Have an answer, made then, leave together with the next one: only where that is sure to come soon."""
        self.release()
        self._held = make

    def release(self) -> None:
        """Send what is held, if anything."""
        if self._held is not None:
            self.send()

    def _take_held(self) -> bytes | bytearray:
        assert self._held is not None
        make, self._held = self._held, None
        return make()

    def send_later(self, ready: Future[Any], *buffers: bytes | memoryview, then: Callable[[], None]) -> None:
        """Send an answer when a future has resolved; `then` is called when `buffers` may change again."""
        self.make_later(ready, lambda: buffers, then=then)

    def make_later(
        self, ready: Future[Any], make: Callable[[], Sequence[bytes | memoryview]], *, then: Callable[[], None]
    ) -> None:
        """As `send_later`, with an answer that is made when the future has resolved; making it may take its time."""
        self.release()

        def answer() -> None:
            try:
                ready.result()
                self._check()
                self._socket.send(*make())
            finally:
                then()

        with self._wake:
            self._wait_for_room()
            self._waiting.append(answer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rpc-answer", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def _wait_for_room(self) -> None:
        self._wake.wait_for(lambda: len(self._waiting) < MAX_WAITING)

    def drain(self) -> None:
        """Wait until nothing waits."""
        if self._waiting:
            with self._wake:
                self._wake.wait_for(lambda: not self._waiting)

    def close(self) -> None:
        """Wait until everything is answered, or cannot be."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        failed = False
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                answer = self._waiting[0]
            try:
                if not failed:
                    answer()
            except Exception as error:  # whatever it is: the session must not wait for this thread for ever
                failed = True
                self._on_error(error)
            with self._wake:
                self._waiting.popleft()
                self._wake.notify_all()
