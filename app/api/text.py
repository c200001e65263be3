"""POST /tokenize, /detokenize, /apply-template: what the model sees, without running it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from app.api.body import JsonRoute
from app.api.context import ApiDep
from app.api.docs import READING, answers
from app.api.prompt import chat_text, checked_ids
from app.api.schemas.chat import ChatRequest
from app.api.schemas.facts import Content, RenderedPrompt, Tokens
from app.api.schemas.text import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from app.engine.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute, tags=["text"])

TOKENS_AT_ONCE = 4096


@router.post("/tokenize", **answers(Tokens, READING))
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(body: TokenizeRequest, api: ApiDep) -> Response:
    """The tokens of a text; special tokens are recognised unless `parse_special` is false."""
    api.check_loaded()
    tokenizer = api.service.tokenizer
    content = await api.in_thread(lambda: tokens_json(tokens_of(body, tokenizer), body, tokenizer))
    return Response(content, media_type="application/json")


@router.post("/detokenize", **answers(Content, READING))
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(body: DetokenizeRequest, api: ApiDep) -> Response:
    """The text of tokens, special ones included."""
    api.check_loaded()
    tokenizer = api.service.tokenizer

    def text() -> str:
        return tokenizer.decode(checked_ids(body.tokens, tokenizer, "tokens"), show_special=True)

    return JSONResponse({"content": await api.in_thread(text)})


@router.post("/apply-template", **answers(RenderedPrompt, READING))
@router.post("/v1/apply-template", include_in_schema=False)
async def apply_template(body: ChatRequest, api: ApiDep) -> Response:
    """The prompt that a chat request would be answered from."""
    api.check_loaded()
    return JSONResponse({"prompt": await api.in_thread(lambda: chat_text(body, api.service, datetime.now()))})


def tokens_of(body: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    parts = [body.content] if isinstance(body.content, str) else body.content
    parse_special = body.parse_special is not False
    tokens: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            tokens += checked_ids([part], tokenizer, f"content[{i}]")
        else:
            first = bool(body.add_special) and i == 0
            tokens += tokenizer.encode(part, add_special=first, parse_special=parse_special)
    return tokens


def tokens_json(tokens: Sequence[int], body: TokenizeRequest, tokenizer: Tokenizer) -> bytes:
    """The answer of /tokenize, written a part at a time: while JSON is written, no other thread runs."""
    parts: list[str] = []
    for at in range(0, len(tokens), TOKENS_AT_ONCE):
        part: Sequence[Any] = tokens[at : at + TOKENS_AT_ONCE]
        if body.with_pieces:
            part = [piece_object(token, tokenizer) for token in part]
        parts.append(json.dumps(part, ensure_ascii=False, separators=(",", ":"))[1:-1])
    return f'{{"tokens":[{",".join(parts)}]}}'.encode()


def piece_object(token: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token and its text, or its bytes where they are half a character."""
    piece = tokenizer.piece(token, show_special=True)
    try:
        return {"id": token, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(piece)}
