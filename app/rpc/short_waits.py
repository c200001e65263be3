"""Receiving without going to sleep, where questions and answers follow each other closely."""

from __future__ import annotations

import os
import socket
import time

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

    def receive(self, space: memoryview) -> int:
        """Received bytes, 0 at the end of the stream. Raises BlockingIOError after a tick without any, OSError."""
        began = time.perf_counter()
        if self._soon:
            while time.perf_counter() - began < SPIN_S:
                try:
                    return self._sock.recv_into(space, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
            self._soon = False
        n = self._sock.recv_into(space)
        waited_s = time.perf_counter() - began
        if waited_s > AT_ONCE_S:
            self._soon = self._may_spin and waited_s < SOON_S
        return n
