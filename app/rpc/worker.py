"""A worker: serves local devices to any client of the protocol, several at once, each with buffers of its own."""

from __future__ import annotations

import errno
import itertools
import logging
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from app.engine.device import Device
from app.errors import ConfigError
from app.rpc.endpoint import DEFAULT_PORT, tune
from app.rpc.protocol import MAX_MESSAGE_BYTES
from app.rpc.session import Session
from app.rpc.station import Station

log = logging.getLogger(__name__)

#: Addresses told to clients start here and are never used twice, by any client: a stale one meets nothing.
_FIRST_ADDRESS = 0x1000_0000
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How a worker serves. `mem_bytes` limits what all clients together may take of each device; None: all of it.

    `version` is the protocol version to announce. `hello_s` and `idle_s` bound a client's silence before its HELLO and
    in the middle of a request.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    version: tuple[int, int] = (7, 0)
    mem_bytes: int | None = None
    max_clients: int = 64
    max_message_bytes: int = MAX_MESSAGE_BYTES
    hello_s: float = 10.0
    idle_s: float = 60.0


class Worker:
    """Serves devices until closed. The devices stay the caller's: close them after the worker."""

    def __init__(self, devices: Sequence[Device], settings: WorkerSettings | None = None) -> None:
        self.settings = settings or WorkerSettings()
        self.stations = tuple(Station(device, self.settings.mem_bytes) for device in devices)
        self._lock = threading.Lock()
        self._sessions: dict[Session, threading.Thread] = {}
        self._addresses = itertools.count(1)
        self._next_base = _FIRST_ADDRESS
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def port(self) -> int:
        """The port that is listened on, once started."""
        return int(self._listener.getsockname()[1]) if self._listener is not None else self.settings.port

    @property
    def n_clients(self) -> int:
        return len(self._sessions)

    def start(self) -> None:
        """Listen, and serve in threads of its own. Raises ConfigError when the address cannot be had."""
        host, port = self.settings.host, self.settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            hint = "; another program has it, choose another --port" if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from error
        self._acceptor = threading.Thread(target=self._accept, name="rpc-accept", daemon=True)
        self._acceptor.start()
        log.info("worker listens on %s:%d with %d device(s)", host, self.port, len(self.stations))

    def serve(self, sock: socket.socket, peer: str) -> None:
        """Serve a connected socket in a thread of its own; the socket is the worker's from now on."""
        session = Session(self, sock, peer)
        thread = threading.Thread(target=self._session, args=(session,), name=f"rpc-serve-{peer}", daemon=True)
        with self._lock:
            full = self._closed.is_set() or len(self._sessions) >= self.settings.max_clients
            if not full:
                self._sessions[session] = thread
        if full:
            log.warning("refused client %s: %d clients are connected", peer, self.settings.max_clients)
            sock.close()
            return
        thread.start()

    def new_address(self, size_bytes: int) -> tuple[int, int]:
        """A handle and a base address for a new buffer, unique in this worker's life."""
        with self._lock:
            base = self._next_base
            self._next_base += (size_bytes // _PAGE_BYTES + 2) * _PAGE_BYTES
            return next(self._addresses) << 12, base

    def wait(self) -> None:
        """Block until the worker is closed."""
        self._closed.wait()

    def close(self) -> None:
        """Hang up on everybody and free what they had. Blocks; may be called twice."""
        self._closed.set()
        if self._listener is not None:
            try:
                self._listener.shutdown(socket.SHUT_RDWR)
            except OSError:  # not on every system for a listening socket; closing it does as well
                pass
            self._listener.close()
        if self._acceptor is not None:
            self._acceptor.join()
        with self._lock:
            sessions = dict(self._sessions)
        for session in sessions:
            session.stop()
        for thread in sessions.values():
            thread.join()

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closed.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                log.warning("cannot accept a client: %s", error)
                self._closed.wait(0.1)  # out of descriptors, most likely: let some go
                continue
            tune(sock)
            self.serve(sock, f"{address[0]}:{address[1]}")

    def _session(self, session: Session) -> None:
        try:
            session.run()
        finally:
            with self._lock:
                del self._sessions[session]
