"""What `tandem worker` says when it stands."""

from __future__ import annotations

import re
import socket

import pytest

from app.bootstrap.working import work
from app.rpc.endpoint import parse_endpoint
from app.rpc.worker import Worker
from app.settings import WorkerSettings


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here"))]
)
def test_the_address_can_be_given_to_rpc_as_it_is_told(
    host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "wait", lambda self: None)
    assert work(WorkerSettings(host=host, port=0, device=("NUMPY",))) == 0
    told = re.match(r"worker listening on (\S+), serving NUMPY", capsys.readouterr().out)
    assert told is not None
    assert parse_endpoint(told[1])[0] == host
