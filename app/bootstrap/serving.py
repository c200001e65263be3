"""`tandem serve`: a model file and devices in, a server that answers out."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from app import __version__, fleet, models_store, report
from app.api.app import create_app
from app.api.half_close import HalfCloseProtocol
from app.api.options import ApiOptions
from app.engine.device import Device
from app.engine.embedding import TokenEmbedding
from app.engine.engine import Engine, EngineParts
from app.engine.executor import Executor, Scratch
from app.engine.front import ServiceFront
from app.engine.gguf.reader import GGUFFile
from app.engine.loader import HashSource, PlannedStage, load_stages, plan_stages
from app.engine.models import registry
from app.engine.models.base import Model
from app.engine.request import SamplingParams
from app.engine.service import ModelInfo
from app.engine.sizing import Sizes, SizeWishes, choose_sizes
from app.engine.text.templates import ChatTemplate
from app.engine.text.tokenizer import Tokenizer
from app.errors import ConfigError, TandemError
from app.http_server import HttpServer
from app.listening import listen, url_of
from app.recovery import Recovery
from app.rpc.tensor_hashes import TensorHashes
from app.settings import ServeSettings, hash_cache_dir

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A model file and what was read from it; nothing of it stands on a device yet."""

    gguf: GGUFFile
    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate


@dataclass(frozen=True, slots=True)
class _Placed:
    """A model, the devices it will stand on, and where."""

    opened: _Opened
    devices: list[Device]
    sizes: Sizes
    stages: list[PlannedStage]


def serve(settings: ServeSettings) -> int:
    """Serve a model until a signal comes; returns the exit code."""
    opened = _open(settings)
    devices = _open_devices(settings)
    try:
        placed = _place(settings, opened, devices)
        return _serve_placed(settings, placed)
    finally:
        fleet.close_all(devices)


def plan(settings: ServeSettings) -> int:
    """Print where everything would stand; load nothing."""
    opened = _open(settings)
    devices = _open_devices(settings)
    try:
        placed = _place(settings, opened, devices)
        report.print_table(report.plan_table(placed.stages, placed.sizes.limits, opened.model.n_layers))
    finally:
        fleet.close_all(devices)
    return 0


def _open_devices(settings: ServeSettings) -> list[Device]:
    devices = fleet.open_devices(settings.device, settings.rpc, settings.threads)
    if settings.split_mode == "none":
        fleet.close_all(devices[1:])
        return devices[:1]
    return devices


def _open(settings: ServeSettings) -> _Opened:
    gguf = GGUFFile.open(models_store.resolve(settings.model_reference))
    model = registry.load(gguf)
    tokenizer = Tokenizer.from_metadata(gguf.metadata)
    return _Opened(gguf, model, tokenizer, _template(settings, gguf, tokenizer))


def _template(settings: ServeSettings, gguf: GGUFFile, tokenizer: Tokenizer) -> ChatTemplate:
    source = settings.chat_template
    if settings.chat_template_file is not None:
        try:
            source = settings.chat_template_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --chat-template-file {settings.chat_template_file}: {error}") from error
    metadata = gguf.metadata if source is None else {**gguf.metadata, "tokenizer.chat_template": source}
    return ChatTemplate.from_metadata(metadata, tokenizer, clock=datetime.now, monotonic=time.monotonic)


def _place(settings: ServeSettings, opened: _Opened, devices: list[Device]) -> _Placed:
    split = settings.tensor_split or None
    wishes = SizeWishes(
        ctx_size=settings.ctx_size,
        n_slots=settings.parallel,
        n_ubatch=settings.ubatch_size,
        max_queue=settings.max_queue,
        cache_prompts=settings.cache_prompt,
        key_type=settings.cache_type_k,
        value_type=settings.cache_type_v,
        tensor_split=split,
        snapshot_budget_bytes=settings.snapshot_mib << 20,
    )
    sizes = choose_sizes(opened.model, devices, wishes)
    # Rope factors depend on how long a sequence may become, which is known only now.
    model = registry.load(opened.gguf, n_ctx=sizes.scheduler.n_ctx)
    return _Placed(replace(opened, model=model), devices, sizes, plan_stages(model, devices, sizes.limits, split))


def _serve_placed(settings: ServeSettings, placed: _Placed) -> int:
    """Listen first, so that a busy port ends the start at once; load behind a server that says it is loading."""
    listener = listen(settings.host, settings.port)
    opened = placed.opened
    front = ServiceFront(_info(settings, placed), opened.tokenizer, opened.template)
    server = HttpServer(create_app(front, _api_options(settings)), listener, HalfCloseProtocol)
    loading = _Loading(placed, front, server.stop)
    with listener:
        thread = threading.Thread(target=loading.run, args=(url_of(listener), bool(settings.api_keys())), daemon=True)
        server.run(on_start=thread.start)
        thread.join()
    return loading.finish()


