"""What a start prints: tables with names as they are, and how far the weights are."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from app import report
from app.bootstrap.listing import list_devices
from app.engine.ggml import GGMLType
from app.engine.loader import PlannedStage, Uploaded
from app.engine.models.base import StageShape
from app.engine.placement import StageSeconds
from app.engine.stage import StageLimits
from app.settings import DevicesSettings
from app.units import mib
from tests.rpc.adder import Adder
from tests.rpc.workers import tcp_worker

MIB = 1 << 20


@pytest.mark.parametrize("name", ["RPC0[localhost:51005]", "RPC0[bold]", ":smile:", "[/red]", "RPC0[10.0.0.1:5]"])
def test_names_stand_in_tables_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title=name)
    table.add_column("device")
    table.add_row(name)
    report.print_table(table)
    assert capsys.readouterr().out.count(name) == 2


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0.0 MiB"), (1, "1 byte"), (100, "100 bytes"), (MIB // 10, "0.1 MiB"), (3000 * MIB, "3,000.0 MiB")],
)
def test_amounts(n_bytes: int, text: str) -> None:
    assert mib(n_bytes) == text


@pytest.mark.parametrize(
    ("sent_bytes", "told"),
    [
        (None, ["CPU 60.0 MiB of 60.0 MiB ("]),
        (60 * MIB, ["CPU 60.0 MiB of 60.0 MiB ("]),
        (MIB, ["CPU 60.0 MiB of 60.0 MiB (59.0 MiB were there, 1.0 MiB sent, "]),
    ],
)
def test_weights_that_were_there_are_not_told_as_sent(
    sent_bytes: int | None, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    uploads = report.UploadReport()
    uploads(Uploaded("CPU", 60 * MIB, 60 * MIB, sent_bytes))
    assert uploads.fraction == 1
    line = capsys.readouterr().err
    assert all(part in line for part in told) and ("were there" in line) == (sent_bytes == MIB)


def test_devices_are_listed_although_a_worker_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    with tcp_worker(Adder()) as gone:
        away = f"127.0.0.1:{gone.port}"
    with tcp_worker(Adder()) as worker:
        here = f"localhost:{worker.port}"
        assert list_devices(DevicesSettings(rpc=(away, here))) == 1
        told = capsys.readouterr()
        assert f"RPC0[{here}]" in told.out
        (line,) = [line for line in told.err.splitlines() if line.startswith("tandem:")]  # the log may be there as well
        assert line.startswith(f"tandem: device {away} could not be reached: ")
        assert list_devices(DevicesSettings(rpc=(here,))) == 0


@pytest.mark.parametrize(
    ("first", "last", "is_last", "told"),
    [(0, 15, False, "0-14"), (15, 30, True, "15-29 + head"), (30, 30, True, "none + head"), (3, 3, False, "none")],
)
def test_layers_are_called_alike_everywhere(first: int, last: int, is_last: bool, told: str) -> None:
    assert StageShape(first, last, is_last).layers == told


@pytest.mark.parametrize("width", [80, 100, 120])
def test_workers_on_one_host_can_be_told_apart(width: int) -> None:
    """However narrow the table, names and numbers are whole, if over several lines."""
    seconds = StageSeconds(prompt_s=0.0011, decode_s=0.0022)
    limits = StageLimits(
        max_tokens=1, max_outputs=1, max_seqs=1, n_cells=8192, n_snapshots=0, key_type=GGMLType.F16,
        value_type=GGMLType.F16,
    )  # fmt: skip
    names = [f"RPC{n}[127.0.0.1:{50052 + n}]" for n in range(2)]
    shapes = [StageShape(0, 15, False), StageShape(15, 30, True)]
    planned = [
        PlannedStage(Adder(name), shape, 50 * MIB, 45 * MIB, 0, 1120 * MIB, seconds)
        for name, shape in zip(names, shapes, strict=True)
    ]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report.plan_table(planned, limits, 30))
    for stage in planned:
        stage.device.close()
    rows = [line for line in console.export_text().splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows if "RPC" in row] == names
    assert not any("…" in row for row in rows)
