"""`Grower`: Algorithm 1 of the paper. Train, look, decide whether and where, insert, train on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sensli.errors import MovedSite, SensliError, ZeroMerits
from sensli.growing.following import Followers
from sensli.growing.logs import Log
from sensli.growing.looked import Looked, keep
from sensli.growing.options import Options
from sensli.growing.recycling import Recycling, reusable
from sensli.growing.room import Room
from sensli.growing.searching import trained
from sensli.growing.sizes import Sizes
from sensli.growing.state import load, read, remember
from sensli.growing.strategies import strategy_of
from sensli.growing.strategies.strategy import Strategy
from sensli.growing.trials.arms import Outcome, Trying
from sensli.growing.trials.trial import Trial
from sensli.growing.trigger import Moment, Trigger
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.merits.ranking import Selection
from sensli.modules import checks
from sensli.modules.engines.distributed import Together, numbered
from sensli.modules.engines.fsdp import is_sharded
from sensli.modules.wrappers import bare
from sensli.moves.choosing import Where, check_where
from sensli.moves.sites import Site, Sites
from sensli.surgery.averaging import Averaged
from sensli.surgery.history.growth import Growth
from sensli.surgery.history.history import History
from sensli.surgery.history.outline import outline
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
        optimizer: The optimizer or optimizers that train the model. Without one nothing trains the new layers.
        example: What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments; keys that ``forward`` does
            not take, such as labels, are left out.
        trigger: When to look, one of `sensli.growing.triggers`, for example ``Every(10) & AtMost(3)``.
        strategy: What is proposed at a look, how it is scored and what is taken: a name that is registered, or a `Strategy` object. The
            options that say where, what and by which merit to grow are those of ``"sensli"``; another strategy uses those that it
            has a use for (default: "sensli").
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
        grow: What to grow: ``"layers"``, ``"units"`` of layers that exist, or ``"both"``, whichever is worth more
            (default: "layers").
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
        freeze_rest: Whether after a growth only the newest layers train, as in `insert` (default: False). Only with
            ``grow="layers"``.
        max_factor: A layer that would bring the model to more than this many times its parameters is left out. None allows
            every layer (default: 2.0).
        floor: Stops growth on a solved problem: once the loss has fallen to a thousandth of the largest one measured so far, a
            change of the new weights by 1 must lower it, to first order, by this share of the largest. 0 turns it off
            (default: 1e-7).
        scheduler: The learning-rate scheduler or schedulers of the optimizer.
        averaged: A `torch.optim.swa_utils.AveragedModel` of the model, or several, that grow with it.
        seed: The random seed of ``select="random"`` (default: 0).
        log: Receives every decision, including those not to insert: a function of a `Look` (``print`` gives one line each), or a
            TensorBoard writer.
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
        grow: str = "layers",
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
        if not self.optimizers:
            warnings.warn(NO_OPTIMIZER, stacklevel=2)

    def __repr__(self) -> str:
        network, grown = bare(self.model), len(self.history)
        size = short_number(sum(parameter.numel() for parameter in network.parameters()))
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
        with ExitStack() as on_failure:
            on_failure.callback(self._count_again, self.calls, self.last_merits)
            with Together(self.model, "step the grower") as together:
                checks.batches("batches", batches)
                checks.loss("loss_fn", loss_fn)
                on_failure.callback(
                    remember(self.model, self.history, self._followers, self._strategy, self.options.trigger)
                )
                growth = self._step(together, batches, loss_fn, metric, on_failure)
            on_failure.pop_all()
        return growth

    def _count_again(self, calls: int, merits: Merits | None) -> None:
        self.calls, self.last_merits = calls, merits

    def _step(
        self,
        together: Together,
        batches: Iterable[Any],
        loss_fn: LossFunction | None,
        metric: Any,
        on_failure: ExitStack,
    ) -> Growth | None:
        metric = self._agreed_metric(together, metric)
        self.calls += 1
        if not self.history.record:
            self.history.record.draw(0, outline(bare(self.model)))
        trigger, looked, look = self.options.trigger, None, None
        fires = bool(trigger.fires(self._moment(metric)))
        together.agree_on({"whether the trigger fires": fires}, last=not fires)
        if fires:
            trigger.looked()
            several = self.options.recycle or self.options.trial is not None
            batches = reusable(batches) if several else batches
            recycled = self._recycle(together, batches)
            looked = self._look(together, batches, loss_fn, metric)
            if looked.merits is not None:
                chosen = self._decide(together, looked.merits, metric)
                outcome = self._try(together, chosen, batches, loss_fn, metric, on_failure)
                if outcome is not None:
                    chosen = [] if outcome.winner is None else [outcome.winner]
                looked.grown = self._grow(together, chosen, metric)
                if outcome is not None:
                    outcome.take_over()
                    trigger.judged(outcome.tried.grew)
                    looked.tried = outcome.tried
                recycled += self._recycle(together, batches, inside=[growth.number for _, growth in looked.grown])
                why = looked.tried or self._strategy.reason(looked.merits, looked.taken)
                looked.reason = f"{why}{looked.room.left_out}"
                looked.rule = "" if looked.tried else self._strategy.rule(looked.merits, looked.taken)
            looked.recycled = recycled
            look = looked.noted(self.calls, self.options, bare(self.model), self._example)
        keep(self.history.record, self.options, bare(self.model), self.calls, metric, look)
        if fires:
            together.agree()
        return looked.grown[0][1] if looked is not None and looked.grown else None

    def _look(
        self, together: Together, batches: Iterable[Any], loss_fn: LossFunction | None, metric: float | None
    ) -> Looked:
        """What the sites that fit are worth; if there is nothing to choose from, the reason."""
        room = Room.of(self._sites(), self.options, self._moment(metric))
        together.agree_on(numbered("site", room.fitting), last=False)
        if not room.fitting:
            if room.larger and not self._said_too_large:  # once: without a log nobody would know
                text = f"{self.options.unit} {self.calls}: nothing was inserted, because {room.why_none}. {room.advice}"
                warnings.warn(text, stacklevel=4)
                self._said_too_large = True
            return Looked(room, reason=room.why_none)
        try:
            self.last_merits = self._strategy.score(self.model, room.fitting, batches, loss_fn)
        except ZeroMerits as nothing:
            warnings.warn(f"{self.options.unit} {self.calls}: nothing was inserted, because {nothing}", stacklevel=4)
            return Looked(room, reason="all merits are zero")
        return Looked(room, self.last_merits, kept=self._strategy.keeps_function())

    def _decide(self, together: Together, merits: Merits, metric: float | None) -> list[Merit]:
        """The merits whose sites the strategy would take, in that order; the same on all ranks."""
        sites = self._strategy.choose(merits, self._moment(metric))
        together.agree_on(numbered("choice", sites), last=False)
        known = {id(merit.site): merit for merit in merits}
        return [known[id(site)] for site in sites]

    def _try(
        self,
        together: Together,
        chosen: Sequence[Merit],
        batches: Iterable[Any],
        loss_fn: LossFunction | None,
        metric: float | None,
        on_failure: ExitStack,
    ) -> Outcome | None:
        """What comes of the best of the chosen growths that the trigger allows, if they are to be tried and there are any."""
        options, moment = self.options, self._moment(metric)
        if options.trial is None:
            return None
        allowed = [merit for merit in chosen if options.trigger.allows(merit.site, moment)]
        candidates = options.trial.candidates_of(allowed)
        if not candidates:
            return None
        trying = Trying(options.trial, self.model, self._followers, self.history, options, self._example, together)
        return trying.run(candidates, batches, loss_fn, on_failure)

    def _grow(self, together: Together, chosen: Sequence[Merit], metric: float | None) -> list[tuple[Merit, Growth]]:
        """Grow at the first ones that the trigger still allows, at most ``count``; at all of them if they are one decision."""
        options, grown = self.options, list[tuple[Merit, Growth]]()
        most = len(chosen) if self._strategy.all_at_once else options.count
        for merit in chosen:
            if len(grown) == most:
                break
            site = self._still_fitting(merit.site) if grown else merit.site
            if site is None or not options.trigger.allows(site, self._moment(metric)):
                continue
            merit_now = replace(merit, site=site)
            growth = self._followers.insert(
                self.model, merit_now, self.history, options, when=self._when, first=not grown
            )
            grown.append((merit, growth))
        if grown:
            options.trigger.grown()
        # Before a sharded model runs for its FLOPs, for which all ranks are needed.
        together.agree_on({"the number of growths": len(self.history)}, last=False)
        return grown

    def _recycle(self, together: Together, batches: Iterable[Any], inside: Sequence[int] | None = None) -> int:
        """Recycle dead units, if that is wanted: all of them, or those in the layers of these growths. How many there were."""
        if not self.options.recycle or (inside is not None and not inside):
            return 0
        return self._recycling.recycle(
            self.model, self._example, batches, together, self.history, when=self._when, inside=inside
        )

    def _still_fitting(self, site: Site) -> Site | None:
        """A site after another growth of the same look, with its costs of now; None if that growth changed what fits there."""
        try:
            return site.move.plan(bare(self.model), site).site
        except MovedSite:
            return None

    @property
    def _when(self) -> dict[str, int]:
        return {self.options.unit: self.calls}

    def _moment(self, metric: float | None) -> Moment:
        return Moment(
            self.calls, metric, self.history.additions, Sizes(bare(self.model), self._example), self.options.grow
        )

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
        with Together(self.model if is_sharded(bare(self.model)) else None, "find sites") as together:
            sites = self._sites()
            together.agree()
        return sites

    def _sites(self) -> Sites:
        found = self._strategy.propose(self.model, self._example)
        sites = trained(bare(self.model), found, self._followers.optimizer, self.options.group)
        if not sites:
            where = self.options.where
            asked = "" if where is None else f" for where={where!r}"
            raise SensliError(f"there is nowhere to grow{asked} in this {type(self.model).__name__}. {sites.explain()}")
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
