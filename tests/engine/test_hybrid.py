"""Models with recurrent state through the engine: whatever is reused, answers are those of a cold run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.request import Started
from app.engine.serving.types import StateAction, StateOp
from tests.fakes.architectures import write_model
from tests.fakes.serving import request
from tests.fakes.splits import SPLITS
from tests.fakes.stack import Stack, values_of
from tests.fakes.talker import Reply, Talker, assert_same, talker
from tests.support import goldens_dir

GOLDENS = ("qwen35-Q4_K_M", "qwen35moe-Q4_K_M", "qwen35-mtp-Q5_K_M")
N_ANSWER = 4


def text(n: int, seed: int) -> list[int]:
    """Tokens that every tiny vocabulary has."""
    drawn: list[int] = np.random.default_rng(seed).integers(33, 200, n).tolist()
    return drawn


@dataclass(frozen=True)
class Chat:
    """The first prompt of a conversation, where its messages begin, and what a second turn adds to it."""

    system: list[int]
    user: list[int]
    opening: list[int]
    turn: list[int]

    @classmethod
    def make(cls, seed: int) -> Chat:
        return cls(*(text(n, 100 * seed + i) for i, n in enumerate((130, 30, 4, 20))))

    @property
    def prompt(self) -> list[int]:
        return [*self.system, *self.user, *self.opening]

    @property
    def starts(self) -> tuple[int, int]:
        """Where the question begins, and the answer."""
        return len(self.system), len(self.system) + len(self.user)

    def second(self, answer: Sequence[int]) -> list[int]:
        return [*self.prompt, *answer, *self.turn, *self.opening]

    def end_of(self, answer: Sequence[int]) -> int:
        """What has been read when an answer is over: all but the token that was drawn last."""
        return len(self.prompt) + len(answer) - 1


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3next with 4 layers, every second of them recurrent."""
    return write_model(tmp_path_factory.mktemp("hybrid") / "next.gguf", "qwen3next")


@pytest.fixture(scope="module", params=["own", *GOLDENS])
def model(request: pytest.FixtureRequest, own: Path) -> Path:
    return own if request.param == "own" else goldens_dir() / "models" / f"{request.param}.gguf"


@pytest.fixture(scope="module")
def warm(model: Path) -> Iterator[Talker]:
    with talker(model) as talking:
        yield talking


@pytest.fixture(scope="module")
def one(own: Path) -> Iterator[Talker]:
    with talker(own) as talking:
        yield talking


def cold(talking: Talker, prompt: list[int], n: int = N_ANSWER) -> Reply:
    """The answer without anything reused or kept."""
    reply = talking.ask(prompt, n, cache_prompt=False)
    assert reply.cached == 0
    return reply


def check(talking: Talker, prompt: list[int], cached: int, starts: tuple[int, ...] = ()) -> Reply:
    """Ask; that much of the prompt was reused, exactly the rest was computed, and the answer is that of a cold run."""
    reply = talking.ask(prompt, N_ANSWER, message_starts=starts)
    assert (reply.cached, reply.prompt_rows) == (cached, len(prompt) - cached)
    assert_same(reply, cold(talking, prompt))
    return reply


# --- chats, on every model ---


def test_a_second_turn_reads_only_what_follows_the_answer(warm: Talker) -> None:
    chat = Chat.make(1)
    first = check(warm, chat.prompt, 0, chat.starts)
    prompt = chat.second(first.tokens)
    second = check(warm, prompt, chat.end_of(first.tokens))
    for _ in range(3):  # the answer again
        again = warm.ask(prompt, N_ANSWER)
        assert (again.cached, again.prompt_rows) == (len(prompt) - 1, 1)
        assert_same(again, second)


def test_an_earlier_answer_written_differently_is_met_before_it(warm: Talker) -> None:
    """Templates drop the thoughts of earlier turns: what was read before the answer's start is still good."""
    chat = Chat.make(2)
    warm.ask([*chat.prompt, *text(6, 9)], message_starts=chat.starts)
    check(warm, chat.second(text(12, 10)), chat.starts[1])


