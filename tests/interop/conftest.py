"""These tests take minutes and need llama.cpp, so they run only when they are asked for: `make interop`."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "interop" in (config.option.markexpr or ""):
        return
    skip = pytest.mark.skip(reason="needs real peers; run `make interop`")
    for item in items:
        if item.get_closest_marker("interop") is not None:
            item.add_marker(skip)
