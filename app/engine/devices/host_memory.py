"""How much memory this machine, or the container we run in, has and has left."""

from __future__ import annotations

import os
from pathlib import Path

from app.engine.device import DeviceMemory

#: Limit and use of this process's control group, version 2 and 1.
_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def host_memory() -> DeviceMemory:
    """Bytes that can be allocated without swapping, and all bytes. Where the system does not say, free is total."""
    total, free = _from_meminfo() or _from_sysconf()
    for limit_file, used_file in _CGROUP_FILES:
        limit, used = _number(limit_file), _number(used_file)
        if limit is not None and used is not None and limit < total:
            total, free = limit, min(free, max(0, limit - used))
    return DeviceMemory(free_bytes=free, total_bytes=total)


def _from_meminfo(path: Path = Path("/proc/meminfo")) -> tuple[int, int] | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # not Linux
        return None
    kib = {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines) if rest}
    if "MemTotal" not in kib:
        return None
    return kib["MemTotal"] * 1024, kib.get("MemAvailable", kib.get("MemFree", 0)) * 1024


def _from_sysconf() -> tuple[int, int]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None
