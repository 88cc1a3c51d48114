"""`Grower`: Algorithm 1 of the paper. Train, look, decide whether and where, insert, train on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sensli.growing.call import Call
from sensli.growing.following import Followers
from sensli.growing.logs import Log
from sensli.growing.looked import Looked
from sensli.growing.options import Options
from sensli.growing.proposing import proposed
from sensli.growing.recycling import Recycling
from sensli.growing.sizes import Sizes
from sensli.growing.state import load, read, remember
from sensli.growing.strategies import strategy_of
from sensli.growing.strategies.strategy import Strategy
from sensli.growing.trials.trial import Trial
from sensli.growing.trigger import Trigger
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merits
from sensli.merits.ranking import Selection
from sensli.modules import checks
from sensli.modules.autocast import without_inference_mode
from sensli.modules.engines.all_or_nothing import AllOrNothing
from sensli.modules.engines.distributed import Together
from sensli.modules.engines.fsdp import is_sharded
from sensli.modules.wrappers import bare, own_parameters
from sensli.moves.choosing import Where, check_where
from sensli.moves.sites import Sites
from sensli.surgery.averaging import Averaged
from sensli.surgery.history.growth import Growth
from sensli.surgery.history.history import History
from sensli.surgery.state.optim import Optimizers
from sensli.surgery.state.rates import Schedulers
from sensli.text.tables import short_number

NO_OPTIMIZER = (
    "this Grower has no optimizer, so nothing will train the layers that it inserts. Give Grower(model, optimizer, ...), or add the "
    "parameters that growth.parameters names to your optimizer yourself after each growth."
)


class Grower:
    """Grows a model between epochs: call `step` once per epoch, and continue training whether it grew or not.

    On a call on which the trigger fires, the merits of all sites are measured, and a layer is inserted if its merit is at least
    ``tau`` times the mean over the existing weights. A model may be wrapped in DistributedDataParallel: then all processes call
    `step`, each with its own batches, and all insert the same layer.

    Args:
        model: The network to grow, or its wrapper.
        optimizer: The optimizer or optimizers that train the model. Without one nothing trains the new layers; none is needed for an
            expansion before the optimizer is made.
        example: What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments; keys that ``forward`` does
            not take, such as labels, are left out.
        trigger: When to look, one of `sensli.triggers`, for example ``Every(10) & AtMost(3)``.
        strategy: What is proposed at a look, how it is scored and what is taken: a name that is registered, or a `Strategy` object. The
            options that say where, what and by which merit to grow are those of ``"sensli"``. One that another strategy has no use for
            is refused, with those that it uses (default: "sensli").
        tau: The threshold: insert only if the merit is at least this many times the mean over the existing weights
            (default: 1.0).
        norm: The norm of the gradient, as in `measure` (default: "auto").
        select: Which site to take: ``"auto"`` takes the largest merit, but between the blocks of a stack the middle, or with ``count``
            even spacing: no merit is known to tell the better place there. ``"largest"`` always takes the largest merit. As controls
            ``"smallest"``, ``"random"``, ``"first"`` or ``"last"`` in the data flow, or ``"even"`` spacing, for which the largest
            merit still decides whether to insert at all; or a function of `Merits` that returns one of them (default: "auto").
        count: The largest number of layers to insert at once (default: 1). A strategy that decides about all layers together takes
            as many as it chose.
        layer: The form of the new layers, as in `find_sites` (default: "auto").
        where: Which sites to consider, as in `find_sites`: a kind, a path or a pattern of paths, a list of these, or a function.
            None considers all of them.
        kernel_size: The kernel size of new convolutions, as in `find_sites`. None takes the neighbour's if it is odd, otherwise 3.
        init: How a twin gets the weights that need not be zero, as in `find_sites` (default: "copy").
        grow: What to grow: ``"layers"``, ``"units"`` of layers that exist, or ``"both"``, whichever is worth more. None grows what
            the strategy grows, with ``"sensli"`` layers.
        units: How many units a layer gets at a growth: a number, or a share of those it has (default: 0.25).
        start: How new units start, as in `find_sites` (default: "sensitive").
        per: Compare merits per added ``"parameters"`` or per added ``"flops"``. None compares them as they are.
        recycle: Whether each look begins with a new start for dead units, as `sensli.recycle` gives it; after a growth also for those
            that a new layer has inherited (default: False).
        trial: A `Trial`: at each look the best candidates, and the model without a growth, train on for a while from the same state,
            and the best of them stays. Only with ``count=1``. None grows without one.
        confidence: Stop measuring as soon as the best site is clear at this level, as in `measure`. None uses all batches.
        tolerance: With ``confidence``: the share of the best merit that may be missed, as in `measure` (default: 0.0).
        lr_scale: Multiplies all learning rates after each growth (default: 1.0).
        own_rate: A factor: each new layer gets separate parameter groups with this many times its neighbours' learning rate. Only
            with ``grow="layers"``: new units are parts of parameters that exist.
        group: The parameter group that new parameters join if their neighbours are in none, as in `insert`. Without it such
            places (a frozen part that the optimizer does not hold) are skipped.
        freeze_rest: Whether after a growth only what has grown trains, as in `insert` (default: False). Only with ``grow="layers"``.
        max_factor: A layer that would bring the model to more than this many times its parameters is left out. None allows
            every layer (default: 2.0).
        floor: Stops growth on a solved problem: once the loss has fallen to a thousandth of the largest one known (measured at a look,
            or of an output that does not depend on the input), a change of the new weights by 1 must lower it, to first order, by
            this share of the largest. 0 turns it off (default: 1e-7).
        scheduler: The learning-rate scheduler or schedulers of the optimizer.
        averaged: A `torch.optim.swa_utils.AveragedModel` of the model or of a part of it, or several, that grow with it. Those that the
            model holds itself need not be given.
        seed: The random seed of ``select="random"`` (default: 0).
        log: Receives every decision, including those not to insert: a function of a `Look` (``print`` gives one line each), a
            TensorBoard writer, or a list of these.
        unit: What one call of `step` is called in the log, the history and the page: ``"epoch"`` or ``"step"`` (default: "epoch").

    Raises:
        ValueError: If an argument is wrong; the message names it. A wrong type raises `WrongType`, which is a ValueError too.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        example: Any,
        trigger: Trigger,
        strategy: str | Strategy = "sensli",
        tau: float = 1.0,
        norm: str = "auto",
        select: str | Selection = "auto",
        count: int = 1,
        layer: str = "auto",
        where: Where = None,
        kernel_size: int | None = None,
        init: str = "copy",
        grow: str | None = None,
        units: int | float = 0.25,
        start: str = "sensitive",
        per: str | None = None,
        recycle: bool = False,
        trial: Trial | None = None,
        confidence: float | None = None,
        tolerance: float = 0.0,
        lr_scale: float = 1.0,
        own_rate: float | None = None,
        group: int | dict[str, Any] | None = None,
        freeze_rest: bool = False,
        max_factor: float | None = 2.0,
        floor: float = 1e-7,
        scheduler: Schedulers = None,
        averaged: Averaged = None,
        seed: int = 0,
        log: Log = None,
        unit: str = "epoch",
    ) -> None:
        self.options = Options.among(locals())
        checks.example("example", example)
        self._followers = Followers(optimizer, scheduler, averaged)
        self._followers.check(model, self.options)
        check_where(where, bare(model))
        self.model = model
        self.history = History()
        self.last_merits: Merits | None = None  # of the last look, also where nothing was inserted
        self.calls = 0
        self._example = example
        self._strategy: Strategy = strategy_of(self.options)
        self._recycling = Recycling(self._followers)
        self._said_too_large = False
        self._strategy.attend(bare(model), self.optimizers, self.history)
        self._said_no_optimizer = bool(self.optimizers)

    def __repr__(self) -> str:
        network, grown = bare(self.model), len(self.history)
        size = short_number(sum(parameter.numel() for parameter in own_parameters(network)))
        return (
            f"Grower({type(network).__name__} with {size} parameters, trigger={self.options.trigger!r}, "
            f"{grown} {'growth' if grown == 1 else 'growths'} in {self.calls} {'call' if self.calls == 1 else 'calls'})"
        )

    @property
    def strategy(self) -> Strategy:
        """What the looks ask: the object that was given, or the one of the name that was given."""
        return self._strategy

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that follow, without wrappers of other libraries."""
        return self._followers.optimizers

    def step(
        self, batches: Iterable[Any], loss_fn: LossFunction | None = None, *, metric: float | None = None
    ) -> Growth | None:
        """Count one epoch; if the trigger fires, measure, decide and insert.

        A call that raises does not count, and leaves the model and all that follows it as they were; with several processes, on
        all of them.

        Args:
            batches: The data to measure on: yields ``(input, target)`` pairs or dicts of keyword arguments.
            loss_fn: The mean loss of a batch, as in `measure`. None uses ``output.loss``.
            metric: The number that `triggers.Plateau` watches, for example the validation loss.

        Returns:
            The growth (with ``count`` > 1 the first one; `history` has all), or None if nothing was inserted.
        """
        if not self._said_no_optimizer and self._in_training:
            warnings.warn(NO_OPTIMIZER, stacklevel=2)
            self._said_no_optimizer = True
        # No decorator: warnings are to name the caller's line.
        with without_inference_mode(), AllOrNothing() as change, Together(self.model, "step the grower") as together:
            change.on_failure(partial(self._count_again, self.calls, self.last_merits, self._said_too_large))
            checks.batches("batches", batches)
            checks.loss("loss_fn", loss_fn)
            change.on_failure(remember(self.history, self._strategy, self.options.trigger))
            call = self._call(together, metric, change)
            self.calls = call.number
            looked = call.run(batches, loss_fn)
            if looked is not None:
                self._tell_of(looked)
        return looked.grown[0][1] if looked is not None and looked.grown else None

    @property
    def _in_training(self) -> bool:
        """Whether something trains the model: an expansion before there is an optimizer is one call, and no gradient is there."""
        return self.calls > 0 or any(parameter.grad is not None for parameter in bare(self.model).parameters())

    def _count_again(self, calls: int, merits: Merits | None, said: bool) -> None:
        self.calls, self.last_merits, self._said_too_large = calls, merits, said

    def _call(self, together: Together, metric: Any, change: AllOrNothing) -> Call:
        return Call(
            self.calls + 1, self._agreed_metric(together, metric), self.model, self._example,
            Sizes(bare(self.model), self._example), self.options, self._strategy, self._followers, self._recycling,
            self.history, together, change,
        )  # fmt: skip

    def _tell_of(self, looked: Looked) -> None:
        """Keep the merits; say once that everything would be too large, which without a log nobody would know."""
        room = looked.room
        if looked.merits is not None:
            self.last_merits = looked.merits
        if room.larger and not room.fitting and not self._said_too_large:
            text = f"{self.options.unit} {self.calls}: nothing was inserted, because {room.why_none}. {room.advice}"
            warnings.warn(text, stacklevel=3)
            self._said_too_large = True

    def _agreed_metric(self, together: Together, metric: Any) -> float | None:
        """The mean of the ranks' metrics: a trigger must see the same everywhere. One that no rank has stays None."""
        own = None if metric is None else checks.number("metric", metric)
        counts = {"the number of calls": self.calls, "the number of growths": len(self.history)}
        given = {"metric=": "given" if own is not None else "not given"}
        told = together.agree_on({**given, **counts, **self.options.common}, own, last=False)
        return None if own is None else sum(told) / len(told)

    def sites(self) -> Sites:
        """The sites at which the model could grow now. Call it before training to learn early that there are none.

        Returns:
            The sites in the order of the data flow.

        Raises:
            SensliError: If there are none.
        """
        # One rank may ask alone, unless the parameters have to be put together for it.
        sharded = self.model if is_sharded(bare(self.model)) else None
        with without_inference_mode(), Together(sharded, "find sites") as together:
            sites = proposed(self._strategy, self.model, self._example, self._followers.optimizer, self.options)
            together.agree()
        return sites

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint: calls, history, trigger, random choices. Save the model's tensors yourself."""
        return {
            "calls": self.calls,
            "history": self.history.to_dict(),
            "trigger": self.options.trigger.state_dict(),
            **self._strategy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. The model must have been grown by `replay` of the same history before.

        Args:
            state: What `state_dict` returned.

        Raises:
            HistoryError: If the state is damaged, or belongs to another model or trigger. Nothing was changed.
        """
        calls, history = read(state, bare(self.model), self.state_dict())
        load(state, self._strategy, self.options.trigger)
        self.calls, self.history = calls, history
        self._strategy.attend(bare(self.model), self.optimizers, history)
