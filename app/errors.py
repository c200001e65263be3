"""Every error Tandem raises on purpose.

    TandemError
    ├ ConfigError              a flag, variable or file that makes no sense; ends the start with exit code 2
    ├ RequestError             what a caller asked cannot be done; the caller can mend it
    │ ├ InvalidParameter       one field is wrong; `param` names it
    │ ├ ContextLengthExceeded  the prompt does not fit the context
    │ ├ NoTokenLeft            bias and constraint together forbid every token
    │ ├ NotFound               no such model, route or object
    │ └ BodyTooLarge           the body is above the limit
    ├ CapacityError            not now; `retry_after_s` says when to try again
    │ ├ QueueFull              the waiting line is full
    │ └ NotReady               the model is loading, or the server is draining
    ├ ModelError               a model file that cannot be served
    │ ├ FormatError            the bytes are not what their header promises
    │ └ UnsupportedModel       a sound file of a kind we do not run
    ├ DeviceError              something below the plan failed
    │ ├ OutOfDeviceMemory      an allocation was refused
    │ │ └ DoesNotFit           the devices together have no room for the model
    │ ├ UnsupportedOp          this device cannot run this op on these types
    │ ├ DeviceLost             the device is gone, with everything it held
    │ │ └ RouteLost            two devices stand, but not the connection between them
    │ └ AccessDenied           a worker and this side do not hold the same token
    ├ ProtocolError            the bytes on a wire are wrong
    │ ├ LocalProtocolError     our own side broke the rules (a bug)
    │ ├ RemoteProtocolError    the peer broke the rules
    │ └ VersionMismatch        the peer speaks another protocol
    └ InternalError            a bug; raised by checks of our own invariants

Messages are lower-case, without a trailing dot, and say what to do next. HTTP statuses live in `app/api/errors.py`
alone. `assert` is for our own invariants, never for input, files or peers.
"""

from __future__ import annotations

from app.units import mib


class TandemError(Exception):
    """Root of the tree."""


class ConfigError(TandemError):
    """A flag, variable or file that makes no sense."""


class RequestError(TandemError):
    """What a caller asked cannot be done; the caller can mend it."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidParameter(RequestError):
    """One field of a request is wrong; `param` names it."""


class ContextLengthExceeded(RequestError):
    """The prompt does not fit the context."""

    def __init__(self, prompt_tokens: int, context_tokens: int, *, param: str | None = "messages") -> None:
        super().__init__(
            # The first words are OpenAI's: clients look for them to know that they should send less.
            f"this model's maximum context length is {context_tokens} tokens, the prompt has {prompt_tokens} tokens, "
            f"and at least one must stay free for the answer; shorten the prompt or start the server with a larger "
            f"--ctx-size",
            param=param,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class NoTokenLeft(RequestError):
    """Bias and constraint together forbid every token, or the constraint became too complex to follow."""


class NotFound(RequestError):
    """No such model, route or object."""


class BodyTooLarge(RequestError):
    """The body is above the limit."""


class CapacityError(TandemError):
    """Not now; `retry_after_s` says when to try again."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(CapacityError):
    """The waiting line is full."""


class DeadlineExceeded(TandemError):
    """A request took longer than it may."""


class NotReady(CapacityError):
    """The model is loading, or the server is draining."""


class ModelError(TandemError):
    """A model file that cannot be served."""


class FormatError(ModelError):
    """The bytes are not what their header promises."""


class UnsupportedModel(ModelError):
    """A sound file of a kind we do not run."""


class DeviceError(TandemError):
    """Something below the plan failed."""


class OutOfDeviceMemory(DeviceError):
    """An allocation was refused."""

    def __init__(self, device: str, needed_bytes: int, free_bytes: int | None = None) -> None:
        free = "" if free_bytes is None else f", {mib(free_bytes)} are free"
        super().__init__(
            f"device {device} refused an allocation of {mib(needed_bytes)}{free}; "
            f"use a smaller --ctx-size, more devices, or another --tensor-split"
        )
        self.device = device
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class DoesNotFit(OutOfDeviceMemory):
    """The devices together have no room for the model; nothing was allocated."""

    def __init__(self, needed_bytes: int, usable_bytes: int, offers: str) -> None:
        DeviceError.__init__(
            self,
            f"the model needs {mib(needed_bytes)} for weights and KV cache, and the devices offer {mib(usable_bytes)} "
            f"({offers}); use a smaller --ctx-size, more devices, or a smaller quantization",
        )
        self.device = offers
        self.needed_bytes = needed_bytes
        self.free_bytes = usable_bytes


class UnsupportedOp(DeviceError):
    """This device cannot run this op on these types."""

    def __init__(self, device: str, op: str, reason: str) -> None:
        super().__init__(f"device {device} cannot run {op}: {reason}")
        self.device = device
        self.op = op
        self.reason = reason


class DeviceLost(DeviceError):
    """The device is gone, with everything it held; or it was never there, if it was not `reached`."""

    def __init__(self, endpoint: str, cause: str, *, command: str | None = None, reached: bool = True) -> None:
        during = f" during {command}" if command else ""
        what = "was lost" if reached else "could not be reached"
        super().__init__(f"device {endpoint} {what}{during}: {cause}")
        self.endpoint = endpoint
        self.command = command
        self.cause = cause

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All that cannot be used because of it."""
        return (self.endpoint,)


class RouteLost(DeviceLost):
    """Two devices stand, but the connection between them is gone, with what was on its way."""

    def __init__(self, source: str, target: str) -> None:
        self.target = target
        cause = f"the connection from worker to worker has failed ({source} -> {target})"
        super().__init__(source, cause, command="PUSH")

    @property
    def endpoints(self) -> tuple[str, ...]:
        return (self.endpoint, self.target)


class AccessDenied(DeviceError):
    """A worker and this side do not hold the same token."""

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(f"no access to worker {endpoint}: {reason}")
        self.endpoint = endpoint
        self.reason = reason


class ProtocolError(TandemError):
    """The bytes on a wire are wrong."""


class LocalProtocolError(ProtocolError):
    """Our own side broke the rules (a bug)."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules."""


class VersionMismatch(ProtocolError):
    """The peer speaks another protocol."""

    def __init__(self, endpoint: str, got: tuple[int, int, int], expected: str) -> None:
        super().__init__(
            f"worker {endpoint} speaks RPC protocol {'.'.join(map(str, got))}, this side speaks {expected}; "
            f"update one of them"
        )
        self.endpoint = endpoint
        self.got = got
        self.expected = expected


class InternalError(TandemError):
    """A bug; raised by checks of our own invariants."""
