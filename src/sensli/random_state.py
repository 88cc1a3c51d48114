"""The random states that training draws from: torch on every device, Python, and numpy where it is in use."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """All random states as plain data."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # not imported for this: what is not in use has no state to keep
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [
            str(name),
            [int(key) for key in keys],
            *(kind(value) for kind, value in zip((int, int, float), rest, strict=True)),
        ]
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` found; devices that this machine lacks are left out."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))  # noqa: NPY002  (the user's global one)
