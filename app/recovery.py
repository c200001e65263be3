"""What happens after a worker is lost: wait until it answers again, give it its layers back, and go on.

The engine calls this on a thread of its own; meanwhile it refuses requests with the worker's name.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from app.engine.device import Device
from app.engine.executor import Executor
from app.engine.gguf.reader import GGUFFile
from app.engine.loader import HashSource, UploadProgress, finish_upload, upload_stage
from app.engine.stage import Stage
from app.errors import DeviceError, DeviceLost, NotReady, ProtocolError

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 15.0

#: Lost devices in, as many working ones in the same order out. Raises DeviceError while they are not back.
Reopen = Callable[[Sequence[Device]], list[Device]]


def pauses_s(rng: random.Random) -> Iterator[float]:
    """How long to wait before each try: exponential with full jitter, so that many clients do not come at once."""
    longest_s = _FIRST_PAUSE_S
    while True:
        yield rng.uniform(0, longest_s)
        longest_s = min(2 * longest_s, _LONGEST_PAUSE_S)


class Recovery:
    """Rebuilds the stages of lost devices."""

    def __init__(
        self,
        gguf: GGUFFile,
        reopen: Reopen,
        *,
        progress: UploadProgress | None = None,
        hashes: HashSource | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._gguf = gguf
        self._reopen = reopen
        self._progress = progress
        self._hashes = hashes
        self._rng = rng or random.Random()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Give up waiting; the call in progress raises NotReady."""
        self._stopping.set()

    def __call__(self, executor: Executor, lost: DeviceLost, tell: Callable[[str], None] = lambda _: None) -> Executor:
        """Blocks until every stage stands again; `tell` hears why an attempt failed. Raises NotReady when stopped."""
        log.warning("lost %s (%s); waiting for it to come back", " and ".join(lost.endpoints), lost.cause)
        pauses = pauses_s(self._rng)
        told = ""
        while True:
            if self._stopping.wait(next(pauses)):
                raise NotReady("the server is shutting down")
            try:
                self._rebuild(executor)
                executor.connect_stages()
            except (DeviceError, ProtocolError) as error:
                reason = str(error)  # each new one is worth a line: a token that is asked for stays asked for
                log.log(logging.DEBUG if reason == told else logging.WARNING, "not back yet: %s", reason)
                told = reason
                tell(error.cause if isinstance(error, DeviceLost) else reason)
            else:
                return executor

    def _rebuild(self, executor: Executor) -> None:
        """Replace all stages whose device is lost, or none of them."""
        numbers = [n for n, stage in enumerate(executor.stages) if is_lost(stage.device)]
        devices = self._reopen([executor.stages[n].device for n in numbers])
        try:
            stages = [executor.stages[n].on(device) for n, device in zip(numbers, devices, strict=True)]
            for stage in stages:
                stage.reserve()
            finish_upload([f for stage in stages for f in self._upload(stage)])
            for stage in stages:
                stage.device.synchronize()
        except BaseException:
            for device in devices:
                device.close()
            raise
        for n, stage in zip(numbers, stages, strict=True):
            executor.stages[n].device.close()
            executor.stages[n] = stage
            log.info("%s is back and has its layers again", stage.device.name)

    def _upload(self, stage: Stage) -> list[Future[None]]:
        return upload_stage(self._gguf, stage, self._progress, self._hashes)


def is_lost(device: Device) -> bool:
    """Whether a device can no longer be used."""
    try:
        device.memory()
    except DeviceLost:
        return True
    return False
