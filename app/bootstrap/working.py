"""`tandem worker`: local devices for another machine's server."""

from __future__ import annotations

import logging

from app import fleet
from app.bootstrap.local_options import local_options
from app.bootstrap.tokens import token_of
from app.listening import is_loopback
from app.rpc import worker as rpc_worker
from app.rpc.endpoint import write_endpoint
from app.rpc.worker import DEFAULT_CACHE_BYTES, Worker
from app.settings import WorkerSettings, hash_cache_dir

log = logging.getLogger(__name__)


def work(settings: WorkerSettings) -> int:
    """Serve local devices over RPC until a signal comes."""
    devices = fleet.open_local(settings.device, local_options(settings))
    major, minor = settings.protocol.split(".")
    served = Worker(
        devices,
        rpc_worker.WorkerSettings(
            host=settings.host,
            port=settings.port,
            version=(int(major), int(minor)),
            mem_bytes=settings.mem,
            max_message_bytes=settings.max_message << 20,
            model_dir=settings.model_dir,
            hash_dir=hash_cache_dir() if settings.model_dir else None,
            cache_dir=settings.cache_dir,
            cache_bytes=DEFAULT_CACHE_BYTES if settings.cache_size is None else settings.cache_size,
            token=token_of(settings.rpc_token_file),
        ),
    )
    try:
        served.start()
        names = ", ".join(f"{device.name} ({device.caps.description or device.caps.kind})" for device in devices)
        print(f"worker listening on {write_endpoint(settings.host, served.port)}, serving {names}", flush=True)
        if settings.rpc_token_file is None and not is_loopback(settings.host):
            log.warning(
                "%s is reachable from other machines, and whoever reaches this port can use its memory and compute; "
                "give it a --rpc-token-file, or keep it on a private network",
                settings.host,
            )
        served.wait()
    finally:
        served.close()
        fleet.close_all(devices)
    return 0
