"""Shapes of generated answers and errors, for the OpenAPI document; answers themselves are made by hand, for speed."""

from __future__ import annotations

from typing import Literal

from app.api.schemas.base import AnswerModel


class ErrorObject(AnswerModel):
    """What went wrong, what to do about it, and which field it was."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(AnswerModel):
    """The body of every error."""

    error: ErrorObject


class TokenDetails(AnswerModel):
    """Of the prompt: how many tokens needed no work."""

    cached_tokens: int


class CompletionDetails(AnswerModel):
    """Of the answer: how many tokens were thinking."""

    reasoning_tokens: int


class Usage(AnswerModel):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails
    completion_tokens_details: CompletionDetails


class Timings(AnswerModel):
    """Where the time went, in milliseconds, under llama-server's names."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    queued_ms: float


class Candidate(AnswerModel):
    """A token that could stand there, with the natural logarithm of its probability."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class ChosenToken(Candidate):
    """The token that does stand there."""

    top_logprobs: list[Candidate]


class ChatLogprobs(AnswerModel):
    """Log probabilities of a chat answer."""

    content: list[ChosenToken]
    refusal: None


class AssistantMessage(AnswerModel):
    """The answer's text; its thinking, if there was any, is apart."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None


FinishReason = Literal["stop", "length"]


class ChatChoice(AnswerModel):
    """One answer. `tokens` only with `return_tokens`."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    tokens: list[int] | None = None


class Answer(AnswerModel):
    """What all whole answers begin and end with."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    timings: Timings


class ChatCompletion(Answer):
    """A whole chat answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatDelta(AnswerModel):
    """What is added to the message; the role comes first, by itself."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(AnswerModel):
    """A step of one answer; the last one has a finish_reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    tokens: list[int] | None = None


class PromptProgress(AnswerModel):
    """How much of the prompt is computed; only with `return_progress`."""

    total: int
    cache: int
    processed: int
    time_ms: int


class Chunk(AnswerModel):
    """What all events of a stream have. An error event has `error` instead."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None


class ChatCompletionChunk(Chunk):
    """One event of a streamed chat answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class LegacyLogprobs(AnswerModel):
    """Log probabilities of a text completion: four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(AnswerModel):
    """One continuation. `tokens` only with `return_tokens`."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason
    tokens: list[int] | None = None


class TextCompletion(Answer):
    """A whole text completion."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class TextChunkChoice(AnswerModel):
    """A step of one continuation; the last one has a finish_reason."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None
    tokens: list[int] | None = None


class TextCompletionChunk(Chunk):
    """One event of a streamed text completion."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


class Infill(AnswerModel):
    """What belongs into the hole, in llama-server's shape."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[True]
    model: str
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str
    truncated: bool
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[ChosenToken] | None = None


class InfillChunk(AnswerModel):
    """One event of a streamed filling; the last one has `stop` true and all that `Infill` has."""

    index: int
    content: str
    stop: bool
    tokens: list[int] | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None
    completion_probabilities: list[ChosenToken] | None = None


class EmbeddingObject(AnswerModel):
    """One vector: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(AnswerModel):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(AnswerModel):
    """One vector per input."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
