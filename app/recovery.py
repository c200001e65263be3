"""What happens after a worker is lost: wait until it answers again, give it its layers back, and go on.

The engine calls this on a thread of its own; meanwhile it refuses requests with the worker's name.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator

from app.engine.device import Device
from app.engine.executor import Executor
from app.engine.gguf.reader import GGUFFile
from app.engine.loader import HashSource, UploadProgress, finish_upload, upload_stage
from app.engine.stage import Stage
from app.errors import DeviceError, DeviceLost, NotReady, ProtocolError

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 15.0


def pauses_s(rng: random.Random) -> Iterator[float]:
    """How long to wait before each try: exponential with full jitter, so that many clients do not come at once."""
    longest_s = _FIRST_PAUSE_S
    while True:
        yield rng.uniform(0, longest_s)
        longest_s = min(2 * longest_s, _LONGEST_PAUSE_S)


class Recovery:
    """Rebuilds the stages of lost devices. `reopen` connects to a device again by the name of the lost one."""

    def __init__(
        self,
        gguf: GGUFFile,
        reopen: Callable[[Device], Device],
        *,
        progress: UploadProgress | None = None,
        hashes: HashSource | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._gguf = gguf
        self._reopen = reopen
        self._progress = progress
        self._hashes = hashes
        self._pauses = rng or random.Random()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Give up waiting; the call in progress raises NotReady."""
        self._stopping.set()

    def __call__(self, executor: Executor, lost: DeviceLost) -> Executor:
        """Blocks until every stage stands again. Raises NotReady when stopped."""
        for number, stage in enumerate(executor.stages):
            if is_lost(stage.device):
                executor.stages[number] = self._rebuild(stage, lost)
        return executor

    def _rebuild(self, stage: Stage, lost: DeviceLost) -> Stage:
        for n_try, pause_s in enumerate(pauses_s(self._pauses), start=1):
            if self._stopping.wait(pause_s):
                raise NotReady("the server is shutting down")
            try:
                return self._try_once(stage)
            except (DeviceError, ProtocolError) as error:
                log.info("%s is not back yet (try %d): %s", stage.device.name, n_try, error)
        raise lost

    def _try_once(self, stage: Stage) -> Stage:
        device = self._reopen(stage.device)
        try:
            rebuilt = stage.on(device)
            rebuilt.reserve()
            finish_upload(upload_stage(self._gguf, rebuilt, self._progress, self._hashes))
            device.synchronize()
        except BaseException:
            device.close()
            raise
        log.info("%s is back and has its layers again", device.name)
        return rebuilt


def is_lost(device: Device) -> bool:
    """Whether a device can no longer be used."""
    try:
        device.memory()
    except DeviceLost:
        return True
    return False
