"""The reference device: this machine's memory, and readable numpy kernels. Every faster device is compared with it."""

from __future__ import annotations

import numpy as np

from app.engine.device import DeviceCaps
from app.engine.devices.host import ALIGNMENT_BYTES, MAX_BUFFER_BYTES, HostBuffer, HostDevice, HostHandle
from app.engine.devices.reference.node import RunContext, Step
from app.engine.devices.reference.program import bind_program
from app.engine.devices.reference.workers import Workers
from app.engine.program import PlacedTensor, Program
from app.errors import InternalError, TandemError

NumpyBuffer = HostBuffer


class NumpyHandle(HostHandle):
    """Bound steps."""

    __slots__ = ("context", "steps")

    def __init__(
        self, device: NumpyDevice, program_name: str, steps: list[tuple[PlacedTensor, Step]], context: RunContext
    ) -> None:
        super().__init__(device, program_name)
        self.steps = steps
        self.context = context

    def let_go(self) -> None:
        self.steps = []

    def work(self) -> None:
        self.context.begin_run()
        try:
            with np.errstate(all="ignore"):  # infinities and NaN are values here, not accidents
                for tensor, step in self.steps:
                    self._run_step(tensor, step)
        finally:
            self.context.end_run()

    def _run_step(self, tensor: PlacedTensor, step: Step) -> None:
        try:
            step()
        except TandemError:
            raise
        except Exception as error:
            what = f"{tensor.op.name} {tensor.name} of program {self.program_name}"
            raise InternalError(f"device {self.device.name} failed in {what}: {error}") from error


class NumpyDevice(HostDevice):
    """See `HostDevice`."""

    def __init__(self, name: str = "CPU", n_threads: int = 1, memory_limit_bytes: int | None = None) -> None:
        workers = Workers(n_threads, name)  # refuses a bad number before a lane starts
        caps = DeviceCaps(
            kind="numpy",
            kernel_variant="numpy",
            alignment_bytes=ALIGNMENT_BYTES,
            max_buffer_bytes=MAX_BUFFER_BYTES,
            description=f"numpy reference, {n_threads} thread{'s' if n_threads > 1 else ''}",
        )
        super().__init__(name, caps, memory_limit_bytes)
        self._workers = workers

    def _bind(self, program: Program) -> NumpyHandle:
        steps, context = bind_program(program, self._memory_of, self._workers)
        return NumpyHandle(self, program.name, steps, context)

    def close(self) -> None:
        super().close()
        self._workers.close()
