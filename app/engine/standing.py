"""Whether the engine can serve, and over which stages: losses of devices, and coming back from them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from app.engine.executor import Executor
from app.engine.parts import Recovery
from app.engine.service import Phase, ServiceStatus
from app.errors import DeviceLost, RouteLost, TandemError

log = logging.getLogger(__name__)

#: What may go on with requests it already has.
_WORKING = (Phase.READY, Phase.DRAINING)


class Standing:
    """The executor in use and the status that callers see. Used by the engine's thread; `status` is read by any.

    `post` takes a command to the engine's thread; `fail_all` ends every request with an error, on that thread.
    """

    def __init__(
        self,
        executor: Executor,
        recovery: Recovery | None,
        *,
        post: Callable[[Callable[[], None]], None],
        fail_all: Callable[[TandemError], None],
    ) -> None:
        self.executor = executor
        self.status = ServiceStatus(phase=Phase.READY, progress=1.0)
        self.n_losses = 0
        self._recovery = recovery
        self._post = post
        self._fail_all = fail_all
        self._lost: DeviceLost | None = None

    @property
    def can_compute(self) -> bool:
        return self.status.phase in _WORKING

    def drain(self) -> None:
        """Admit nothing more."""
        self.status = ServiceStatus(phase=Phase.DRAINING)

    def watch_devices(self) -> None:
        """Hear of a loss at once, also when nothing is running."""

        def on_lost(lost: DeviceLost) -> None:
            self._post(lambda: self.on_error(lost))

        for stage in self.executor.stages:
            stage.device.watch(on_lost)

    def on_error(self, error: TandemError) -> None:
        """A lane failed: what its ubatches wrote is unknown, so every request and the whole cache end with it.

        A loss is told by the ubatch and by the device itself; only the first of the two counts.
        """
        if isinstance(error, DeviceLost) and not self.can_compute:
            self._note_another(error)
            return
        log.error("a ubatch failed: %s", error)
        comes_back = isinstance(error, DeviceLost) and self.status.phase is Phase.READY  # nobody needs it after a drain
        if isinstance(error, DeviceLost) and comes_back:
            self.n_losses += 1
            self._lost = error
            self.status = ServiceStatus(
                phase=Phase.DEGRADED, detail=str(error.cause), lost_devices=error.endpoints, progress=0.0
            )
        self._fail_all(error)
        self.executor.forget_inputs()
        if isinstance(error, DeviceLost) and comes_back and self._recovery is not None:
            recover = (self._recovery, error)
            threading.Thread(target=self._recover, args=recover, name="engine-recovery", daemon=True).start()

    def _note_another(self, error: DeviceLost) -> None:
        """One more is lost; or one that had only seemed to have lost its connection to another."""
        status = self.status
        if status.phase is not Phase.DEGRADED or isinstance(error, RouteLost):
            return
        if isinstance(self._lost, RouteLost):
            self._lost = error
            self.status = replace(status, detail=error.cause, lost_devices=error.endpoints)
        elif error.endpoint not in status.lost_devices:
            self.status = replace(status, lost_devices=(*status.lost_devices, error.endpoint))

    def _note_attempt(self, reason: str) -> None:
        """Why the latest attempt to go on has failed, on the engine's thread."""
        if self.status.phase is Phase.DEGRADED:
            self.status = replace(self.status, detail=reason)

    def _recover(self, recovery: Recovery, lost: DeviceLost) -> None:
        """On a thread of its own: wait for the device to come back, then hand the new stages to the engine."""
        try:
            executor = recovery(self.executor, lost, lambda reason: self._post(lambda: self._note_attempt(reason)))
        except Exception as error:  # whatever it was, the server must say that it will not come back by itself
            log.error("recovery from the loss of %s failed for good: %s", lost.endpoint, error)
            self.status = ServiceStatus(phase=Phase.FAILED, detail=str(error), lost_devices=lost.endpoints)
            return
        self._post(lambda: self._resume(executor))

    def _resume(self, executor: Executor) -> None:
        self.executor = executor
        self.watch_devices()
        self.status = ServiceStatus(phase=Phase.READY, progress=1.0)
        log.info("all devices stand again")
