"""The vocabulary of a model file: token texts and types, special ids, and the flags that steer encoding.

Read from GGUF metadata (`tokenizer.ggml.*`). Nothing here encodes; the merge models in this package do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.engine.text.pretokenizers import PreTokenizer
from app.engine.text.special_ids import SpecialIds, TokenType, correct_types, find_special_ids
from app.errors import FormatError, UnsupportedModel

PREFIX = "tokenizer.ggml."

#: A byte that is not part of valid UTF-8 is held in a Python string as this block of lone surrogates (PEP 383).
ESCAPED_BYTES = "\udc80-\udcff"


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What a tokenizer model assumes where the file is silent."""

    ids: Mapping[str, int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool


DEFAULTS: Mapping[str, ModelDefaults] = {
    "llama": ModelDefaults({"bos": 1, "eos": 2, "unknown": 0}, True, False, True),
    "gpt2": ModelDefaults({"bos": 11, "eos": 11}, False, False, False),
    "gemma4": ModelDefaults({}, True, False, False),
    "bert": ModelDefaults({"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103}, True, False, True),
    "t5": ModelDefaults({"eos": 1, "unknown": 2, "padding": 0}, False, True, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Everything the file says about tokens. `texts` are as stored; bytes that are not UTF-8 are escaped (PEP 383).

    `scores` is empty when the file has none. `pre` names the pre-tokenizer of a BPE model. `suppressed` tokens are
    never to be sampled. `adds_separator`: pairs of texts have the separator between them.
    """

    model: str
    pre: str
    texts: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    ids: SpecialIds
    eog: frozenset[int]
    add_bos: bool
    add_eos: bool
    adds_separator: bool
    add_space_prefix: bool
    remove_extra_whitespaces: bool
    lowercase: bool
    strip_accents: bool
    general_name: str
    suppressed: frozenset[int]
    index: Mapping[str, int]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], row: PreTokenizer | None) -> Vocabulary:
        """Read and check. `row` has the defaults of a byte-pair vocabulary's family.

        Raises FormatError for contradictions, UnsupportedModel for a kind of tokenizer we do not have.
        """
        model, pre = kind_of(metadata)
        check_arrays(metadata)
        defaults = DEFAULTS[model]
        default_ids = dict(defaults.ids)
        if row is not None and row.no_bos:
            default_ids.pop("bos", None)
        texts = _texts(metadata)
        index = _index(texts)
        types = _types(metadata, len(texts))
        ids = find_special_ids(metadata, default_ids, index)
        eog = correct_types(types, index, ids)
        begins_with_bos = defaults.add_bos or (row is not None and row.begins_with_bos)

        def flag(key: str, default: bool) -> bool:
            value = metadata.get(PREFIX + key, default)
            if not isinstance(value, int):
                raise FormatError(f"{PREFIX}{key} is {value!r}, expected true or false; the file is damaged")
            return bool(value)

        lowercase = flag("normalizer.lowercase", True)
        return cls(
            model=model,
            pre=pre,
            texts=texts,
            types=types,
            scores=_scores(metadata, len(texts)),
            ids=ids,
            eog=eog,
            add_bos=model == "gemma4" or flag("add_bos_token", begins_with_bos),
            add_eos=flag("add_eos_token", defaults.add_eos),
            adds_separator=flag("add_sep_token", row is not None and row.adds_separator),
            add_space_prefix=flag("add_space_prefix", defaults.add_space_prefix),
            remove_extra_whitespaces=flag("remove_extra_whitespaces", False),
            lowercase=lowercase,
            strip_accents=flag("normalizer.strip_accents", lowercase),
            general_name=as_text(metadata.get("general.name", "")),
            suppressed=frozenset(_list(metadata.get(PREFIX + "suppress_tokens", ()))),
            index=index,
        )

    def __len__(self) -> int:
        return len(self.texts)


def kind_of(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """The tokenizer model and the name of the pre-tokenizer. Raises UnsupportedModel for a model we do not have."""
    model = as_text(metadata.get(PREFIX + "model", ""))
    if model not in DEFAULTS:
        raise UnsupportedModel(
            f"tokenizer model {model!r} is not supported; supported are {', '.join(sorted(DEFAULTS))}"
        )
    return model, as_text(metadata.get(PREFIX + "pre", "default"))


_TEXT, _INTEGER, _NUMBER = (bytes, str), (int,), (int, float)
#: What the arrays of a vocabulary hold.
_ARRAYS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "tokens": (_TEXT, "texts"),
    "merges": (_TEXT, "texts"),
    "token_type": (_INTEGER, "integers"),
    "scores": (_NUMBER, "numbers"),
    "suppress_tokens": (_INTEGER, "integers"),
}


def check_arrays(metadata: Mapping[str, Any]) -> None:
    """Raises FormatError where something else is stored than an array of the right kind."""
    for key, (kinds, name) in _ARRAYS.items():
        stored = metadata.get(PREFIX + key)
        if stored is None:
            continue
        if not isinstance(stored, list | tuple) and not hasattr(stored, "tolist"):
            raise FormatError(
                f"{PREFIX}{key} holds {type(stored).__name__}, expected an array of {name}; the file is damaged"
            )
        wrong = next((kind for kind in set(map(type, _list(stored))) if not issubclass(kind, kinds)), None)
        if wrong is not None:
            raise FormatError(f"{PREFIX}{key} has entries of {wrong.__name__}, expected {name}; the file is damaged")


def as_text(value: object) -> str:
    """A metadata string, whether the reader kept it as bytes or as text."""
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "surrogateescape")
    return str(value)


def _texts(metadata: Mapping[str, Any]) -> list[str]:
    stored = metadata.get(PREFIX + "tokens")
    if stored is None or len(stored) == 0:
        raise FormatError(f"the file has no {PREFIX}tokens; it cannot be run without a vocabulary")
    if isinstance(stored[0], bytes):
        texts = [token.decode("utf-8", "surrogateescape") for token in stored]
    else:
        texts = list(stored)
    for token in (i for i, text in enumerate(texts) if not text):
        texts[token] = f"[EMPTY_{token}]"
    return texts


def _index(texts: Sequence[str]) -> dict[str, int]:
    index = {text: token for token, text in enumerate(texts)}
    if len(index) == len(texts):
        return index
    seen: dict[str, int] = {}
    for token, text in enumerate(texts):
        if text in seen:
            raise FormatError(f"tokens {seen[text]} and {token} of the vocabulary have the same text {text!r}")
        seen[text] = token
    return index


def _types(metadata: Mapping[str, Any], n_tokens: int) -> list[int]:
    stored = metadata.get(PREFIX + "token_type")
    return [int(TokenType.NORMAL)] * n_tokens if stored is None else _numbers(stored, "token_type", n_tokens)


def _scores(metadata: Mapping[str, Any], n_tokens: int) -> list[float]:
    stored = metadata.get(PREFIX + "scores")
    return [] if stored is None else _numbers(stored, "scores", n_tokens)


def _numbers(stored: Any, key: str, n_tokens: int) -> list[Any]:
    numbers = _list(stored)
    if len(numbers) < n_tokens:
        raise FormatError(f"{PREFIX}{key} has {len(numbers)} entries for {n_tokens} tokens; the file is damaged")
    return numbers[:n_tokens]


def _list(stored: Any) -> list[Any]:
    return list(stored.tolist()) if hasattr(stored, "tolist") else list(stored)
