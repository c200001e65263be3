"""Asks a Tandem worker for a sign of life on a connection of its own; the others may wait for long computations."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from app.errors import DeviceLost
from app.rpc.dispatcher import Dispatcher
from app.rpc.messages import Ping, Value

log = logging.getLogger(__name__)


class Heartbeat:
    """Pings every `every_s`; no answer within `patience_s`, and the watched connections are declared lost.

    Owns `pulse`, the connection it asks on. `leave` is called once for each of `watched`; the last one ends it.
    """

    def __init__(self, pulse: Dispatcher, watched: Sequence[Dispatcher], *, every_s: float, patience_s: float) -> None:
        self._pulse = pulse
        self._watched = tuple(watched)
        self._every_s = every_s
        self._patience_s = patience_s
        self._users = len(self._watched)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rpc-pulse-{pulse.endpoint}", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """One watched connection less."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._stop.set()
            self._pulse.close()
            self._thread.join()

    def _run(self) -> None:
        nonce = 0
        while not self._stop.wait(self._every_s):
            nonce += 1
            try:
                answer: Value = self._pulse.ask(Ping(nonce)).result(self._patience_s)
            except TimeoutError:
                return self._give_up(f"no heartbeat within {self._patience_s:g} s")
            except DeviceLost as lost:
                return self._give_up(f"the heartbeat ended: {lost.cause}")
            if answer.value != nonce:
                return self._give_up(f"heartbeat {nonce} was answered with {answer.value}")

    def _give_up(self, cause: str) -> None:
        if self._stop.is_set():
            return
        log.warning("worker %s: %s", self._pulse.endpoint, cause)
        for dispatcher in self._watched:
            dispatcher.lose(cause)
