"""Mixed precision around a call of ours: what we compute about a model is computed in the precision of its tensors.

In half precision a layer that is not exact looks exact, products of ours would lose their digits, and the graph of a run is full of casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "privateuseone")


@contextmanager
def without_autocast() -> Iterator[None]:
    """No autocast as long as the context lasts, even inside of somebody's `torch.autocast`; also a decorator.

    Weights may have changed meanwhile, so what was cast of them before is forgotten.
    """
    devices = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    try:
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        if devices:
            torch.clear_autocast_cache()


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
