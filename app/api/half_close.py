"""Lets a client close its sending side and still get its answer, and yet notices one that is gone altogether.

Both look the same from here: the end of its bytes. They differ in what happens to ours: a client that is gone refuses
them. So after the end of its bytes a harmless answer is sent now and then until the real one is on its way: an interim
`100 Continue` before the status line; event streams speak more often by themselves (they see a message from `receive`).
"""

from __future__ import annotations

from app.api.bad_http import BoundedHeadProtocol

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
#: Seconds until each further probe; the last counts for all that follow.
PROBE_AFTER_S = (0.05, 0.2, 1.0)


class HalfCloseProtocol(BoundedHeadProtocol):
    """uvicorn's HTTP/1.1 protocol, but the end of the client's bytes is not the end of the connection."""

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the connection open for writing. Not with TLS (asyncio), nor in HTTP/1.0 (no interim answers)."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:  # without a request there is no scope yet
            return False
        if self.scheme == "https" or self.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False
        cycle.message_event.set()
        self._probe(0)
        return True

    def _probe(self, n_sent: int) -> None:
        if self.transport.is_closing() or self.cycle.response_started:
            return
        self.transport.write(INTERIM)
        self.loop.call_later(PROBE_AFTER_S[min(n_sent, len(PROBE_AFTER_S) - 1)], self._probe, n_sent + 1)
