"""The random states that training draws from: torch on every device, Python, and numpy where it is in use."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two captured states are equal, so that the same numbers would be drawn."""
    return one.keys() == other.keys() and all(
        all(map(torch.equal, state, other[name])) if name == "cuda" else
        torch.equal(state, other[name]) if isinstance(state, torch.Tensor) else state == other[name]
        for name, state in one.items()
    )  # fmt: skip


@contextmanager
def kept_outside_of_torch() -> Iterator[None]:
    """The states of Python's `random` and of numpy are put back when the context ends; `torch.random.fork_rng` does it for torch."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)


@contextmanager
def kept_of_loader(batches: Any) -> Iterator[None]:
    """The generators that a DataLoader and its samplers were given are put back: a look does not change the order of the next epoch."""
    put_back = capture_of_loader(batches)
    try:
        yield
    finally:
        put_back()


def capture_of_loader(batches: Any) -> Callable[[], None]:
    """How to put back the generators that a DataLoader and its samplers were given."""
    sampler, batch_sampler = getattr(batches, "sampler", None), getattr(batches, "batch_sampler", None)
    holders = (batches, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(each, "generator", None) for each in holders]
    kept = [(each, each.get_state()) for each in found if isinstance(each, torch.Generator)]

    def put_back() -> None:
        for generator, state in kept:
            generator.set_state(state)

    return put_back