def test_edits_prefixes_and_other_questions(warm: Talker) -> None:
    chat = Chat.make(3)
    warm.ask(chat.prompt, message_starts=chat.starts)
    check(warm, [*chat.system, *text(50, 11), *chat.opening], chat.starts[0])  # other words, the same instructions
    check(warm, chat.prompt[: chat.starts[1] + 1], chat.starts[1])  # a strict prefix
    check(warm, [*text(5, 12), *chat.prompt[:60]], 0)  # nothing in common


# --- everything else, on a small one ---


def test_where_no_state_was_kept_nothing_is_reused(one: Talker) -> None:
    chat = Chat.make(4)
    one.ask(chat.prompt, message_starts=chat.starts)
    check(one, chat.prompt[:-2], chat.starts[1])
    check(one, chat.prompt[:-20], chat.starts[0])
    check(one, [*chat.prompt[:141], *text(20, 13)], chat.starts[0])
    check(one, chat.prompt[:100], 0)


@pytest.mark.parametrize("split", SPLITS)
def test_a_chat_over_any_devices_is_the_same(own: Path, one: Talker, split: str) -> None:
    chat = Chat.make(5)
    with talker(own, SPLITS[split]) as talking:
        stages = talking.engine._standing.executor.stages
        assert sum(stage.state_bytes() > 0 for stage in stages) == min(2, len(stages))
        first = talking.ask(chat.prompt, N_ANSWER, message_starts=chat.starts)
        assert_same(first, cold(one, chat.prompt))
        for prompt, cached in (
            (chat.second(first.tokens), chat.end_of(first.tokens)),
            ([*chat.system, *text(20, 14)], chat.starts[0]),
        ):
            reply = talking.ask(prompt, N_ANSWER)
            assert (reply.cached, reply.prompt_rows) == (cached, len(prompt) - cached)
            assert_same(reply, cold(one, prompt))


def test_four_turns_and_then_the_second_is_edited(one: Talker) -> None:
    """Every turn goes on where the last answer ended, and so does the edit: all but the last token of it was read."""
    questions = [text(140, 80 + i) for i in range(4)]
    opening = text(4, 84)
    prompt: list[int] = []
    starts: list[int] = []
    cached = 0
    for question in questions:
        starts += [len(prompt), len(prompt) + len(question)]
        prompt = [*prompt, *question, *opening]
        reply = check(one, prompt, cached, tuple(starts))
        cached = len(prompt) + len(reply.tokens) - 1
        prompt = [*prompt, *reply.tokens]
    second = starts[2]
    edited = [*prompt[:second], *text(50, 85), *opening]
    check(one, edited, second - 1, (*starts[:3], second + 50))


def test_two_conversations_that_share_most_take_turns(own: Path) -> None:
    shared = text(160, 14)
    with talker(own, n_slots=2) as talking:
        asked = {name: [*shared, *text(40, seed)] for name, seed in (("a", 15), ("b", 16))}
        starts: dict[str, tuple[int, ...]] = {"a": (160,), "b": (160,)}
        seen = {"a": 0, "b": 160}
        for _ in range(3):
            for name in asked:
                reply = check(talking, asked[name], seen[name], starts[name])
                seen[name] = len(asked[name]) + N_ANSWER - 1
                asked[name] = [*asked[name], *reply.tokens, *text(25, 17)]


def test_requests_side_by_side_do_not_mix(own: Path, one: Talker) -> None:
    prompts = [text(20 + 37 * i, 20 + i) for i in range(5)]
    with talker(own, n_slots=3) as talking:
        replies = talking.run(talking.all(*((prompt, 10, {}) for prompt in prompts)))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert_same(reply, cold(one, prompt, 10))


