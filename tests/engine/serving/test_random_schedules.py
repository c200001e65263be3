"""Random mixes of requests, aborts, losses and limits: every row must see its own sequence's KV and nothing else."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.engine.serving.types import BLOCK_CELLS, Budget, SchedulerConfig
from app.errors import QueueFull

from .fake_device import Driver

#: A few long texts to cut prompts from, so that prefixes are often shared, also within blocks.
TEXTS = [tuple((i * i * seed + i // 7) % 5 for i in range(400)) for seed in (1, 1, 2, 3)]

limits = st.one_of(st.none(), st.integers(1, 100))


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    n_blocks = draw(st.one_of(st.integers(2, 8), st.integers(8, 40)))
    most = min(n_blocks * BLOCK_CELLS, 450)
    recurrent = draw(st.booleans())
    return SchedulerConfig(
        n_slots=draw(st.integers(1, 6)),
        n_blocks=n_blocks,
        n_ctx=draw(st.one_of(st.just(most), st.integers(2, most))),
        n_ubatch=draw(st.sampled_from([1, 3, 17, 64, 100, 512])),
        max_queue=draw(st.integers(0, 8)),
        max_outputs=draw(st.sampled_from([0, 1, 4])),
        equal_lengths=draw(st.booleans()),
        recurrent=recurrent,
        snapshot_bytes=10,
        snapshot_budget_bytes=draw(st.integers(0, 60)) if recurrent else 0,
        snapshot_interval_tokens=100,
        snapshot_spacing_tokens=10,
        hold_tokens=draw(st.sampled_from([1, 32, 10_000])),
        cache_prompts=draw(st.sampled_from([True, True, True, False])),
    )


class Serving(RuleBasedStateMachine):
    @initialize(config=configs(), n_in_flight=st.integers(1, 4), goes_ahead=st.booleans())
    def start(self, config: SchedulerConfig, n_in_flight: int, goes_ahead: bool) -> None:
        self.driver = Driver(config, stop_every=200, goes_ahead=goes_ahead)
        self.n_in_flight = n_in_flight

    @rule(
        text=st.integers(0, len(TEXTS) - 1),
        n=st.one_of(st.integers(1, 130), st.integers(1, 400)),
        own=st.lists(st.integers(0, 4), max_size=3),
        max_tokens=st.one_of(st.none(), st.integers(0, 300)),
        cache_prompt=st.sampled_from([True, True, True, False]),
        prompt_logprobs=st.sampled_from([False, False, False, True]),
        starts=st.lists(st.integers(0, 400), max_size=3),
        namespace=st.sampled_from(["", "", "adapter"]),
    )
    def ask(self, text, n, own, max_tokens, cache_prompt, prompt_logprobs, starts, namespace) -> None:
        prompt = (TEXTS[text][:n] + tuple(own))[: self.driver.config.n_ctx - 1]
        self.submit(
            prompt,
            max_tokens=max_tokens,
            cache_prompt=cache_prompt,
            prompt_logprobs=prompt_logprobs,
            message_starts=tuple(starts),
            namespace="" if self.driver.config.recurrent else namespace,
        )

    @precondition(lambda self: self.driver.asked)
    @rule(data=st.data(), own=st.lists(st.integers(0, 4), max_size=5), max_tokens=st.integers(1, 200))
    def go_on(self, data: st.DataObject, own: list[int], max_tokens: int) -> None:
        """The next turn of a conversation, whether the last one is over or not."""
        asked = self.driver.asked[data.draw(st.sampled_from(sorted(self.driver.asked)))]
        prompt = (tuple(asked.tokens) + tuple(own))[: self.driver.config.n_ctx - 1]
        self.submit(prompt, max_tokens=max_tokens, namespace=asked.namespace)

    @rule(n=st.integers(2, 6), n_shared=st.integers(0, 130), n_own=st.integers(1, 70), max_tokens=st.integers(50, 400))
    def crowd(self, n: int, n_shared: int, n_own: int, max_tokens: int) -> None:
        """Several at once, with long answers: memory runs short while they decode."""
        for i in range(n):
            prompt = TEXTS[0][:n_shared] + TEXTS[1 + i % 3][i : i + n_own]
            self.submit(prompt[: self.driver.config.n_ctx - 1], max_tokens=max_tokens)

    def submit(self, prompt: tuple[int, ...], **fields) -> None:
        driver = self.driver
        is_full = len(driver.scheduler.roster.live) >= driver.config.n_slots + driver.config.max_queue
        try:
            driver.add(prompt, **fields)
            assert not is_full
        except QueueFull as refusal:
            assert is_full and refusal.retry_after_s >= 1

    @rule(n=st.integers(1, 30), n_tokens=limits, n_prompt=limits, n_decode=limits)
    def work(self, n: int, n_tokens: int | None, n_prompt: int | None, n_decode: int | None) -> None:
        for _ in range(n):
            self.driver.step(self.n_in_flight, Budget(n_tokens=n_tokens, n_prompt=n_prompt, n_decode=n_decode))

    @rule()
    def look_ahead(self) -> None:
        """As many ubatches as there are, without a commit in between (but a bounded number)."""
        for _ in range(3):
            self.driver.schedule()

    @precondition(lambda self: 0 < len(self.driver.in_flight) < 6)
    @rule()
    def go_ahead(self) -> None:
        self.driver.go_ahead()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def commit(self) -> None:
        self.driver.commit()

    @precondition(lambda self: self.driver.scheduler.roster.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.driver.scheduler.roster.live)))
        assert self.driver.abort(request_id)
        assert not self.driver.abort(request_id)

    @precondition(lambda self: self.driver.scheduler.roster.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """At any moment, also while its token is being computed."""
        roster = self.driver.scheduler.roster
        roster.preempt(data.draw(st.sampled_from(roster.running)))

    @rule(n=st.integers(1, 10))
    def slide(self, n: int) -> None:
        pool = self.driver.cache.pool
        pool.slide(min(n, pool.n_free))

    @rule(n=st.integers(1, 5))
    def evict(self, n: int) -> None:
        for _ in range(n):
            self.driver.cache.tree.evict_one()

    @rule()
    def drain(self) -> None:
        self.driver.drain(self.n_in_flight)

    @precondition(lambda self: len(self.driver.asked) > 3)
    @rule()
    def lose_device(self) -> None:
        self.driver.lose_device()

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain(self.n_in_flight)


TestServing = Serving.TestCase
TestServing.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