class _Loading:
    """Loads the model on a thread of its own while the server already answers, and keeps what was built."""

    def __init__(self, placed: _Placed, front: ServiceFront, stop: Callable[[], None]) -> None:
        self._placed = placed
        self._front = front
        self._stop = stop
        self._engine: Engine | None = None
        self._error: TandemError | None = None
        self._hashes = _hash_source(placed.opened.gguf)
        self._recovery = Recovery(placed.opened.gguf, fleet.reopen, hashes=self._hashes)

    def run(self, url: str, needs_key: bool) -> None:
        try:
            self._engine = self._load()
        except TandemError as error:
            self._error = error
            self._stop()
            return
        self._front.open(self._engine)
        placed = self._placed
        report.print_table(report.plan_table(placed.stages, placed.sizes.limits, placed.opened.model.n_layers))
        print(
            f"{self._front.info.alias}: context {placed.sizes.scheduler.n_ctx:,} tokens, "
            f"{placed.sizes.scheduler.n_slots} slots"
        )
        print(f"listening on {url}\ntry: {report.curl_line(url, needs_key)}", flush=True)

    def finish(self) -> int:
        """After the server has stopped: end the engine. Raises what made loading fail."""
        self._recovery.stop()
        if self._engine is not None:
            self._engine.close()
        if self._error is not None:
            raise self._error
        return 0

    def _load(self) -> Engine:
        placed, opened = self._placed, self._placed.opened
        uploads = report.UploadReport()

        def progress(device: str, sent_bytes: int, total_bytes: int) -> None:
            uploads(device, sent_bytes, total_bytes)
            self._front.progress(uploads.fraction, uploads.seconds_left, "uploading weights")

        stages = load_stages(
            opened.gguf, opened.model, placed.stages, placed.sizes.limits, progress=progress, hashes=self._hashes
        )
        embedding = TokenEmbedding.of(opened.gguf, opened.model)
        config = placed.sizes.scheduler
        scratch = Scratch(
            cell=config.scratch_cell, state_row=config.scratch_slot, first_snapshot_row=config.scratch_slot + 1
        )
        executor = Executor(opened.model, stages, embedding, placed.sizes.limits, scratch)
        return Engine(
            EngineParts(
                info=self._front.info,
                tokenizer=opened.tokenizer,
                template=opened.template,
                config=config,
                executor=executor,
                recovery=self._recovery,
                max_in_flight=len(stages) + 1,
            )
        )


def _hash_source(gguf: GGUFFile) -> HashSource:
    """Hashes by which workers are offered weights that they may have; computed when asked for, and kept on disk."""
    hashes = TensorHashes(gguf, hash_cache_dir())
    return lambda spec: partial(hashes.of, spec.name)


def _info(settings: ServeSettings, placed: _Placed) -> ModelInfo:
    opened, model = placed.opened, placed.opened.model
    path = opened.gguf.path
    return ModelInfo(
        name=model.name,
        alias=settings.alias or path.stem,
        path=str(path),
        architecture=model.architecture,
        created_unix=int(path.stat().st_mtime),
        n_params=sum(math.prod(info.ne) for info in opened.gguf.tensors.values()),
        size_bytes=opened.gguf.size_bytes,
        n_vocab=model.n_vocab,
        n_embd=model.n_embd,
        n_ctx_train=model.n_ctx_train,
        n_ctx=placed.sizes.scheduler.n_ctx,
        n_slots=placed.sizes.scheduler.n_slots,
        file_type=str(opened.gguf.metadata.get("general.file_type", "unknown")),
        devices=tuple(stage.device.name for stage in placed.stages),
    )


def _api_options(settings: ServeSettings) -> ApiOptions:
    return ApiOptions(
        version=__version__,
        api_keys=settings.api_keys(),
        cors_origins=settings.cors_origin,
        sampling=SamplingParams(
            temperature=settings.temp,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            typical_p=settings.typical,
            repeat_penalty=settings.repeat_penalty,
            repeat_last_n=settings.repeat_last_n,
            presence_penalty=settings.presence_penalty,
            frequency_penalty=settings.frequency_penalty,
            seed=None if settings.seed < 0 else settings.seed,
        ),
        cache_prompt=settings.cache_prompt,
        request_timeout_s=settings.timeout,
    )
