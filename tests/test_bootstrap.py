"""What a start decides before anything is loaded: where everything stands, and what depends on the context."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app import bootstrap, fleet
from app.bootstrap import serving
from app.engine import probe
from app.engine.placement import DeviceSpeed
from app.errors import ConfigError
from app.settings import ServeSettings
from tests.fakes.architectures import write_model
from tests.fakes.gguf import TinyLlama, write_tiny_llama


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


@pytest.mark.parametrize(("tune", "layers"), [("prompt", "0-1"), ("decode", "0-2"), ("auto", "0-1")])
def test_several_devices_are_measured_and_tell_what_stages_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tune: str, layers: str
) -> None:
    """What the probe finds is given here: for decode the head is as dear as a layer and a half."""
    model = write_tiny_llama(tmp_path / "tiny.gguf", TinyLlama(n_layers=4))
    head = DeviceSpeed(layer_prompt_s=1e-9, layer_decode_s=1e-9, head_prompt_s=1e-12, head_decode_s=4e-9)
    monkeypatch.setattr(probe, "measure", lambda model, devices, limits: [head] * len(devices))
    settings = ServeSettings(model=str(model), ctx_size=512, device=("NUMPY", "CPU"), tune=tune)
    assert bootstrap.plan(settings) == 0
    told = capsys.readouterr().out
    assert "ms per prompt token" in told and "no stage times" not in told
    assert next(line.split("│")[2].strip() for line in told.splitlines() if "NUMPY" in line) == layers


def test_a_trace_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    for path, reason in ((tmp_path / "no" / "x.json", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"--trace .* cannot be written: {reason}"):
            bootstrap.serve(ServeSettings(model=str(model), ctx_size=512, device=("NUMPY",), port=0, trace=path))


def test_a_split_by_hand_and_a_single_device_are_not_measured(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = str(write_tiny_llama(tmp_path / "tiny.gguf"))
    monkeypatch.setattr(probe, "measure", lambda model, devices, limits: pytest.fail("measured"))
    by_hand = ServeSettings(model=model, ctx_size=512, device=("NUMPY", "CPU"), tensor_split=(1.0, 1.0))
    assert bootstrap.plan(by_hand) == 0
    told = capsys.readouterr().out
    assert "no stage times: --tensor-split says" in told and "ms per prompt token" not in told
    assert bootstrap.plan(ServeSettings(model=model, ctx_size=512, device=("NUMPY",))) == 0
    told = capsys.readouterr().out
    assert "no stage times: one device has all layers" in told and "ms per prompt token" not in told
    assert "--tune" not in caplog.text
    assert bootstrap.plan(replace(by_hand, tune="decode")) == 0
    assert "--tune decode changes nothing: --tensor-split says" in caplog.text
    assert bootstrap.plan(ServeSettings(model=model, ctx_size=512, device=("NUMPY",), tune="prompt")) == 0
    assert "--tune prompt changes nothing: one device" in caplog.text
    monkeypatch.setattr(probe, "measure", lambda model, devices, limits: None)
    assert bootstrap.plan(replace(by_hand, tensor_split=())) == 0
    assert "no stage times: a device had no memory left for it" in capsys.readouterr().out


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
