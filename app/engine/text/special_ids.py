"""Which tokens have a role: begin, end, fill-in-the-middle, and all that end an answer.

Files often leave ids out, so missing ones are guessed by exact text, as every engine that reads these files does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class TokenType(IntEnum):
    """What a token is, as the file says. Control and unknown tokens never come from plain text."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


#: Types that are no text: hidden in answers, and matched in prompts only where that is asked for.
CONTROL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class FimIds:
    """Tokens of fill-in-the-middle prompts: before the prefix, the suffix and the middle; padding, file boundaries."""

    prefix: int | None = None
    suffix: int | None = None
    middle: int | None = None
    padding: int | None = None
    repository: int | None = None
    separator: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Token ids by role; None where the vocabulary has no such token."""

    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    eom: int | None = None
    unknown: int | None = None
    separator: int | None = None
    padding: int | None = None
    mask: int | None = None
    fim: FimIds = FimIds()


#: Role -> metadata keys (the misspelling is the format's own; later ones are old names), and texts to guess it by.
_ROLES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bos": (("bos",), ()),
    "eos": (("eos",), ()),
    "eot": (
        ("eot",),
        (
            "<|eot_id|>",
            "<|im_end|>",
            "<|end|>",
            "<end_of_turn>",
            "<|endoftext|>",
            "<|end_of_text|>",
            "<EOT>",
            "_<EOT>",
            "[EOT]",
            "<｜end▁of▁sentence｜>",
            "<end_of_utterance>",
        ),
    ),
    "eom": (("eom",), ("<|eom_id|>",)),
    "unknown": (("unknown",), ()),
    "separator": (("seperator", "separator"), ()),
    "padding": (("padding",), ()),
    "mask": (("mask",), ()),
}

_FIM_ROLES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prefix": (
        ("fim_pre", "prefix"),
        (
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ),
    ),
    "suffix": (
        ("fim_suf", "suffix"),
        (
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ),
    ),
    "middle": (
        ("fim_mid", "middle"),
        (
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ),
    ),
    "padding": (("fim_pad",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    "repository": (
        ("fim_rep",),
        ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ),
    "separator": (("fim_sep",), ("<|file_sep|>",)),
}

#: Texts that end an answer wherever they stand in a vocabulary.
_EOG_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)

#: Parts of channel markup: they must show in the output, where a parser reads them.
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


def find_special_ids(metadata: Mapping[str, Any], defaults: Mapping[str, int], index: Mapping[str, int]) -> SpecialIds:
    """Ids from the file, else the model's defaults, else by text. Ids outside the vocabulary count as absent."""

    def find(role: tuple[tuple[str, ...], tuple[str, ...]]) -> int | None:
        keys, texts = role
        for key in keys:
            stored = metadata.get(f"tokenizer.ggml.{key}_token_id", defaults.get(key))
            if isinstance(stored, int) and 0 <= stored < len(index):
                return stored
        return next((index[text] for text in texts if text in index), None)

    fim = FimIds(**{name: find(role) for name, role in _FIM_ROLES.items()})
    return SpecialIds(fim=fim, **{name: find(role) for name, role in _ROLES.items()})


def correct_types(types: list[int], index: Mapping[str, int], ids: SpecialIds) -> frozenset[int]:
    """Mend token types that files get wrong, in place; returns the tokens that end an answer."""
    fim = ids.fim
    by_text = {index[text] for text in _EOG_TEXTS if text in index}
    roles = (ids.eot, ids.eom, fim.prefix, fim.suffix, fim.middle, fim.padding, fim.repository, fim.separator)
    for token in by_text.union(_present(*roles)):
        types[token] = TokenType.CONTROL
    for token in (index[text] for text in _ALWAYS_SHOWN if text in index):
        types[token] = TokenType.USER_DEFINED
    eog = by_text.union(_present(ids.eos, ids.eot, ids.eom, fim.padding, fim.repository, fim.separator))
    _keep_open(eog, types, index)
    return frozenset(eog)


def _present(*tokens: int | None) -> list[int]:
    return [token for token in tokens if token is not None]


def _keep_open(eog: set[int], types: list[int], index: Mapping[str, int]) -> None:
    """Families in which a usual end marker ends a part of the answer only."""
    ends_calls = {"<|return|>", "<|call|>"} <= index.keys() or {"<|calls|>", "<|flush|>"} <= index.keys()
    if ends_calls and index.get("<|end|>") in eog:
        eog.discard(index["<|end|>"])
        types[index["<|end|>"]] = TokenType.USER_DEFINED
    if ("<|tool_response>" in index or "<|plamo:eos|>" in index) and "</s>" in index:
        eog.discard(index["</s>"])
        types[index["</s>"]] = TokenType.NORMAL
