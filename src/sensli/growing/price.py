"""What checks cost beside training: steps of the optimizer are counted, and batches that checks took."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

from torch.optim import Optimizer

from sensli.modules import checks
from sensli.surgery.warmup import has_step_hooks

# Steps of training that measuring a batch stands for: a forward and a backward pass, and sums of gradients.
_BATCH = 1.5
_LEAST = 8  # batches; a check on fewer says little, unless there are no more
_LOSSES = 3  # batches whose loss alone costs as much as a step
# Of "auto": the share, and batches that need not be earned, so that short trainings grow too; so many of them at once.
_SHARE, _FREE, _AT_ONCE = 0.02, 160, 16
AUTO = "auto"


def check_share(value: float | str | None) -> float | str | None:
    """A number between 0 and 1, "auto" or None."""
    if value is None or (isinstance(value, str) and value == AUTO):
        return value
    what = "between 0 and 1 (for example 0.02), 'auto' or None"
    share = checks.number("max_check_share", value, what)
    return share if 0 < share < 1 else checks.refuse("max_check_share", what, value, ValueError)


class CheckPrice:
    """How many steps of training there have been, and how many batches the checks have taken.

    A batch of a check is taken for one of training. Of several optimizers the one counts that takes most steps.

    Args:
        limit: The largest share of the steps that checks may take, "auto" for 2 % and 160 batches more, or None for no limit.
        optimizers: Those that train the model.
    """

    def __init__(self, limit: float | str | None, optimizers: Sequence[Optimizer]) -> None:
        self.share, self._free = (_SHARE, _FREE) if isinstance(limit, str) else (limit, 0)
        self.steps = 0
        self.batches = 0
        self.losses = 0  # batches of which only the loss was taken
        self.last: int | None = None  # batches of the last check
        self.skipped = 0  # calls since then
        self._optimizers = tuple(optimizers)
        self._most = 0  # steps of any of them
        self._count_steps()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy counts the steps of the copies."""
        self.__dict__.update(state)
        self._count_steps()

    def _count_steps(self) -> None:
        for optimizer in filter(has_step_hooks, self._optimizers):
            count = _StepCount(weakref.ref(self), self._most)
            weakref.finalize(self, optimizer.register_step_pre_hook(count.begin).remove)
            weakref.finalize(self, optimizer.register_step_post_hook(count.end).remove)

    def affordable(self, batches: Iterable[Any]) -> int | None:
        """How many batches a check may take now: None for all of them, 0 for a check that must wait."""
        if self.share is None or self.steps == 0:
            return None
        wanted = len(batches) if isinstance(batches, Sized) else self.last
        if wanted is None:
            return None
        earned = int(self.share * self.steps / _BATCH) - self.batches
        left = max(earned, min(earned + self._free, _AT_ONCE)) if self._free else earned
        if left >= wanted:
            return None
        return left if left >= _LEAST else 0

    def affordable_losses(self, most: int) -> int:
        """Of how many batches the loss alone may be taken now: at most so many, 0 if it must wait. The same on all ranks."""
        if self.share is None or self.steps == 0:
            return most
        left = int(_LOSSES * (self.share * self.steps + _BATCH * self._free)) - self.losses
        found = min(most, left) if 2 * left >= most else 0
        self.losses += found
        return found

    def counted(self, batches: Iterable[Any], most: int | None) -> Iterable[Any]:
        """The batches, at most so many, counted as they are taken."""
        if self.share is None:
            return batches
        self.last, self.skipped = 0, 0
        return _CountedBatches(self, batches, most)

    def state_dict(self) -> dict[str, Any]:
        """Plain data; empty where nothing was counted."""
        return {} if self.share is None and not self.steps else {name: getattr(self, name) for name in _STATE}

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


class _StepCount:
    """Counts the steps of one optimizer. A class that calls the step of its parent begins twice and ends twice."""

    def __init__(self, price: weakref.ref[CheckPrice], steps: int) -> None:
        self._price, self._steps, self._begun = price, steps, False

    def begin(self, *_: Any) -> None:
        self._begun = True

    def end(self, *_: Any) -> None:
        price = self._price()
        if price is not None and self._begun:
            self._begun = False
            self._steps += 1
            if self._steps > price._most:
                price._most = self._steps
                price.steps += 1


class _CountedBatches:
    """Batches of a check. Those of a second pass are the same ones, and attributes, such as a loader's generator, those of the source."""

    def __init__(self, price: CheckPrice, source: Iterable[Any], most: int | None) -> None:
        self._price, self._source, self._most = price, source, most

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(islice(iter(self._source), self._most)):
            if index >= (self._price.last or 0):
                self._price.batches += 1
                self._price.last = index + 1
            yield batch

    def __len__(self) -> int:
        known = len(self._source)  # type: ignore[arg-type]  # raises, as it should, where nobody knows
        return known if self._most is None else min(known, self._most)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


_STATE = {"steps": 0, "batches": 0, "losses": 0, "last": None, "skipped": 0}
