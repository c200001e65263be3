"""Fields that say how tokens are chosen, by OpenAI's names and by llama-server's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from app.api.schemas.base import Int, RequestModel, TokenId

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)] | Literal[False]
BiasPair = Annotated[tuple[TokenId | str, Bias], Strict(False)]
RepeatPenalty = Annotated[float, Field(ge=0.01, le=100)]
Choices = Annotated[list[str], Field(max_length=16384, fail_fast=True)]
NotNegative = Annotated[float, Field(ge=0)]


class StructuredOutputs(RequestModel):
    """vLLM's way to say what form an answer must have: one of these."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: Annotated[str | None, Field(description="GBNF, or a grammar in Lark's notation")] = None
    json_object: bool | None = None


class SamplingFields(RequestModel):
    """Mixed into every request that generates. A field left out has the server's default value."""

    temperature: Annotated[float, Field(ge=0, le=2, description="0 takes the likeliest token")] | None = None
    top_p: Probability | None = None
    top_k: Annotated[Int, Field(ge=-1, le=2**31 - 1, description="0 or less: off")] | None = None
    min_p: Probability | None = None
    typical_p: Probability | None = None
    min_keep: Annotated[Int, Field(ge=0, le=2**31 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: RepeatPenalty | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=0.01, le=100, description="Another name of repeat_penalty")] | None
    ) = None
    repeat_last_n: Annotated[Int, Field(ge=-1, le=2**31 - 1, description="-1: the whole context")] | None = None
    dry_multiplier: NotNegative | None = None
    dry_base: NotNegative | None = None
    dry_allowed_length: Annotated[Int, Field(ge=0, le=2**31 - 1)] | None = None
    dry_penalty_last_n: Annotated[Int, Field(ge=-1, le=2**31 - 1)] | None = None
    dry_sequence_breakers: Annotated[list[str], Field(fail_fast=True)] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    mirostat: Annotated[Int, Field(ge=0, le=2)] | None = None
    mirostat_tau: NotNegative | None = None
    mirostat_eta: NotNegative | None = None
    seed: Annotated[Int, Field(description="-1: a fresh one")] | None = None
    ignore_eos: bool | None = None
    logit_bias: (
        Annotated[
            Annotated[dict[str, Bias], Field(max_length=4096)]
            | Annotated[list[BiasPair], Field(max_length=4096, fail_fast=True)],
            Field(description="Token ids to biases from -100 to 100; false bans a token. Pairs may name text instead"),
        ]
        | None
    ) = None
    samplers: (
        Annotated[list[str] | str, Field(description="Steps to use, by name or by letter; those left out are off")]
        | None
    ) = None
    dynatemp_range: Any = None
    dynatemp_exponent: Any = None
    top_n_sigma: Any = None
    grammar: Annotated[str | None, Field(description="A grammar (GBNF) that the answer must follow")] = None
    grammar_lazy: Any = None
    json_schema: Annotated[dict[str, Any] | bool | None, Field(description="A schema that the answer must match")] = (
        None
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    lora: Any = None
    reasoning_budget: Any = None
    reasoning_budget_tokens: Any = None
    thinking_budget_tokens: Any = None


class GenerationFields(SamplingFields):
    """Fields of every request that generates, besides how tokens are chosen."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None
    n: Annotated[Int, Field(ge=1)] | None = None
    cache_prompt: bool | None = None
    id_slot: Any = None
    n_cache_reuse: Any = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None


class StreamOptions(RequestModel):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
