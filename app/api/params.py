"""From schemas to what the engine understands. Every refusal of a request's contents is made here or in `prompt`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.api.constraints import constraint_of
from app.api.context import Api
from app.api.options import ApiLimits
from app.api.samplers import switched
from app.api.schemas.chat import ChatRequest
from app.api.schemas.completions import CompletionRequest, InfillRequest
from app.api.schemas.sampling import GenerationFields, SamplingFields
from app.engine.request import Constraint, GenerateRequest, SamplingParams, Thought
from app.errors import InvalidParameter

if TYPE_CHECKING:
    from app.engine.text.tokenizer import Tokenizer

#: Known fields we do not act on, with the values that ask for nothing. Any other value is refused by name.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "mirostat": (0, 2),
    "dynatemp_range": (0,),
    "dynatemp_exponent": (1,),
    "top_n_sigma": (0, -1),
    "grammar_lazy": (False,),
    "lora": ([],),
    "reasoning_budget": (-1,),
    "reasoning_budget_tokens": (-1,),
    "thinking_budget_tokens": (-1,),
    "id_slot": (-1,),
    "n_cache_reuse": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
#: Fields of older clients, the values that ask for nothing, and what took their place.
RENAMED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "functions": (([],), "tools"),
    "function_call": (("none", "auto"), "tool_choice"),
}
#: Fields that pass to SamplingParams under their own name.
SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "min_keep", "presence_penalty", "frequency_penalty"),
    *("repeat_penalty", "repeat_last_n", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta", "ignore_eos"),
)
SEED_MODULUS = 2**64
#: OpenAI's default for text completions; chat answers end by themselves.
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What one request asks of each of its choices, besides the prompt."""

    sampling: SamplingParams
    n: int
    max_tokens: int | None
    stop: tuple[str, ...]
    cache_prompt: bool
    report_progress: bool
    deadline_s: float | None
    constraint: Constraint | None

    def requests(
        self,
        prompt: tuple[int, ...],
        ids: Sequence[str],
        *,
        prompt_logprobs: bool = False,
        message_starts: tuple[int, ...] = (),
        thought: Thought | None = None,
    ) -> list[GenerateRequest]:
        """One engine request per choice of one prompt; a given seed is offset by the choice's number."""
        seed = self.sampling.seed
        return [
            GenerateRequest(
                id=request_id,
                prompt=prompt,
                sampling=self.sampling if seed is None else replace(self.sampling, seed=(seed + i) % SEED_MODULUS),
                max_tokens=self.max_tokens,
                stop=self.stop,
                cache_prompt=self.cache_prompt,
                deadline_s=self.deadline_s,
                prompt_logprobs=prompt_logprobs,
                report_progress=self.report_progress,
                message_starts=message_starts,
                constraint=self.constraint,
                thought=thought,
            )
            for i, request_id in enumerate(ids)
        ]


def refuse_unsupported(body: SamplingFields) -> None:
    """Raise for known fields that ask for something this server does not do."""
    for name, neutral in UNSUPPORTED.items():
        value = getattr(body, name, None)
        if value is not None and value not in neutral:
            given = f"{name} {value}" if neutral and isinstance(value, int | float) else name
            raise InvalidParameter(
                f"{given} is not supported by this server; leave it out", param=name, code="unsupported"
            )
    for name, (neutral, successor) in RENAMED.items():
        value = getattr(body, name, None)
        if value is not None and value not in neutral:
            raise InvalidParameter(
                f"{name} is the older way and not supported by this server; use {successor}",
                param=name,
                code="unsupported",
            )


def wanted(body: GenerationFields, api: Api, *, max_tokens: int | None, n_logprobs: int | None) -> Wanted:
    """Check everything that needs no prompt, and have the engine prepare for it. May take long: run it in a thread."""
    refuse_unsupported(body)
    n = body.n or 1
    if n > api.options.limits.choices:
        raise InvalidParameter(f"n is {n}, at most {api.options.limits.choices} choices are given", param="n")
    held = api.service.info.n_held
    if held is not None and n > held:
        raise InvalidParameter(f"n is {n}, and this server holds {held} answers at once; ask for fewer", param="n")
    sampling = sampling_params(body, api, n_logprobs)
    api.service.prepare(sampling)
    return Wanted(
        sampling=sampling,
        n=n,
        max_tokens=max_tokens,
        stop=stop_strings(body.stop, api),
        cache_prompt=api.options.cache_prompt and body.cache_prompt is not False,
        report_progress=bool(body.return_progress and body.stream),
        deadline_s=api.options.request_timeout_s,
        constraint=constraint_of(body),
    )


def sampling_params(body: SamplingFields, api: Api, n_logprobs: int | None) -> SamplingParams:
    """The server's defaults, overlaid by what the request gives."""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if body.repetition_penalty is not None and body.repeat_penalty is None:
        given["repeat_penalty"] = body.repetition_penalty
    if body.dry_sequence_breakers is not None:
        given["dry_sequence_breakers"] = breakers(body.dry_sequence_breakers, api.options.limits)
    if body.logit_bias is not None:
        given["logit_bias"] = logit_bias(body.logit_bias, api.service.tokenizer, api.options.limits)
    if body.seed is not None:
        given["seed"] = None if body.seed == -1 else body.seed % SEED_MODULUS
    if body.samplers is not None:
        given |= switched(body.samplers)
    return replace(api.options.sampling, n_logprobs=n_logprobs, **given)


