"""Where a worker is, and how to get a connected socket to it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from app.errors import ConfigError, DeviceLost

DEFAULT_PORT = 50052

#: Gives a new connection to one worker. The seam for TLS and for connections in memory.
Dial = Callable[[], socket.socket]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long one connection waits, in seconds.

    `answer_s` runs from the moment a command is written and its predecessor answered; a long prompt on a slow worker
    must fit. `idle_s` bounds a pause in the middle of an answer. A Tandem worker is asked for a sign of life every
    `heartbeat_s` and has `patience_s` to give it.
    """

    connect_s: float = 10.0
    hello_s: float = 10.0
    answer_s: float = 600.0
    idle_s: float = 60.0
    heartbeat_s: float = 5.0
    patience_s: float = 20.0


def parse_endpoint(text: str) -> tuple[str, int]:
    """`host`, `host:port`, `[v6]:port` to host and port. Raises ConfigError."""
    if "://" in text:
        raise ConfigError(f"endpoint {text!r} has a scheme; write host:port alone")
    host, colon, port = text.strip().rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):  # no port, or a bare IPv6 address
        host, port = text.strip(), str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"endpoint {text!r} is not host:port; write for example 192.168.1.20:{DEFAULT_PORT}")
    return host, int(port)


def write_endpoint(host: str, port: int) -> str:
    """What `parse_endpoint` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tcp_dial(endpoint: str, timeouts: Timeouts) -> Dial:
    """Dials a worker over TCP. Raises DeviceLost with the reason and ConfigError for a malformed endpoint."""
    address = parse_endpoint(endpoint)

    def dial() -> socket.socket:
        try:
            return socket.create_connection(address, timeouts.connect_s)
        except TimeoutError as error:
            cause = f"no connection within {timeouts.connect_s:g} s; is the host up, and no firewall between?"
            raise DeviceLost(endpoint, cause, reached=False) from error
        except ValueError as error:  # not even a question to ask the resolver
            raise ConfigError(f"endpoint {endpoint!r} names a host that cannot exist") from error
        except OSError as error:
            hint = "; is a worker running there?" if isinstance(error, ConnectionRefusedError) else ""
            raise DeviceLost(endpoint, f"{error.strerror or error}{hint}", reached=False) from error

    return dial


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and notice a peer that lost power. Does nothing for sockets that are not TCP."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
