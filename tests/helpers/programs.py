"""Starts a program as a user would, with this Python and this sensli."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Only a program that hangs takes so many seconds, however busy the machine is.
HANGS = 240


def environment(**more: str) -> dict[str, str]:
    """The variables of this process, its import path, and one thread."""
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command in the folder to its end; more: variables of the environment."""
    return subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=HANGS)
