"""Text to token ids and back, as the model file says.

`encode` partitions at special tokens and hands what lies between to the model of the vocabulary. Text from users can
become a control token only with `parse_special`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from app.engine.text.bpe import BpeModel, byte_characters
from app.engine.text.guard import without_marks
from app.engine.text.partition import Fragment, Partition, SpecialToken
from app.engine.text.pieces import Pieces, tidy_spaces
from app.engine.text.pretokenizers import pre_tokenizer
from app.engine.text.special_ids import CONTROL_TYPES, FimIds, TokenType
from app.engine.text.spm import SpmModel
from app.engine.text.ugm import UgmModel
from app.engine.text.vocab import Vocabulary, kind_of
from app.engine.text.wpm import WpmModel

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


class MergeModel(Protocol):
    """Turns raw text, free of special tokens, into token ids."""

    def encode(self, text: str, after_special: bool) -> list[int]: ...


class Tokenizer:
    """One vocabulary, ready to encode and decode. Safe to use from several threads.

    `eog` are the tokens that end an answer, `suppressed` those that may never be sampled. `bos` and `eos` are None
    where the vocabulary has none.
    """

    def __init__(self, vocabulary: Vocabulary, model: MergeModel, *, clean_spaces: bool) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self.bos = vocabulary.ids.bos
        self.eos = vocabulary.ids.eos
        self.eog = vocabulary.eog
        self.fim: FimIds = vocabulary.ids.fim
        self.suppressed = vocabulary.suppressed
        self.add_bos = vocabulary.add_bos and self.bos is not None
        self.add_eos = vocabulary.add_eos and self.eos is not None
        self._model = model
        self._pieces = Pieces(vocabulary)
        self._clean_spaces = clean_spaces
        self._longest = _longest_token(vocabulary)
        specials = _special_tokens(vocabulary)
        self._partition_all = Partition(specials)
        self._partition_plain = Partition(
            [token for token in specials if vocabulary.types[token.id] == TokenType.USER_DEFINED]
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from GGUF metadata. Token strings may be bytes or text.

        Raises UnsupportedModel for kinds of vocabulary we do not have, FormatError for contradictions.
        """
        kind, pre = kind_of(metadata)
        row = pre_tokenizer("gemma4" if kind == "gemma4" else pre) if kind in ("gpt2", "gemma4") else None
        vocabulary = Vocabulary.from_metadata(metadata, row)
        model: MergeModel
        if row is not None:
            model = BpeModel(vocabulary, row, metadata)
        elif kind == "llama":
            model = SpmModel(vocabulary)
        elif kind == "bert":
            model = WpmModel(vocabulary)
        else:
            model = UgmModel(vocabulary, metadata)
        return cls(vocabulary, model, clean_spaces=row is not None and row.clean_spaces)

    def encode(self, text: str | bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids. `add_special` puts BOS before and EOS (or SEP) behind where the model wants them;
        `parse_special` lets the texts of control tokens stand for these tokens."""
        tokens: list[int] = []
        after_special = True
        for fragment in self.fragments(text, parse_special=parse_special):
            if isinstance(fragment, int):
                tokens.append(fragment)
            else:
                tokens += self._model.encode(without_marks(fragment), after_special)
            after_special = isinstance(fragment, int)
        return self._with_ends(tokens) if add_special else tokens

    def encode_prompt(self, text: str | bytes, *, parse_special: bool = True) -> list[int]:
        """Token ids of a whole prompt: BOS and EOS as the model wants them, but never twice when `text` has them."""
        tokens = self.encode(text, add_special=False, parse_special=parse_special)
        full = self._with_ends(tokens)
        if self.add_bos and tokens[:1] == [self.bos]:
            full = full[1:]
        if self.add_eos and tokens[-1:] == [self.eos]:
            full = full[:-1]
        return full

    def fewest_tokens(self, text: str | bytes) -> int:
        """A number of tokens that `text` has at the least, found without encoding it: as many as if every token were
        the longest there is. Tells at once that a text cannot fit; 0 where nothing can be said."""
        n_chars = len(text) // 4 if isinstance(text, bytes) else len(without_marks(text))
        return -(-n_chars // self._longest) if self._longest else 0

    def fragments(self, text: str | bytes, *, parse_special: bool) -> list[Fragment]:
        """Raw texts and the ids of special tokens between them, in order."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        elif _LONE_SURROGATES.search(text):
            text = _LONE_SURROGATES.sub("\ufffd", text)
        return (self._partition_all if parse_special else self._partition_plain).split(text)

    @property
    def control_texts(self) -> list[str]:
        """The texts that stand for control tokens with `parse_special`."""
        return [text for text, token in self.vocabulary.index.items() if self.vocabulary.types[token] in CONTROL_TYPES]

    def piece(self, token: int, *, show_special: bool) -> bytes:
        """The bytes a token stands for; they may be part of a character. Control tokens are empty unless shown.

        Raises IndexError outside the vocabulary.
        """
        return self._pieces.piece(token, show_special)

    def is_control(self, token: int) -> bool:
        """Whether a token is markup, which no text can contain."""
        return self.vocabulary.types[token] in CONTROL_TYPES

    def show_always(self, texts: Iterable[str]) -> None:
        """Let these tokens appear in answers though they are control tokens: markup that a parser has to read."""
        for text in texts:
            if (token := self.token_id(text)) is not None:
                self._pieces.show_always(token)

    def decode(self, tokens: Iterable[int], *, show_special: bool = False) -> str:
        """The text of a whole sequence; what is no UTF-8 becomes U+FFFD."""
        return self.decode_bytes(tokens, show_special=show_special).decode("utf-8", "replace")

    def decode_bytes(self, tokens: Iterable[int], *, show_special: bool = False) -> bytes:
        """The bytes of a whole sequence: without the space that encoding put in front, and tidied where the model
        asks for it. A text that streams is the plain pieces instead."""
        pieces = [self._pieces.piece(token, show_special) for token in tokens]
        if pieces and self.vocabulary.add_space_prefix:
            pieces[0] = pieces[0].removeprefix(b" ")
        data = b"".join(pieces)
        return tidy_spaces(data) if self._clean_spaces else data

    def token_text(self, token: int) -> str:
        """A token as the vocabulary stores it, such as `<s>` or `Ġhello`."""
        return self.vocabulary.texts[token]

    def token_id(self, text: str) -> int | None:
        """The token that the vocabulary stores under this text."""
        return self.vocabulary.index.get(text)

    def _with_ends(self, tokens: Sequence[int]) -> list[int]:
        head = [self.bos] if self.add_bos and self.bos is not None else []
        separator = self.vocabulary.ids.separator
        if self.vocabulary.model == "bert":
            return [*head, *tokens, *([] if separator is None else [separator])]
        tail = [self.eos] if self.add_eos and self.eos is not None else []
        return [*head, *tokens, *tail]


def _special_tokens(vocabulary: Vocabulary) -> list[SpecialToken]:
    kinds = (*CONTROL_TYPES, TokenType.USER_DEFINED)
    is_phi3 = _is_phi3(vocabulary)
    keeps = {"<unk>", "<s>", "<|endoftext|>"}
    masks = {"<mask>", "[MASK]"} if vocabulary.model in ("bert", "gpt2") and vocabulary.ids.mask is not None else set()
    return [
        SpecialToken(
            token,
            vocabulary.texts[token],
            eats_before=vocabulary.texts[token] in masks,
            eats_after=is_phi3 and vocabulary.texts[token] not in keeps,
        )
        for token, kind in enumerate(vocabulary.types)
        if kind in kinds
    ]


def _longest_token(vocabulary: Vocabulary) -> int:
    """Most characters that one token can stand for; 0 where a token may stand for any number of them."""
    if vocabulary.model == "llama":
        keeps_all = True
    else:
        keeps_all = vocabulary.model == "gpt2" and set(byte_characters()) <= vocabulary.index.keys()
    return max(map(len, vocabulary.texts)) if keeps_all and not _is_phi3(vocabulary) else 0


def _is_phi3(vocabulary: Vocabulary) -> bool:
    name = vocabulary.general_name.lower()
    return "phi-3" in name or "phi3" in name
