"""What the operator decides about the HTTP surface. Parsed elsewhere; the API only reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.engine.request import SamplingParams

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """Bounds on one request. What is above them is refused, never cut."""

    body_bytes: int = 32 * MIB
    choices: int = 32
    prompts: int = 256
    stops: int = 16
    stop_chars: int = 1024
    breakers: int = 16
    breaker_chars: int = 64
    biases: int = 4096
    bias_chars: int = 256
    top_logprobs: int = 20
    embedding_inputs: int = 2048
    stored_responses: int = 1024
    stored_bytes: int = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOptions:
    """Settings of the HTTP surface.

    `api_keys` empty: no key is asked for. `any_model`: a request may name any model and gets the loaded one.
    `sampling` are the values of fields a request leaves out. `keepalive_s` is the longest silence in a stream.
    `pooling` makes one vector of many in embeddings: `mean` or `last`.
    `reasoning_format` `none` leaves thoughts in the content.
    `text_threads` bounds the threads that render templates and tokenize.
    """

    version: str = "0"
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ("*",)
    any_model: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)
    limits: ApiLimits = field(default_factory=ApiLimits)
    cache_prompt: bool = True
    request_timeout_s: float | None = None
    keepalive_s: float = 10.0
    pooling: str = "mean"
    reasoning_format: str = "auto"
    enable_slots: bool = True
    enable_props: bool = True
    enable_metrics: bool = False
    text_threads: int = 4
