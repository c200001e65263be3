"""A worker: serves local devices to any client of the protocol, several at once, each with buffers of its own."""

from __future__ import annotations

import errno
import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.engine.device import Device
from app.errors import ConfigError, TandemError
from app.rpc.endpoint import DEFAULT_PORT, write_endpoint
from app.rpc.inlets import Inlets
from app.rpc.lobby import Lobby
from app.rpc.protocol import MAX_MESSAGE_BYTES, RequestParser
from app.rpc.session import Session
from app.rpc.station import Station
from app.rpc.token import Token
from app.rpc.weight_cache import WeightCache
from app.rpc.weights import ModelIndex, WeightStore

log = logging.getLogger(__name__)

#: Addresses told to clients start here and are never used twice, by any client: a stale one meets nothing.
_FIRST_ADDRESS = 0x1000_0000
_PAGE_BYTES = 4096

DEFAULT_CACHE_BYTES = 32 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How a worker serves.

    `version` is the protocol version to announce; without `extensions` this worker passes for a stock one. `mem_bytes`
    limits what all clients together may take of each device; None: all of it. `hello_s` and `idle_s` bound a client's
    silence before its HELLO and in the middle of a request. Weights found below `model_dir` need not be sent (their
    hashes are kept in `hash_dir`, which must be given with it); those sent are kept in `cache_dir`, up to
    `cache_bytes`, for whoever asks for the same bytes: share such a worker among people who trust each other. With a
    `token` only clients that hold it are served, which leaves out stock ones.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    version: tuple[int, int] = (7, 0)
    extensions: bool = True
    mem_bytes: int | None = None
    max_clients: int = 64
    max_message_bytes: int = MAX_MESSAGE_BYTES
    hello_s: float = 10.0
    idle_s: float = 60.0
    model_dir: Path | None = None
    hash_dir: Path | None = None
    cache_dir: Path | None = None
    cache_bytes: int = DEFAULT_CACHE_BYTES
    token: Token | None = None


class Worker:
    """Serves devices until closed. The devices stay the caller's: close them after the worker."""

    def __init__(self, devices: Sequence[Device], settings: WorkerSettings | None = None) -> None:
        self.settings = settings or WorkerSettings()
        if self.settings.token is not None and not self.settings.extensions:
            raise ConfigError("a worker that passes for a stock one cannot ask for a token")
        self.stations = tuple(Station(device, self.settings.mem_bytes) for device in devices)
        #: Tells this worker from others, whatever names lead to it.
        self.identity = secrets.token_hex(8)
        self.weights = _weight_store(self.settings)
        self.inlets = Inlets()
        self._lock = threading.Lock()
        self._sessions: dict[Session, threading.Thread] = {}
        self._addresses = itertools.count(1)
        self._next_base = _FIRST_ADDRESS
        self._port = 0
        self._lobby: Lobby | None = None
        self._closing = False
        self._closed = threading.Event()

    @property
    def port(self) -> int:
        """The port that is listened on, once started."""
        return self._port or self.settings.port

    @property
    def n_clients(self) -> int:
        return len(self._sessions)

    def start(self) -> None:
        """Listen, and serve in threads of its own. Raises TandemError when the address cannot be had."""
        host, port = self.settings.host, self.settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            hint = "; another program has it, choose another --port" if error.errno == errno.EADDRINUSE else ""
            raise TandemError(
                f"cannot listen on {write_endpoint(host, port)}: {error.strerror or error}{hint}"
            ) from error
        self._port = listener.getsockname()[1]
        self._lobby = Lobby(listener, self._new_parser, self.serve, self.settings.hello_s)
        log.info("worker listens on %s with %d device(s)", write_endpoint(host, self._port), len(self.stations))

    def serve(self, sock: socket.socket, client: str, parser: RequestParser | None = None) -> None:
        """Serve a connected socket in a thread of its own; the socket is the worker's from now on.

        `parser` has read the client's HELLO already; without it the session waits for that.
        """
        session = Session(self, sock, client, parser or self._new_parser())
        thread = threading.Thread(target=self._session, args=(session,), name=f"rpc-serve-{client}", daemon=True)
        with self._lock:
            full = self._closing or (len(self._sessions) >= self.settings.max_clients and not self._evict_stranger())
            if not full:
                self._sessions[session] = thread
        if full:
            log.warning("closed client %s: %d others are connected", client, self.settings.max_clients)
            sock.close()
            return
        thread.start()

    def _evict_stranger(self) -> bool:
        """Hang up on somebody who has not shown the token yet, in favour of a newcomer. The lock is held."""
        stranger = next((session for session in self._sessions if not session.trust.given), None)
        if stranger is not None:
            log.warning("closed client %s: it has not shown the token, and all places are taken", stranger.client)
            stranger.stop()
        return stranger is not None

    def new_address(self, size_bytes: int) -> tuple[int, int]:
        """A handle and a base address for a new buffer, unique in this worker's life."""
        with self._lock:
            base = self._next_base
            self._next_base += (size_bytes // _PAGE_BYTES + 2) * _PAGE_BYTES
            return next(self._addresses) << 12, base

    def wait_for_weights(self) -> None:
        """Block until the models below `model_dir` are indexed; clients are served before that all the same."""
        self.weights.wait()

    def wait(self) -> None:
        """Block until the worker is closed."""
        self._closed.wait()

    def close(self) -> None:
        """Hang up on everybody and free what they had. Blocks; may be called twice."""
        if self._lobby is not None:
            self._lobby.close()
            self._lobby = None
        with self._lock:
            self._closing = True
            sessions = dict(self._sessions)
        for session in sessions:
            session.stop()
        for thread in sessions.values():
            thread.join()
        self.weights.close()
        self._closed.set()

    def _new_parser(self) -> RequestParser:
        return RequestParser(self.settings.version, self.settings.max_message_bytes)

    def _session(self, session: Session) -> None:
        try:
            session.run()
        finally:
            with self._lock:
                del self._sessions[session]


def _weight_store(settings: WorkerSettings) -> WeightStore:
    """Raises ConfigError for directories that cannot be used."""
    index = cache = None
    if settings.model_dir is not None:
        if settings.hash_dir is None:
            raise ConfigError("a worker with a model directory needs a directory to keep hashes in")
        index = ModelIndex(settings.model_dir, settings.hash_dir)
    if settings.cache_dir is not None:
        cache = WeightCache(settings.cache_dir, settings.cache_bytes)
    return WeightStore(index, cache)
