"""`Trial`: how candidates are tried at a look, checked when it is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sensli.errors import WrongType
from sensli.merits.merits import Merit
from sensli.modules import checks

EXTRAS = ("scheduler", "averaged")  # what a step may ask for by name
MODES = ("min", "max")
_STEP = "a function of model, optimizer and batch (and, if it names them, scheduler and averaged) that trains one step and returns the loss"


class Trial:
    """How a `Grower` tries growths before it keeps one: ``Grower(..., trial=Trial(steps=200))``.

    At a look the best candidates, and the model without any growth, train on from the same state with the same batches, for
    the same number of FLOPs: larger networks take fewer steps. The best of them stays, and its steps count as training.

    Args:
        steps: How many steps the model takes without a growth. A larger one takes fewer, at least one.
        candidates: How many growths to try at most (default: 3): the best of each kind (layers, units), because merits of
            different kinds predict the outcome less well than merits of one kind, then the next best by merit.
        batches: The batches to train on, such as the training loader; taken again from the beginning when they end. They are
            drawn once for each look and kept in memory. None takes the batches given to `Grower.step`.
        step: ``step(model, optimizer, batch)`` takes one step of training and returns the loss of the batch, for loops that clip,
            accumulate or scale gradients. It gets what `Grower` was given, and ``scheduler`` and ``averaged`` too if it has
            arguments of these names. None takes a plain step with the ``loss_fn`` of `Grower.step`, which updates neither
            schedulers nor averages.
        metric: ``metric(model)`` returns the number that decides, for example the loss on held-out data. None compares the mean
            training loss over the last batches, which are the same for all.
        mode: Whether a smaller metric is better (``"min"``) or a larger one (``"max"``) (default: "min").
        last: Without a metric: over which share of the steps the training loss is averaged (default: 0.5).
        stateful: Objects that ``step`` uses and changes, each with ``state_dict`` and ``load_state_dict``, such as a
            ``GradScaler``: every candidate begins with their state (default: ()).
    """

    def __init__(
        self,
        steps: int,
        *,
        candidates: int = 3,
        batches: Iterable[Any] | None = None,
        step: Callable[..., Any] | None = None,
        metric: Callable[[Any], Any] | None = None,
        mode: str = "min",
        last: float = 0.5,
        stateful: Sequence[Any] = (),
    ) -> None:
        self.steps = checks.whole("steps", steps, 200)
        self.candidates = checks.whole("candidates", candidates, 3)
        self.batches = None if batches is None else checks.batches("batches", batches)
        self.step = None if step is None else _taking("step", step, _STEP, 3, EXTRAS)
        self.metric = (
            None if metric is None else _taking("metric", metric, "a function of the model that returns a number", 1)
        )
        self.mode = checks.one_of("mode", mode, MODES)
        self.last = checks.share("last", last, 0.5)
        self.stateful = _stateful(stateful)

    def candidates_of(self, chosen: Sequence[Merit]) -> list[Merit]:
        """Those of the chosen growths, best first, that are tried: the first of each kind, then the others in their order.

        Args:
            chosen: The growths that the strategy chose, best first.

        Returns:
            At most as many as `candidates`.
        """
        first = {merit.site.move.tag: merit for merit in reversed(chosen)}.values()
        ranked = sorted(chosen, key=lambda merit: not any(merit is one for one in first))
        return ranked[: self.candidates]

    def __repr__(self) -> str:
        """What several processes must have in common; functions and data are each one's own."""
        functions = "".join(f", {name}=a function" for name in ("step", "metric") if getattr(self, name) is not None)
        mode = f", mode={self.mode!r}" if self.metric is not None else f", last={self.last:g}"
        return f"Trial({self.steps}, candidates={self.candidates}{functions}{mode})"


def _taking(name: str, value: Any, what: str, count: int, extras: Sequence[str] = ()) -> Any:
    """A function that can be called with so many arguments, and with those of the extras that it names."""
    checks.function(name, value, what)
    if isinstance(value, type):
        checks.refuse(name, what, value, WrongType)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # of some functions that are not Python's nobody knows it
        return value
    try:
        signature.bind(*(None,) * count, **dict.fromkeys(named(value, extras)))
    except TypeError as error:
        given = f"{getattr(value, '__name__', type(value).__name__)}{signature}"
        raise ValueError(f"{name} must be {what}, got {given}: {error}.") from None
    return value


def named(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Those of the names that the function has arguments of."""
    try:
        return [name for name in names if name in inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return []


def _stateful(given: Any) -> tuple[Any, ...]:
    what = "a sequence of objects with state_dict and load_state_dict (for example [scaler])"
    if not isinstance(given, (list, tuple)):
        checks.refuse("stateful", what, given, WrongType)
    for each in given:
        if isinstance(each, type) or not all(hasattr(each, name) for name in ("state_dict", "load_state_dict")):
            checks.refuse("stateful", what, given, WrongType)
    return tuple(given)
