"""From sampled tokens to the text and token records of one answer.

Text leaves as whole characters and never contains any part of a stop string; a token leaves together with the last
character it contributes to, so the records of an answer always stand for exactly its text.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.request import Delta, FinishReason, TokenInfo
from app.engine.text.detokenizer import Detokenizer
from app.engine.text.stop import StopMatcher
from app.engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _HeldToken:
    info: TokenInfo
    end: int | None  # characters of the answer up to and including this token's last one; None: not whole yet


class Answer:
    """The growing answer of one request. `push` every sampled token, in order, until it is finished."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...],
        max_tokens: int | None,
        ignore_eos: bool,
        show_special: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, show_special=show_special)
        self.stops = stop
        self._stops = StopMatcher(stop)
        self._max_tokens = max_tokens
        self._ignore_eos = ignore_eos
        self._held: list[_HeldToken] = []
        self._n_produced = 0  # characters the detokenizer has given out
        self._n_emitted = 0  # characters that left
        self.n_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None

    def push(self, info: TokenInfo) -> Delta | None:
        """Take one sampled token; what can leave now. Sets `finish_reason` when the answer is complete."""
        self.n_tokens += 1
        if info.token in self._tokenizer.eog and not self._ignore_eos:
            return self.finish(FinishReason.STOP)
        text = self._detokenizer.push_piece(info.piece)
        is_last = self._max_tokens is not None and self.n_tokens >= self._max_tokens
        if text and self._stops.is_idle and not self._held and not is_last:  # nearly every token: it leaves at once
            self._n_produced += len(text)
            self._n_emitted += len(text)
            return Delta(text=text, tokens=(info,))
        self._hold(info, text)
        result = self._stops.push(text)
        if result.matched is not None:
            self.finish_reason, self.stop_string = FinishReason.STOP, result.matched
            return self._emit(result.text)
        if is_last:
            return self.finish(FinishReason.LENGTH, before=result.text)
        return self._emit(result.text)

    def finish(self, reason: FinishReason, before: str = "") -> Delta | None:
        """End the answer: everything held back leaves, unless it completes a stop string after all."""
        self.finish_reason = reason
        rest = self._detokenizer.flush()
        self._n_produced += len(rest)
        for held in self._held:
            held.end = self._n_produced if held.end is None else held.end
        result = self._stops.push(rest)
        if result.matched is not None:
            self.finish_reason, self.stop_string = FinishReason.STOP, result.matched
            return self._emit(before + result.text)
        return self._emit(before + result.text + self._stops.flush())

    def _hold(self, info: TokenInfo, text: str) -> None:
        self._n_produced += len(text)
        is_whole = bool(text) or not info.piece
        self._held.append(_HeldToken(info, None))
        if is_whole:
            for held in self._held:
                held.end = self._n_produced if held.end is None else held.end

    def _emit(self, text: str) -> Delta | None:
        self._n_emitted += len(text)
        n_done = 0
        while n_done < len(self._held) and self._is_out(self._held[n_done]):
            n_done += 1
        tokens = tuple(held.info for held in self._held[:n_done])
        del self._held[:n_done]
        return Delta(text=text, tokens=tokens) if text or tokens else None

    def _is_out(self, held: _HeldToken) -> bool:
        return held.end is not None and held.end <= self._n_emitted
