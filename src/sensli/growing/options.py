"""How to grow: presets, and the options of `Grower` and of the callbacks, one frozen object that checks itself."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn, Protocol, TypedDict, runtime_checkable

from torch import nn

from sensli.errors import UnsupportedModel, WrongType
from sensli.growing.price import AUTO, check_share
from sensli.growing.saturating import Saturating
from sensli.growing.strategy import STRATEGIES, Strategy, check_strategy, strategy_class
from sensli.growing.triggers import Diminishing, Limit, Pays, Spaced, Trigger
from sensli.merits.measuring import check_level
from sensli.merits.merits import BY_MERIT, LEAST, Merit, Selection, check_per, check_selection
from sensli.merits.norms import choose_norm
from sensli.modules import checks
from sensli.modules.wrappers import is_sharded
from sensli.moves.finding import Init, check_init, check_request, check_units
from sensli.moves.sites import Where, check_where
from sensli.moves.stacking import check_copies
from sensli.moves.twin.twins import INITS
from sensli.moves.width.starts import STARTS
from sensli.surgery.optimizers import Optimizers, check_group, check_needed, check_optimizers
from sensli.surgery.rates import (
    Schedulers,
    check_factor,
    check_own_factor,
    check_own_rate,
    check_power,
    plan_rate_scaling,
)
from sensli.surgery.record import STEP_NAMES, Decision
from sensli.surgery.warmup import check_step_hooks, check_warmup
from sensli.text.commands import GROW, UNIFORM

# ---- Where decisions go while a training runs: any callable, a writer of TensorBoard scalars, or several of them.


@runtime_checkable
class ScalarWriter(Protocol):
    """What we use of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...
    def add_text(self, tag: str, text_string: str, global_step: int) -> Any: ...


OneLog = Callable[[Decision], Any] | ScalarWriter
Log = OneLog | Sequence[OneLog] | None


def check_log(log: Log) -> None:
    """Refuse what is neither, before any training."""
    for one in _each(log):
        writer = isinstance(one, ScalarWriter)
        if isinstance(one, type) if writer else not callable(one):  # the class of a writer can be called too
            what = "a function that takes one Decision (for example print), a writer with add_scalar and add_text, or a list of these"
            checks.refuse("log", what, one, WrongType)


def tell_log(log: Log, look: Decision) -> None:
    """Hand a decision on. A log that fails warns: the model has grown already, and training must go on."""
    for one in _each(log):
        try:
            if isinstance(one, ScalarWriter):
                _write(one, look)
            else:
                one(look)
        except Exception as error:
            warnings.warn(f"the log of the Grower failed: {type(error).__name__}: {error}", stacklevel=5)


def _each(log: Log) -> Sequence[Any]:
    if log is None:
        return ()
    return log if isinstance(log, (list, tuple)) else (log,)


def _write(writer: ScalarWriter, look: Decision) -> None:
    for merit in look.merits if look.measured else ():
        writer.add_scalar(f"sensli/merit/{merit.site}", merit.value, look.call)
    if look.merits and look.merits[0].ratio is not None:
        writer.add_scalar("sensli/best ratio", look.merits[0].ratio, look.call)
    if look.parameters_after is not None:
        writer.add_scalar("sensli/parameters", look.parameters_after, look.call)
    if look.tried is not None:
        writer.add_scalar("sensli/trial FLOPs", look.tried.flops, look.call)
        writer.add_scalar("sensli/lost FLOPs", look.tried.lost, look.call)
    writer.add_text("sensli/decision", str(look), look.call)


# ---- `Trial`: how candidates are tried at a look, checked when it is made.


EXTRAS = ("scheduler", "averaged")  # what a step may ask for by name
MODES = ("min", "max")
_STEP = "a function of model, optimizer and batch (and, if it names them, scheduler and averaged) that trains one step and returns the loss"
_METRIC = "a function of the model that returns a number"


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
        self.metric = None if metric is None else _taking("metric", metric, _METRIC, 1)
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
    if not callable(value) or isinstance(value, type):
        checks.refuse(name, what, value, WrongType)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # of some functions that are not Python's nobody knows it
        return value
    try:
        signature.bind(*(None,) * count, **dict.fromkeys(named_arguments(value, extras)))
    except TypeError as error:
        given = f"{getattr(value, '__name__', type(value).__name__)}{signature}"
        raise ValueError(f"{name} must be {what}, got {given}: {error}.") from None
    return value


