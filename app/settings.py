"""What can be set, command by command: frozen settings, with llama-server's names where it has one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import ConfigError
from app.options import (
    boolean,
    choice,
    cpu_mask,
    cpu_range,
    endpoints,
    existing_directory,
    existing_file,
    integer,
    numbers,
    option,
    path,
    real,
    size,
    switch,
    words,
)

PORT = integer(0, 65535)
MAX_THREADS = 1024
CACHE_TYPES = ("f16", "bf16", "f32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")

MODEL = "Model"
SERVER = "HTTP server"
DEVICES = "Devices and placement"
CONTEXT = "Context and batches"
SAMPLING = "Sampling defaults, for what a request leaves out"
WORKER = "Worker"
WEIGHTS = "Weights that need not travel"
CHAT = "Conversation"
OUTPUT = "Output"

#: What is served and pulled when no model is named.
DEFAULT_MODEL = "smollm2"
#: How the name of a model on the hub begins.
HUB_PREFIX = "hf:"


def user_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where Tandem keeps what it can make or fetch again: $XDG_CACHE_HOME/tandem, by default below ~/.cache."""
    base = environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "tandem")


def model_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where pulled models are kept."""
    return user_cache_dir(environ) / "models"


def hash_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where a worker keeps the hashes of the weights of its --model-dir, which take long to make."""
    return user_cache_dir(environ) / "hashes"


def hub_endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """Where `hf:` models come from: $HF_ENDPOINT, as the hub's own tools read it."""
    return environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def hub_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """The hub's access token for gated models: $HF_TOKEN."""
    return environ.get("HF_TOKEN") or None


def _cache_type(value: str) -> str:
    return str(choice(*CACHE_TYPES)(value.lower()))


def _gpu_layers(value: str) -> str:
    return "all" if value in ("all", "auto") else str(integer(-1)(value))


