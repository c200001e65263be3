"""Makes the sampler of a request: draws a seed where none was given, and finds DRY's sequence breakers once."""

from __future__ import annotations

import secrets
from functools import cached_property, lru_cache

from app.engine.request import GenerateRequest, SamplingParams
from app.engine.serving.penalties import Breakers, find_breakers
from app.engine.serving.sampler import Sampler
from app.engine.text.tokenizer import Tokenizer

_SEED_BITS = 63
#: Sets of sequence breakers remembered; finding one scans the vocabulary.
_BREAKER_SETS = 32


class SamplerFactory:
    """One per model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab
        self._breakers = lru_cache(_BREAKER_SETS)(self._find_breakers)

    def prepare(self, params: SamplingParams) -> None:
        """Do what takes long in `make`, which then finds it done: go through the vocabulary for DRY's breakers."""
        if params.dry_multiplier:
            self._breakers(params.dry_sequence_breakers)

    def make(self, request: GenerateRequest) -> Sampler:
        """Raises InvalidParameter for parameters that only the model can tell are wrong."""
        params = request.sampling
        return Sampler(
            params,
            request.prompt,
            n_vocab=self._n_vocab,
            seed=secrets.randbits(_SEED_BITS),
            eog=self._tokenizer.eog,
            breakers=self._breakers(params.dry_sequence_breakers) if params.dry_multiplier else None,
        )

    def _find_breakers(self, breakers: tuple[str, ...]) -> Breakers:
        def encode(text: bytes) -> list[int]:
            return self._tokenizer.encode(text, add_special=False, parse_special=False)

        return find_breakers(breakers, self._pieces, encode)

    @cached_property
    def _pieces(self) -> list[bytes]:
        return [self._tokenizer.piece(token, show_special=False) for token in range(self._tokenizer.vocab_size)]
