"""What the callbacks of different trainers do at a look: a loss step in place of forward, and what is logged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from sensli.growing.grower import Grower
from sensli.merits.merits import Merits
from sensli.modules.flops import count_flops
from sensli.modules.wrappers import bare, own_parameters
from sensli.text.names import UNMEASURED


class StandIn:
    """A module's forward for as long as it is looked at: a step of the training, inside of which forward is the user's own.

    An object and no closure: a copy of the module gets a copy of it that belongs to the copy. ``step`` must be a function, which copies
    share.
    """

    def __init__(self, module: nn.Module, step: Callable[..., Any]) -> None:
        self.module, self.step = module, step
        self.own = module.__dict__.get("forward")  # set on the module itself, as accelerate does for mixed precision

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.module.__dict__
        mine = own.pop("forward")
        if self.own is not None:
            own["forward"] = self.own
        try:
            return self.step(self.module, *args, **kwargs)
        finally:
            own["forward"] = mine


@contextmanager
def standing_in(module: nn.Module, step: Callable[..., Any], **others: Any) -> Iterator[None]:
    """Calling the module runs ``step(module, ...)``; ``others`` are methods that are replaced meanwhile."""
    own = module.__dict__
    kept = {name: own[name] for name in ("forward", *others) if name in own}
    try:
        own.update(forward=StandIn(module, step), **others)
        yield
    finally:
        for name in ("forward", *others):
            own.pop(name, None)
        own.update(kept)


@contextmanager
def itself(module: nn.Module) -> Iterator[None]:
    """The module with its own forward, not the one that stands in for it during a look."""
    own = module.__dict__
    standing = own.pop("forward")
    if standing.own is not None:
        own["forward"] = standing.own
    try:
        yield
    finally:
        own["forward"] = standing


class Facts:
    """What is logged at the end of an epoch: the size of the model and, after a look, the best merit."""

    def __init__(self) -> None:
        self._flops: tuple[Any, int] = (None, 0)  # what has grown, and the count for that
        self._seen: Merits | None = None

    def of(self, grower: Grower, example: Any) -> dict[str, float]:
        """Numbers by name; FLOPs are counted only after a growth."""
        network = bare(grower.model)
        grown = [(growth.number, growth.name, growth.resized) for growth in grower.history]
        if self._flops[0] != grown:
            self._flops = (grown, int(count_flops(network, example)))
        facts: dict[str, float | None] = {
            "growths": grower.history.additions,
            "parameters": sum(parameter.numel() for parameter in own_parameters(network)),
            "flops": self._flops[1],
        }
        merits = grower.last_merits
        if merits is not None and merits is not self._seen and merits.norm != UNMEASURED:
            facts.update(merit=merits.best.value, ratio=merits.best.ratio)
        self._seen = merits
        return {f"sensli/{name}": float(value) for name, value in facts.items() if value is not None}