def _token_file(help: str, *other_flags: str, panel: str = DEVICES) -> Any:
    flags = ("--rpc-token-file", *other_flags)
    return option(None, *flags, convert=existing_file, metavar="FILE", help=help, panel=panel)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSettings:
    """What every command takes."""

    threads: int | None = option(
        None, "-t", "--threads", convert=integer(1, MAX_THREADS), metavar="N", panel=DEVICES,
        help="Threads of the CPU device; default: one per core.",
    )  # fmt: skip
    cpu_variant: str | None = option(
        None, "--cpu-variant", metavar="NAME", panel=DEVICES,
        help="Kernels of the CPU device, such as avx2; default: the fastest. Changes speed, not bits.",
    )  # fmt: skip
    cpu_range: tuple[int, ...] = option(
        (), "-Cr", "--cpu-range", convert=cpu_range, metavar="LO-HI", panel=DEVICES,
        help="CPUs that the CPU device's threads may run on; default: all this process may use.",
    )  # fmt: skip
    cpu_mask: tuple[int, ...] = option(
        (), "-C", "--cpu-mask", convert=cpu_mask, metavar="HEX", panel=DEVICES,
        help="The same as a mask; with --cpu-range: the CPUs of both.",
    )  # fmt: skip
    cpu_strict: bool = option(
        False, "--cpu-strict", convert=boolean, metavar="0|1", panel=DEVICES,
        help="1: each thread of the CPU device stays on a CPU of its own.",
    )  # fmt: skip
    config: Path | None = option(
        None, "--config", convert=existing_file, metavar="FILE", help="Settings in TOML, one table per command.",
        panel=OUTPUT,
    )  # fmt: skip
    log_json: bool = switch(False, "--log-json", help="Log one JSON object per line.", panel=OUTPUT)
    verbose: int = option(
        0, "-v", "--verbose", convert=integer(0), counts=True, help="Log more; twice: with tracebacks.", panel=OUTPUT
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(CommonSettings):
    """`tandem serve`. Neither `model` nor `hf_repo`: the default model. `ctx_size` counts cells of the shared pool."""

    model: str | None = option(
        None, "-m", "--model", metavar="MODEL", positional="MODEL", panel=MODEL,
        help="A GGUF file (the first of a split), hf:org/repo[:quant], or a name that `tandem pull` knows.",
    )  # fmt: skip
    hf_repo: str | None = option(
        None, "-hf", "--hf-repo", metavar="ORG/REPO[:QUANT]", help="The same as MODEL hf:org/repo[:quant].", panel=MODEL
    )
    alias: str | None = option(
        None, "-a", "--alias", metavar="NAME", help="The model's name in the API; default: from the file.", panel=MODEL
    )
    chat_template: str | None = option(
        None, "--chat-template", metavar="JINJA", help="A template instead of the model's own.", panel=MODEL
    )
    chat_template_file: Path | None = option(
        None, "--chat-template-file", convert=existing_file, metavar="FILE", help="The same, from a file.", panel=MODEL
    )
    jinja: bool = switch(True, "--jinja", help="Accepted: templates are always Jinja.", panel=MODEL)

    host: str = option("127.0.0.1", "--host", metavar="ADDRESS", help="Address to listen on.", panel=SERVER)
    port: int = option(8080, "--port", convert=PORT, metavar="PORT", help="Port; 0: any free one.", panel=SERVER)
    api_key: tuple[str, ...] = option(
        (), "--api-key", convert=words, metavar="KEY,...", help="Keys that clients must send.", panel=SERVER
    )
    api_key_file: Path | None = option(
        None, "--api-key-file", convert=existing_file, metavar="FILE", help="The same, one per line.", panel=SERVER
    )
    timeout: float | None = option(
        None, "-to", "--timeout", convert=real(0.001), metavar="S", help="Seconds one request may take.", panel=SERVER
    )
    max_queue: int = option(
        64, "--max-queue", convert=integer(0), metavar="N", help="Requests that may wait for a slot.", panel=SERVER
    )
    cors_origin: tuple[str, ...] = option(
        ("*",), "--cors-origin", convert=words, metavar="ORIGIN,...", help="Web pages that may call.", panel=SERVER
    )

    any_model: bool = switch(
        True, "--any-model", off_flag="--no-any-model", help="Requests may name any model.", panel=SERVER
    )
    metrics: bool = switch(False, "--metrics", help="Serve GET /metrics.", panel=SERVER)
    slots: bool = switch(True, "--slots", off_flag="--no-slots", help="Serve GET /slots.", panel=SERVER)
    props: bool = switch(True, "--props", off_flag="--no-props", help="Serve GET /props.", panel=SERVER)
    reasoning_format: str = option(
        "auto", "--reasoning-format", convert=choice("auto", "deepseek", "none"), metavar="FORMAT", panel=SERVER,
        help="none: leave thoughts in the content; else in reasoning_content.",
    )  # fmt: skip
    pooling: str = option(
        "mean", "--pooling", convert=choice("mean", "last"), metavar="KIND", help="Of embeddings.", panel=SERVER
    )

    rpc: tuple[str, ...] = option(
        (), "--rpc", convert=endpoints, metavar="HOST:PORT,...", help="Workers to split the model over.", panel=DEVICES
    )
    rpc_token_file: Path | None = _token_file("Show this secret to workers; the first line of the file.")
    device: tuple[str, ...] = option(
        (), "-dev", "--device", convert=words, metavar="NAME,...", panel=DEVICES,
        help="Devices in layer order, such as CPU,RPC0; default: all workers if any, else the best local device.",
    )  # fmt: skip
    split_mode: str = option(
        "layer", "-sm", "--split-mode", metavar="MODE", panel=DEVICES,
        convert=choice("layer", "none", refused={"row": "is not offered", "tensor": "is not offered"}),
        help="layer: over all devices; none: on the first.",
    )  # fmt: skip
    tensor_split: tuple[float, ...] = option(
        (), "-ts", "--tensor-split", convert=numbers, metavar="3,1", panel=DEVICES,
        help="Proportions of the layers, one per device; default: the slowest stage as fast as possible.",
    )  # fmt: skip
    tune: str = option(
        "auto", "--tune", convert=choice("auto", "prompt", "decode"), metavar="KIND", panel=DEVICES,
        help="What the split shall be fast for: prompt, decode, or auto for both.",
    )  # fmt: skip
    n_gpu_layers: str = option(
        "all", "-ngl", "--n-gpu-layers", convert=_gpu_layers, metavar="N", help="Accepted: --device decides.",
        panel=DEVICES,
    )  # fmt: skip

    ctx_size: int = option(
        0, "-c", "--ctx-size", convert=integer(0), metavar="TOKENS", panel=CONTEXT,
        help="Cells of the pool all slots share; 0: the model's context times slots, or what fits.",
    )  # fmt: skip
    parallel: int = option(
        4, "-np", "--parallel", convert=integer(1, 1024), metavar="N", help="Slots: requests at once.", panel=CONTEXT
    )
    batch_size: int = option(
        2048, "-b", "--batch-size", convert=integer(1), metavar="TOKENS", help="Tokens per step.", panel=CONTEXT
    )
    ubatch_size: int = option(
        512, "-ub", "--ubatch-size", convert=integer(1), metavar="TOKENS", help="Tokens per pass.", panel=CONTEXT
    )
    cache_type_k: str = option(
        "f16", "-ctk", "--cache-type-k", convert=_cache_type, metavar="TYPE", help="Type of keys.", panel=CONTEXT
    )
    cache_type_v: str = option(
        "f16", "-ctv", "--cache-type-v", convert=_cache_type, metavar="TYPE", help="Type of values.", panel=CONTEXT
    )
    flash_attn: str = option(
        "auto", "-fa", "--flash-attn", metavar="MODE", panel=CONTEXT, help="Accepted: attention is always fused.",
        convert=choice("auto", "on", refused={"off": "is not offered: attention is always fused"}),
    )  # fmt: skip
    cache_prompt: bool = switch(
        True, "--cache-prompt", off_flag="--no-cache-prompt", help="Reuse shared prefixes.", panel=CONTEXT
    )
    snapshot_mib: int = option(
        1024, "--snapshot-mib", convert=integer(0), metavar="MIB", panel=CONTEXT,
        help="Memory for snapshots of recurrent state, on all devices together; less where it does not fit.",
    )  # fmt: skip

    seed: int = option(
        -1, "-s", "--seed", convert=integer(-1), metavar="N", help="Seed; -1: a fresh one each time.", panel=SAMPLING
    )
    temp: float = option(0.8, "--temp", convert=real(0), metavar="X", help="Temperature; 0: greedy.", panel=SAMPLING)
    top_k: int = option(
        40, "--top-k", convert=integer(0), metavar="N", help="Keep the N likeliest; 0: all.", panel=SAMPLING
    )
    top_p: float = option(
        0.95, "--top-p", convert=real(0, 1), metavar="X", help="Keep this much probability; 1: all.", panel=SAMPLING
    )
    min_p: float = option(
        0.05, "--min-p", convert=real(0, 1), metavar="X", help="Least share of the likeliest; 0: all.", panel=SAMPLING
    )
    typical: float = option(
        1.0, "--typical", convert=real(0, 1), metavar="X", help="Locally typical sampling; 1: off.", panel=SAMPLING
    )
    repeat_penalty: float = option(
        1.0,
        "--repeat-penalty",
        convert=real(0.01, 100),
        metavar="X",
        help="Divide repeated logits; 1: off.",
        panel=SAMPLING,
    )
    repeat_last_n: int = option(
        64,
        "--repeat-last-n",
        convert=integer(-1),
        metavar="N",
        help="Tokens the penalties look at; -1: all.",
        panel=SAMPLING,
    )
    presence_penalty: float = option(
        0.0, "--presence-penalty", convert=real(-2, 2), metavar="X", help="Per repeated token; 0: off.", panel=SAMPLING
    )
    frequency_penalty: float = option(
        0.0, "--frequency-penalty", convert=real(-2, 2), metavar="X", help="Per repetition; 0: off.", panel=SAMPLING
    )

    trace: Path | None = option(
        None, "--trace", convert=path, metavar="FILE", panel=OUTPUT,
        help="Write when each stage computed, waited and was sent to, for Perfetto or chrome://tracing.",
    )  # fmt: skip
    plan: bool = switch(False, "--plan", help="Print placement and memory, load nothing.", panel=OUTPUT)

    def __post_init__(self) -> None:
        if self.model is not None and self.hf_repo is not None:
            raise ConfigError("--model and --hf-repo both name a model; give one of them")
        if self.chat_template is not None and self.chat_template_file is not None:
            raise ConfigError("--chat-template and --chat-template-file exclude each other; give one of them")
        if self.ubatch_size > self.batch_size:
            raise ConfigError(
                f"--ubatch-size {self.ubatch_size} is above --batch-size {self.batch_size}; lower it or raise the other"
            )
        if self.split_mode == "none" and self.tensor_split:
            raise ConfigError("--tensor-split needs --split-mode layer; with none there is nothing to split")
        if self.device and self.tensor_split and len(self.device) != len(self.tensor_split):
            raise ConfigError(
                f"--tensor-split has {len(self.tensor_split)} proportions for {len(self.device)} devices; name as many"
            )

    @property
    def model_reference(self) -> str | None:
        """What to load, as `models_store.resolve` takes it; None: the default model."""
        return f"hf:{self.hf_repo}" if self.hf_repo is not None else self.model

    def api_keys(self) -> tuple[str, ...]:
        """All keys, those of the file included. Raises ConfigError if the file cannot be read or holds none."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = self.api_key_file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --api-key-file {self.api_key_file}: {error}") from error
        from_file = tuple(line.strip() for line in lines if line.strip())
        if not from_file:
            raise ConfigError(f"--api-key-file {self.api_key_file} holds no key; write one per line")
        return (*self.api_key, *from_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(CommonSettings):
    """`tandem worker`. `mem` and `cache_size` in bytes."""

    host: str = option("127.0.0.1", "-H", "--host", metavar="ADDRESS", help="Address to listen on.", panel=WORKER)
    port: int = option(50052, "-p", "--port", convert=PORT, metavar="PORT", help="Port; 0: any.", panel=WORKER)
    device: tuple[str, ...] = option(
        (), "-d", "--device", convert=words, metavar="NAME,...", help="Local devices to serve.", panel=DEVICES
    )
    mem: int | None = option(
        None, "--mem", convert=size("m"), metavar="MIB", panel=DEVICES,
        help="Memory that all clients together may take of each device, such as 512 or 1.5G; default: all of it.",
    )  # fmt: skip
    rpc_token_file: Path | None = _token_file(
        "Serve only clients that hold this secret, the first line of the file; stock clients hold none.",
        "--token-file",
        panel=WORKER,
    )
    max_message: int = option(
        64, "--max-message", convert=integer(1), metavar="MIB", help="Longest message to accept.", panel=WORKER
    )
    model_dir: Path | None = option(
        None, "--model-dir", convert=existing_directory, metavar="DIR", panel=WEIGHTS,
        help="Weights found in the GGUF files here are never sent to this worker.",
    )  # fmt: skip
    cache_dir: Path | None = option(
        None, "--cache-dir", convert=path, metavar="DIR", help="Keep weights that were sent here.", panel=WEIGHTS
    )
    cache_size: int | None = option(
        None, "--cache-size", convert=size("g"), metavar="GIB", panel=WEIGHTS,
        help="Largest size of --cache-dir, such as 1.5 or 500M; default: 32.",
    )  # fmt: skip
    protocol: str = option(
        "7.0", "--protocol", convert=choice("7.0", "6.0"), metavar="VERSION", panel=WORKER,
        help="Of ggml's RPC, 7.0 or 6.0: 6.0 for clients of llama.cpp that are too old for 7.0. Tandem speaks both.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.cache_size is not None and self.cache_dir is None:
            raise ConfigError("--cache-size is the size of --cache-dir, and none is named; name one, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesSettings(CommonSettings):
    """`tandem devices`."""

    rpc: tuple[str, ...] = option(
        (), "--rpc", convert=endpoints, metavar="HOST:PORT,...", help="Workers to ask as well.", panel=DEVICES
    )
    rpc_token_file: Path | None = _token_file("Show this secret to workers; the first line of the file.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings(CommonSettings):
    """`tandem pull`."""

    name: str = option(
        DEFAULT_MODEL, "--name", metavar="NAME", positional="NAME", panel=MODEL,
        help="A known name, or hf:org/repo[:quant].",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings(CommonSettings):
    """`tandem chat`."""

    url: str = option(
        "http://127.0.0.1:8080", "--url", metavar="URL", positional="URL", help="The server.", panel=SERVER
    )
    key: str | None = option(None, "--key", metavar="KEY", help="The server's API key.", panel=SERVER)
    system: str | None = option(None, "--system", metavar="TEXT", help="A system message.", panel=CHAT)
    max_tokens: int | None = option(
        None, "-n", "--max-tokens", convert=integer(1), metavar="N", help="Longest answer.", panel=CHAT
    )
    temperature: float | None = option(
        None, "--temperature", convert=real(0, 2), metavar="X", help="Default: the server's.", panel=CHAT
    )


ALL_SETTINGS = (ServeSettings, WorkerSettings, DevicesSettings, PullSettings, ChatSettings)
