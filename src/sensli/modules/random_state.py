"""The random states that training draws from: torch on every device, Python, and numpy where it is in use."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def capture() -> dict[str, Any]:
    """All random states as plain data."""
    state: dict[str, Any] = {**of_torch(), "python": random.getstate()}
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
    restore_torch(state)
    random.setstate(state["python"])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))  # noqa: NPY002  (the user's global one)


def equal_states(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two captured states are equal, so that the same numbers would be drawn."""
    return one.keys() == other.keys() and all(_same(state, other[name]) for name, state in one.items())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


# --- torch alone: the CPU, and every device of the accelerator, since a model may lie on several ---


def of_torch() -> dict[str, Any]:
    """The states of torch: of the CPU, and by the kind of the accelerator those of all its devices, if it is in use."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    kind, module = _accelerator()
    # Asking an accelerator that nobody has started for its state would start it.
    if module is not None and getattr(module, "is_initialized", module.is_available)():
        state[kind] = [module.get_rng_state(index) for index in range(module.device_count())]
    return state


def restore_torch(state: dict[str, Any]) -> None:
    """Put back what `of_torch` found, and what older versions wrote into checkpoints; devices that are not there are left out."""
    torch.set_rng_state(state["torch"])
    kind, module = _accelerator()
    if module is not None and kind in state and module.is_available():
        saved = [state[kind]] if isinstance(state[kind], Tensor) else state[kind]  # MPS had one, and no list
        for index, each in zip(range(module.device_count()), saved, strict=False):
            module.set_rng_state(each, index)


def seed_torch(number: int) -> None:
    """Seed all that `of_torch` keeps. `torch.manual_seed` would keep a note for every kind of device that is not there."""
    torch.default_generator.manual_seed(number)
    _, module = _accelerator()
    if module is not None and getattr(module, "is_initialized", module.is_available)():
        # MPS has one device and no function for all.
        getattr(module, "manual_seed_all", module.manual_seed)(number)


def _accelerator() -> tuple[str, Any]:
    """The kind of accelerator that this torch knows, and its module (`torch.cuda`, `torch.xpu`); None for the CPU alone."""
    found = torch.accelerator.current_accelerator()
    return ("", None) if found is None else (found.type, torch.get_device_module(found.type))


@contextmanager
def kept_of_torch() -> Iterator[None]:
    """The states of torch are put back when the context ends."""
    state = of_torch()
    try:
        yield
    finally:
        restore_torch(state)


@contextmanager
def kept() -> Iterator[None]:
    """All random states are put back when the context ends."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        with kept_of_torch():
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


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
