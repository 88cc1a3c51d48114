"""`Grower`: Algorithm 1 of the paper. Train, look, decide whether and where, insert, train on.

The story of a step is `Grower.step` at the end of this file, and `Call.run`: ask the trigger, look, decide, try, grow, note.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from sensli.errors import BadExample, HistoryError, MeasurementError, MovedSite, SensliError, ZeroMerits
from sensli.growing.following import Followers, Recycling, first_input, loss_of_some, reusable_batches
from sensli.growing.looking import Room, Sizes, propose_sites
from sensli.growing.options import (
    ON_BLOCKS,
    Log,
    Options,
    Rates,
    StrategyOptions,
    Trial,
    leaves_open,
    tell_log,
)
from sensli.growing.price import CheckPrice
from sensli.growing.strategy import Strategy, strategy_of
from sensli.growing.trials import Outcome, Trying
from sensli.growing.triggers import Trigger, TriggerContext
from sensli.growing.watching import NOTHING_WATCHED, Watch, Watching, check_watchable
from sensli.merits.catching import LossFunction
from sensli.merits.merits import LEAST, Merit, Merits
from sensli.merits.probe import check_scaler
from sensli.modules import checks
from sensli.modules.engines.all_or_nothing import AllOrNothing
from sensli.modules.engines.distributed import Together, number_facts
from sensli.modules.grown import grown_modules
from sensli.modules.running import without_inference_mode
from sensli.modules.wrappers import bare, is_sharded, own_parameters
from sensli.moves.sites import Site, Sites, check_where
from sensli.moves.stacking import find_stack_copies
from sensli.surgery.averaging import Averaged
from sensli.surgery.history import Growth, History, current_names
from sensli.surgery.optimizers import Optimizers
from sensli.surgery.outline import outline
from sensli.surgery.rates import Schedulers
from sensli.surgery.record import Decision, Record, Tried
from sensli.surgery.warmup import steps_of_warmup, watch_loaded, watch_steps
from sensli.text.commands import UNMEASURED
from sensli.text.tables import short_number

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class Looked:
    """What a look found, why it ended as it did, and what was inserted for which merit."""

    room: Room
    merits: Merits | None = None  # None where there was nothing to choose from
    reason: str = ""
    grown: list[tuple[Merit, list[Growth]]] = field(default_factory=list)  # a decision may be of several parts
    recycled: int = 0  # units
    tried: Tried | None = None
    kept: bool = True  # the function
    rule: str = ""  # by which the place was taken, where the merit did not decide it

    @property
    def taken(self) -> list[Merit]:
        """The merits that were taken."""
        return [merit for merit, _ in self.grown]

    def noted(self, call: int, options: Options, sizes: Sizes) -> Decision:
        """What the page and the log show. FLOPs are counted after a growth only."""
        flops = sizes.flops_for_log() if self.grown else None
        grown = [growths for _, growths in self.grown]
        if flops is not None:
            flops -= sum(growth.site.flops for growths in grown for growth in growths)
        return Decision.of(
            self.merits, self.taken, call=call, tau=options.tau, select=options.selection,
            reason=self.reason + (f"; dead units recycled: {self.recycled}" if self.recycled else ""),
            growths=tuple(growth.number for growths in grown for growth in growths),
            added=tuple(sum(growth.site.parameters for growth in growths) for growths in grown),
            parameters=self.room.parameters, flops=flops, per=options.per, step_name=options.step_name,
            tried=self.tried, kept=self.kept, rule=self.rule,
        )  # fmt: skip


def keep(
    record: Record, options: Options, network: nn.Module, call: int, metric: float | None, look: Decision | None
) -> None:
    """Record a call, and the look if there was one, which the log is told."""
    record.step_name = options.step_name
    record.count(call, metric)
    if look is not None:
        record.decisions.append(look)
        if look.growths or look.parameters != record.drawn_parameters:  # or whoever undid a growth meanwhile
            keep_drawing(record, call, network)
        tell_log(options.log, look)
        if hint := hint_of(record.decisions, options):
            warnings.warn(hint, stacklevel=4)  # at the call of `step`


MANY = 5  # checks in a row without a growth, after which a hint is due


def hint_of(looks: Sequence[Decision], options: Options) -> str:
    """Why nothing grows and what to change, when so many checks in a row have grown nothing for the first time; empty otherwise."""
    longest = longest_before = current = 0
    for look in looks:
        current = 0 if look.growths else current + 1
        longest_before, longest = longest, max(longest, current)
    if current != MANY or longest_before >= MANY:
        return ""
    last = looks[-1]
    best = last.merits[0] if last.merits else None
    if best is not None and best.ratio is not None and best.ratio < options.tau:
        ratios = [merit.ratio for look in looks[-MANY:] for merit in look.merits if merit.ratio is not None]
        advice = f"The largest ratio was {max(ratios):.2g}: give a smaller tau, or leave it to preset='auto'"
    elif "payoff" in last.reason:
        instead = "give trigger=triggers.Pays(1) or triggers.Every(10)"
        advice = f"The network may be large enough. To grow nevertheless, {instead}"
    elif "max_factor" in last.reason:
        advice = "Give a larger max_factor"
    elif "limits" in last.reason:
        advice = "Give the trigger larger limits"
    else:
        return ""
    return f"{options.step_name} {last.call}: {MANY} checks in a row have grown nothing. The last: {last.reason}. {advice}."


def keep_drawing(record: Record, call: int, network: nn.Module) -> None:
    """Keep a drawing of the model for the page. One that fails warns: nothing depends on it but the page."""
    try:
        record.draw(call, outline(network))
    except Exception as error:
        warnings.warn(
            f"the model could not be drawn for the page of the training: {type(error).__name__}: {error}", stacklevel=5
        )


# ---- One call of `Grower.step`: ask the trigger, and if it fires look, decide, try, grow and note what came of it.

Batches = Iterable[Any] | Watching  # what merits are taken from


@dataclass(frozen=True)
class Call:
    """What one call works with. It changes the model, what follows it and the history; the caller takes all back if it raises."""

    number: int  # from 1
    metric: float | None  # what was given, the same on all ranks
    watched: float | None  # what the triggers watch: the metric, or what stands for it
    steps: int | None  # of the optimizer, that all ranks have taken; None if nobody counts them
    model: nn.Module  # or its wrapper
    example: Any
    sizes: Sizes  # counted again after a growth
    options: Options
    strategy: Strategy
    followers: Followers
    recycling: Recycling
    history: History
    together: Together
    change: AllOrNothing  # takes everything back if the call raises
    price: CheckPrice

    def run(self, batches: Batches, loss_fn: LossFunction | None) -> Looked | None:
        """What the look came to, or None if the trigger did not fire; recorded either way."""
        if not self.history.record:
            keep_drawing(self.history.record, 0, bare(self.model))
        fires = bool(self.options.trigger.fires(self._context))
        self.together.agree_on({"whether the trigger fires": fires}, last=not fires)
        waited, most = self.price.skipped, self._affordable(batches) if fires else None
        if most == 0:
            self.price.skipped = waited + 1
        looks = fires and most != 0
        if looks and self.price.share is not None and not isinstance(batches, Watching):
            batches = self.price.counted(batches, most)
        looked = self._looked(batches, loss_fn) if looks else None
        if looked is not None and (waited or most is not None):
            looked.reason += self._spared(waited, most)
        look = None if looked is None else looked.noted(self.number, self.options, self.sizes)
        if look is not None and not self.history.record.decisions and self.options.preset != "paper":
            look = replace(look, preset=str(self.options))
        metric = self.metric
        if self.watched is not None and looked is not None and looked.merits is not None and metric is None:
            metric = looked.merits.loss
        keep(self.history.record, self.options, bare(self.model), self.number, metric, look)
        if fires:
            self.together.agree()
        return looked

    def _affordable(self, batches: Batches) -> int | None:
        """How many batches all ranks can afford: None for all of them, 0 if the check must wait."""
        if self.price.share is None or isinstance(batches, Watching):
            return None
        told = self.together.agree(self.price.affordable(batches), last=False)
        known = [most for most in told if most is not None]
        return min(known) if known else None

    def _spared(self, waited: int, most: int | None) -> str:
        """What a reason adds about the price of checks."""
        share = f"max_check_share = {self.price.share:g}"
        fewer = f"; measured on {most} batches only, as {share} allows" if most is not None else ""
        return fewer + (f"; checks that had to wait for {share}: {waited}" if waited else "")

    def _looked(self, batches: Batches, loss_fn: LossFunction | None) -> Looked:
        """All that a look does."""
        self.followers.keep(self.change, self.model, self.history)
        self.options.trigger.looked()
        several = self.options.recycle or self.options.trial is not None or self.options.select == LEAST  # passes
        if several and not isinstance(batches, Watching):
            batches = reusable_batches(batches)
        recycled = self._recycle(batches)
        looked = self._look(batches, loss_fn)
        if looked.merits is not None:
            chosen = self._decide(looked.merits)
            self._grow_by_trial(looked, chosen, batches, loss_fn)
            numbers = [growth.number for _, growths in looked.grown for growth in growths]
            recycled += self._recycle(batches, inside=numbers)
            refused = self.options.trigger.refusal(self._context_of(chosen[0])) if chosen and not looked.grown else ""
            why = looked.tried or refused or self.strategy.reason(looked.merits, looked.taken)
            looked.reason = f"{why}{looked.room.left_out}"
            looked.rule = "" if looked.tried else self.strategy.rule(looked.merits, looked.taken)
        looked.recycled = recycled
        return looked

    def _look(self, batches: Batches, loss_fn: LossFunction | None) -> Looked:
        """What the sites that fit are worth; if there is nothing to choose from, the reason."""
        if isinstance(batches, Watching):
            sites = batches.sites
        else:
            optimizer = self.followers.optimizer
            sites = propose_sites(self.strategy, self.model, self.example, optimizer, self.options)
        room = Room.of(sites, self.options, self._context)
        self.together.agree_on(number_facts("site", room.fitting), last=False)
        if not room.fitting:
            return Looked(room, reason=room.why_none)
        try:
            if isinstance(batches, Watching):
                merits = batches.merits_of(room.fitting)
            else:
                merits = self.strategy.score(self.model, room.fitting, batches, loss_fn)
        except ZeroMerits as nothing:
            text = f"{self.options.step_name} {self.number}: nothing has grown, because {nothing}"
            warnings.warn(text, stacklevel=5)  # at the call of `step`
            return Looked(room, reason="all merits are zero")
        return Looked(room, merits, kept=self.strategy.keeps_function())

    def _decide(self, merits: Merits) -> list[Merit]:
        """The merits whose sites the strategy would take, in that order; the same on all ranks."""
        sites = self.strategy.choose(merits, self._context)
        self.together.agree_on(number_facts("choice", sites), last=False)
        known = {id(merit.site): merit for merit in merits}
        return [known[id(site)] for site in sites]

    def _grow_by_trial(
        self, looked: Looked, chosen: Sequence[Merit], batches: Batches, loss_fn: LossFunction | None
    ) -> None:
        """Grow what was chosen; where growths are tried first, what won, with the values it ended with."""
        measured = looked.merits is not None and looked.merits.norm != UNMEASURED
        outcome = self._try(chosen, batches, loss_fn)
        if outcome is None:
            looked.grown = self._grow(chosen, measured)
            return
        looked.grown = self._grow([] if outcome.winner is None else [outcome.winner], measured)
        outcome.take_over()
        self.options.trigger.judged(outcome.tried.grew)
        looked.tried = outcome.tried

    def _try(self, chosen: Sequence[Merit], batches: Batches, loss_fn: LossFunction | None) -> Outcome | None:
        """What comes of the best of the chosen growths that the trigger allows, if they are to be tried and there are any."""
        options, trial = self.options, self.options.trial
        if trial is None:
            return None
        candidates = trial.candidates_of(
            [merit for merit in chosen if options.trigger.allows(merit.site, self._context_of(merit))]
        )
        if not candidates:
            return None
        trying = Trying(trial, self.model, self.followers, self.history, options, self.sizes["flops"], self.together)
        # Where steps were watched it has batches of its own.
        return trying.run(candidates, () if isinstance(batches, Watching) else batches, loss_fn, self.change)

    def _grow(self, chosen: Sequence[Merit], measured: bool) -> list[tuple[Merit, list[Growth]]]:
        """Grow at the first ones that the trigger still allows, at most ``max_growths``; at all of them if they are one decision."""
        options, grown = self.options, list[tuple[Merit, list[Growth]]]()
        most = len(chosen) if self.strategy.all_at_once else options.max_growths
        for merit in chosen:
            if len(grown) == most:
                break
            site = self._still_fitting(merit.site) if grown else merit.site
            if site is None:
                continue
            merit_now = replace(merit, site=site)
            if not options.trigger.allows(site, self._context_of(merit_now)):
                continue
            growths = self.followers.insert(
                self.model, merit_now, self.history, options, when=self._when, first=not grown, measured=measured
            )
            grown.append((merit, growths))
            self.sizes.forget()
        if grown:
            options.trigger.grown()
        # Before a sharded model runs for its FLOPs, for which all ranks are needed.
        self.together.agree_on({"the number of growths": len(self.history)}, last=False)
        return grown

    def _recycle(self, batches: Batches, inside: Sequence[int] | None = None) -> int:
        """Recycle dead units, if that is wanted: all of them, or those in the layers of these growths. How many there were."""
        if isinstance(batches, Watching) or not self.options.recycle or (inside is not None and not inside):
            return 0
        return self.recycling.recycle(
            self.model, self.example, batches, self.together, self.history, when=self._when, inside=inside,
            warmup=steps_of_warmup(self.options.rates.warmup, self.followers.optimizer),
        )  # fmt: skip

    def _still_fitting(self, site: Site) -> Site | None:
        """A site after another growth of the same look, with its costs of now; None if that growth changed what fits there."""
        try:
            return site.move.plan(bare(self.model), site).site
        except MovedSite:
            return None

    def _context_of(self, merit: Merit) -> TriggerContext:
        """The context, with what was measured of the site in question."""
        return replace(self._context, merit=merit)

    @property
    def _when(self) -> dict[str, int]:
        return {self.options.step_name: self.number}

    @property
    def _context(self) -> TriggerContext:
        """What triggers and strategies are told, as it is now."""
        return TriggerContext(
            self.number, self.watched, self.history.additions, self.sizes, self.options.what, steps=self.steps
        )


# ---- The state of a Grower: remembered in case a step fails, and read from a checkpoint, checked before anything is
# changed.

_NEWER = {"largest_loss", "price"}  # states that were saved earlier lack it


def remember_state(history: History, strategy: Strategy, trigger: Trigger, price: CheckPrice) -> Callable[[], None]:
    """How to put back what a step changes of a Grower itself."""
    record = history.record.copied()
    chosen, fired = strategy.state_dict(), trigger.state_dict()
    steps, paid = price.steps, None if price.share is None else price.state_dict()

    def put_back() -> None:
        history.record.become(record)
        strategy.load_state_dict(chosen)
        price.steps = steps  # a trial takes some
        if paid is not None:
            price.load_state_dict(paid)
        if trigger.state_dict() != fired:
            trigger.load_state_dict(fired)

    return put_back


def read_state(state: Mapping[str, Any], network: nn.Module, wanted: Collection[str]) -> tuple[int, History]:
    """Calls and history of a state that has the keys in ``wanted`` and belongs to this network."""
    checks.instance("state", state, Mapping, "what Grower.state_dict() returned", error=HistoryError)
    missing = set(wanted) - _NEWER - set(state)
    if missing:
        raise HistoryError(f"Not a state of a Grower: the keys {sorted(missing)} are missing. Use an intact copy.")
    with _reading():
        history, calls = History.from_dict(state["history"]), state["calls"]
        if type(calls) is not int or not 0 <= calls < 2**63:
            raise ValueError(f"calls is {calls!r}")
        _check_grown(network, history)
        return calls, history


def load_states(state: Mapping[str, Any], strategy: Strategy, trigger: Trigger, price: CheckPrice) -> None:
    """Give strategy, trigger and price their states, or raise and leave them as they were."""
    before, paid = strategy.state_dict(), price.state_dict()
    with AllOrNothing() as change, _reading():
        change.on_failure(partial(price.load_state_dict, paid))
        price.load_state_dict(state.get("price", {}))
        strategy.load_state_dict(state)
        change.on_failure(partial(strategy.load_state_dict, before))
        try:
            trigger.load_state_dict(state["trigger"])
        except Exception as error:
            raise HistoryError(
                f"the state belongs to a trigger other than {trigger!r}. Make the Grower with the trigger it was saved with."
            ) from error


@contextmanager
def _reading() -> Iterator[None]:
    """Whatever the parts of a damaged state raise becomes one error."""
    try:
        yield
    except SensliError:
        raise
    except Exception as error:
        raise HistoryError(
            f"the state of the Grower is damaged: {type(error).__name__}: {error}. Use an intact copy."
        ) from error


def _check_grown(network: nn.Module, history: History) -> None:
    names = [name for name, _ in network.named_parameters()]
    numbers = [number for number, _, _ in grown_modules(network)]
    lacking = [str(name) for name in current_names(history) if name not in names]
    lacking += [f"growth {growth.number}" for growth in history if growth.number not in numbers]
    if lacking:
        raise HistoryError(
            f"the model lacks {lacking[0]}: it has not grown as this state says. "
            "Call replay(model, History.from_dict(state['history'])) before loading the state."
        )


NO_OPTIMIZER = (
    "this Grower has no optimizer, so nothing will train the layers that it inserts. Give Grower(model, optimizer, ...), or add the "
    "parameters that growth.parameters names to your optimizer yourself after each growth."
)


OPEN = "preset='auto': decides at the first step between copies of blocks and units"
FEW = 8  # batches whose loss stands for a metric that was not given
_KEPT = ("max_factor", "rates", "seed", "log", "step_name", "max_check_share")  # options that do not say how to grow


class Grower:
    """Grows a model between epochs: call `step` once per epoch, and continue training whether it grew or not.

    On a call on which the trigger fires, the merits of all sites are measured, and the best one is taken if it is worth it. A model
    may be wrapped in DistributedDataParallel: then all processes call `step`, each with its own batches, and all grow alike.

    Args:
        model: The network to grow, or its wrapper.
        optimizer: The optimizer or optimizers that train the model. Without one nothing trains what is new; none is needed for an
            expansion before the optimizer is made.
        preset: ``"auto"`` is what we recommend. A stack of equal blocks, as in a transformer, doubles by copies of its blocks when it has
            nearly learned what it can, after 1,000 steps of the optimizer: ``Saturating``. Every other model gets units, those that
            are worth most for their FLOPs, when they pay for them or training has slowed down, at growing distances:
            ``(Pays() | Diminishing()) & Spaced()``. Both stop at ten times the parameters. It is decided at the first step, unless you
            say what to grow. ``"paper"`` is Algorithm 1 of the paper: layers whose merit is at least the mean over the existing weights,
            when the trigger that you give fires. Every other argument overrides it (default: "auto").
        trigger: When to check, one of `sensli.triggers`, for example ``Every(10) & Limit(growths=3)``. None takes that of the preset.
        strategy: What is proposed at a check, how it is scored and what is taken: a name that is registered, such as ``"stack"``, which
            copies whole stacks of blocks, or a `Strategy` object. None takes that of the preset, or ``"sensli"``.
        example: What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments; keys that ``forward`` does
            not take, such as labels, are left out. None takes the first batch that `step` is given.
        max_factor: A growth that would bring the model to more than this many times its parameters is left out. None allows
            every growth (default: 2.0).
        rates: A `Rates`: what a growth does to learning rates and parameter groups. None changes no learning rate, but the units of
            ``preset="auto"`` warm up under Adam and its relatives.
        trial: A `Trial`: at each check the best candidates, and the model without a growth, train on for a while from the same state,
            and the best of them stays. Only with ``max_growths=1``. None grows without one.
        recycle: Whether each check begins with a new start for dead units, as `sensli.recycle` gives it; after a growth also for those
            that a new layer has inherited (default: False).
        scheduler: The learning-rate scheduler or schedulers of the optimizer.
        averaged: A `torch.optim.swa_utils.AveragedModel` of the model or of a part of it, or several, that grow with it. Those that the
            model holds itself need not be given.
        log: Receives every decision, including those not to grow: a function of a `Decision` (``print`` gives one line each), a
            TensorBoard writer, or a list of these.
        step_name: What one call of `step` is called in the log, the history and the page: ``"epoch"`` or ``"step"`` (default: "epoch").
        **options: Those of the strategy, `StrategyOptions`: ``what``, ``where``, ``units``, ``tau``, ``norm``, ... One that the
            strategy has no use for is refused, with those that it uses.

    Raises:
        ValueError: If an argument is wrong; the message names it. A wrong type raises `WrongType`, which is a ValueError too.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        preset: str = "auto",
        trigger: Trigger | None = None,
        strategy: str | Strategy | None = None,
        example: Any = None,
        max_factor: float | None = 2.0,
        rates: Rates | None = None,
        trial: Trial | None = None,
        recycle: bool = False,
        scheduler: Schedulers = None,
        averaged: Averaged = None,
        log: Log = None,
        step_name: str = "epoch",
        **options: Unpack[StrategyOptions],
    ) -> None:
        self._default_rates = rates is None
        self.options = Options.of(
            preset, trigger=trigger, strategy=strategy, max_factor=max_factor, rates=rates,
            trial=trial, recycle=recycle, log=log, step_name=step_name, **options,
        )  # fmt: skip
        if example is not None:
            checks.example("example", example)
        self._followers = Followers(optimizer, scheduler, averaged)
        self._followers.check(model, self.options)
        check_where(self.options.where, bare(model))
        self.model = model
        self.history = History()
        self.last_merits: Merits | None = None  # of the last check, also where nothing has grown
        self.calls = 0
        self._example = example
        self._metric_optional = trigger is None  # that of the preset can do without
        # Whether the first step decides how the model grows.
        self._open = leaves_open(preset, strategy, options, trial=trial, recycle=recycle)
        self._on_blocks = False  # whether it has decided for copies of blocks
        self._strategy: Strategy = strategy_of(self.options)
        self._recycling = Recycling(self._followers)
        self._watching = Watching(model, self._strategy, self.options, self._followers)
        self._price = CheckPrice(self.options.max_check_share, self.optimizers)
        self._said_too_large = False
        self._strategy.attend(bare(model), self.optimizers, self.history)
        self._said_no_optimizer = bool(self.optimizers)
        if self.options.rates.warmup is not None:
            watch_loaded(self.optimizers)
            watch_steps(self.optimizers)

    def __repr__(self) -> str:
        network, grown = bare(self.model), len(self.history)
        size = short_number(sum(parameter.numel() for parameter in own_parameters(network)))
        return (
            f"Grower({type(network).__name__} with {size} parameters, {OPEN if self._open else self.options}, "
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

    def watch(self, *, scaler: torch.amp.GradScaler | None = None) -> Watch:
        """Take the merits of the next check from the training steps inside the context, without an extra pass.

            with grower.watch():
                loss = loss_fn(model(x), y)
                optimizer.zero_grad(); loss.backward(); optimizer.step()
            ...
            grower.step(metric=loss.item())  # no batches: decides by what was watched

        Watch as many steps before a call of `step` as you like, such as the last eight: one update in each context, all its batches if
        gradients are accumulated. Merits are those of the mean gradient over these steps, during which the weights move. With weights that
        stand still they are those of `measure` on the same batches. Hooks are there inside the context only, and not even there if the
        trigger cannot fire on the next call. What was watched is not saved in a checkpoint; a step that raises is left out.

        Args:
            scaler: The `torch.amp.GradScaler` that scales the loss. Without it merits are those of the scaled loss; their ratios are the
                same.

        Returns:
            The context. ``add_loss`` of it notes the loss of a batch, which tells when a problem is solved.

        Raises:
            SensliError: If the strategy or an option needs passes of its own, or there is nowhere to grow.
        """
        self._open = False  # what is watched are merits, so "auto" is what grows by them: units
        check_watchable(self._strategy, self.options)
        check_scaler(scaler)
        self._watching.asked = True
        idle = not self._watching.may_fire(self._may_fire)
        return Watch(self._watching, self._example, scaler, idle=idle)

    def add_steps(self, count: int) -> None:
        """Count steps that the optimizer took before this Grower was made: ``Saturating(steps=...)`` waits for so many.

        Args:
            count: How many.
        """
        self._price.steps += checks.whole("count", count, 1000, least=0)

    @property
    def has_watched(self) -> bool:
        """Whether `watch_steps` was called since the last call of `step`, which then decides by what was watched."""
        return self._watching.asked

    def _may_fire(self) -> bool:
        sizes = Sizes(bare(self.model), self._example)
        context = TriggerContext(self.calls + 1, None, self.history.additions, sizes, self.options.what)
        return self.options.trigger.may_fire(context)

    def step(
        self, batches: Iterable[Any] | None = None, loss_fn: LossFunction | None = None, *, metric: float | None = None
    ) -> Growth | None:
        """Count one epoch; if the trigger fires, measure, decide and grow.

        A call that raises does not count, and leaves the model and all that follows it as they were; with several processes, on
        all of them.

        Args:
            batches: The data to measure on: yields ``(input, target)`` pairs or dicts of keyword arguments. None decides by the steps that
                `watch_steps` has watched since the last call.
            loss_fn: The mean loss of a batch, as in `measure`. None uses ``output.loss``.
            metric: The number that triggers watch: the mean training loss of the epoch, or a validation loss. Without it the trigger of
                the preset goes by the losses of its own checks.

        Returns:
            The growth (with ``max_growths`` > 1 or ``what="uniform"`` the first one; `history` has all), or None if nothing has grown.
        """
        if not self._said_no_optimizer and self._in_training:
            warnings.warn(NO_OPTIMIZER, stacklevel=2)
            self._said_no_optimizer = True
        # No decorator: warnings are to name the caller's line.
        with without_inference_mode(), AllOrNothing() as change, Together(self.model, "step the grower") as together:
            change.on_failure(partial(self._count_again, self.calls, self.last_merits, self._said_too_large))
            source = self._source(batches)
            checks.loss("loss_fn", loss_fn)
            change.on_failure(remember_state(self.history, self._strategy, self.options.trigger, self._price))
            source = self._take_example(together, source)
            self._settle(change)
            if metric is None and self._metric_optional and self._on_blocks and not isinstance(source, Watching):
                source = reusable_batches(source)
                few = self._price.affordable_losses(FEW)
                metric = loss_of_some(self.model, source, loss_fn, few) if few else None
            call = self._call(together, metric, change)
            self.calls = call.number
            looked = call.run(source, loss_fn)
            if looked is not None:
                self._tell_of(looked)
        self._watching.forget()
        return looked.grown[0][1][0] if looked is not None and looked.grown else None

    def _source(self, batches: Iterable[Any] | None) -> Batches:
        """What the merits are taken from: the batches that were given, or the steps that were watched."""
        if self._watching.is_open:
            raise SensliError("grower.step was called inside of `with grower.watch()`. Leave that `with` block first.")
        if batches is None and not self._watching.asked:
            raise MeasurementError(NOTHING_WATCHED)
        if batches is not None and self._watching.asked:
            raise SensliError(
                "batches must be left out where steps were watched since the last call: the check decides by these. Give batches, or use "
                "grower.watch(), but not both."
            )
        return self._watching if batches is None else checks.batches("batches", batches)

    def _take_example(self, together: Together, batches: Batches) -> Batches:
        """Take the example from the first batch if none is known, that of the first rank on all of them. The batches, all of them."""
        if self._example is None and not isinstance(batches, Watching):
            found, batches = first_input(self.model, batches)
            self._example = together.agree(found, last=False)[0]
        return batches

    def _settle(self, change: AllOrNothing) -> None:
        """Decide, where it was left open, what "auto" is for this model: copies of blocks if it has a stack of them, otherwise units."""
        if not self._open or self._example is None:
            return
        change.on_failure(partial(self._become, self.options, self._strategy, self._watching, self._on_blocks, True))
        self._open = False
        try:
            on_blocks = bool(find_stack_copies(self.model, self._example))
        except SensliError:  # the check says what is wrong
            on_blocks = False
        if on_blocks:
            self._take_blocks()

    def _take_blocks(self) -> None:
        """From now on what "auto" is for a stack of blocks."""
        kept = {each.name: getattr(self.options, each.name) for each in fields(Options) if each.name in _KEPT}
        if self._default_rates:
            kept["rates"] = Rates()  # blocks have moments of their own
        trigger = None if self._metric_optional else self.options.trigger
        options = Options.of("auto", trigger=trigger, **ON_BLOCKS, **kept)
        strategy = strategy_of(options)
        strategy.attend(bare(self.model), self.optimizers, self.history)
        self._become(options, strategy, Watching(self.model, strategy, options, self._followers), True, False)

    def _become(self, options: Options, strategy: Strategy, watching: Watching, on_blocks: bool, is_open: bool) -> None:
        self.options, self._strategy, self._watching = options, strategy, watching
        self._on_blocks, self._open = on_blocks, is_open

    @property
    def _in_training(self) -> bool:
        """Whether something trains the model: an expansion before there is an optimizer is one call, and no gradient is there."""
        return self.calls > 0 or any(parameter.grad is not None for parameter in bare(self.model).parameters())

    def _count_again(self, calls: int, merits: Merits | None, said: bool) -> None:
        self.calls, self.last_merits, self._said_too_large = calls, merits, said

    def _call(self, together: Together, metric: Any, change: AllOrNothing) -> Call:
        agreed, steps = self._agreed(together, metric)
        return Call(
            self.calls + 1, agreed, self._watched(agreed), steps, self.model, self._example,
            Sizes(bare(self.model), self._example), self.options, self._strategy, self._followers, self._recycling,
            self.history, together, change, self._price,
        )  # fmt: skip

    def _tell_of(self, looked: Looked) -> None:
        """Keep the merits; say once that everything would be too large, which without a log nobody would know."""
        room = looked.room
        if looked.merits is not None:
            self.last_merits = looked.merits
        if room.larger and not room.fitting and not self._said_too_large:
            text = f"{self.options.step_name} {self.calls}: nothing has grown, because {room.why_none}. {room.advice}"
            warnings.warn(text, stacklevel=3)
            self._said_too_large = True

    def _agreed(self, together: Together, metric: Any) -> tuple[float | None, int | None]:
        """The mean of the ranks' metrics, and the least of their steps: a trigger must see the same everywhere."""
        own = None if metric is None else checks.number("metric", metric)
        counts = {"the number of calls": self.calls, "the number of growths": len(self.history)}
        given = {"metric=": "not given" if own is None else "given", "grower.watch()": self._watching.asked}
        told = together.agree_on({**given, **counts, **self.options.common}, (own, self._price.steps), last=False)
        metrics, steps = zip(*told, strict=True)
        return None if own is None else sum(metrics) / len(metrics), min(steps) or None

    def _watched(self, metric: float | None) -> float | None:
        """What the triggers watch. That of a preset can do without a metric: it gets the loss of the last check, which is in the record."""
        if metric is not None or not self._metric_optional:
            return metric
        known = self.history.record.metrics
        found = known[-1][1] if known and known[-1][0] == self.calls else None
        return math.nan if found is None else found

    def sites(self) -> Sites:
        """The sites at which the model could grow now. Call it before training to learn early that there are none.

        Returns:
            The sites in the order of the data flow.

        Raises:
            SensliError: If there are none.
        """
        # One rank may ask alone, unless the parameters have to be put together for it.
        sharded = self.model if is_sharded(bare(self.model)) else None
        if self._example is None:
            raise BadExample(
                "the sites are found by running the model, and no example is known before the first step. Give Grower(..., example=x[:1])."
            )
        with without_inference_mode(), AllOrNothing() as change, Together(sharded, "find sites") as together:
            self._settle(change)
            sites = propose_sites(self._strategy, self.model, self._example, self._followers.optimizer, self.options)
            together.agree()
        return sites

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint: calls, history, trigger, random choices. Save the model's tensors yourself."""
        return {
            "calls": self.calls,
            "history": self.history.to_dict(),
            "trigger": self.options.trigger.state_dict(),
            **self._strategy.state_dict(),
            **({"price": paid} if (paid := self._price.state_dict()) else {}),
            **({"on_blocks": True} if self._on_blocks else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. The model must have been grown by `replay` of the same history before.

        Args:
            state: What `state_dict` returned.

        Raises:
            HistoryError: If the state is damaged, or belongs to another model or trigger. Nothing was changed.
        """
        before = self.options, self._strategy, self._watching, self._on_blocks, self._open
        try:
            if self._open and isinstance(state, Mapping) and state.get("on_blocks") is True:
                self._take_blocks()
            calls, history = read_state(state, bare(self.model), self.state_dict())
            load_states(state, self._strategy, self.options.trigger, self._price)
        except BaseException:
            self._become(*before)
            raise
        self._open = self._open and calls == 0
        self.calls, self.history = calls, history
        self._watching.forget()
        self._strategy.attend(bare(self.model), self.optimizers, history)
        watch_steps(self.optimizers)
