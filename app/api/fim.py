"""Fill-in-the-middle prompts: what stands before a hole, what after it, in the order the model learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.api.context import Api
from app.api.prompt import check_fits, check_may_fit
from app.api.schemas.completions import ExtraFile
from app.errors import InvalidParameter

if TYPE_CHECKING:
    from app.engine.text.tokenizer import Tokenizer


def fim_tokens(
    prefix: str, suffix: str, api: Api, *, param: str, typed: str = "", extra: Sequence[ExtraFile] = ()
) -> tuple[int, ...]:
    """BOS, other files, prefix marker, prefix, suffix marker, suffix, middle marker, what was typed at the hole.

    Raises InvalidParameter naming `param` when the model has no markers. Text cannot become a marker.
    """
    tokenizer = api.service.tokenizer
    fim = tokenizer.fim
    if fim.prefix is None or fim.suffix is None or fim.middle is None:
        raise InvalidParameter(
            "this model has no fill-in-the-middle tokens; use a model that was trained for it",
            param=param,
            code="unsupported",
        )

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=False)

    check_may_fit(f"{prefix}{suffix}", api, param=param)
    bos = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    tokens = (
        *bos,
        *project_tokens(extra, tokenizer),
        *(fim.prefix, *plain(prefix)),
        *(fim.suffix, *plain(suffix)),
        *(fim.middle, *plain(typed)),
    )
    check_fits(tokens, api, param=param)
    return tokens


def project_tokens(extra: Sequence[ExtraFile], tokenizer: Tokenizer) -> list[int]:
    """Other files, each behind the model's file separator and its name; as plain text where there is no separator."""
    fim = tokenizer.fim
    tokens: list[int] = []
    if extra and fim.repository is not None and fim.separator is not None:
        tokens += [fim.repository, *tokenizer.encode("project\n", add_special=False, parse_special=False)]
    for i, file in enumerate(extra):
        name = file.filename or f"file{i}"
        if fim.separator is not None:
            tokens.append(fim.separator)
            text = f"{name}\n{file.text}"
        else:
            text = f"\n\n--- {name} ---\n\n{file.text}"
        tokens += tokenizer.encode(text, add_special=False, parse_special=False)
    if extra and fim.separator is not None:
        tokens += [fim.separator, *tokenizer.encode("current\n", add_special=False, parse_special=False)]
    return tokens
