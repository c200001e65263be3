"""Shapes of answers that say what there is, for the OpenAPI document: models, tokens, slots, health."""

from __future__ import annotations

from typing import Any, Literal

from app.api.schemas.base import AnswerModel


class ModelMeta(AnswerModel):
    """Facts about the weights and the context in use."""

    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_params: int
    size: int
    architecture: str
    ftype: str


class Model(AnswerModel):
    """A model, with the running context length under all its common names; OpenAI's fields and Anthropic's."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    created_at: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    context_length: int
    context_window: int
    max_context_length: int
    max_input_tokens: int
    meta: ModelMeta


class LocalModelDetails(AnswerModel):
    """How the weights are stored."""

    format: Literal["gguf"]
    family: str
    quantization_level: str


class LocalModel(AnswerModel):
    """A model as catalogues of local models show it."""

    name: str
    model: str
    type: Literal["model"]
    capabilities: list[str]
    details: LocalModelDetails


class ModelList(AnswerModel):
    """All models, in both shapes, on one page."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str
    models: list[LocalModel]


class TokenPiece(AnswerModel):
    """A token and its text, or its bytes where they are half a character."""

    id: int
    piece: str | list[int]


class Tokens(AnswerModel):
    """The tokens of a text."""

    tokens: list[int] | list[TokenPiece]


class Content(AnswerModel):
    """The text of tokens."""

    content: str


class RenderedPrompt(AnswerModel):
    """A conversation as the model sees it."""

    prompt: str


class Cancellation(AnswerModel):
    """A request was told to stop."""

    id: str
    object: Literal["cancellation"]
    cancelled: Literal[True]


class GenerationSettings(AnswerModel):
    """Defaults of requests."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    params: dict[str, Any]


class Modalities(AnswerModel):
    """What the model can take besides text."""

    vision: bool
    audio: bool


class Props(AnswerModel):
    """Facts about the server."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    model_ftype: str
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    devices: list[str]
    build_info: str
    is_sleeping: bool


class NextToken(AnswerModel):
    """How far a slot's answer is."""

    has_next_token: bool
    n_decoded: int


class Slot(AnswerModel):
    """What one slot works on."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    id_task: str | None
    n_prompt_tokens: int
    n_prompt_tokens_cache: int
    n_prompt_tokens_processed: int
    next_token: list[NextToken]


class Health(AnswerModel):
    """All is well."""

    status: Literal["ok"]


class Liveness(AnswerModel):
    """The process answers."""

    status: Literal["alive"]
    phase: str


class Readiness(AnswerModel):
    """Whether a request would be taken now, and what is missing if not."""

    status: Literal["ready", "not ready"]
    phase: str
    detail: str
    progress: float
    eta_seconds: float | None
    lost_devices: list[str]
