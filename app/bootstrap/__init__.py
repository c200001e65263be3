"""The only place that builds things and wires them together.

One function per command. Each loads its own module when it is called: a worker needs no web framework.
"""

from __future__ import annotations

import gc

from app.settings import DevicesSettings, ServeSettings, WorkerSettings


def serve(settings: ServeSettings) -> int:
    """Serve a model until a signal comes; returns the exit code."""
    gc.disable()  # a start makes half a million objects that stay; `serving` switches it on when they are there
    try:
        from app.bootstrap import serving

        return serving.serve(settings)
    finally:
        gc.enable()


def plan(settings: ServeSettings) -> int:
    """Print where everything would stand; load nothing."""
    from app.bootstrap import serving

    return serving.plan(settings)


def worker(settings: WorkerSettings) -> int:
    """Serve local devices over RPC until a signal comes."""
    from app.bootstrap import working

    return working.work(settings)


def devices(settings: DevicesSettings) -> int:
    """Print local devices and those of workers."""
    from app.bootstrap import listing

    return listing.list_devices(settings)
