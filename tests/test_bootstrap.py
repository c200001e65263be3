"""What a start decides before anything is loaded: where everything stands, and what depends on the context."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from app import bootstrap, fleet
from app.bootstrap import serving
from app.settings import ServeSettings
from tests.fakes.architectures import write_model
from tests.fakes.gguf import write_tiny_llama


def test_the_plan_of_a_hybrid_tells_its_state_and_snapshots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "next.gguf", "qwen3next")
    settings = ServeSettings(model=str(model), ctx_size=2048, device=("NUMPY",), snapshot_mib=0)
    assert bootstrap.plan(settings) == 0
    without = capsys.readouterr().out
    assert "0 snapshots" in without and "state" in without
    assert bootstrap.plan(ServeSettings(model=str(model), ctx_size=2048, device=("NUMPY",))) == 0
    assert "32 snapshots" in capsys.readouterr().out


def test_the_plan_of_other_models_has_no_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    assert bootstrap.plan(ServeSettings(model=str(model), ctx_size=512, device=("NUMPY",))) == 0
    told = capsys.readouterr().out
    assert "snapshots" not in told and "state" not in told and "NUMPY" in told


@pytest.mark.parametrize(("ctx_size", "factors"), [(256, "short"), (512, "short"), (1024, "long"), (0, "long")])
def test_rope_factors_follow_the_context_that_was_settled_on(tmp_path: Path, ctx_size: int, factors: str) -> None:
    changes = {"phi3.rope.scaling.original_context_length": 512}
    model = write_model(tmp_path / "phi.gguf", "phi3-long", **changes)
    settings = ServeSettings(model=str(model), ctx_size=ctx_size, device=("NUMPY",))
    devices = serving._open_devices(settings)
    try:
        placed = serving._place(settings, serving._open(settings), devices)
    finally:
        fleet.close_all(devices)
    names = {spec.name for spec in placed.opened.model.weights()}
    assert {name for name in names if "rope_factors" in name} == {f"rope_factors_{factors}.weight"}


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("app.bootstrap.working", ("fastapi", "starlette", "uvicorn", "pydantic", "jinja2", "rich", "app.api")),
        ("app.bootstrap.listing", ("fastapi", "starlette", "uvicorn", "pydantic", "jinja2", "app.api")),
        ("app.cli", ("numpy", "fastapi", "uvicorn", "app.engine", "app.rpc", "app.api")),
    ],
)
def test_a_command_loads_only_what_it_needs(command: str, absent: tuple[str, ...]) -> None:
    told = subprocess.run(
        [sys.executable, "-c", f"import sys, {command}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(absent).isdisjoint(told.stdout.split())
