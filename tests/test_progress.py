"""Progress where there is no terminal, and where there is one."""

from __future__ import annotations

import io
import re

from app.progress import transfer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines() -> None:
    out = io.StringIO()
    with transfer("loading", 3 << 20, stream=out) as advance:
        for _ in range(3):
            advance(1 << 20)
    first, last = out.getvalue().splitlines()
    assert first == "loading: 3.0 MiB"
    assert re.fullmatch(r"loading: done, [\d.]+ MiB/s", last)


def test_a_bar_on_a_terminal() -> None:
    out = Terminal()
    with transfer("loading", 1 << 20, stream=out) as advance:
        advance(1 << 20)
    assert "loading" in out.getvalue()
    assert "MiB" in out.getvalue()


def test_a_label_in_brackets_is_no_markup() -> None:
    out = Terminal()
    with transfer("model[bold].gguf", 1 << 20, stream=out) as advance:
        advance(1 << 20)
    assert "model[bold].gguf" in out.getvalue()
