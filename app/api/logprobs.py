"""Log probabilities in the shape of chat completions. JSON has no infinity, so what is impossible gets a floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.engine.request import TokenInfo, TokenLogprob

if TYPE_CHECKING:
    from app.engine.text.tokenizer import Tokenizer

#: What OpenAI reports for a token that cannot occur.
FLOOR = -9999.0


def finite(logprob: float | None) -> float:
    """At most zero, at least FLOOR."""
    return FLOOR if logprob is None else min(0.0, max(FLOOR, logprob)) + 0.0


def chat_entries(tokens: Sequence[TokenInfo], n_top: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """`logprobs.content` entries. With alternatives asked for, the chosen token is always among them."""
    return [
        {
            **chat_candidate(token.token, token.piece, token.logprob),
            "top_logprobs": [
                chat_candidate(top.token, piece_of(top, token, tokenizer), top.logprob)
                for top in with_chosen(token, n_top)
            ],
        }
        for token in tokens
    ]


def chat_candidate(token: int, piece: bytes, logprob: float | None) -> dict[str, Any]:
    return {
        "id": token,
        "token": piece.decode("utf-8", "replace"),
        "bytes": list(piece),
        "logprob": finite(logprob),
    }


def with_chosen(token: TokenInfo, n_top: int) -> Sequence[TokenLogprob]:
    """The `n_top` likeliest; the last gives way to the chosen token when sampling went beyond them."""
    top = token.top[:n_top]
    if not top or token.logprob is None or any(candidate.token == token.token for candidate in top):
        return top
    return (*top[:-1], TokenLogprob(token.token, token.logprob))


def token_text(piece: bytes) -> str:
    """The token as text; where its bytes are half a character, OpenAI's way to spell bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def piece_of(candidate: TokenLogprob, chosen: TokenInfo, tokenizer: Tokenizer) -> bytes:
    if candidate.token == chosen.token:
        return chosen.piece
    return tokenizer.piece(candidate.token, show_special=True)