def test_a_prompt_cut_off_while_it_is_read_is_good_as_far_as_it_came(own: Path, one: Talker) -> None:
    prompt = text(700, 30)
    with talker(own, n_ubatch=32, ctx_size=2048) as talking:

        async def cut_off() -> None:
            stream = talking.engine.submit(request("cut", prompt, 4, message_starts=(300,)))
            async for event in stream:
                if isinstance(event, Started):
                    stream.abort()

        talking.run(cut_off())
        for resent in (prompt[:350], prompt):
            reply = talking.ask(resent, N_ANSWER)
            assert reply.cached + reply.prompt_rows == len(resent)
            assert_same(reply, cold(one, resent))


def test_preempted_requests_answer_the_same(own: Path, one: Talker) -> None:
    prompts = [text(120, 40 + i) for i in range(3)]
    with talker(own, n_slots=3, ctx_size=512, snapshot_budget_bytes=1 << 20) as talking:
        replies = talking.run(talking.all(*((prompt, 80, {}) for prompt in prompts)))
        assert talking.engine.counters()["preemptions_total"] > 0
    for prompt, reply in zip(prompts, replies, strict=True):
        assert_same(reply, cold(one, prompt, 80))


def test_without_a_budget_nothing_is_reused_and_answers_are_right(own: Path, one: Talker) -> None:
    with talker(own, snapshot_budget_bytes=0) as talking:
        assert talking.engine._standing.executor.stages[0].state_bytes() > 0
        chat = Chat.make(6)
        for _ in range(2):
            reply = talking.ask(chat.prompt, N_ANSWER, message_starts=chat.starts)
            assert reply.cached == 0
            assert_same(reply, cold(one, chat.prompt))


def test_snapshots_give_way_to_newer_ones(own: Path, one: Talker) -> None:
    row = one.engine._config.snapshot_bytes
    with talker(own, snapshot_budget_bytes=3 * row + row // 2) as talking:
        assert talking.engine._config.n_snapshots == 3
        for seed in range(50, 56):
            prompt = text(90, seed)
            assert_same(talking.ask(prompt, 6, message_starts=(40,)), cold(one, prompt, 6))
            assert talking.engine.counters()["snapshots"] <= 3
        assert talking.ask(text(90, 55), 1).cached == 89
        assert talking.ask(text(90, 50), 1).cached == 0


def test_a_restored_state_is_the_same_bits(own: Path) -> None:
    stack = Stack(GGUFFile.open(own), [NumpyDevice(f"D{i}") for i in range(2)], cache_type=GGMLType.F32)
    first, rest = text(64, 60), text(32, 61)
    stack.feed(first)
    take = stack.ubatch(rest[:16], [15])
    taken = stack.executor.submit(replace(take, before=(StateOp(StateAction.TAKE, 0, 0),)))
    want = [values_of(taken), stack.feed(rest[16:])]
    stack.n_past = 64
    restored = stack.executor.submit(
        replace(stack.ubatch(rest[:16], [15]), before=(StateOp(StateAction.RESTORE, 0, 0),))
    )
    got = [values_of(restored), stack.feed(rest[16:])]
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    stack.n_past = 64
    assert not np.array_equal(stack.feed(rest[:16]), want[0])  # without it the state is that of what came since
    stack.close()


def test_a_new_sequence_starts_from_zeros(own: Path) -> None:
    stack = Stack(GGUFFile.open(own), [NumpyDevice("D")], cache_type=GGMLType.F32)
    want = stack.feed(text(20, 62))
    stack.feed(text(50, 63))
    stack.restart()
    assert np.array_equal(stack.feed(text(20, 62)), want)
    stack.close()


def test_hidden_states_come_from_a_state_of_their_own(own: Path, one: Talker) -> None:
    """Pooled requests read their prompt from nothing, and leave nothing that others would go on from."""
    prompt = text(90, 70)
    warm_up = one.ask(prompt, N_ANSWER)
    with talker(own, SPLITS["two local"]) as talking:
        talking.ask(text(60, 71), N_ANSWER)
        for pooling in ("mean", "last"):
            got = talking.run(talking.engine.embed(prompt, pooling)).vector
            want = one.run(one.engine.embed(prompt, pooling)).vector
            assert np.allclose(got, want, atol=1e-4) and np.std(want) > 0
        assert_same(talking.ask(prompt, N_ANSWER), warm_up)
