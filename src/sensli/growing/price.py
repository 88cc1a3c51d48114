"""What checks cost beside training: steps of the optimizer are counted, and batches that checks took."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

from torch.optim import Optimizer

_BATCH = (
    1.5  # steps of training that measuring a batch stands for: a forward and a backward pass, and sums of gradients
)
_LEAST = 8  # batches; a check on fewer says little, unless there are no more


class CheckPrice:
    """How many steps of training there have been, and how many batches the checks have taken.

    A batch of a check is taken for one of training. The first of the optimizers counts: the others step beside it.

    Args:
        share: The largest share of the steps that checks may take, or None for no limit.
        optimizers: Those that train the model.
    """

    def __init__(self, share: float | None, optimizers: Sequence[Optimizer]) -> None:
        self.share = share
        self.steps = 0
        self.batches = 0
        self.last: int | None = None  # batches of the last check
        self.skipped = 0  # calls since then
        if share is not None and optimizers:
            own = weakref.ref(self)

            def count(*_: Any) -> None:
                price = own()
                if price is not None:
                    price.steps += 1

            weakref.finalize(self, optimizers[0].register_step_post_hook(count).remove)

    def affordable(self, batches: Iterable[Any]) -> int | None:
        """How many batches a check may take now: None for all of them, 0 for a check that must wait."""
        if self.share is None or self.steps == 0:
            return None
        wanted = len(batches) if isinstance(batches, Sized) else self.last
        if wanted is None:
            return None
        left = int(self.share * self.steps / _BATCH) - self.batches
        if left >= wanted:
            return None
        return left if left >= _LEAST else 0

    def counted(self, batches: Iterable[Any], most: int | None) -> Iterable[Any]:
        """The batches, at most so many, counted as they are taken."""
        if self.share is None:
            return batches
        self.last, self.skipped = 0, 0
        return iter(self._taken(batches if most is None else islice(iter(batches), most)))

    def _taken(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self.batches += 1
            self.last = (self.last or 0) + 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Plain data; empty where there is no limit."""
        return {} if self.share is None else {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`. A state of a Grower without a limit has nothing of it. Raises ValueError if it is damaged."""
        found = {name: state.get(name, default) for name, default in _STATE.items()}
        if not isinstance(state, Mapping) or any(
            (type(value) is not int or value < 0) and not (name == "last" and value is None)
            for name, value in found.items()
        ):
            raise ValueError(f"the counts of steps and of batches are {state!r}")
        for name, value in found.items():
            setattr(self, name, value)


_STATE = {"steps": 0, "batches": 0, "last": None, "skipped": 0}
