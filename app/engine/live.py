"""One request while the engine works on it: its stream, sampler, growing answer, and times."""

from __future__ import annotations

from app.engine.answer import Answer
from app.engine.constraint import AnswerConstraint
from app.engine.request import (
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Progress,
    Started,
    Timings,
    TokenInfo,
    TokenLogprob,
)
from app.engine.rows import WHOLE, Row, RowWish
from app.engine.serving.sampler import Sampler, score
from app.engine.serving.types import Ended, Report
from app.engine.stream import EventStream
from app.engine.text.tokenizer import Tokenizer

_MS = 1000.0


class LiveRequest:
    """Owned by the engine's thread once submitted. Times are seconds of the engine's clock."""

    def __init__(
        self,
        request: GenerateRequest,
        stream: EventStream,
        sampler: Sampler,
        tokenizer: Tokenizer,
        submitted_s: float,
        constraint: AnswerConstraint | None = None,
    ) -> None:
        self.request = request
        self.stream = stream
        self.submitted_s = submitted_s
        self.deadline_s = None if request.deadline_s is None else submitted_s + request.deadline_s
        self.answer = Answer(
            tokenizer,
            stop=request.stop,
            max_tokens=request.max_tokens,
            ignore_eos=request.sampling.ignore_eos,
            show_special=request.show_special,
        )
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._constraint = constraint
        self._started_s = submitted_s
        self._first_token_s: float | None = None
        self._prompt_logprobs: list[TokenInfo] = []

    def start(self, report: Report, now_s: float) -> Started:
        """The request has a slot."""
        self._started_s = now_s
        return Started(prompt_tokens=report.prompt_tokens, cached_tokens=report.cached_tokens)

    def progress(self, report: Report, processed_tokens: int, now_s: float) -> Progress:
        return Progress(
            prompt_tokens=report.prompt_tokens,
            cached_tokens=report.cached_tokens,
            processed_tokens=processed_tokens,
            elapsed_ms=(now_s - self._started_s) * _MS,
        )

    def wish(self, n_ahead: int = 0) -> RowWish:
        """How much of the row is needed that the next token is drawn from, or the one `n_ahead` tokens later."""
        return WHOLE if self._constraint is not None else self._sampler.wish(n_ahead)

    def draw(self, row: Row, position: int, now_s: float) -> tuple[int, Delta | None]:
        """Choose the next token; what of the answer can leave now."""
        if self._first_token_s is None:
            self._first_token_s = now_s
        sampled = self._sampler.sample(row, position, None if self._constraint is None else self._constraint.allowed())
        delta = self.answer.push(self._info(sampled.token, sampled.logprob, sampled.top))
        if self._constraint is not None and self.answer.finish_reason is not FinishReason.STOP:
            delta = self._constrain(self._constraint, sampled.token, delta)
        return sampled.token, delta

    def _constrain(self, constraint: AnswerConstraint, token: int, delta: Delta | None) -> Delta | None:
        """End the answer with the token that completes it; one that max_tokens ends there is whole all the same."""
        if not constraint.push(token):
            return delta
        if self.answer.finish_reason is FinishReason.LENGTH:
            self.answer.finish_reason = FinishReason.STOP
            return delta
        rest = self.answer.finish(FinishReason.STOP)
        if delta is None or rest is None:
            return delta or rest
        return Delta(text=delta.text + rest.text, tokens=delta.tokens + rest.tokens)

    def add_prompt_logprob(self, row: Row, target: int) -> None:
        """Note how likely a prompt token was under a whole row; called in prompt order."""
        if not self._prompt_logprobs:
            self._prompt_logprobs.append(self._info(self.request.prompt[0], None, ()))
        scored = score(row, target, self.request.sampling.n_logprobs or 0)
        self._prompt_logprobs.append(self._info(target, scored.logprob, scored.top))

    def _info(self, token: int, logprob: float | None, top: tuple[TokenLogprob, ...]) -> TokenInfo:
        piece = self._tokenizer.piece(token, show_special=self.request.show_special)
        return TokenInfo(token=token, piece=piece, logprob=logprob, top=top)

    def finish(self, ended: Ended, now_s: float) -> list[Event]:
        """The last events: held-back text, if the answer ended without a stop, and the ending itself."""
        events: list[Event] = []
        if self.answer.finish_reason is None:
            rest = self.answer.finish(ended.reason)
            if rest is not None and ended.reason is not FinishReason.ABORT:
                events.append(rest)
        events.append(
            Finished(
                reason=self.answer.finish_reason or ended.reason,
                stop_string=self.answer.stop_string,
                prompt_tokens=ended.report.prompt_tokens,
                cached_tokens=ended.report.cached_tokens,
                completion_tokens=self.answer.n_tokens,
                timings=self._timings(ended.report, now_s),
                prompt_logprobs=tuple(self._prompt_logprobs),
            )
        )
        return events

    def _timings(self, report: Report, now_s: float) -> Timings:
        first_token_s = self._first_token_s if self._first_token_s is not None else now_s
        return Timings(
            cache_n=report.cached_tokens,
            prompt_n=report.prompt_tokens - report.cached_tokens,
            prompt_ms=(first_token_s - self._started_s) * _MS,
            predicted_n=self.answer.n_tokens,
            predicted_ms=(now_s - first_token_s) * _MS,
            queued_ms=(self._started_s - self.submitted_s) * _MS,
        )
