"""Packages for Node, fetched from their registry."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def packages_at(place: Path, *names: str) -> None:
    """Install packages into a folder; skips the test without Node, or where the registry is out of reach."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("no Node here")
    command = [npm, "install", "--no-audit", "--no-fund", "--silent", *names]
    if subprocess.run(command, cwd=place, capture_output=True, timeout=100).returncode != 0:
        pytest.skip("the package registry for Node is out of reach")
