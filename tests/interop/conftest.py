"""Whole models over real peers take minutes: such tests run only when they are asked for, by `make interop`."""

from __future__ import annotations

import pytest


@pytest.fixture
def asked_for(request: pytest.FixtureRequest) -> None:
    """Skips the test unless interop tests were chosen."""
    if "interop" not in (request.config.option.markexpr or ""):
        pytest.skip("takes minutes; run `make interop`")
