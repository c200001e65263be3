"""Parts of the bench of splits are chosen by their names."""

from __future__ import annotations

import argparse

import pytest

from bench.split import PARTS, parts


def test_unknown_parts_are_told_and_which_there_are() -> None:
    assert parts("decode,prompt") == ["decode", "prompt"]
    with pytest.raises(argparse.ArgumentTypeError, match=f"no part 'foo', ''; there are {', '.join(PARTS)}"):
        parts("decode,foo,")
