"""Addresses to listen on: a socket or one clear line, who can reach it, and how a person would write it."""

from __future__ import annotations

import ipaddress
import socket

from app.errors import TandemError

_BACKLOG = 2048


class ListenError(TandemError):
    """The address cannot be listened on."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises ListenError naming the address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ListenError(f"cannot listen on {host}: {error.strerror or error}; check --host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ListenError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --host or --port"
        ) from error
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)


def url_of(listener: socket.socket) -> str:
    """The URL a person on this machine would open."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
