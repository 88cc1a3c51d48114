"""What a model's code raises while something is tried: memory that ran out goes through, other failures are noted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_failures: ContextVar[list[str] | None] = ContextVar("failures", default=None)

# How torch says it without a class of its own: on the CPU, on MPS, in a library of CUDA.
_TEXTS = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, which says nothing of the model: with more of it the same would have run."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def brief_error(error: BaseException) -> str:
    """An error as a part of a sentence: its class, and the beginning of what it says."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:120]}"


def let_memory_through(error: BaseException) -> None:
    """For whoever goes on without what raised: raise the error again if memory ran out."""
    if is_out_of_memory(error):
        raise error


@contextmanager
def forgiven() -> Iterator[None]:
    """Failures end the context and are forgotten, unless memory ran out."""
    try:
        yield
    except Exception as error:
        let_memory_through(error)


def note(error: Exception) -> None:
    """The same, and other failures of a model's code are noted: they may pass, and what they led to with them."""
    let_memory_through(error)
    failures = _failures.get()
    if failures is not None:
        failures.append(f"{type(error).__name__}: {error}")  # not the error, which holds all that ran


@contextmanager
def noting() -> Iterator[list[str]]:
    """What is noted as long as the context lasts."""
    failures: list[str] = []
    token = _failures.set(failures)
    try:
        yield failures
    finally:
        _failures.reset(token)
