"""Where a result comes from: which code, on which software, on which device."""

from __future__ import annotations

import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sensli import __version__
from sensli.paper.plans.machine import Machine
from sensli.paper.plans.settings import Settings


def origin(settings: Settings, machine: Machine) -> dict[str, Any]:
    """The facts that are stored with a result. Called where the result was computed."""
    return {**provenance(), **({"device": str(machine)} if settings.engine == "cnn" else {})}


@lru_cache
def provenance() -> dict[str, Any]:
    """Which code on which software computed a result."""
    return {
        "commit": _commit(),
        "versions": {"sensli": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _commit() -> str | None:
    """The commit of the checkout this package runs from, marked where files differ from it; None if installed."""
    here = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        call = ["git", "-C", str(here), *arguments]
        return subprocess.run(call, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # an installed package may lie inside somebody else's repository: only our own source tree counts
        if Path(git("rev-parse", "--show-toplevel")) / "src" / "sensli" / "paper" != here:
            return None
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
