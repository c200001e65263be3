"""`tandem devices`: what there is to place a model on."""

from __future__ import annotations

from app import fleet, report
from app.bootstrap.local_options import local_options
from app.bootstrap.tokens import token_of
from app.settings import DevicesSettings


def list_devices(settings: DevicesSettings) -> int:
    """Print local devices and those of workers."""
    options = local_options(settings)
    found = fleet.open_local((), options)
    try:
        if settings.rpc:
            found += fleet.open_devices((), settings.rpc, options, token_of(settings.rpc_token_file))
        report.print_table(report.device_table(found))
    finally:
        fleet.close_all(found)
    return 0
