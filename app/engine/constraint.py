"""Holds an answer to its constraint: what may come next, and when it is whole.

Masks are made on a thread of their own as soon as a token is known, while devices compute the next logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from app.engine.grammar import Grammars, Matcher
from app.engine.request import GenerateRequest, Thought
from app.engine.text.tokenizer import Tokenizer

Mask = NDArray[np.uint8]


class Constrainer:
    """Makes the constraints of requests. One per engine; `close` ends its thread."""

    def __init__(self, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def make(self, request: GenerateRequest) -> AnswerConstraint | None:
        """None when the request has none. Raises InvalidParameter for what cannot be compiled."""
        if request.constraint is None:
            return None
        return AnswerConstraint(
            self._grammars.matcher(request.constraint),
            None if request.thought is None else ThoughtGate(request.thought, self._tokenizer),
            self._pool,
        )

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class ThoughtGate:
    """Lets a thought pass freely, but not the end of the answer within it."""

    def __init__(self, thought: Thought, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._closing = thought.closing.encode()
        opening = tokenizer.encode(thought.opening.strip(), add_special=False, parse_special=True)
        #: A thought the model may begin by itself, where its tag is one token that nothing else begins with.
        self.opening = opening[0] if len(opening) == 1 else None
        self.is_open = thought.is_open
        self.may_open = not thought.is_open and self.opening is not None
        self._tail = b""
        self.inside = _bits(tokenizer.vocab_size, tokenizer.eog)

    def push(self, token: int) -> None:
        """Go on by a token of the thought."""
        seen = self._tail + self._tokenizer.piece(token, show_special=True)
        self.is_open = self._closing not in seen
        self._tail = seen[-len(self._closing) :]


class AnswerConstraint:
    """One answer's constraint. The matcher belongs to the pool from `push` until the mask is there."""

    def __init__(self, matcher: Matcher, gate: ThoughtGate | None, pool: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._gate = gate
        self._pool = pool
        self._next: Future[Mask] = pool.submit(matcher.mask)

    def allowed(self) -> Mask:
        """The tokens that may come next, as the sampler takes them."""
        gate = self._gate
        if gate is not None and gate.is_open:
            return gate.inside
        mask = self._next.result()
        if gate is not None and gate.may_open and gate.opening is not None:
            mask = mask.copy()
            mask[gate.opening >> 3] |= np.uint8(1 << (gate.opening & 7))
        return mask

    def push(self, token: int) -> bool:
        """Go on by an allowed token that ends nothing; whether the answer is whole by now."""
        gate = self._gate
        if gate is not None:
            if gate.is_open:
                gate.push(token)
                return False
            begins, gate.may_open = gate.may_open and token == gate.opening, False
            if begins:
                gate.is_open = True
                return False
        self._next.result()  # the matcher is ours again
        if self._matcher.push(token):
            return True
        self._next = self._pool.submit(self._matcher.mask)
        return False


def _bits(n_vocab: int, without: Iterable[int]) -> Mask:
    """All tokens of the vocabulary but these."""
    allowed = np.ones(n_vocab, dtype=np.bool_)
    allowed[list(without)] = False
    return np.packbits(allowed, bitorder="little")
