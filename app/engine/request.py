"""What a caller asks of the engine, and what comes back. Plain data; the API builds one and renders the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


class FinishReason(StrEnum):
    """Why an answer ended. The API maps these to each dialect's words."""

    STOP = "stop"  # an end-of-generation token or a stop string
    LENGTH = "length"  # max_tokens reached or the context is full
    ABORT = "abort"  # the caller went away or asked to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Field names and meanings are llama-server's; a zero or one switches a filter off.

    `seed` None: a fresh one is drawn at submit. `n_logprobs` is the number of alternatives to report per token
    (0: the chosen token alone; None: no logprobs at all).
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    seed: int | None = None
    n_logprobs: int | None = None
    min_keep: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The form an answer must have: text that matches `source`. `param` is the request's field, for refusals.

    `source` is a JSON schema, a regular expression, a grammar as llama-server takes it, or one in Lark's notation.
    """

    kind: Literal["json_schema", "regex", "gbnf", "lark"]
    source: str
    param: str = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """How a thought is marked that may stand before a constrained answer. `is_open`: it began in the prompt."""

    opening: str
    closing: str
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to continue.

    `prompt` are token ids, special tokens already in place. `max_tokens` None: until the context is full.
    `stop` strings end the answer and are not part of it. `deadline_s` counts from submit. `message_starts` are prompt
    positions at which a conversation could later be cut (snapshots of recurrent state are taken there). With `pooling`
    nothing is generated: the hidden states of the prompt are wanted, of all its tokens or of the last one. An answer
    with a `constraint` follows it from its beginning, or from where its `thought` ends.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    cache_prompt: bool = True
    deadline_s: float | None = None
    prompt_logprobs: bool = False
    report_progress: bool = False
    show_special: bool = False
    pooling: Literal["mean", "last"] | None = None
    message_starts: tuple[int, ...] = ()
    constraint: Constraint | None = None
    thought: Thought | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate: natural log of its probability at temperature 1, before any filter."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """One produced (or echoed) token. `piece` are the bytes it stands for; they may be half a character."""

    token: int
    piece: bytes
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of one request went. Milliseconds, as llama-server reports them."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    queued_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first event: the request has a slot. `cached_tokens` of the prompt need no work."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Prompt work so far; only with `report_progress`."""

    prompt_tokens: int
    cached_tokens: int
    processed_tokens: int
    elapsed_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New text, whole characters only, and the tokens it came from (either may be empty)."""

    text: str
    tokens: tuple[TokenInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of a request that ended well."""

    reason: FinishReason
    stop_string: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings
    prompt_logprobs: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The last event of a request with `pooling`: n_embd floats, not normalised."""

    vector: tuple[float, ...]
    prompt_tokens: int


Event = Embedded | Started | Progress | Delta | Finished
