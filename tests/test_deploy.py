"""The compose file and the image: what they start is what the command line takes, and workers are not exposed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from app import cli
from app.options import endpoints
from app.settings import model_cache_dir
from tests.support import REPO

COMPOSE: dict[str, Any] = yaml.safe_load((REPO / "deploy" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = {name: service for name, service in SERVICES.items() if service["command"][0] == "worker"}

#: What the compose specification allows in a service, of what we use.
SERVICE_KEYS = frozenset(
    "image build command init restart read_only tmpfs cap_drop security_opt stop_grace_period networks healthcheck "
    "depends_on ports volumes environment".split()
)


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_one_server_and_two_workers() -> None:
    assert set(SERVICES) == {"server", *WORKERS}
    assert len(WORKERS) == 2
    assert set(COMPOSE) - {"name", "services", "networks", "volumes"} == {"x-tandem", "x-worker"}


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_well_formed(name: str) -> None:
    service = SERVICES[name]
    assert set(service) <= SERVICE_KEYS
    assert set(service["networks"]) <= set(COMPOSE["networks"])
    assert (REPO / "deploy" / service["build"]["context"] / "Dockerfile").is_file()
    assert all(volume.split(":")[0] in COMPOSE["volumes"] for volume in service.get("volumes", []))
    assert service["healthcheck"]["test"][0] == "CMD"
    assert all(isinstance(word, str) for word in service["command"])


@pytest.mark.parametrize("name", SERVICES)
def test_health_checks_are_programs_that_compile(name: str) -> None:
    _, python, option, program = SERVICES[name]["healthcheck"]["test"]
    assert (python, option) == ("python", "-c")
    compile(program, name, "exec")


@pytest.mark.parametrize("name", SERVICES)
def test_the_command_line_takes_every_command(name: str, capsys: Any) -> None:
    assert cli.run([*SERVICES[name]["command"], "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_the_server_knows_every_worker() -> None:
    command = SERVICES["server"]["command"]
    expected = {f"{name}:{flag(service['command'], '--port')}" for name, service in WORKERS.items()}
    assert set(endpoints(flag(command, "--rpc"))) == expected
    assert set(SERVICES["server"]["depends_on"]) == set(WORKERS)


def test_workers_are_not_exposed() -> None:
    for service in WORKERS.values():
        assert "ports" not in service
        assert service["networks"] == ["workers"]
    assert COMPOSE["networks"]["workers"]["internal"] is True
    assert all(port.startswith("127.0.0.1:") for port in SERVICES["server"]["ports"])


def test_the_image_keeps_models_where_the_volume_is() -> None:
    dockerfile = (REPO / "Dockerfile").read_text()
    cache = re.search(r"XDG_CACHE_HOME=(\S+)", dockerfile)
    assert cache is not None
    place = model_cache_dir({"XDG_CACHE_HOME": cache[1]}).parent
    assert f"VOLUME {place}" in dockerfile
    assert SERVICES["server"]["volumes"] == [f"models:{place}"]


def test_the_image_runs_as_nobody_special() -> None:
    lines = (REPO / "Dockerfile").read_text().splitlines()
    assert lines.index("USER tandem") < lines.index('ENTRYPOINT ["tandem"]')
