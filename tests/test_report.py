"""What a start prints: tables with names as they are, and how far the weights are."""

from __future__ import annotations

import pytest
from rich.table import Table

from app import report
from app.bootstrap.listing import list_devices
from app.engine.loader import Uploaded
from app.engine.models.base import StageShape
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
