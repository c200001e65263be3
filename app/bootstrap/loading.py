"""Loading a placed model on a thread of its own, while a server already says how far it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from app import fleet, report
from app.engine.device import Device
from app.engine.embedding import TokenEmbedding
from app.engine.engine import Engine
from app.engine.executor import Executor, Scratch
from app.engine.front import ServiceFront
from app.engine.gguf.reader import GGUFFile
from app.engine.loader import HashSource, PlannedStage, Uploaded, load_stages
from app.engine.models.base import Model
from app.engine.parts import EngineParts
from app.engine.ranking import Ranking
from app.engine.sizing import Sizes
from app.engine.text.templates import ChatTemplate
from app.engine.text.tokenizer import Tokenizer
from app.engine.trace import Trace
from app.errors import InternalError, TandemError
from app.recovery import Recovery
from app.rpc.tensor_hashes import TensorHashes
from app.rpc.token import Token
from app.settings import hash_cache_dir

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A model file and what was read from it; nothing of it stands on a device yet."""

    gguf: GGUFFile
    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate


@dataclass(frozen=True, slots=True)
class Placed:
    """A model, the devices it will stand on, and where. `unmeasured`: why it is not known what its stages take."""

    opened: Opened
    devices: list[Device]
    sizes: Sizes
    stages: list[PlannedStage]
    unmeasured: str = ""

    def print_plan(self) -> None:
        table = report.plan_table(self.stages, self.sizes.limits, self.opened.model.n_layers, self.unmeasured)
        report.print_table(table)


class Loading:
    """Loads the model on a thread of its own while the server already answers, and keeps what was built."""

    def __init__(
        self, placed: Placed, front: ServiceFront, trace: Trace | None = None, token: Token | None = None
    ) -> None:
        """`token`: what to show workers that come back."""
        self._placed = placed
        self._front = front
        self._trace = trace
        self._engine: Engine | None = None
        self._error: TandemError | None = None
        self._tell_failure: Callable[[], None] | None = None
        self._hashes = TensorHashes(placed.opened.gguf, hash_cache_dir())
        reopen = partial(fleet.reopen, token=token)
        self._recovery = Recovery(placed.opened.gguf, reopen, hashes=_hash_source(self._hashes))
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, url: str, needs_key: bool) -> None:
        """Begin. `url` and `needs_key` are for what is printed when the model stands."""
        self._thread = threading.Thread(target=self._run, args=(url, needs_key), name="loading", daemon=True)
        self._thread.start()

    def on_failure(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when loading fails; at once if it already has."""
        with self._lock:
            self._tell_failure = tell
            has_failed = self._error is not None
        if has_failed:
            tell()

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join()

    def _run(self, url: str, needs_key: bool) -> None:
        try:
            self._engine = self._load()
        except TandemError as error:
            self._fail(error)
        except Exception as error:  # nobody may wait for a model that will never stand
            log.exception("loading the model failed")
            self._fail(InternalError(f"loading the model failed: {error!r}; this is a bug"))
        else:
            self._front.open(self._engine)
            self._announce(url, needs_key)

    def _fail(self, error: TandemError) -> None:
        with self._lock:
            self._error = error
            tell = self._tell_failure
        if tell is not None:
            tell()

    def _announce(self, url: str, needs_key: bool) -> None:
        placed = self._placed
        placed.print_plan()
        print(
            f"{self._front.info.alias}: context {placed.sizes.scheduler.n_ctx:,} tokens, "
            f"{placed.sizes.scheduler.n_slots} slots"
        )
        print(f"listening on {url}\ntry: {report.curl_line(url, needs_key)}", flush=True)

    def finish(self) -> int:
        """After the server has stopped: end the engine. Raises what made loading fail."""
        self._recovery.stop()
        self._hashes.save()  # of weights that were offered to a worker that came back
        if self._engine is not None:
            self._engine.close()
            if self._trace is not None:
                self._trace.save()
                print(f"trace written to {self._trace.path}", flush=True)
        if self._error is not None:
            raise self._error
        return 0

    def _load(self) -> Engine:
        placed, opened = self._placed, self._placed.opened
        uploads = report.UploadReport()

        def progress(uploaded: Uploaded) -> None:
            uploads(uploaded)
            self._front.progress(uploads.fraction, uploads.seconds_left, "uploading weights")

        hashes = _hash_source(self._hashes)
        try:
            stages = load_stages(
                opened.gguf, opened.model, placed.stages, placed.sizes.limits, progress=progress, hashes=hashes
            )
        finally:
            self._hashes.save()
        embedding = TokenEmbedding.of(opened.gguf, opened.model)
        config = placed.sizes.scheduler
        scratch = Scratch(
            cell=config.scratch_cell, state_row=config.scratch_slot, first_snapshot_row=config.scratch_slot + 1
        )
        if self._trace is not None:
            self._trace.stage_names = [stage.name for stage in stages]
        executor = Executor(opened.model, stages, embedding, placed.sizes.limits, scratch)
        return Engine(
            EngineParts(
                info=self._front.info,
                tokenizer=opened.tokenizer,
                template=opened.template,
                config=config,
                executor=executor,
                grammars=self._front.grammars,
                ranking=Ranking.of(opened.gguf, opened.tokenizer),
                recovery=self._recovery,
                max_in_flight=len(stages) + 1,
                trace=self._trace,
            )
        )


def _hash_source(hashes: TensorHashes) -> HashSource:
    """Hashes by which workers are offered weights that they may have; computed when asked for, and kept on disk."""
    return lambda spec: partial(hashes.of, spec.name)
