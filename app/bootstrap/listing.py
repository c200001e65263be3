"""`tandem devices`: what there is to place a model on."""

from __future__ import annotations

import sys

from app import fleet, report
from app.bootstrap.local_options import local_options
from app.bootstrap.tokens import token_of
from app.settings import DevicesSettings


def list_devices(settings: DevicesSettings) -> int:
    """Print local devices and those of workers, then a line for each worker that does not answer; 1 if one did not."""
    found = fleet.open_local((), local_options(settings))
    try:
        remote, errors = fleet.open_remote(settings.rpc, token_of(settings.rpc_token_file))
        found += remote
        report.print_table(report.device_table(found))
    finally:
        fleet.close_all(found)
    for error in errors:
        print(f"tandem: {error}", file=sys.stderr)
    return 1 if errors else 0
