"""What every figure depends on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

#: Instructions that decide which kernels run.
_NAMED = ("avx2", "avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm")


def machine() -> dict[str, str | int]:
    """The processor, which of the instructions that matter it has, the cores this process may use, and the system."""
    model, flags = platform.processor() or platform.machine(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        pairs = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        entries = {name.strip(): value.strip() for name, _, value in pairs}
        model = entries.get("model name", model)
        present = entries.get("flags", entries.get("Features", "")).split()
        flags = " ".join(name for name in _NAMED if name in present)
    return {"cpu": model, "instructions": flags, "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}


def described() -> str:
    """The same in a line."""
    told = machine()
    return f"{told['cores']} cores of {told['cpu']}, {told['system']}, Python {platform.python_version()}"