def breakers(given: Sequence[str], limits: ApiLimits) -> tuple[str, ...]:
    """DRY's sequence breakers, in bounds."""
    name = "dry_sequence_breakers"
    if len(given) > limits.breakers:
        raise InvalidParameter(f"{name} has {len(given)} strings, at most {limits.breakers} are taken", param=name)
    if any(len(breaker) > limits.breaker_chars for breaker in given):
        raise InvalidParameter(f"{name} must have at most {limits.breaker_chars} characters each", param=name)
    return tuple(given)


def logit_bias(
    given: Mapping[str, float | bool] | Sequence[tuple[int | str, float | bool]],
    tokenizer: Tokenizer,
    limits: ApiLimits,
) -> dict[int, float]:
    """Token id -> bias, from an object keyed by ids or from pairs that may name text. False bans a token."""
    if len(given) > limits.biases:
        raise InvalidParameter(
            f"logit_bias has {len(given)} entries, at most {limits.biases} are taken", param="logit_bias"
        )
    pairs = [(token_id(key), value) for key, value in given.items()] if isinstance(given, Mapping) else given
    biases: dict[int, float] = {}
    for key, value in pairs:
        if isinstance(key, str) and len(key) > limits.bias_chars:
            raise InvalidParameter(
                f"logit_bias names a text of {len(key)} characters, at most {limits.bias_chars} are taken",
                param="logit_bias",
            )
        tokens = [key] if isinstance(key, int) else tokenizer.encode(key, add_special=False, parse_special=True)
        for token in tokens:
            if not 0 <= token < tokenizer.vocab_size:
                raise InvalidParameter(
                    f"logit_bias names token {token}, the vocabulary has {tokenizer.vocab_size}", param="logit_bias"
                )
            biases[token] = -math.inf if value is False else float(value)
    return biases


def token_id(key: str) -> int:
    """A key of a logit_bias object."""
    if not (key.isascii() and key.isdecimal() and len(key) < 12):
        raise InvalidParameter(f"logit_bias has the key {key[:40]!r}, which is not a token id", param="logit_bias")
    return int(key)


def stop_strings(given: str | Sequence[str] | None, api: Api) -> tuple[str, ...]:
    """One string or several, none of them empty, in bounds."""
    stops = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    limits = api.options.limits
    if len(stops) > limits.stops:
        raise InvalidParameter(f"stop has {len(stops)} strings, at most {limits.stops} are taken", param="stop")
    if any(not stop or len(stop) > limits.stop_chars for stop in stops):
        raise InvalidParameter(f"stop strings must have 1 to {limits.stop_chars} characters", param="stop")
    return stops


def chat_params(body: ChatRequest, api: Api) -> Wanted:
    """Check a chat request, all but its messages."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidParameter("top_logprobs needs logprobs to be true", param="top_logprobs")
    check_n_logprobs(body.top_logprobs, api, "top_logprobs")
    return wanted(
        body, api, max_tokens=max_tokens(body), n_logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )


def completion_params(body: CompletionRequest, api: Api) -> Wanted:
    """Check a completion request, all but its prompts."""
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise InvalidParameter(f"best_of is {body.best_of}; only n, {n}, is supported", param="best_of")
    n_logprobs, param = (body.n_probs or None, "n_probs") if body.logprobs is None else (body.logprobs, "logprobs")
    check_n_logprobs(n_logprobs, api, param)
    if body.echo and body.suffix:
        raise InvalidParameter("echo and suffix exclude each other", param="echo")
    n_prompts = 1 if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else len(body.prompt)
    if n_prompts > api.options.limits.prompts:
        raise InvalidParameter(
            f"prompt has {n_prompts} prompts, at most {api.options.limits.prompts} are taken", param="prompt"
        )
    limit = max_tokens(body, default=DEFAULT_COMPLETION_TOKENS)
    return wanted(body, api, max_tokens=limit, n_logprobs=n_logprobs)


def infill_params(body: InfillRequest, api: Api) -> Wanted:
    """Check an infill request, all but its texts."""
    check_n_logprobs(body.n_probs, api, "n_probs")
    limit = next((value for value in (body.n_predict, body.max_tokens) if value is not None), -1)
    return wanted(body, api, max_tokens=None if limit < 0 else limit, n_logprobs=body.n_probs or None)


def check_n_logprobs(n_logprobs: int | None, api: Api, param: str) -> None:
    most = api.options.limits.top_logprobs
    if (n_logprobs or 0) > most:
        raise InvalidParameter(f"{param} is {n_logprobs}, at most {most} alternatives are told", param=param)


def max_tokens(body: ChatRequest | CompletionRequest, *, default: int | None = None) -> int | None:
    """The first of the field's three names that is given; None: until the context is full."""
    for value in (body.max_completion_tokens, body.max_tokens, body.n_predict):
        if value is not None:
            return None if value < 0 else value
    return default
