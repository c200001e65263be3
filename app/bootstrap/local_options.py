"""What a command's settings say about local devices."""

from __future__ import annotations

from app.fleet import LocalOptions
from app.settings import CommonSettings


def local_options(settings: CommonSettings) -> LocalOptions:
    return LocalOptions(
        threads=settings.threads,
        cpu_variant=settings.cpu_variant,
        cpus=tuple(sorted({*settings.cpu_range, *settings.cpu_mask})),
        pin=settings.cpu_strict,
    )
