"""One client of a worker: what it asks, one request after the other.

Nothing a client says is believed before it is checked; a violation ends this session and no other. Requests are parsed
by `protocol` and done by the handlers of `facts`, `memory`, `receiving`, `sending` and `computing`, which share what
stands here.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from app.errors import DeviceError, TandemError
from app.rpc import computing, facts, memory, pushing, receiving, sending, taking, trust, turns
from app.rpc import messages as m
from app.rpc.answers import Answers, Staging
from app.rpc.client_socket import ClientSocket
from app.rpc.graphs import Graphs
from app.rpc.holdings import Holdings
from app.rpc.protocol import RequestParser, encode_answer
from app.rpc.pushing import Routes
from app.rpc.specs import SPECS
from app.rpc.trust import Trust
from app.rpc.wire import ANSWER_HEADER, FIRST_EXTENSION, Command
from app.rpc.workload import Workload

if TYPE_CHECKING:
    from app.rpc.worker import Worker

log = logging.getLogger(__name__)


class Session:
    """Serves one connected socket until the client leaves, breaks the rules, or stays silent within a request.

    Its parts are the handlers' to use, in the session's thread.
    """

    def __init__(self, worker: Worker, sock: socket.socket, client: str, parser: RequestParser) -> None:
        settings = worker.settings
        self.client = client
        self.worker = worker
        self.socket = ClientSocket(sock, parser, hello_s=settings.hello_s, idle_s=settings.idle_s)
        self.holdings = Holdings(worker.stations, worker.new_address)
        self.graphs = Graphs(self.holdings, client)
        self.answers = Answers(self.socket, self.check, self._answers_ended)
        self.staging = Staging()
        self.answer_room = turns.AnswerRoom()
        self.workload = Workload(self.check)
        self.routes = Routes(worker.inlets)
        self.trust = Trust(settings.token, self.socket, parser)
        self._specs = SPECS[settings.version]
        self._parser = parser
        #: A stranger is told why it is refused in any case: one that does not understand fails as it should.
        self._understands_notices = not self.trust.given
        self._failure: str | None = None
        #: A request that was read ahead.
        self._following: m.Request | None = None

    def run(self) -> None:
        """Serve until the end, then free everything the client had."""
        reason: str | None = None
        try:
            self._serve()
        except (TandemError, MemoryError) as error:
            reason = self._failure or str(error) or type(error).__name__
        except (EOFError, OSError) as error:
            reason = self._failure
            log.debug("client %s left: %s", self.client, error)
        except Exception:
            log.exception("a bug in this worker ended the session of client %s", self.client)
        finally:
            self.routes.close()  # answers may wait for a receiver of pushes
            self.answers.close()
            if reason is not None:
                log.warning("closed client %s: %s", self.client, reason)
                if self._understands_notices:
                    self.socket.say_why(reason)
            self._free_everything()
            self.socket.close()

    def stop(self) -> None:
        """Hang up, from any thread."""
        self.socket.stop()

    def _serve(self) -> None:
        if self._parser.greeted:  # before this session began
            facts.hello(self, m.Hello())
        while True:
            request, self._following = self._following or self.socket.next_request(), None
            self.check()
            if request.command >= FIRST_EXTENSION:
                self._understands_notices = True
            self.trust.check(request.command)
            _HANDLERS[request.command](self, request)

    # -- for the handlers -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nothing is done and nothing answered after something has failed that has no answer of its own."""
        if self._failure is not None:
            raise DeviceError(self._failure)

    def fail(self, reason: str) -> None:
        """End the session for this reason, from any thread; the first one is the one that is told."""
        self._failure = self._failure or reason
        self.socket.stop_reading()

    def peek(self) -> m.Request | None:
        """The next request, if it has come already. Views of this one are not valid any more."""
        if self._following is None:
            self._following = self.socket.request_in_sight()
        return self._following

    def skip_following(self) -> None:
        """The request that was read ahead is done."""
        self._following = None

    def look_ahead(self) -> Callable[[], None]:
        """Read the next request if it has come already, before something that lasts: this machine's caches, and with
        them the speed of all this, are another's afterwards. What to do right behind it, to the same end: a read.
        """
        if self._following is None and self.socket.has_more:
            self._following = self.socket.request_at_hand()
        answer = sending.prepared(self, self._following)
        if answer is None:
            return _nothing
        self._following = None
        return answer

    def encode(self, command: Command, answer: Any) -> bytes:
        """An answer of fixed size."""
        layout = self._specs[command].answer
        assert layout is not None
        return encode_answer(layout, answer)

    def answer(self, command: Command, answer: Any) -> None:
        self.check()
        self.answers.send(self.encode(command, answer))

    def answer_text(self, text: bytes) -> None:
        self.answers.send(ANSWER_HEADER.pack(len(text)), text)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _answers_ended(self, error: BaseException) -> None:
        if isinstance(error, TandemError):
            self.fail(str(error))
            return
        if not isinstance(error, OSError):
            log.error("a bug in this worker ended the answers to client %s", self.client, exc_info=error)
        self.socket.stop_reading()

    def _free_everything(self) -> None:
        try:
            self.graphs.forget_all()
            self.holdings.free_all()
        except DeviceError as error:  # the device is closed: its memory went with it
            log.debug("nothing to free for client %s: %s", self.client, error)


def _nothing() -> None:
    """A session goes on with its next request."""


_HANDLERS: Mapping[Command, Callable[[Session, Any], None]] = {
    **facts.HANDLERS,
    **memory.HANDLERS,
    **receiving.HANDLERS,
    **sending.HANDLERS,
    **computing.HANDLERS,
    **turns.HANDLERS,
    **trust.HANDLERS,
    **pushing.HANDLERS,
    **taking.HANDLERS,
}
