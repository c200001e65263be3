"""Receiving without going to sleep, where questions and answers follow each other closely."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

#: How long to look for bytes before going to sleep, where the last wait was no longer than `SOON_S`. A core that has
#: gone to sleep takes tens of microseconds to wake, longest in a virtual machine. Below `AT_ONCE_S` nothing was waited.
SPIN_S, SOON_S, AT_ONCE_S = 50e-6, 100e-6, 10e-6


class ShortWaits:
    """Receives from a socket whose waits end with every tick. Used by one thread at a time.

    No core is kept busy while the peer computes or has nothing to say: one longer wait ends the spinning.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._soon = False
        self._may_spin = (os.cpu_count() or 1) > 1

    def receive(self, *spaces: memoryview, flags: int = 0) -> int:
        """Received bytes, into one space after the other; 0 at the end of the stream.

        `flags` are those of a wait that goes to sleep. Raises BlockingIOError after a tick without any, OSError.
        """
        began = time.perf_counter()
        if self._soon:
            n = self._look(spaces, began + SPIN_S)
            if n is not None:
                return n
            self._soon = False
        n = self._sock.recvmsg_into(spaces, 0, flags)[0]
        waited_s = time.perf_counter() - began
        if waited_s > AT_ONCE_S:
            self._soon = self._may_spin and waited_s < SOON_S
        return n

    def _look(self, spaces: Sequence[memoryview], until: float) -> int | None:
        """Look for bytes again and again."""
        while time.perf_counter() < until:
            try:
                return self._sock.recvmsg_into(spaces, 0, socket.MSG_DONTWAIT)[0]
            except BlockingIOError:
                continue
        return None
