"""POST /v1/embeddings: vectors of the loaded model."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api.body import JsonRoute
from app.api.context import Api, ApiDep
from app.api.disconnect import until_disconnect
from app.api.docs import GENERATING, answers
from app.api.prompt import check_fits, check_may_fit, checked_ids
from app.api.schemas.answers import Embeddings
from app.api.schemas.text import EmbeddingRequest
from app.engine.service import Embedding
from app.errors import InvalidParameter

if TYPE_CHECKING:
    pass

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])

#: Inputs that one request may have in the engine at once, so that others get their turn.
AT_ONCE = 8
#: `embd_normalize`: llama-server's numbers for Euclidean length 1 and for no change.
EUCLIDEAN, UNCHANGED = 2, -1


@router.post("/v1/embeddings", **answers(Embeddings, GENERATING))
@router.post("/embeddings", include_in_schema=False)
async def embeddings(request: Request, body: EmbeddingRequest, api: ApiDep) -> Response:
    """One vector per input, of length 1."""
    model = api.check_model(body.model)
    check_vectors(body, api)
    inputs = await api.in_thread(lambda: inputs_of(body, api))
    answer = Response(status_code=499)  # for a client that is gone
    async with until_disconnect(request.receive):
        results = await embed_all(inputs, body.pooling or api.options.pooling, api)
        answer = JSONResponse(embeddings_answer(results, body, model))
    return answer


def check_vectors(body: EmbeddingRequest, api: Api) -> None:
    """Check everything but the texts."""
    n_embd = api.service.info.n_embd
    if body.dimensions is not None and body.dimensions > n_embd:
        raise InvalidParameter(f"dimensions is {body.dimensions}, this model has {n_embd}", param="dimensions")
    if body.embd_normalize not in (None, EUCLIDEAN, UNCHANGED):
        raise InvalidParameter("embd_normalize is 2 (length 1) or -1 (as it is)", param="embd_normalize")
    n_inputs = 1 if isinstance(body.input, str) or isinstance(body.input[0], int) else len(body.input)
    if n_inputs > api.options.limits.embedding_inputs:
        raise InvalidParameter(
            f"input has {n_inputs} texts, at most {api.options.limits.embedding_inputs} are taken", param="input"
        )


def inputs_of(body: EmbeddingRequest, api: Api) -> list[tuple[int, ...]]:
    """Tokens of every input; a list of numbers is one input."""
    given = body.input
    if isinstance(given, str) or isinstance(given[0], int):
        return [input_tokens(given, api, "input")]
    return [input_tokens(one, api, f"input[{i}]") for i, one in enumerate(given)]


def input_tokens(given: str | Sequence[int], api: Api, where: str) -> tuple[int, ...]:
    tokenizer = api.service.tokenizer
    if isinstance(given, str):
        check_may_fit(given, api, param=where)
        tokens = tuple(tokenizer.encode(given, add_special=True, parse_special=False))
    else:
        tokens = checked_ids(given, tokenizer, where)
    check_fits(tokens, api, param=where)
    if not tokens:
        raise InvalidParameter("an empty text has no tokens to make a vector of", param=where)
    return tokens


async def embed_all(inputs: Sequence[Sequence[int]], pooling: str, api: Api) -> list[Embedding]:
    """All vectors in order; the first error stops the rest."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(tokens: Sequence[int]) -> Embedding:
        async with turn:
            return await api.service.embed(tokens, pooling)

    tasks = [asyncio.create_task(one(tokens)) for tokens in inputs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def embeddings_answer(results: Sequence[Embedding], body: EmbeddingRequest, model: str) -> dict[str, Any]:
    n_tokens = sum(result.n_tokens for result in results)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": encode(vector(result, body), body.encoding_format)}
            for i, result in enumerate(results)
        ],
        "model": model,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }


def vector(result: Embedding, body: EmbeddingRequest) -> Sequence[float]:
    """The vector, cut to the dimensions asked for, then of length 1 unless it is to stay as it is."""
    values = result.vector[: body.dimensions]
    if body.embd_normalize == UNCHANGED:
        return values
    length = math.hypot(*values)
    return [value / length for value in values] if length > 0 else values


def encode(values: Sequence[float], encoding_format: str | None) -> str | list[float]:
    """A list, or little-endian float32 in base64."""
    if encoding_format == "base64":
        return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    return list(values)
