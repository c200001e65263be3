"""GET /v1/models and /v1/models/{id}: the one model, with the context it really runs with."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from app.api.context import Api, ApiDep
from app.api.docs import LOOKING, answers
from app.api.schemas.facts import Model, ModelList
from app.errors import NotFound

router = APIRouter(tags=["models"])


@router.get("/v1/models", **answers(ModelList, LOOKING))
@router.get("/models", include_in_schema=False)
async def list_models(api: ApiDep) -> dict[str, Any]:
    """The models that can be asked: one."""
    api.check_loaded()
    only = model_card(api)
    page = {"has_more": False, "first_id": only["id"], "last_id": only["id"]}
    return {"object": "list", "data": [only], **page, "models": [local_card(api)]}


@router.get("/v1/models/{model:path}", **answers(Model, (*LOOKING, 404)))
@router.get("/models/{model:path}", include_in_schema=False)
async def get_model(model: str, api: ApiDep) -> dict[str, Any]:
    """One model by its id, which may contain slashes."""
    api.check_loaded()
    if model not in (api.service.info.alias, api.service.info.name):
        raise NotFound(
            f"the model {model!r} does not exist here; this server has {api.service.info.alias!r}",
            param="model",
            code="model_not_found",
        )
    return model_card(api)


def model_card(api: Api) -> dict[str, Any]:
    """OpenAI's fields and Anthropic's, and the running context length under every name that clients look for."""
    info = api.service.info
    return {
        "id": info.alias,
        "object": "model",
        "type": "model",
        "display_name": info.name,
        "created_at": datetime.fromtimestamp(info.created_unix, UTC).isoformat(),
        "created": info.created_unix,
        "owned_by": "tandem",
        "root": info.name,
        "parent": None,
        "max_model_len": info.n_ctx,
        "context_length": info.n_ctx,
        "context_window": info.n_ctx,
        "max_context_length": info.n_ctx,
        "max_input_tokens": info.n_ctx,
        "meta": {
            "n_ctx": info.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_vocab": info.n_vocab,
            "n_embd": info.n_embd,
            "n_params": info.n_params,
            "size": info.size_bytes,
            "architecture": info.architecture,
            "ftype": info.file_type,
        },
    }


def local_card(api: Api) -> dict[str, Any]:
    """The same model as catalogues of local models show it."""
    info = api.service.info
    return {
        "name": info.alias,
        "model": info.alias,
        "type": "model",
        "capabilities": ["completion"],
        "details": {"format": "gguf", "family": info.architecture, "quantization_level": info.file_type},
    }
