from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.text.stop import StopMatcher

letters = st.text(alphabet="ab🦙é", max_size=30)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """Push until a match, as a caller does; the text that left, and the match."""
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        result = matcher.push(piece)
        out += result.text
        if result.matched is not None:
            assert matcher.push("more").text == ""
            assert matcher.flush() == ""
            return out, result.matched
    return out + matcher.flush(), None


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300)
@given(st.lists(st.text(alphabet="ab🦙é", max_size=4), max_size=4), st.lists(letters, max_size=6))
def test_equals_a_plain_search_however_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == naive(stops, "".join(pieces))
    assert run(stops, list("".join(pieces))) == naive(stops, "".join(pieces))


def test_holds_back_only_what_may_become_a_stop() -> None:
    matcher = StopMatcher(["</s>", "\n\nUser:"])
    assert matcher.push("done <").text == "done "
    assert matcher.push("/b> \n").text == "</b> "
    assert matcher.push("\n").text == ""
    assert matcher.push("\n").text == "\n"
    result = matcher.push("User: hi")
    assert (result.text, result.matched) == ("", "\n\nUser:")


def test_a_stop_inside_another_ends_the_text_first() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")


def test_stops_that_end_together_give_the_longest() -> None:
    assert run(["b", "ab"], ["xab"]) == ("x", "ab")


def test_what_waited_comes_out_at_the_end() -> None:
    assert run(["STOP"], ["it S", "TO"]) == ("it STO", None)


def test_no_stops_and_empty_stops_let_all_through() -> None:
    assert run([], ["a"]) == ("a", None)
    assert run([""], ["a"]) == ("a", None)


def test_a_hostile_text_costs_linear_time() -> None:
    stops = ["a" * n + "b" for n in range(1, 64)]
    start = time.process_time()
    assert run(stops, ["a" * 1000] * 200) == ("a" * 200_000, None)
    assert time.process_time() - start < 2.0
