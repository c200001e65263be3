"""One frozen dataclass per kind of answer; see `messages`."""

from __future__ import annotations

from dataclasses import dataclass

from app.rpc.wire import NO_CAPS


@dataclass(frozen=True, slots=True)
class HelloAnswer:
    """Who answers: the protocol version, and a pad byte that only Tandem workers set."""

    major: int
    minor: int
    patch: int
    pad: int
    conn_caps: bytes = NO_CAPS


@dataclass(frozen=True, slots=True)
class Allocated:
    """A new buffer; zeros mean the allocation was refused."""

    remote_ptr: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Value:
    """One unsigned number: an alignment, a size, an address, a count or a result of 0 or 1."""

    value: int


@dataclass(frozen=True, slots=True)
class Challenge:
    """A worker's nonce, and whether it serves only those who hold its token."""

    demanded: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Proof:
    """A worker's own proof."""

    proof: bytes


@dataclass(frozen=True, slots=True)
class Ticket:
    """Good for one connection from another worker."""

    ticket: bytes


@dataclass(frozen=True, slots=True)
class MemoryAnswer:
    """Free and total bytes of a device."""

    free_bytes: int
    total_bytes: int
