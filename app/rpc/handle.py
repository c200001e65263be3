"""A program at a worker, as its client knows it."""

from __future__ import annotations

from concurrent.futures import Future

from app.engine.device import Device, Handle
from app.rpc.link import RpcBuffer


class RpcHandle(Handle):
    """A program as the worker gets it: the frame that sends it whole, or the frame that names it."""

    __slots__ = ("buffers", "device", "frame", "graph_id", "refusal", "released")

    def __init__(
        self, device: Device, program_name: str, frame: bytes, graph_id: int | None, buffers: frozenset[RpcBuffer]
    ) -> None:
        super().__init__(program_name)
        self.device = device
        self.frame = frame
        self.graph_id = graph_id
        self.buffers = buffers
        self.released = False
        #: What the worker said against it, once it was heard.
        self.refusal: str | None = None

    @property
    def flaw(self) -> str | None:
        """Why it must not run any more. A stock worker would not survive a graph on memory that is gone."""
        if self.released:
            return "it was released"
        if self.refusal is not None:
            return self.refusal
        return None if all(buffer.live for buffer in self.buffers) else "a buffer that it uses was freed"

    def note_refusal(self, heard: Future[memoryview]) -> None:
        """What was sent to the worker in the meantime has failed there, or the connection has."""
        error = heard.exception()
        reason = str(error) if error is not None else bytes(heard.result()).decode(errors="replace")
        self.refusal = reason or None
