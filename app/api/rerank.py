"""POST /v1/rerank: documents in the order in which they answer a query, by models that can say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api.body import JsonRoute
from app.api.context import Api, ApiDep
from app.api.disconnect import until_disconnect
from app.api.docs import GENERATING, answers
from app.api.embeddings import embed_all
from app.api.prompt import check_fits, check_may_fit
from app.api.schemas.rerank import RankedText, Rerank, RerankRequest
from app.engine.ranking import Ranking
from app.errors import InvalidParameter

router = APIRouter(route_class=JsonRoute, tags=["rerank"])


@router.post("/v1/rerank", **answers(Rerank | list[RankedText], GENERATING))
@router.post("/rerank", include_in_schema=False)
@router.post("/reranking", include_in_schema=False)
@router.post("/v1/reranking", include_in_schema=False)
async def rerank(request: Request, body: RerankRequest, api: ApiDep) -> Response:
    """How well each document answers the query, best first. Given `texts`, the answer is a list of scores alone."""
    model = api.check_model(body.model)
    ranking = ranking_of(api)
    texts = texts_of(body, api)
    prompts = await api.in_thread(lambda: [prompt(body.query, text, ranking, api, i) for i, text in enumerate(texts)])
    answer = Response(status_code=499)  # for a client that is gone
    async with until_disconnect(request.receive):
        states = await embed_all(prompts, "last", api)
        scores = [ranking.score(np.asarray(state.vector, dtype=np.float32)) for state in states]
        order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n]
        n_tokens = sum(state.n_tokens for state in states)
        if body.documents is None:
            answer = JSONResponse([scored_text(i, scores[i], texts, body) for i in order])
        else:
            answer = JSONResponse(
                {
                    "object": "list",
                    "model": model,
                    "results": [ranked_document(i, scores[i], texts, body) for i in order],
                    "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
                }
            )
    return answer


def ranking_of(api: Api) -> Ranking:
    """The model's head for it. Raises InvalidParameter for a model that has none."""
    ranking = api.service.ranking
    if ranking is None:
        raise InvalidParameter(
            f"the model {api.service.info.alias!r} cannot rank: its file has no head for it (cls.output.weight); serve "
            f"a reranker, such as a GGUF of Qwen3-Reranker, or compare vectors from /v1/embeddings",
            param="model",
            code="unsupported",
        )
    return ranking


def texts_of(body: RerankRequest, api: Api) -> list[str]:
    """What is to be ranked, under one of its two names, in bounds."""
    name, given = ("texts", body.texts) if body.documents is None else ("documents", body.documents)
    if given is None:
        raise InvalidParameter("documents: field required", param="documents")
    if body.documents is not None and body.texts is not None:
        raise InvalidParameter("documents and texts exclude each other; give one of them", param="texts")
    limit = api.options.limits.embedding_inputs
    if len(given) > limit:
        raise InvalidParameter(f"{name} has {len(given)} texts, at most {limit} are taken", param=name)
    return [one if isinstance(one, str) else one.text for one in given]


def prompt(query: str, text: str, ranking: Ranking, api: Api, index: int) -> tuple[int, ...]:
    where = f"documents[{index}]"
    check_may_fit(text, api, param=where)
    check_may_fit(query, api, param="query")
    tokens = ranking.tokens(query, text, api.service.tokenizer)
    check_fits(tokens, api, param=where)
    return tokens


def ranked_document(index: int, score: float, texts: Sequence[str], body: RerankRequest) -> dict[str, Any]:
    document = {"document": {"text": texts[index]}} if body.return_documents else {}
    return {"index": index, "relevance_score": score, **document}


def scored_text(index: int, score: float, texts: Sequence[str], body: RerankRequest) -> dict[str, Any]:
    text = {"text": texts[index]} if body.return_text else {}
    return {"index": index, "score": score, **text}