def named_arguments(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Those of the names that the function has arguments of."""
    try:
        return [name for name in names if name in inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return []


def _stateful(given: Any) -> tuple[Any, ...]:
    what = "a sequence of objects with state_dict and load_state_dict (for example [scaler])"
    for each in given if isinstance(given, (list, tuple)) else (None,):
        if isinstance(each, type) or not all(hasattr(each, name) for name in ("state_dict", "load_state_dict")):
            checks.refuse("stateful", what, given, WrongType)
    return tuple(given)


# ---- `Rates`: what a growth does to the learning rates and to the parameter groups.


@dataclass(frozen=True)
class Rates:
    """What a growth does to learning rates and parameter groups: ``Grower(..., rates=Rates(lr_factor=0.5))``.

    Attributes:
        lr_factor: Multiplies all learning rates after each growth (default: 1.0).
        new_lr_factor: A factor: each new layer gets separate parameter groups with this many times its neighbors' learning rate. Only
            with ``what="layers"``: new units are parts of parameters that exist.
        group: The parameter group that new parameters join if their neighbors are in none, as in `grow`. Without it such sites (in a
            frozen part that the optimizer does not hold) are skipped.
        freeze_rest: Whether after a growth only what has grown trains, as in `grow` (default: False). Only with ``what="layers"``.
        warmup: A number of steps: after a growth the k-th update of everything that is new, layers, units and recycled units, is
            multiplied by ``k / warmup`` until it is 1. Old weights move as without it. ``"auto"`` is a quarter of the steps so far, at most
            200, under Adam and its relatives, and none elsewhere. None is no warm-up. Without any `Rates` it is ``"auto"`` for the units of
            ``preset="auto"``.
        depth_power: A growth that makes the model deeper, from a to b blocks of this kind or layers with weights, multiplies all
            learning rates by ``(a / b) ** depth_power``, besides ``lr_factor`` (default: 0.0). Not with ``what="units"``.
    """

    lr_factor: float = 1.0
    new_lr_factor: float | None = None
    group: int | dict[str, Any] | None = None
    freeze_rest: bool = False
    warmup: int | str | None = None
    depth_power: float = 0.0

    def __post_init__(self) -> None:
        set_frozen_fields(
            self,
            lr_factor=check_factor(self.lr_factor),
            new_lr_factor=None if self.new_lr_factor is None else check_own_factor(self.new_lr_factor),
            group=None if self.group is None else check_group(self.group),
            freeze_rest=checks.flag("freeze_rest", self.freeze_rest),
            warmup=check_warmup(self.warmup, auto=True),
            depth_power=check_power(self.depth_power),
        )


def set_frozen_fields(frozen: Any, **values: Any) -> None:
    """Give the fields of a frozen object the values that were checked."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


# ---- `Options`: everything that a Grower is told, with the preset filled in.


class StrategyOptions(TypedDict, total=False):
    """What a strategy that is given by its name may be told. ``"sensli"`` takes all but what is about ``"stack"``; others refuse what they
    do not use.

    Attributes:
        what: What to grow: ``"layers"``, ``"units"`` of layers that exist, ``"both"``, whichever is worth more, or ``"uniform"``: all
            layers that can have more units get the same share of them, as one decision. By default what the preset says, or what the
            strategy grows.
        where: Which sites to consider, as in `find_sites`: a kind, a path or a pattern of paths, a list of these, or a function.
            None considers all of them.
        units: How many units a layer gets at a growth: a number, or a share of those it has (default: 0.25).
        form: The form of the new layers, as in `find_sites` (default: "auto").
        kernel_size: The kernel size of new convolutions, as in `find_sites`. None takes the neighbor's if it is odd, otherwise 3.
        init: How what is new gets its weights, as in `find_sites`. None copies blocks and chooses the most sensitive units.
        tau: The threshold: grow only if the merit is at least this many times the mean over the existing weights (default: 0.0, with
            ``preset="paper"`` 1.0).
        norm: The norm of the gradient, as in `measure` (default: "auto").
        select: Which site to take: ``"auto"`` takes the largest merit, but between the blocks of a stack the middle, or with
            ``max_growths`` even spacing, as no merit is known to tell the better site. ``"largest"`` always takes the largest merit. As
            controls ``"smallest"``, ``"random"``, ``"first"`` or ``"last"`` in the data flow, or ``"even"`` spacing, for which the largest
            merit still decides whether to grow at all; ``"least"``, which copies the block that matters least, by the sum of
            ``|weight * gradient|`` over its weights; or a function of `Merits` that returns one of them (default: "auto").
        max_growths: The largest number of growths at once (default: 1). A strategy that decides about all layers together takes as many as
            it chose.
        per: Compare merits per added ``"parameters"`` or per added ``"flops"``. None compares them as they are. By default what the
            preset says: ``"flops"`` for the units of ``preset="auto"``, otherwise None.
        confidence: Stop measuring as soon as the best site is clear at this level, as in `measure`. None uses all batches.
        tolerance: With ``confidence``: the share of the best merit that may be missed, as in `measure` (default: 0.0).
        floor: Stops growth on a solved problem: once the loss has fallen to a thousandth of the largest one known (measured at a check,
            or of an output that does not depend on the input), a change of the new weights by 1 must lower it, to first order, by
            this share of the largest. Where targets are classes, a loss of ten times this share ends growth too. 0 turns it off
            (default: 1e-7).
        seed: The random seed of ``select="random"`` and of ``noise`` (default: 0).
        factor: With ``strategy="stack"``: how many times as many blocks each stack has after a growth (default: 2). ``max_factor`` must
            allow it.
        order: With ``strategy="stack"``: ``"stack"`` puts the copies after the last block (ABC becomes ABCABC), ``"interleave"`` each after
            its own block (AABBCC) (default: "stack").
        spare: With ``strategy="stack"``: how many blocks at each end of a stack are not copied (default: 0).
        noise: With ``strategy="stack"``: the standard deviation of noise on the copies, as a share of that of each tensor (default: 0.0).
        max_check_share: The largest share of the training that checks may take, such as 0.02. A check that would take more is done on
            fewer batches, but at least 8, or waits for the next call on which the trigger fires; the log says at the next check how many
            have waited. The steps of the optimizer are counted, and a batch of a check is taken for one of training. Before the first
            step nothing waits. ``"auto"`` is 0.02, and ten checks of at most 16 batches more, so that short trainings can grow. None
            sets no limit (default: "auto" with the trigger of the preset, otherwise None).
    """

    what: str | None
    where: Where
    units: int | float
    form: str
    kernel_size: int | None
    init: Init
    tau: float
    norm: str
    select: str | Selection
    max_growths: int
    per: str | None
    confidence: float | None
    tolerance: float
    floor: float
    seed: int
    factor: int
    order: str
    spare: int
    noise: float
    max_check_share: float | str | None


# What a preset gives the strategy "sensli" where nothing else was said. "paper" is Algorithm 1, whose values are the defaults of `Options`.
PRESETS: dict[str, dict[str, Any]] = {"auto": {"what": "units", "tau": 0.0, "per": "flops"}, "paper": {}}
# What may differ between ranks. What a trigger says is compared when it says it, and so is a choice that depends on the seed.
_OWN = ("trigger", "rates", "seed", "log")
_OF_LAYERS, _OF_UNITS = frozenset({"form", "kernel_size"}), frozenset({"units"})
_OF_CHOICE = frozenset({"select", "per", "confidence", "tolerance"})  # which of several sites to take
OF_STACKS = frozenset({"factor", "order", "spare", "noise"})  # how blocks are copied
# What a strategy may take (`Strategy.takes`). All other options are for `Grower` itself, whatever the strategy is.
OF_STRATEGIES = _OF_LAYERS | _OF_UNITS | _OF_CHOICE | OF_STACKS | {"init", "tau", "norm", "where", "floor"}


# What "auto" gives instead where the model has a stack of equal blocks. Copies in their places ended lower than copies on top, and both
# lower than blocks that begin at zero, in the study of long budgets.
ON_BLOCKS: dict[str, Any] = {"strategy": "stack", "order": "interleave"}


def leaves_open(preset: str, strategy: str | Strategy | None, given: Collection[str], **others: Any) -> bool:
    """Whether it is left to the model how it grows: the preset is "auto", and nothing was said that is about one way of growing."""
    said = OF_STRATEGIES | {"what", "max_growths"}
    return preset == "auto" and strategy is None and not said & set(given) and not any(others.values())


STEPS = 1000  # before which a stack does not double: the loss may rest there and then fall on
MOST = 10  # times the parameters that a model begins with: a default must not grow without end


def default_trigger(preset: str, strategy: str | Strategy) -> Trigger:
    """When to check if nobody says it: where growing pays, or when training has slowed down; a stack when it is near its end."""
    if preset == "paper":
        raise ValueError(
            "trigger must be one of sensli.triggers with preset='paper' (for example triggers.Every(10)), got None: "
            "the paper leaves it to you when to grow."
        )
    kind = strategy_class(strategy) if isinstance(strategy, str) else strategy
    often = Pays() | Diminishing() if kind.shares else Diminishing()
    return (Saturating(0.4, calls=16, steps=STEPS) if strategy == "stack" else often & Spaced()) & Limit(factor=MOST)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `Grower` documents, without the model and what belongs to a run of it. Numbers of numpy and torch become Python's."""

    trigger: Trigger
    preset: str = "paper"
    strategy: str | Strategy = "sensli"
    tau: float = 1.0
    norm: str = "auto"
    select: str | Selection = "auto"
    max_growths: int = 1
    form: str = "auto"
    where: Where = None
    kernel_size: int | None = None
    init: Init = None
    what: str = None  # type: ignore[assignment]  # becomes what the strategy grows
    units: int | float = 0.25
    per: str | None = None
    recycle: bool = False
    trial: Trial | None = None
    confidence: float | None = None
    tolerance: float = 0.0
    rates: Rates = Rates()
    max_factor: float | None = 2.0
    floor: float = 1e-7
    seed: int = 0
    log: Log = None
    step_name: str = "epoch"
    factor: int = 2
    order: str = "stack"
    spare: int = 0
    noise: float = 0.0
    max_check_share: float | str | None = None

    @classmethod
    def of(
        cls, preset: str, *, trigger: Trigger | None = None, strategy: str | Strategy | None = None, **given: Any
    ) -> Options:
        """The options with a preset filled in: what is given overrides it."""
        checks.one_of("preset", preset, PRESETS)
        strategy = "sensli" if strategy is None else strategy
        check_strategy(strategy, STRATEGIES)
        known = [each.name for each in fields(cls)]
        for name in given:
            if name in Rates.__dataclass_fields__:
                raise TypeError(f"{name} belongs to the learning rates: give rates=Rates({name}=...).")
            if name not in known:
                hint = checks.nearest_name(name, known) or f"There are {', '.join(sorted(known))}."
                raise TypeError(f"Grower has no argument {name!r}. {hint}")
        expanded = PRESETS[preset] if strategy == "sensli" else {}
        if given.get("what") is None:
            given.pop("what", None)
        units = given.get("what", "units") == "units"
        if not units or given.get("confidence") is not None:
            # merits of layers and units are too far apart, and `confidence` is about the merits as they are
            expanded = {name: value for name, value in expanded.items() if name != "per"}
        if given.get("rates") is None:
            given["rates"] = Rates(warmup=AUTO if preset == "auto" and strategy == "sensli" and units else None)
        if trigger is None:
            trigger = default_trigger(preset, strategy)
            given.setdefault("max_check_share", AUTO)
        return cls(preset=preset, trigger=trigger, strategy=strategy, **{**expanded, **given})

    def __str__(self) -> str:
        """What the preset came to: the first line of the log."""
        strategy = self.strategy if isinstance(self.strategy, str) else type(self.strategy).__name__
        tau = f", tau={self.tau:g}" if "tau" in used_options(self.strategy, self.what) else ""
        per = "" if self.per is None else f", per={self.per!r}"
        warmup = "" if self.rates.warmup is None else f", warmup={self.rates.warmup!r}"
        return f"preset={self.preset!r}: strategy={strategy!r}, what={self.what!r}{tau}{per}{warmup}, trigger={self.trigger!r}"

    def __post_init__(self) -> None:
        what = "one of sensli.triggers (for example triggers.Every(10) & triggers.Limit(growths=3))"
        checks.instance("trigger", self.trigger, Trigger, what)
        check_strategy(self.strategy, STRATEGIES)
        checks.instance("rates", self.rates, Rates, "a Rates (for example sensli.Rates(lr_factor=0.5))")
        check_selection(self.select)
        confidence, tolerance = check_level(self.confidence, self.tolerance)
        factor, order, spare, noise = check_copies(self.factor, self.order, self.spare, self.noise)
        set_frozen_fields(
            self,
            tau=checks.at_least("tau", self.tau, 0, 1.0),
            max_growths=checks.whole("max_growths", self.max_growths, 1),
            confidence=confidence,
            tolerance=tolerance,
            max_factor=_factor(self.max_factor),
            floor=checks.share("floor", self.floor, 1e-7, zero=True),
            seed=checks.whole("seed", self.seed, 0, least=0, below=2**64),
            kernel_size=check_request(self.form, self.kernel_size),
            units=check_units(self.units),
            recycle=checks.flag("recycle", self.recycle),
            factor=factor,
            order=order,
            spare=spare,
            noise=noise,
            max_check_share=check_share(self.max_check_share),
        )
        choose_norm(self.norm, ())
        check_where(self.where)
        checks.one_of("what", "layers" if self.what is None else self.what, (*GROW, UNIFORM))
        check_init(self.init)
        check_per(self.per)
        self._check_use()
        if self.confidence is not None and (self.select not in BY_MERIT or self.max_growths != 1):
            raise ValueError(
                "confidence= stops when the single largest merit is clear; use it with select='auto' or 'largest', and max_growths=1."
            )
        if self.trial is not None:
            checks.instance("trial", self.trial, Trial, "a Trial (for example sensli.Trial(steps=200))")
            if self.max_growths != 1:
                raise ValueError(
                    f"max_growths must be 1 with trial=, got {self.max_growths}: each candidate of a trial is a single growth."
                )
        check_log(self.log)
        checks.one_of("step_name", self.step_name, STEP_NAMES)

    def _check_use(self) -> None:
        """Refuse what the strategy, or what grows, has no use for. An option that has its default counts as not given."""
        strategy = strategy_class(self.strategy) if isinstance(self.strategy, str) else self.strategy
        if self.what is None:
            set_frozen_fields(self, what=strategy.grows[0])
        if self.what not in strategy.grows:
            raise ValueError(
                f"what must be {' or '.join(map(repr, strategy.grows))} with {self._named}, got {self.what!r}: it grows nothing else. "
                "Leave it out, or use another strategy."
            )
        takes = used_options(self.strategy, self.what)
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in OF_STRATEGIES - takes and not (value is each.default or value == each.default):
                self._refuse_unused(each.name, value, takes)
        self._check_init()
        if "factor" in takes and self.max_factor is not None and self.factor > self.max_factor:
            raise ValueError(
                f"factor must be at most max_factor, which is {self.max_factor:g}, got {self.factor}: stacks {self.factor} times as "
                f"deep may bring the model to {self.factor} times its parameters. Give max_factor={self.factor} too, or None."
            )
        if self.select == LEAST and (self.what != "layers" or self.form not in ("auto", "twin")):
            raise ValueError(
                f"select='least' copies blocks: it needs what='layers' with form='auto' or 'twin', got what={self.what!r} and "
                f"form={self.form!r}."
            )
        if self.what == UNIFORM and not isinstance(self.units, float):
            raise ValueError(
                f"units must be a share with what='uniform' (for example 0.25), got {self.units}: every layer grows by the same share."
            )
        if self.what == UNIFORM and self.max_growths != 1:
            raise ValueError(
                f"max_growths must be left out with what='uniform', got {self.max_growths}: all layers grow together."
            )
        if strategy.all_at_once and self.max_growths != 1:
            raise ValueError(
                f"max_growths must be left out with {self._named}, got {self.max_growths}: it decides about all layers together."
            )
        where = f"what={self.what!r}" if len(strategy.grows) > 1 else f"{self._named}, which grows {self.what}"
        remedy = "Leave it out, or use what='layers'." if "layers" in strategy.grows else "Leave it out."
        if self.rates.new_lr_factor is not None and self.what != "layers":
            raise ValueError(
                f"new_lr_factor must be None with {where}, got {self.rates.new_lr_factor}: new units are part of existing parameters, "
                f"which cannot have a separate learning rate. {remedy}"
            )
        if self.rates.freeze_rest and self.what != "layers":
            raise ValueError(
                f"freeze_rest must be False with {where}, got True: new units are part of existing parameters, which cannot "
                f"train alone. {remedy}"
            )
        if self.rates.depth_power and self.what == "units":
            raise ValueError(
                f"depth_power must be 0 with {where}, got {self.rates.depth_power}: new units make nothing deeper, so no rate would "
                f"change. {remedy}"
            )
        self.trigger.made_for(what=self.what, shares=strategy.shares)

    def _check_init(self) -> None:
        """Refuse an initialization of what does not grow."""
        given = () if self.init is None else (self.init,) if isinstance(self.init, str) else self.init
        for names, what, other in ((STARTS, "layers", "units"), (INITS, "units", "layers")):
            wrong = [name for name in given if name in names]
            if wrong and (self.what == what or (self.what, what) == (UNIFORM, "units")):
                raise ValueError(
                    f"init must be about what grows with what={self.what!r}, got {wrong[0]!r}: it is about {other}. Leave it out, or use "
                    f"what={other!r} or 'both'."
                )

    def _refuse_unused(self, name: str, value: Any, takes: Collection[str]) -> NoReturn:
        told = f"{name} must be left out with {self._named}, got {checks.show_value(value)}:"
        if not isinstance(self.strategy, str):
            kind = type(self.strategy).__name__
            raise ValueError(
                f"{told} only a strategy that is given by its name gets it. Give it to {kind}(...) itself."
            )
        if name in strategy_class(self.strategy).takes & _OF_CHOICE:  # but not with what grows
            raise ValueError(
                f"{name} must be left out with what={self.what!r}, got {checks.show_value(value)}: it chooses between sites, and all "
                "of them grow together. Leave it out, or use what='units'."
            )
        if name in strategy_class(self.strategy).takes:
            other = "layers" if name in _OF_LAYERS else "units"
            raise ValueError(
                f"{name} must be left out with what={self.what!r}, got {checks.show_value(value)}: it is about {other}. Leave it out, or "
                f"use what={other!r} or 'both'."
            )
        uses = " and ".join(filter(None, (", ".join(sorted(takes)[:-1]), *sorted(takes)[-1:]))) or "none"
        raise ValueError(
            f"{told} of the options that say how to grow it uses {uses}. Leave it out, or use another strategy."
        )

    @property
    def _named(self) -> str:
        """The strategy in an error text."""
        named = repr(self.strategy) if isinstance(self.strategy, str) else f"{type(self.strategy).__name__}(...)"
        return f"strategy={named}"

    def check_followers(self, model: nn.Module, optimizer: Optimizers, scheduler: Schedulers) -> None:
        """Refuse what these options need and this optimizer, with its scheduler, does not have."""
        rates = self.rates
        # any factor will do for one that is known at a growth only
        plan_rate_scaling(optimizer, scheduler, rates.lr_factor * 0.5**rates.depth_power)
        check_needed(
            optimizer, lr_factor=rates.lr_factor != 1, group=rates.group is not None, warmup=rates.warmup not in (None, AUTO),
            depth_power=rates.depth_power != 0, trial=self.trial is not None,
        )  # fmt: skip
        check_step_hooks(optimizer, rates.warmup)
        if self.trial is not None and is_sharded(model):
            raise UnsupportedModel(
                "trial= cannot be used with a model sharded by fully_shard: each process holds parts of its values, which cannot be put "
                "back after a growth. Leave it out, or use DistributedDataParallel."
            )
        if rates.new_lr_factor is not None:
            check_own_rate(optimizer, rates.new_lr_factor)
        check_optimizers(model, optimizer, rates.group)

    @property
    def selection(self) -> str:
        """The name of the selection."""
        return self.select if isinstance(self.select, str) else getattr(self.select, "__name__", "a callable")

    @property
    def common(self) -> dict[str, Any]:
        """What all ranks must have in common, as plain data. What a function says is compared when it says it."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _OWN}
        named = {name: "a function" if callable(value) else value for name, value in own.items()}
        strategy = self.strategy if isinstance(self.strategy, str) else type(self.strategy).__name__
        rates = {name: value for name, value in vars(self.rates).items() if name != "group"}  # each rank has its own
        return {**named, **rates, "select": self.selection, "strategy": strategy, "trial": repr(self.trial)}


def used_options(strategy: str | Strategy, what: str | None = None) -> frozenset[str]:
    """Which of the options that say how to grow mean something with a strategy; an object has got its own when it was made."""
    if not isinstance(strategy, str):
        return frozenset()
    kind = strategy_class(strategy)
    unused = {"layers": _OF_UNITS, "units": _OF_LAYERS, UNIFORM: _OF_LAYERS | _OF_CHOICE}
    return kind.takes - unused.get(what or kind.grows[0], frozenset())


def _factor(value: float | None) -> float | None:
    if value is None:
        return None
    what = "a number above 1 (for example 2), or None"
    factor = checks.number("max_factor", value, what)
    if not factor > 1:
        checks.refuse("max_factor", what, value, ValueError)
    return factor
