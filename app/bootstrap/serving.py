"""`tandem serve`: a model file and devices in, a server that answers out."""

from __future__ import annotations

import gc
import logging
import math
import time
from dataclasses import replace
from datetime import datetime

from app import fleet, models_store
from app.bootstrap.loading import Loading, Opened, Placed
from app.bootstrap.local_options import local_options
from app.bootstrap.tokens import token_of
from app.engine import probe
from app.engine.device import Device
from app.engine.front import ServiceFront
from app.engine.gguf.file_type import file_type_name
from app.engine.gguf.reader import GGUFFile
from app.engine.loader import plan_stages
from app.engine.models import registry
from app.engine.placement import Tune
from app.engine.service import ModelInfo
from app.engine.sizing import SizeWishes, choose_sizes
from app.engine.text.templates import ChatTemplate
from app.engine.text.tokenizer import Tokenizer
from app.engine.trace import Trace
from app.errors import ConfigError
from app.listening import listen, url_of
from app.settings import ServeSettings

log = logging.getLogger(__name__)


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
        _place(settings, opened, devices).print_plan()
    finally:
        fleet.close_all(devices)
    return 0


def _open_devices(settings: ServeSettings) -> list[Device]:
    token = token_of(settings.rpc_token_file)
    devices = fleet.open_devices(settings.device, settings.rpc, local_options(settings), token)
    if settings.split_mode == "none":
        fleet.close_all(devices[1:])
        return devices[:1]
    return devices


def _open(settings: ServeSettings) -> Opened:
    gguf = GGUFFile.open(models_store.resolve(settings.model_reference))
    model = registry.load(gguf)
    tokenizer = Tokenizer.from_metadata(gguf.metadata)
    return Opened(gguf, model, tokenizer, _template(settings, gguf, tokenizer))


def _template(settings: ServeSettings, gguf: GGUFFile, tokenizer: Tokenizer) -> ChatTemplate:
    source = settings.chat_template
    if settings.chat_template_file is not None:
        try:
            source = settings.chat_template_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --chat-template-file {settings.chat_template_file}: {error}") from error
    metadata = gguf.metadata if source is None else {**gguf.metadata, "tokenizer.chat_template": source}
    return ChatTemplate.from_metadata(metadata, tokenizer, clock=datetime.now, monotonic=time.monotonic)


def _place(settings: ServeSettings, opened: Opened, devices: list[Device]) -> Placed:
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
    # A split by hand needs no measuring, and one device has nothing to be split.
    why = "--tensor-split says where the layers stand" if split else "one device has all layers"
    is_given = bool(split) or len(devices) < 2
    if settings.tune != Tune.AUTO and is_given:
        log.warning("--tune %s changes nothing: %s", settings.tune, why)
    speeds = None if is_given else probe.measure(model, devices, sizes.limits)
    stages = plan_stages(model, devices, sizes.limits, split, speeds=speeds, tune=Tune(settings.tune))
    unmeasured = "" if speeds else why if is_given else "a device had no memory left for it"
    return Placed(replace(opened, model=model), devices, sizes, stages, unmeasured)


def _trace(settings: ServeSettings) -> Trace | None:
    """Raises ConfigError for a file that cannot be written, at the start and not after hours."""
    if settings.trace is None:
        return None
    trace = Trace(settings.trace)
    try:
        trace.check()
    except OSError as error:
        raise ConfigError(f"--trace {settings.trace} cannot be written: {error.strerror}") from error
    return trace


def _serve_placed(settings: ServeSettings, placed: Placed) -> int:
    """Listen first, so that a busy port ends the start at once; load behind a server that says it is loading."""
    trace = _trace(settings)
    listener = listen(settings.host, settings.port)
    opened = placed.opened
    front = ServiceFront(_info(settings, placed), opened.tokenizer, opened.template)
    token = token_of(settings.rpc_token_file)
    loading = Loading(placed, front, trace, token)
    with listener:
        loading.start(url_of(listener), bool(settings.api_keys()))
        from app.bootstrap import web  # this takes half a second, in which weights are on their way

        server = web.http_server(settings, front, listener)
        loading.on_failure(server.stop)
        gc.freeze()  # what stands now stands to the end
        gc.enable()
        server.run()
        loading.join()
    return loading.finish()


def _info(settings: ServeSettings, placed: Placed) -> ModelInfo:
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
        n_held=placed.sizes.scheduler.n_slots + placed.sizes.scheduler.max_queue,
        file_type=file_type_name(opened.gguf.metadata.get("general.file_type")),
        devices=tuple(stage.device.name for stage in placed.stages),
    )
