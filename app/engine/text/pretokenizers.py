"""How the text of a byte-pair vocabulary is cut into pieces before merging: one row per `tokenizer.ggml.pre`.

The expressions of a row apply one after the other; each cuts every piece so far into its matches and the gaps between
them, and sees nothing outside its piece. They are the ones that model authors publish in their `tokenizer.json`, in
the syntax of Oniguruma, which the `tokenizers` package runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from app.engine.text.character_classes import (
    CASED_WORD,
    CJK_AND_HANGUL,
    HAN_AND_KANA,
    SENTENCE_MARKS,
    UNSPACED_SCRIPTS,
    WIDE_PUNCTUATION,
    YOUTU_SCRIPTS,
)
from app.errors import UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """One way to cut text into pieces, and what comes with it.

    `whole_words`: a piece that is a token is taken as it is, whatever the merges say. `begins_with_bos`: the default
    of `add_bos`. `clean_spaces`: whole-text decoding tidies spaces. `raw`: merges work on characters with U+2581 for
    spaces, not on mapped bytes. `cuts_at_spaces`: no expression takes a letter and white space after it into one piece,
    so long texts may be cut there. `cuts_at_digits`: the same between any two digits.
    """

    patterns: tuple[str, ...]
    clean_spaces: bool = False
    whole_words: bool = False
    begins_with_bos: bool = False
    no_bos: bool = False
    adds_separator: bool = False
    raw: bool = False
    cuts_at_spaces: bool = True
    cuts_at_digits: bool = False


_SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CAMEL_SHORT = "|".join(f"{word}{_SHORT}?" for word in _CAMEL)
_PATH_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_HAN_UPPER = rf"[{_UPPER}&&[^\p{{Han}}]]"
_HAN_LOWER = rf"[{_LOWER}&&[^\p{{Han}}]]"
_HAN_CAMEL = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_HAN_UPPER}*{_HAN_LOWER}+{_SHORT}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_HAN_UPPER}+{_HAN_LOWER}*{_SHORT}?"
)
_ASCII_MARK_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_SYMBOL_WORDS = rf"{_ASCII_MARK_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}"
_QWEN35 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT4O = rf"{_CAMEL_SHORT}|\p{{N}}{{1,3}}|{_PATH_MARKS}|{_SPACES}"
_RUNS_OF_512 = "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"\s{1,2}(?!\S)|\s{1}"

_DEFAULT = PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"), clean_spaces=True)
_LLAMA3_LIKE = PreTokenizer(patterns=(_LLAMA3,), clean_spaces=True, whole_words=True, begins_with_bos=True)
_DIGITS_THEN_GPT2 = (r"\p{N}", _GPT2)

#: (names, row). A name stands in one row only.
_ROWS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", _DEFAULT),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3_LIKE),
    ("dbrx smaug-bpe", PreTokenizer(patterns=(_LLAMA3,), clean_spaces=True)),
    ("chatglm-bpe", PreTokenizer(patterns=(_LLAMA3,), clean_spaces=True, no_bos=True)),
    ("glm4 glm5", PreTokenizer(patterns=(_LLAMA3,), clean_spaces=True, whole_words=True, no_bos=True)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2",
        PreTokenizer(patterns=(_QWEN2,), cuts_at_digits=True),
    ),
    ("megrez stablelm2", PreTokenizer(patterns=(_QWEN2,), clean_spaces=True, cuts_at_digits=True)),
    ("qwen35", PreTokenizer(patterns=(_QWEN35,), cuts_at_digits=True)),
    (
        "gpt-2 phi-2 mpt olmo jais jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4",
        PreTokenizer(patterns=(_GPT2,), clean_spaces=True),
    ),
    ("jina-v1-en jina-v2-code roberta-bpe", PreTokenizer(patterns=(_GPT2,), clean_spaces=True, adds_separator=True)),
    ("trillion granite-docling", PreTokenizer(patterns=(_GPT2,))),
    (
        "starcoder refact codeshell exaone minerva-7b mellum2",
        PreTokenizer(patterns=_DIGITS_THEN_GPT2, clean_spaces=True, cuts_at_digits=True),
    ),
    ("smollm command-r", PreTokenizer(patterns=_DIGITS_THEN_GPT2, cuts_at_digits=True)),
    ("falcon", PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"), clean_spaces=True)),
    (
        "deepseek-llm",
        PreTokenizer(patterns=(r"[\r\n]", CASED_WORD, WIDE_PUNCTUATION, r"\s+$", CJK_AND_HANGUL, r"\p{N}+")),
    ),
    (
        "deepseek-coder",
        PreTokenizer(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_AND_HANGUL, r"\p{N}"), cuts_at_digits=True),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer(
            patterns=(
                r"\p{N}{1,3}",
                HAN_AND_KANA,
                rf"{_SYMBOL_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
            )
        ),
    ),
    (
        "tekken",
        PreTokenizer(
            patterns=(rf"{'|'.join(_CAMEL)}|\p{{N}}|{_PATH_MARKS}|{_SPACES}",),
            whole_words=True,
            begins_with_bos=True,
            cuts_at_digits=True,
        ),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer(patterns=(_GPT4O,))),
    ("granite-embed-multi-97m", PreTokenizer(patterns=(_GPT4O,), whole_words=True)),
    ("kimi-k2", PreTokenizer(patterns=(rf"\p{{Han}}+|{_HAN_CAMEL}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}",))),
    (
        "gemma4 granite-embed-multi-311m mmbert",
        PreTokenizer(patterns=(r"[^\n]+|[\n]+",), clean_spaces=True, raw=True, cuts_at_spaces=False),
    ),
    ("sarvam-moe", PreTokenizer(patterns=(r"[^\n]+|[\n]+",), raw=True, cuts_at_spaces=False)),
    ("laguna", PreTokenizer(patterns=(r"[^\n]+|[\n]+", _QWEN2), cuts_at_digits=True)),
    (
        "tiny_aya cohere2moe",
        PreTokenizer(patterns=(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    ),
    ("bloom gpt3-finnish", PreTokenizer(patterns=(SENTENCE_MARKS,), clean_spaces=True)),
    ("poro-chat", PreTokenizer(patterns=(SENTENCE_MARKS,))),
    ("viking", PreTokenizer(patterns=(SENTENCE_MARKS, r"\p{N}"))),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            patterns=(rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_MARKS}|\s*[\r\n]|\s+(?!\S)|\s+",),
            cuts_at_digits=True,
        ),
    ),
    (
        "seed-coder",
        PreTokenizer(
            patterns=(rf"{_SHORT}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",), cuts_at_digits=True
        ),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            patterns=(
                rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            ),
            clean_spaces=True,
            cuts_at_spaces=False,
        ),
    ),
    (
        "minicpm5",
        PreTokenizer(
            patterns=(r"\p{N}{1,3}", rf"{_SHORT}|{_WORD}|\p{{N}}+|{_MARKS}|{_SPACES}"),
            clean_spaces=True,
            whole_words=True,
        ),
    ),
    ("superbpe", PreTokenizer(patterns=(r"\p{N}+", r"(?=(\d{3})+(?!\d))"), cuts_at_spaces=False)),
    (
        "youtu",
        PreTokenizer(
            patterns=(YOUTU_SCRIPTS, rf"{_CAMEL_SHORT}|\p{{N}}|{_PATH_MARKS}|{_SPACES}"),
            whole_words=True,
            cuts_at_digits=True,
        ),
    ),
    (
        "jais-2",
        PreTokenizer(
            patterns=(rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]+|{_RUNS_OF_512}",), clean_spaces=True
        ),
    ),
    (
        "spark2_5",
        PreTokenizer(
            patterns=(
                r"\p{N}{1,3}",
                HAN_AND_KANA,
                rf"{_SYMBOL_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
                r"\p{N}",
            )
        ),
    ),
    ("ufakzeka", PreTokenizer(patterns=(rf"{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}",), cuts_at_digits=True)),
    (
        "chameleon",
        PreTokenizer(
            patterns=(
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            begins_with_bos=True,
        ),
    ),
    (
        "afmoe",
        PreTokenizer(
            patterns=(
                r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
                UNSPACED_SCRIPTS,
                rf"{_SYMBOL_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
            )
        ),
    ),
)


def _by_name() -> Iterator[tuple[str, PreTokenizer]]:
    for names, row in _ROWS:
        for name in names.split():
            yield name, row


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = dict(_by_name())


def pre_tokenizer(name: str) -> PreTokenizer:
    """The row of that name. Raises UnsupportedModel, since a wrong guess would quietly make a model worse."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModel(f"pre-tokenizer {name!r} is not known; known are {known}") from None
