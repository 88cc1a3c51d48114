"""Mixed precision or inference mode around a call of ours: what we compute about a model is computed as if they were not there.

In half precision a layer that is not exact looks exact, products of ours would lose their digits, and the graph of a run is full of casts.
What is made in inference mode can never be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "privateuseone")


@contextmanager
def without_autocast() -> Iterator[None]:
    """No autocast as long as the context lasts, even inside of somebody's `torch.autocast`, and no inference mode; also a decorator.

    Weights may have changed meanwhile, so what was cast of them before is forgotten.
    """
    devices = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    try:
        with ExitStack() as stack:
            stack.enter_context(without_inference_mode())
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        if devices:
            torch.clear_autocast_cache()


@contextmanager
def without_inference_mode() -> Iterator[None]:
    """No inference mode as long as the context lasts; also a decorator."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():  # it turns gradients on
        yield


def autocast_of_now() -> Callable[[], AbstractContextManager[None]]:
    """The autocast that is around this call, to run the user's own code with it inside of `without_autocast`."""
    dtypes = {device: torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)}
    cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            for device, dtype in dtypes.items():
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cached))
            yield

    return again
