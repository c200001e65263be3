"""A device that computes nothing before its gate is open."""

from __future__ import annotations

import threading

from app.engine.device import Handle
from app.engine.devices.numpy import NumpyDevice

WAIT_S = 30.0


class Gated(NumpyDevice):
    """What is asked of it waits for `gate`, for half a minute at most."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def run(self, handle: Handle) -> None:
        self._lane.submit(lambda: self.gate.wait(WAIT_S))
        super().run(handle)
