"""Byte-pair vocabularies: a merge table, applied by the `tokenizers` core to pieces of the text.

What is ours: reading the file's table, the pre-tokenizer, and cutting long texts where no piece can span the cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from app.engine.text.pretokenizers import PreTokenizer
from app.engine.text.special_ids import CONTROL_TYPES
from app.engine.text.spm import SPACE
from app.engine.text.vocab import ESCAPED_BYTES, PREFIX, Vocabulary, as_text
from app.errors import FormatError

#: Texts above this are cut; the core is several times faster on short ones, and takes many at once.
_CHUNK_CHARS = 16384

_AT_SPACE = r"[A-Za-z](?=[ \n])|[\u4e00-\u9fff](?=[\u3002\uff0c])"
_AT_DIGIT = r"[0-9](?=[0-9])"
_INVALID = re.compile(f"[{ESCAPED_BYTES}]")
_NEWLINES = re.compile(r"\n+|[^\n]+")


def byte_characters() -> tuple[str, ...]:
    """The printable stand-in of each byte, as byte-level vocabularies write it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


class BpeModel:
    """Tokens of one piece of raw text."""

    def __init__(self, vocabulary: Vocabulary, row: PreTokenizer, metadata: Mapping[str, Any]) -> None:
        self._n_tokens = len(vocabulary)
        self._ids = {
            text: token for text, token in vocabulary.index.items() if vocabulary.types[token] not in CONTROL_TYPES
        }
        self._raw = row.raw or vocabulary.model == "gemma4"
        self._cut = _cut_pattern(row)
        _refuse_broken_texts(self._ids)
        merges = _merges(metadata, self._ids, vocabulary.pre)
        self._extra = _missing_results(merges, self._ids, self._n_tokens)
        core = Tokenizer(
            models.BPE(
                vocab={**self._ids, **{text: token for token, text in self._extra.items()}},
                merges=merges,
                ignore_merges=row.whole_words and not self._raw,
                byte_fallback=self._raw,
            )
        )
        if not self._raw:
            core.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in row.patterns),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        self._core = core

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of `text`. Bytes that are not UTF-8 count as U+FFFD, one each."""
        text = _INVALID.sub("\ufffd", text)
        tokens = self._encode_raw(text.replace(" ", SPACE)) if self._raw else self._encode_pieces(text)
        return self._spell(tokens) if self._extra else tokens

    def _encode_pieces(self, text: str) -> list[int]:
        if len(text) <= _CHUNK_CHARS:
            return self._run(text)
        chunks = list(chunks_of(text, self._cut, _CHUNK_CHARS))
        encodings = self._core.encode_batch_fast(chunks, add_special_tokens=False)
        return [token for encoding in encodings for token in encoding.ids]

    def _encode_raw(self, text: str) -> list[int]:
        tokens: list[int] = []
        for piece in _NEWLINES.findall(text):
            whole = self._ids.get(piece) if piece[0] == "\n" else None
            tokens += self._run(piece) if whole is None else [whole]
        return tokens

    def _run(self, text: str) -> list[int]:
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return ids

    def _spell(self, tokens: Sequence[int]) -> list[int]:
        """Replace what merges made but the vocabulary does not hold by its single characters."""
        out: list[int] = []
        for token in tokens:
            if token < self._n_tokens:
                out.append(token)
            else:
                out += [self._ids[char] for char in self._extra[token] if char in self._ids]
        return out


def _cut_pattern(row: PreTokenizer) -> re.Pattern[str] | None:
    places = [_AT_SPACE] * row.cuts_at_spaces + [_AT_DIGIT] * row.cuts_at_digits
    return re.compile("|".join(places)) if places else None


def chunks_of(text: str, cut: re.Pattern[str] | None, n_chars: int) -> Iterator[str]:
    """Cut `text` at places where `cut` matches, into chunks of about `n_chars`; longer where there is no such place."""
    start = 0
    while len(text) - start > n_chars and cut is not None:
        place = cut.search(text, start + n_chars)
        if place is None:
            break
        yield text[start : place.end()]
        start = place.end()
    if start < len(text):
        yield text[start:]


def _refuse_broken_texts(ids: Mapping[str, int]) -> None:
    """The merge core takes Unicode alone; bytes that are not UTF-8 have no place in a byte-level vocabulary."""
    for text, token in ids.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise FormatError(
                f"token {token} of {PREFIX}tokens is not UTF-8: {text.encode(errors='surrogateescape')!r}; "
                f"the file is damaged, fetch it again"
            ) from None


def _merges(metadata: Mapping[str, Any], ids: Mapping[str, int], pre: str) -> list[tuple[str, str]]:
    stored = metadata.get(PREFIX + "merges")
    if stored is None:
        if pre == "kimi-k2":
            return _merges_of_ranks(ids)
        raise FormatError(f"the file has no {PREFIX}merges, which its byte-pair vocabulary needs")
    # A dict keeps the first of two equal entries in place, as the format wants.
    return list(dict.fromkeys(_pair(entry) for entry in stored))


def _pair(entry: object) -> tuple[str, str]:
    text = as_text(entry)
    at = text.find(" ", 1)
    if at < 0:
        raise FormatError(f"the entry {text!r} of {PREFIX}merges is not a pair")
    return text[:at], text[at + 1 :]


def _merges_of_ranks(ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The table of a vocabulary whose ids are the ranks: every way to put a token together from two others."""
    return [
        (text[:at], text[at:])
        for text in sorted(ids, key=ids.__getitem__)
        for at in range(1, len(text))
        if text[:at] in ids and text[at:] in ids
    ]


def _missing_results(merges: Sequence[tuple[str, str]], ids: Mapping[str, int], n_tokens: int) -> dict[int, str]:
    """Symbols of the table that are no tokens, under ids above the vocabulary: the core wants an id for each."""
    missing = {text: None for left, right in merges for text in (left, right, left + right) if text not in ids}
    return dict(enumerate(missing, n_tokens))
