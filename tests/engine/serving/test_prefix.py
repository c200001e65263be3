"""The prefix tree: matches by token over running and finished sequences, sharing, copying, eviction, snapshots."""

from __future__ import annotations

import pytest

from app.engine.serving.kv import BlockPool
from app.engine.serving.prefix import PrefixTree
from app.engine.serving.snapshots import SnapshotStore
from app.engine.serving.types import SchedulerConfig
from app.errors import InternalError

from .fake_device import Driver


def driver(**fields) -> Driver:
    return Driver(SchedulerConfig(**{"n_slots": 4, "n_blocks": 64, "n_ctx": 2000, "n_ubatch": 512, **fields}))


def text(n: int, seed: int = 1) -> tuple[int, ...]:
    return tuple((i * i * 7 + (i + 1) * seed + i // 3 * seed) % 1000 for i in range(n))


def ask(d: Driver, prompt: tuple[int, ...], n: int = 3, **fields):
    asked = d.add(prompt, max_tokens=n, **fields)
    d.drain()
    return asked


def cached(asked) -> int:
    return asked.ended.report.cached_tokens


def test_the_same_prompt_again_computes_one_row() -> None:
    d = driver()
    for n in (1, 2, 63, 64, 65, 128, 130, 500):
        prompt = text(n, seed=n)
        ask(d, prompt)
        assert cached(ask(d, prompt)) == n - 1


def test_matches_are_by_token_not_by_block() -> None:
    d = driver()
    first = ask(d, text(300))
    for n in (1, 10, 63, 64, 65, 200, 299):
        assert cached(ask(d, text(n) + (5000 + n, 6000, 7000))) == n
    assert cached(ask(d, (*first.tokens, 1, 2, 3))) == len(first.tokens) - 1  # the last one drawn was never computed


def test_the_longest_of_many_siblings_is_found() -> None:
    d = driver(n_blocks=200)
    for i in range(40):
        ask(d, text(70) + (2000 + i,) * (i % 7) + text(20, seed=i + 2), 1)
    for i in range(40):
        assert cached(ask(d, text(70) + (2000 + i,) * (i % 7) + text(20, seed=i + 2) + (9, 9), 1)) >= 70 + i % 7 + 19


def test_the_next_turn_appends_in_place_and_a_fork_copies() -> None:
    d = driver()
    first = ask(d, text(100))
    d.add((*first.tokens, 7, 7, 7), max_tokens=1)
    assert d.schedule().copies == ()
    d.drain()
    d.add((*first.tokens[:90], 8), max_tokens=1)
    (copy,) = d.schedule().copies
    assert copy.n_cells == 90 - 64
    d.drain()


def test_whole_blocks_are_shared_not_copied() -> None:
    d = driver()
    d.add(text(640), max_tokens=100)
    d.step()
    d.step()
    for i in range(3):
        d.add(text(640) + (5000 + i,), max_tokens=100)
    ubatch = d.schedule()
    assert ubatch.copies == () and ubatch.n_tokens == 4
    # 10 shared blocks, and one of its own for each of the four
    assert d.cache.pool.n_used == 10 + 4
    d.scheduler.check_integrity()
    d.drain()


@pytest.mark.parametrize("n", [64, 350, 384, 395, 400])
def test_a_second_request_joins_one_that_is_still_computing_its_prompt(n: int) -> None:
    d = driver(n_ubatch=100, hold_tokens=10_000)
    d.add(text(1000), max_tokens=1)
    for _ in range(4):
        d.schedule()  # nothing is committed: what is submitted counts
    b = d.add(text(n) + (5000,), max_tokens=1)
    d.drain()
    assert cached(b) == n


def test_what_is_not_submitted_yet_cannot_be_joined() -> None:
    d = driver(n_ubatch=100, hold_tokens=10_000)
    d.add(text(1000), max_tokens=1)
    d.schedule()
    b = d.add(text(600), max_tokens=1)
    d.drain()
    assert cached(b) == 100


def test_a_request_waits_for_the_one_that_computes_its_prefix_anyway() -> None:
    d = driver(n_ubatch=100, hold_tokens=1)
    a = d.add(text(1000), max_tokens=1)
    twins = [d.add(text(380) + (5000 + i,), max_tokens=1) for i in range(3)]
    other = d.add(text(30, seed=9), max_tokens=1)
    d.drain()
    assert d.n_rows == 1000 + 3 * 1 + 30
    assert [cached(t) for t in twins] == [380] * 3 and cached(a) == cached(other) == 0


def test_who_waits_for_a_prefix_goes_ahead_when_its_maker_is_gone() -> None:
    d = driver(n_ubatch=100)
    d.add(text(900), max_tokens=1)
    b = d.add(text(900) + (1,), max_tokens=1)
    d.step()
    d.abort("r0")
    d.drain()
    assert cached(b) == 100


def test_namespaces_share_nothing() -> None:
    d = driver()
    ask(d, text(200))
    assert cached(ask(d, text(200), namespace="adapter")) == 0
    assert cached(ask(d, text(200), namespace="adapter")) == 199


def test_without_cache_prompt_nothing_is_read_or_written() -> None:
    d = driver()
    ask(d, text(200), cache_prompt=False)
    assert d.cache.pool.n_used == 0
    ask(d, text(200))
    n_used = d.cache.pool.n_used
    assert cached(ask(d, text(200), cache_prompt=False)) == 0
    assert d.cache.pool.n_used == n_used


def test_the_server_wide_switch_does_the_same() -> None:
    d = driver(cache_prompts=False)
    ask(d, text(200))
    assert cached(ask(d, text(200))) == 0 and d.cache.pool.n_used == 0


def test_a_cache_full_of_old_prompts_forgets_the_least_recently_used() -> None:
    d = driver(n_blocks=20, n_ctx=300, n_slots=1)
    prompts = [text(250, seed=s) for s in range(3, 7)]  # 4 blocks each, with their answers
    for prompt in prompts:
        ask(d, prompt)
    assert cached(ask(d, prompts[0])) == 249  # and now it is the newest
    ask(d, text(250, seed=50))
    ask(d, text(250, seed=51))
    assert cached(ask(d, prompts[0])) == 249
    assert cached(ask(d, prompts[1])) < 249


def test_what_a_running_request_shares_is_not_evicted() -> None:
    d = driver(n_blocks=20, n_ctx=600, n_slots=2)
    ask(d, text(250))
    d.add(text(250) + (5000,), max_tokens=300)
    for seed in range(10, 20):
        d.step()
        d.add(text(200, seed=seed), max_tokens=2)
        for _ in range(6):
            d.step()
        d.scheduler.check_integrity()
    d.drain()


def test_a_longer_answer_to_the_same_prompt_takes_the_place_of_the_shorter() -> None:
    d = driver()
    for n in (3, 40, 10):
        ask(d, text(10), n)
    assert d.cache.pool.n_used == 1
    (leaf,) = d.cache.tree.nodes()
    assert len(leaf.tokens) == 10 + 40 - 1


def test_two_that_compute_the_same_at_the_same_time_keep_one_copy() -> None:
    d = driver(hold_tokens=10_000)
    for _ in range(2):
        d.add(text(63), max_tokens=300)
    while len(d.asked["r0"].answer) < 10:
        ubatch = d.step()
    assert ubatch.sequences[0].blocks[0] == ubatch.sequences[1].blocks[0]
    d.drain()
    answers = {a.answer for a in d.asked.values()}
    assert len(answers) == 1
    n = 63 + len(answers.pop()) - 1
    assert d.cache.pool.n_used == -(-n // 64)


def test_two_prompts_computed_in_one_ubatch_keep_one_copy() -> None:
    d = driver(hold_tokens=10_000)
    for _ in range(2):
        d.add(text(150), max_tokens=4)
    assert d.step().n_tokens == 300
    a, b = (s.blocks.tolist() for s in d.step().sequences)
    assert a[:2] == b[:2] and a[2] != b[2]
    d.drain()


def test_a_copy_that_does_not_lie_in_order_is_not_exchanged() -> None:
    """The tree has the first block from above the second block of someone who computed both himself."""
    pool = BlockPool(4)
    tree = PrefixTree(pool, SnapshotStore(0))
    low = [pool.allocate(None)]
    low.append(pool.allocate(low[0]))
    high = [pool.allocate(low[1])]
    tokens = list(range(128))
    first, second = (tree.attach(tree.lookup("", tokens, 0).end, (), None) for _ in range(2))
    assert tree.advance(first, tokens, 64, high)
    assert not tree.advance(second, tokens, 128, low)
    assert not second.is_attached
    assert [b.index for b in low] == [0, 1] and [b.index for b in high] == [2]
    for tail, blocks in ((first, high), (second, low)):
        node = tree.finish(tail)
        for block in blocks:
            pool.drop(block)
        tree.released(node)
    tree.check_integrity()
    pool.check_integrity()
    assert pool.n_used == pool.n_evictable == 1


def test_the_eviction_queue_does_not_grow_while_nothing_is_evicted() -> None:
    d = driver()
    tokens = list(text(10))
    for _ in range(600):
        asked = ask(d, tuple(tokens), 1)
        tokens = asked.tokens
    assert len(d.cache.tree._queue) < 200


def test_a_broken_tree_is_found() -> None:
    d = driver()
    ask(d, text(200))
    node = next(n for n in d.cache.tree.nodes() if n.depth == 128)
    node.block.index, node.parent.block.index = node.parent.block.index, node.block.index
    with pytest.raises(InternalError):
        d.scheduler.check_integrity()


# --- models whose state cannot rewind ---


def recurrent(**fields) -> Driver:
    config = {"recurrent": True, "equal_lengths": True, "snapshot_bytes": 10, "snapshot_budget_bytes": 1000}
    return driver(**{**config, "snapshot_spacing_tokens": 1, **fields})


def test_a_recurrent_model_resumes_at_snapshots_only() -> None:
    d = recurrent()
    first = ask(d, text(500), message_starts=(100, 200, 480))
    assert cached(ask(d, text(500))) == 499  # the prompt's end minus one
    assert cached(ask(d, text(300) + (5000,))) == 200
    assert cached(ask(d, text(199) + (5000,))) == 100
    assert cached(ask(d, text(90) + (5000,))) == 0
    assert cached(ask(d, (*first.tokens, 1, 2, 3))) == len(first.tokens) - 1  # where the answer ended


def test_an_edit_of_an_earlier_turn_resumes_at_its_start_across_blocks() -> None:
    d = recurrent()
    starts = (64, 128, 192, 250)
    ask(d, text(260), message_starts=starts)
    for start in starts:
        edited = text(start) + tuple(5000 + i for i in range(40))
        assert cached(ask(d, edited, message_starts=starts)) == start


def test_long_prompts_are_cut_at_the_interval() -> None:
    d = recurrent(snapshot_interval_tokens=150)
    ask(d, text(500))
    assert cached(ask(d, text(320) + (5000,))) == 300


def test_the_kv_that_is_there_is_not_written_again() -> None:
    d = recurrent()
    ask(d, text(500), message_starts=(100,))
    n_used = d.cache.pool.n_used
    asked = d.add(text(400) + (5000,), max_tokens=1)
    ubatch = d.schedule()
    assert ubatch.cells.tolist()[:300] == [d.config.scratch_cell] * 300
    d.drain()
    assert cached(asked) == 100
    assert d.cache.pool.n_used == n_used + 1


def test_snapshots_keep_to_their_budget_least_recently_used_first() -> None:
    d = recurrent(snapshot_budget_bytes=45)
    for seed in range(1, 6):
        ask(d, text(100, seed=seed), 1)
        assert len(d.cache.snapshots) <= 4
    assert cached(ask(d, text(100, seed=5), 1)) == 99
    assert cached(ask(d, text(100, seed=1), 1)) == 0


def test_a_snapshot_that_is_used_stays() -> None:
    d = recurrent(snapshot_budget_bytes=60)
    for seed in (1, 2, 3, 1, 4):  # two each: the prompt's end minus one, and the answer's end
        ask(d, text(100, seed=seed), 1)
    assert cached(ask(d, text(100, seed=1), 1)) == 99
    assert cached(ask(d, text(100, seed=2), 1)) == 0


def test_snapshots_go_with_the_kv_they_need() -> None:
    d = recurrent(n_blocks=10, n_ctx=300, n_slots=1)
    for seed in range(1, 12):
        ask(d, text(250, seed=seed), message_starts=(100, 200))
    n_nodes = sum(1 for _ in d.cache.tree.nodes())
    assert len(d.cache.snapshots) <= 2 * n_nodes
    d.scheduler.check_integrity()


def test_a_snapshot_is_passed_over_when_its_kv_finds_no_room() -> None:
    d = recurrent(n_blocks=3, n_ctx=190, n_slots=1)
    ask(d, text(150), message_starts=(100, 133))
    fork = ask(d, text(138) + (5000,) * 20, message_starts=(133,))
    assert cached(fork) == 100


def test_no_budget_means_no_reuse_and_right_answers() -> None:
    d = recurrent(snapshot_budget_bytes=0)
    ask(d, text(200))
    assert cached(ask(d, text(200))) == 0


def test_nobody_waits_for_a_prefix_without_a_snapshot() -> None:
    d = recurrent(n_ubatch=64)
    d.add(text(1000), max_tokens=1)
    d.add(text(300) + (5000,) * 20, max_tokens=1)
    assert [s.request_id for s in d.schedule().sequences] == ["r1"]
    d.drain()


def test_twins_of_a_recurrent_model_wait_for_the_snapshot() -> None:
    d = recurrent(n_ubatch=64)
    for i in range(3):
        d.add(text(300) + (5000 + i,) * 20, max_tokens=1, message_starts=(256,))
    d.drain()
    assert [a.ended.report.cached_tokens for a in d.asked.values()] == [0, 256, 256]
