"""More conversations than the cache holds: reuse as LRU predicts, and blocks that do not move about for ever."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from app.engine.serving.types import SchedulerConfig

from .fake_device import Driver

N_CONVERSATIONS = 200
N_HELD = 50
N_SYSTEM = 64  # tokens that all share: one block
N_OWN = 180  # with the answer: three blocks each


def lru_hits(visits: list[int], capacity: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for who in visits:
        if who in held:
            hits += 1
            held.move_to_end(who)
        else:
            held[who] = None
            if len(held) > capacity:
                held.popitem(last=False)
    return hits


def conversation(who: int) -> tuple[int, ...]:
    return tuple(range(N_SYSTEM)) + tuple(1000 + (who * 7919 + i * i) % 60_000 for i in range(N_OWN))


def visit_all(driver: Driver, visits: list[int]) -> int:
    """Serve the visits in turn; returns how many found their whole conversation (they all find the system prompt)."""
    n_whole = 0
    for i, who in enumerate(visits):
        asked = driver.add(conversation(who), max_tokens=4)
        driver.drain()
        cached = asked.ended.report.cached_tokens
        n_whole += cached == N_SYSTEM + N_OWN - 1
        assert i == 0 or cached >= N_SYSTEM
    return n_whole


def moved_per_allocated(driver: Driver) -> float:
    counters = driver.scheduler.counters()
    return counters["blocks_moved_total"] / counters["blocks_allocated_total"]


def driver() -> Driver:
    n_blocks = 1 + 3 * N_HELD
    return Driver(SchedulerConfig(n_slots=4, n_blocks=n_blocks, n_ctx=600, n_ubatch=256))


def test_cycling_through_more_than_fits_reuses_the_common_part_alone() -> None:
    d = driver()
    visits = list(range(N_CONVERSATIONS)) * 3
    assert lru_hits(visits, N_HELD) == 0
    assert visit_all(d, visits) == 0
    assert moved_per_allocated(d) < 12


@pytest.mark.parametrize("skew", [0.8, 1.2])
def test_popular_conversations_stay_as_lru_predicts(skew: float) -> None:
    d = driver()
    rng = random.Random(5)
    weights = [1 / (1 + rank) ** skew for rank in range(N_CONVERSATIONS)]
    visits = rng.choices(range(N_CONVERSATIONS), weights, k=1500)
    n_whole = visit_all(d, visits)
    # eviction frees up to an eighth of the pool at once, so a bit less than all of it holds conversations
    fewest, most = lru_hits(visits, N_HELD - N_HELD // 8 - 2), lru_hits(visits, N_HELD)
    assert fewest * 0.98 <= n_whole <= most * 1.02
    assert moved_per_allocated(d) < 12


def test_growing_conversations_side_by_side_move_few_blocks() -> None:
    """Long answers into a full cache: every few tokens someone needs a block above its last one."""
    d = Driver(SchedulerConfig(n_slots=8, n_blocks=400, n_ctx=1500, n_ubatch=256))
    rng = random.Random(6)
    talks: list[tuple[int, ...]] = [(i, *range(i, i + 100)) for i in range(80)]
    for _ in range(25):
        chosen = rng.sample(range(len(talks)), 8)
        asked = [(who, d.add(talks[who], max_tokens=rng.randint(20, 200))) for who in chosen]
        d.drain(3)
        for who, one in asked:
            grown = (*one.tokens, *(rng.randint(0, 999) for _ in range(30)))
            talks[who] = grown if len(grown) < 1200 else grown[:100]
    assert d.scheduler.counters()["blocks_allocated_total"] > 500
    assert moved_per_allocated(d) < 12
