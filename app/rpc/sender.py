"""One device's way onto the wire: bytes and commands in call order, with small writes riding on what follows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from app.engine.mask import MaskRecipe
from app.engine.rows import F32_BYTES, WHOLE, RowSelection
from app.errors import DeviceLost
from app.rpc.awaited import Awaited
from app.rpc.hasher import HASH_BYTES, Hasher
from app.rpc.link import Link, RpcBuffer
from app.rpc.messages import CopyTensor, Push, PushTurn, ReadRows, Request, SetTensorHash, TakeTurn, Value, WriteMask
from app.rpc.outbox import SKIP, Answer, Entry, LaneState, settle
from app.rpc.protocol import encode
from app.rpc.specs import answer_range
from app.rpc.transfers import MAX_WAITING_BYTES, SMALL_BYTES, Late, Riders, chunks, get_frame, set_frame
from app.rpc.wire import region


class Sender:
    """Thread-safe; whoever needs several calls to be one step holds the link's lock, which may be taken again."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lane = LaneState()
        self._hasher = Hasher(link.endpoint, lambda: link.dispatcher.lost)
        self._riders = Riders(batched=link.peer.is_tandem)
        self._read_command = "READ_REGION" if link.peer.is_tandem else "GET_TENSOR"
        #: None until the first COPY_TENSOR was answered: some backends refuse to copy within themselves.
        self._copies: bool | None = True if link.peer.is_tandem else None

    # -- commands ---------------------------------------------------------------------------------------------------

    def submit(self, command: str, frame: bytes, answer: Answer | None = None) -> None:
        """Queue a command behind the small writes and runs that wait, in one frame with them. Raises DeviceLost.

        With an answer it is a read or an event: it fails with what went wrong in the lane before, if anything did.
        """
        with self._link.lock:
            riding, riders = self._take()
            entry = Entry(command, frame, answer=answer, lane=self._lane, surfaces=answer is not None)
            if riders:
                entry.frame, entry.riders, entry.remainder = riding + frame, riders, riding
            self._link.dispatcher.submit(entry)

    def run(self, command: str, frame: bytes) -> None:
        """Run what the worker keeps. Where the connection is this device's alone, it leaves with the read or event that
        follows: nobody can tell before whether it has run, and the worker knows what will be asked before it starts.
        """
        if not self._link.peer.is_tandem:
            self.submit(command, frame)
            return
        with self._link.lock:
            self._riders.add_run(command, frame)
            if len(self._riders) > MAX_WAITING_BYTES:
                self.flush()

    def tell(self, request: Request) -> None:
        """Queue a command without an answer."""
        self.submit(request.command.name, encode(request, self._link.peer.version))

    def ask(self, request: Request, tail: memoryview | None = None) -> Future[Any]:
        """Queue a question about the device rather than about its lane."""
        with self._link.lock:
            self.flush()
            return self._link.dispatcher.ask(request, tail=tail)

    def ask_in_lane(self, request: Request, *, gate: Future[Any]) -> Future[Any]:
        """Queue a question that has its place in the lane, in one frame with what waits. What opens or fails its gate
        opens or fails it.
        """
        with self._link.lock:
            riding, riders = self._take()
            name, answer, frame = self._question(request)
            opened = gate.done() and not gate.cancelled() and gate.exception() is None
            entry = Entry(name, riding + frame, gate=None if opened else gate, answer=answer, lane=self._lane)
            entry.riders, entry.remainder = riders, riding
            self._link.dispatcher.submit(entry)
        return answer.future

    def push(self, request: Push, sent: Future[None]) -> Future[Any]:
        """Have the worker push what a run leaves, as one turn with the run if that is all that waits.

        It fails, as a read does, with what went wrong in the lane before. `sent` resolves when it has left.
        """
        with self._link.lock:
            turn = self._riders.take_turn() if self._link.takes_turns else None
            riding, riders = self._take() if turn is None else (turn.otherwise, ())
            asked: Push | PushTurn = request
            if turn is not None:
                asked = PushTurn(
                    turn.device,
                    turn.graph_id,
                    request.address,
                    request.size_bytes,
                    request.route,
                    request.sequence,
                    memoryview(turn.items),
                )
            items, late = (b"", None) if turn is None else (turn.items, turn.late)
            name, answer, frame = self._question(asked, items, late)
            if turn is None:
                frame = riding + frame
            entry = Entry(name, frame, sent=sent, answer=answer, lane=self._lane, surfaces=True)
            entry.riders, entry.remainder = riders, riding
            self._submit_late(entry, late)
        return answer.future

    def _question(
        self, request: Request, tail: bytes | bytearray = b"", late: Late | None = None
    ) -> tuple[str, Answer, bytes | bytearray]:
        """A command whose answer is a message: its name, the answer, its bytes as far as they are there."""
        peer, name = self._link.peer, request.command.name
        spec = peer.specs[request.command]
        least, most = answer_range(spec, request)
        decode = None if spec.answer is None else spec.answer.unpack
        answer = Answer(name, least, most, self._link.dispatcher.awaited(), decode=decode)
        n_late = 0 if late is None else late.size_bytes
        return name, answer, encode(request, peer.version, len(tail) + n_late) + tail

    def fail(self, command: str, error: Exception) -> None:
        """Send nothing; the error surfaces at the next read or event, like that of a command that was sent."""
        failed: Future[Any] = Future()
        failed.set_exception(error)
        with self._link.lock:
            self.flush()
            self._link.dispatcher.submit(Entry(command, b"", gate=failed, lane=self._lane))

    def flush(self) -> None:
        """Queue the small writes and runs that wait."""
        with self._link.lock:
            riding, riders = self._take()
            if riders:
                self._link.dispatcher.submit(Entry(riders[0], riding, lane=self._lane, riders=riders[1:]))

    def _take(self) -> tuple[bytearray, tuple[str, ...]]:
        """The small writes and runs that wait; what waits for bytes of its own is queued in front of them."""
        self._queue_late()
        return self._riders.take()

    def _queue_late(self) -> None:
        riding = self._riders.take_late()
        if riding is not None:
            *riders, command = riding.commands
            entry = Entry(command, riding.frame, lane=self._lane, riders=tuple(riders), remainder=riding.otherwise)
            self._submit_late(entry, riding.late)

    def _submit_late(self, entry: Entry, late: Late | None) -> None:
        """Queue a command that may have to wait for bytes. Raises DeviceLost, which who waits for them hears too."""
        _wait_for(entry, late)
        try:
            self._link.dispatcher.submit(entry)
        except DeviceLost as lost:
            if late is not None:
                settle(late.sent, error=lost)
            raise

    # -- bytes ------------------------------------------------------------------------------------------------------

    def write_small(self, buffer: RpcBuffer, offset: int, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Copy a few bytes, each piece so far behind `offset`; they leave with the next command."""
        with self._link.lock:
            self._queue_late()
            for at, view in pieces:
                self._riders.add_write(buffer, offset + at, view)
            if len(self._riders) > MAX_WAITING_BYTES:
                self.flush()

    def write_mask(self, buffer: RpcBuffer, offset: int, recipe: MaskRecipe) -> None:
        """Have a mask made; its recipe leaves with the next command."""
        request, tail = WriteMask(buffer.address.base + offset, memoryview(b"")), recipe.packed
        with self._link.lock:
            self._queue_late()
            self._riders.add_mask("WRITE_MASK", encode(request, self._link.peer.version, len(tail)) + tail)
            if len(self._riders) > MAX_WAITING_BYTES:
                self.flush()

    def write(self, buffer: RpcBuffer, offset: int, view: memoryview, chunk_bytes: int, *, cache: int) -> Future[None]:
        """Send bytes as views of their source, in chunks; the future resolves when all have left."""
        sent: Future[None] = Future()
        with self._link.lock:
            self.flush()
            for start, n in chunks(len(view), chunk_bytes):
                frame = set_frame(buffer, offset + start, n, cache=cache)
                last = sent if start + n == len(view) else None
                chunk = view[start : start + n]
                self._link.dispatcher.submit(Entry("SET_TENSOR", frame, chunk, n, sent=last, lane=self._lane))
        return sent

    def write_later(self, buffer: RpcBuffer, offset: int, payload: Future[Any], size: int) -> Future[None]:
        """A write whose bytes are still on their way, in the place taken now. The future resolves when they have left.

        If they are few, and a run and a read or push come next, all of it is one turn.
        """
        if not 0 < size <= SMALL_BYTES or not self._link.takes_turns:
            return self._write_gated(buffer, offset, payload, size)
        late = Late(payload, size)

        def come(_: Future[Any]) -> None:
            with self._link.lock, suppress(DeviceLost):  # it is told by the future
                if self._riders.late is late:  # nothing has followed yet, and who waits for this must not wait for that
                    self.flush()

        with self._link.lock:
            self._queue_late()
            self._riders.add_late_write(buffer, offset, late)
        payload.add_done_callback(come)
        return late.sent

    def _write_gated(
        self, buffer: RpcBuffer, offset: int, payload: Future[Any], size: int, cache: int = 0
    ) -> Future[None]:
        """A write of its own whose bytes are still on their way, or are not needed (SKIP)."""
        sent: Future[None] = Future()
        frame = set_frame(buffer, offset, size, cache=cache)
        with self._link.lock:
            self.flush()
            entry = Entry("SET_TENSOR", frame, payload_bytes=size, gate=payload, sent=sent, lane=self._lane)
            self._link.dispatcher.submit(entry)
        return sent

    def offer(self, buffer: RpcBuffer, offset: int, view: memoryview, content_hash: Callable[[], int]) -> Future[None]:
        """Ask the worker whether it has these bytes; they travel, in the place taken now, only if it has not.

        The question has its place too and waits there for the hash, which may take a while to compute.
        """
        gate: Future[Any] = Future()
        tensor = region(buffer.address.remote_ptr, buffer.address.base + offset, len(view))
        frame = encode(SetTensorHash(tensor, 0, 0), self._link.peer.version)[:-HASH_BYTES]
        asked = self._link.dispatcher.awaited()
        answer = Answer("SET_TENSOR_HASH", 1, 1, asked)

        def answered(asked: Future[memoryview]) -> None:
            error = asked.exception()
            settle(gate, None if error else SKIP if asked.result()[0] else view, error=error)

        with self._link.lock:
            self.flush()
            hashed = self._hasher.compute(content_hash)
            entry = Entry("SET_TENSOR_HASH", frame, None, HASH_BYTES, hashed, answer=answer, lane=self._lane)
            self._link.dispatcher.submit(entry)
            sent = self._write_gated(buffer, offset, gate, len(view), cache=1)
        asked.add_done_callback(answered)
        return sent

    def close(self) -> None:
        """Compute no more hashes."""
        self._hasher.close()

    def read(self, buffer: RpcBuffer, offset: int, size: int, into: memoryview | None) -> Future[memoryview]:
        future: Awaited[memoryview] = self._link.dispatcher.awaited()
        answer = Answer(self._read_command, size, size, future, into)
        wishes = b"" if (offset | size) % F32_BYTES else _ONE_ROW
        if not self._end_turn(buffer, offset, size // F32_BYTES, wishes, answer):
            self.submit(self._read_command, get_frame(buffer, offset, size), answer)
        return future

    def read_rows(
        self, buffer: RpcBuffer, offset: int, rows: RowSelection, into: memoryview | None
    ) -> Future[memoryview]:
        future: Awaited[memoryview] = self._link.dispatcher.awaited()
        size, wishes = rows.n_bytes, rows.packed
        answer = Answer("READ_ROWS", size, size, future, into)
        if not self._end_turn(buffer, offset, rows.n_columns, wishes, answer):
            request = ReadRows(buffer.address.base + offset, rows.n_columns, memoryview(wishes))
            self.submit("READ_ROWS", encode(request, self._link.peer.version, len(wishes)) + wishes, answer)
        return future

    def _end_turn(self, buffer: RpcBuffer, offset: int, n_columns: int, wishes: bytes, answer: Answer) -> bool:
        """Ask for a read and all that waits as one turn, if that is all a turn is."""
        if not self._link.takes_turns or not wishes:
            return False
        with self._link.lock:
            turn = self._riders.take_turn()
            if turn is None:
                return False
            address = buffer.address.base + offset
            request = TakeTurn(turn.device, turn.graph_id, address, n_columns, len(wishes), memoryview(b""))
            tail = wishes + turn.items
            frame = encode(request, self._link.peer.version, len(tail) + turn.late_bytes) + tail
            answer.command = "TAKE_TURN"
            entry = Entry("TAKE_TURN", frame, answer=answer, lane=self._lane, surfaces=True, remainder=turn.otherwise)
            self._submit_late(entry, turn.late)
        return True

    # -- copies -----------------------------------------------------------------------------------------------------

    def copy(self, source: RpcBuffer, source_offset: int, target: RpcBuffer, target_offset: int, n: int) -> None:
        """One COPY_TENSOR; until the worker has proved that it can, a read and a write stand behind it as fallback."""
        with self._link.lock:
            if self._copies is False:
                tried: Future[Any] = Future()
                tried.set_result(None)
                self._copy_by_hand(source, source_offset, target, target_offset, n, tried)
                return
            asked = self.ask(
                CopyTensor(
                    region(source.address.remote_ptr, source.address.base + source_offset, n),
                    region(target.address.remote_ptr, target.address.base + target_offset, n),
                )
            )
            if self._copies:
                asked.add_done_callback(self._must_have_worked)
                return
            tried = Future()
            self._copy_by_hand(source, source_offset, target, target_offset, n, tried)
        asked.add_done_callback(lambda done: self._was_tried(done, tried))

    def _copy_by_hand(
        self,
        source: RpcBuffer,
        source_offset: int,
        target: RpcBuffer,
        target_offset: int,
        n: int,
        tried: Future[Any],
    ) -> None:
        """A read and a write of the same bytes, in their places in the queue, unless `tried` says SKIP."""
        self.flush()
        staged = self._link.dispatcher.awaited()
        answer = Answer("GET_TENSOR", n, n, staged)
        frame = get_frame(source, source_offset, n)
        self._link.dispatcher.submit(Entry("GET_TENSOR", frame, gate=tried, answer=answer, lane=self._lane))
        payload: Future[Any] = Future()
        staged.add_done_callback(lambda got: _pass_on(got, payload))
        self._write_gated(target, target_offset, payload, n)

    def _was_tried(self, asked: Future[Value], tried: Future[Any]) -> None:
        error = asked.exception()
        if error is None:
            self._copies = bool(asked.result().value)
        settle(tried, SKIP if self._copies else None, error=error)

    def _must_have_worked(self, asked: Future[Value]) -> None:
        if asked.exception() is None and not asked.result().value and self._lane.error is None:
            self._lane.error = DeviceLost(self._link.endpoint, "the worker refused a copy", command="COPY_TENSOR")


def _wait_for(entry: Entry, late: Late | None) -> None:
    """Have a command leave when the bytes behind it have come."""
    if late is None:
        return
    entry.gate, entry.payload_bytes = late.payload, late.size_bytes
    if entry.sent is None:
        entry.sent = late.sent
    else:
        entry.sent.add_done_callback(lambda sent: settle(late.sent, error=sent.exception()))


#: The wishes for a region: one row of floats, whole.
_ONE_ROW = RowSelection(0, (WHOLE,)).packed


def _pass_on(got: Future[Any], payload: Future[Any]) -> None:
    """Bytes of a fallback read to its write; None means the read was skipped, and so is the write."""
    error = got.exception()
    settle(payload, None if error else SKIP if got.result() is None else got.result(), error=error)
