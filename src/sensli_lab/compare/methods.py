"""The arms of a comparison: networks of fixed size, SensLI, its controls, every strategy that is registered, all of them under the
common schedule; and those that have a published schedule under their own."""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sensli.growing.strategy import STRATEGIES, strategy_class
from sensli_lab.compare.task import Task
from sensli_lab.errors import BadComparison
from sensli_lab.paper.reading import unknown_name

# ---- What each publication prescribes around its growths: when, how many, what the optimizer keeps, the learning rate
# after a growth.
#
# Everything is stated in shares of the FLOPs, so that a method under its own schedule spends as much as the others.
# The optimizer and its first learning rate stay those of the task, since no publication has chosen them for it. Where
# a publication says nothing, or its number has no meaning at this size, `words` says what was taken instead.

Shape = Callable[[float], float]  # from the share of a round that is over to the factor of the learning rate

SHAPES: Mapping[str, Shape] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: min(1.0, 2.0 * (1.0 - share)),  # the common one: constant to the half, then linear to 0
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
    "cosine to a tenth": lambda share: 0.1 + 0.45 * (1 + math.cos(math.pi * share)),
    "last fifth": lambda share: min(1.0, 5.0 * (1.0 - share)),
    "tenths": lambda share: 1.0 if share < 0.5 else 0.1 if share < 0.75 else 0.01,
}
WARMUP = 0.03  # of a round


@dataclass(frozen=True)
class MethodSchedule:
    """One publication's schedule."""

    words: str  # what it says, and where it is from
    looks: tuple[float, ...]  # shares of the FLOPs at which it grows
    shape: str = "linear"  # one of `SHAPES`: the learning rate over a round
    rounds: str = "one"  # a single round; "each": every look begins another one; "last": constant to the last look, then one round
    after: float = 1.0  # a factor on the learning rate of all rounds but the first
    warmup: bool = False  # whether rounds after the first begin with a warm-up
    forgets: bool = False  # whether the optimizer begins again after a growth, instead of padding its state with zeros
    options: Mapping[str, Any] = field(default_factory=dict)  # what `Grower` is given beyond the method's own options

    def rate(self, share: float) -> float:
        """The factor of the learning rate after this share of the FLOPs."""
        begins = {"one": (0.0,), "each": (0.0, *self.looks), "last": (0.0, self.looks[-1])}[self.rounds]  # of rounds
        number = sum(begin <= share for begin in begins) - 1
        begin, end = begins[number], (*begins, 1.0)[number + 1]
        if self.rounds == "last" and number == 0 and len(begins) > 1:
            return 1.0
        place = min(1.0, (share - begin) / (end - begin))
        factor = SHAPES[self.shape](place) * (self.after if number else 1.0)
        return factor * max(place / WARMUP, 0.02) if number and self.warmup and place < WARMUP else max(factor, 0.0)

    def facts(self) -> dict[str, Any]:
        """What decides numbers: plain data."""
        facts = asdict(self)
        del facts["words"]
        return facts


def _equally(first: float, last: float, count: int) -> tuple[float, ...]:
    return tuple(round(first + (last - first) * step / (count - 1), 4) for step in range(count))


def _rounds(count: int) -> tuple[float, ...]:
    return tuple(round(step / count, 4) for step in range(1, count))


_ALL = {"count": 1000}  # widths or places at once
_GRADMAX = _equally(0.128, 0.481, 12)
# Stages of 8, 10, 12, 14, 17, 20, 24, 29 epochs, each a fifth longer than the one before, of 200 epochs.
_VARIANCE_TRANSFER = (0.04, 0.09, 0.15, 0.22, 0.305, 0.405, 0.525, 0.67)

_AUTOGROW = MethodSchedule(
    "One block every few epochs at a constant rate, until the stages are closed; then a tenth and a hundredth from the half and from three "
    "quarters of the rest on; the momentum is kept.",
    _equally(0.025, 0.5, 20), "tenths", rounds="last",
)  # fmt: skip

# Method -> its schedule. Methods without one: nothing is prescribed, or nothing is known of it.
OWN: Mapping[str, MethodSchedule] = {
    "layers": MethodSchedule(
        "The paper's CNN: a look every 50 of 200 epochs, which are these shares with its three insertions; a layer if its merit is at "
        "least the mean of the existing weights; a constant rate; the optimizer is made again, as its scripts do.",
        (0.11, 0.31, 0.61), "constant", forgets=True, options={"tau": 1.0},
    ),
    "net2net": MethodSchedule(
        "Once, on a trained network, all layers at once, 1.83 times as wide (its teacher has 0.3 of the channels, under a root); another "
        "optimizer, a tenth of the learning rate.",
        (0.4,), rounds="each", after=0.1, forgets=True, options={**_ALL, "units": 0.83},
    ),
    "netmorph": MethodSchedule(
        "Once, on a trained network, all layers at once; learning rates of fine-tuning, taken as those of Net2Net.",
        (0.4,), rounds="each", after=0.1, forgets=True, options={**_ALL, "units": 0.83},
    ),
    "net2net-deeper": MethodSchedule(
        "As Net2Net: once, on a trained network, at all places; another optimizer, a tenth of the learning rate.",
        (0.4,), rounds="each", after=0.1, forgets=True, options=_ALL,
    ),
    "netmorph-deeper": MethodSchedule(
        "Once, on a trained network, at all places; learning rates of fine-tuning, taken as those of Net2Net.",
        (0.4,), rounds="each", after=0.1, forgets=True, options=_ALL,
    ),
    "gradmax": MethodSchedule(
        "Twelve growths from iteration 10,000 on, every 2,500 of 78,000; all layers at once, from a quarter of the width to all of it, "
        "here by the same factor each time; cosine; momentum padded with zeros.",
        _GRADMAX, "cosine", options={**_ALL, "units": 0.12},
    ),
    "random-units": MethodSchedule(
        "The schedule of GradMax, whose control it is.", _GRADMAX, "cosine", options={**_ALL, "units": 0.12}
    ),
    "tiny": MethodSchedule(
        "One layer after the other, with a quarter of an epoch to one epoch between growths, then long at full width; the optimizer is "
        "made again. Learning rates are not known: the common ones.",
        _equally(0.01, 0.12, 12), forgets=True,
    ),
    "senn": MethodSchedule(
        "Asked at equal intervals to the end, and all that passes is taken. It trains by natural gradients, which the task's optimizer "
        "replaces; the rate is constant.",
        _equally(0.1, 0.9, 9), "constant", options=_ALL,
    ),
    "north": MethodSchedule(
        "Asked after every mini-batch in the publication, here 49 times, since looks are paid for; all layers; cosine, as for its CNNs.",
        _equally(0.02, 0.98, 49), "cosine", options={**_ALL, "units": 1},
    ),
    "convsenn": MethodSchedule(
        "Ten of 300 epochs from one growth to the next; its rate is halved when there is no progress, which is a constant one here.",
        _equally(0.0333, 0.9667, 29), "constant",
    ),
    "morphnet": MethodSchedule(
        "Shrinks for a third of the time at a constant rate, removes and widens, and trains again with another optimizer.",
        (0.02, 0.32, 0.33), rounds="last", forgets=True,
    ),
    "autogrow": _AUTOGROW,
    "autogrow-gauss": _AUTOGROW,
    "autogrow-adam": _AUTOGROW,
    "splitting": MethodSchedule(
        "Ten rounds; in each the learning rate begins again, with a tenth and a hundredth from its half and three quarters on; another "
        "optimizer each time.",
        _rounds(10), "tenths", rounds="each", forgets=True,
    ),
    "firefly": MethodSchedule(
        "Eleven rounds; in each the learning rate begins again, with a tenth and a hundredth from its half and three quarters on; another "
        "optimizer each time.",
        _rounds(11), "tenths", rounds="each", forgets=True,
    ),
    "variance-transfer": MethodSchedule(
        "Eight growths of all layers by a fifth, in stages that each are a fifth longer than the one before; cosine over everything.",
        _VARIANCE_TRANSFER, "cosine", options={**_ALL, "units": 0.2},
    ),
    "g-stack": MethodSchedule(
        "Once, early (its formula for the moment holds for large language models: after a twentieth here), with empty AdamW, another "
        "warm-up and another cosine from 0.3 of the first rate to a tenth of that.",
        (0.05,), "cosine to a tenth", rounds="each", after=0.3, warmup=True, forgets=True,
    ),
    "llama-pro": MethodSchedule(
        "Once, on a trained network; the old blocks are frozen; another optimizer and another round of learning rates.",
        (0.4,), rounds="each", warmup=True, forgets=True, options={"grow": "layers", "freeze_rest": True},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """What trains: the network it begins with, and what it gives `Grower`; a network of fixed size gives nothing.

    ``schedule`` is None for what follows the schedule of the task. ``full`` spends more than the others: as many steps as the small network
    takes with the FLOPs of the task. ``trial`` is the share of the FLOPs that are left for which each network of a trial trains. What
    ``waits`` asks `Diminishing` when to look, instead of looking when the task says; what ``pays`` asks `Pays` as well. ``source`` is the
    digest of the code of a strategy that is not ours.
    """

    name: str
    what: str  # empty: what its strategy says of itself
    kind: str  # one of KINDS
    size: str = "small"
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: MethodSchedule | None = None
    full: bool = False
    trial: float | None = None
    waits: bool = False
    pays: bool = False
    source: str = ""
    trigger: str = ""  # one of TRIGGERS of `training`, which it asks instead
    preset: str = ""  # of `Grower`, which gets nothing but that

    @property
    def grows(self) -> bool:
        return self.kind not in ("fixed", "reference")

    @property
    def widens(self) -> bool:
        """Whether it may take units whose rows SensLI chooses."""
        return self.kind in ("sensli", "control") and self.options.get("grow") in ("units", "both")

    @property
    def in_front(self) -> bool:
        """Whether its curve is one of those that the front is made of: fixed sizes that spend what all spend."""
        return self.kind == "fixed"


def _largest(grow: str) -> dict[str, Any]:
    """By merit, said in words: what `Grower` does without being asked may change."""
    return {"grow": grow, "select": "largest"}


_GROWING = (
    Method("layers", "SensLI: a layer where its merit is largest", "sensli", options=_largest("layers")),
    Method("units", "SensLI: units where their merit is largest", "sensli", options=_largest("units")),
    Method("both", "SensLI: a layer or units, whichever has the largest merit", "sensli", options=_largest("both")),
    Method("auto", "as 'both', but in a stack of blocks at its middle", "sensli", options={"grow": "both", "select": "auto"}),
    Method(
        "tried", "as 'both', but the best layer, the best units and no growth train first; the best of them stays", "sensli",
        options=_largest("both"), trial=1 / 32,
    ),
    Method(
        "when", "as 'units', but when training on brings little for its FLOPs, instead of at fixed looks", "sensli",
        options=_largest("units"), waits=True,
    ),
    Method(
        "pays", "as 'when', and also as long as units add more to the gradient than to the FLOPs", "sensli",
        options=_largest("units"), waits=True, pays=True,
    ),
    Method("natural", "as 'both', by the natural merit", "sensli", options={**_largest("both"), "norm": "natural"}),
    Method(
        "layers-middle", "a layer in the middle of the places, whatever the merits are", "control",
        options={"grow": "layers", "select": "even"},
    ),
    Method(
        "random-place", "the sites and starts of 'both', a random one of them", "control",
        options={"grow": "both", "select": "random"},
    ),
    Method(
        "random-start", "the place that 'both' chooses, units with random rows", "control",
        options={**_largest("both"), "strategy": "random-start"},
    ),
)  # fmt: skip
_FULL = Method(
    "large-full", "the largest network for as many steps as 'small' takes: more FLOPs than all others", "reference", "large", full=True
)  # fmt: skip
# Strategies that are methods already; "random-place" is select="random" under another name.
_KNOWN = {"sensli", *(method.name for method in _GROWING), *(method.options.get("strategy") for method in _GROWING)}
# Each is also the name of all its methods; "all" is all of them.
KINDS = ("fixed", "reference", "sensli", "control", "rival", "own", "long")


# ---- The arms of long budgets: one mechanism each, from the same small network, under warm-up, a constant rate, and decay in the last
# fifth of the FLOPs.


def at_shares(name: str, words: str, *percents: int, trial: float | None = None, **options: Any) -> Method:
    """Growths, or trials of them, at these percents of the FLOPs, which are a part of the name."""
    shares = tuple(percent / 100 for percent in percents)
    schedule = MethodSchedule("", shares, "last fifth")
    full = "-".join([name, *map(str, dict.fromkeys(percents))])
    return Method(full, words, "long", options=options, schedule=schedule, trial=trial)


def when_triggered(name: str, words: str, **options: Any) -> Method:
    """Growths when the trigger of this name says it."""
    kind = options.get("form") or options.get("strategy", "sensli")
    return Method(f"{kind}-{name}", words, "long", options=options, waits=True, trigger=name)


DEFAULT = Method(
    "default", "what `Grower(model, optimizer)` does, nothing else said", "sensli", waits=True, preset="auto"
)


def methods(task: Task) -> dict[str, Method]:
    """All methods of a task, the networks of fixed size first."""
    words = {
        "small": "the network that every growth begins with",
        "large": "the largest network, from scratch, at equal FLOPs",
    }
    fixed = [Method(size, words.get(size, "a fixed size between them"), "fixed", size) for size in task.sizes]
    rivals = [Method(name, "", "rival", options={"strategy": name}) for name in STRATEGIES if name not in _KNOWN]
    growing = (*_GROWING, *rivals)
    own = [
        Method(
            f"{method.name}-own", f"{method.name} under its published schedule", "own",
            options={**method.options, **OWN[method.name].options}, schedule=OWN[method.name],
        )
        for method in growing if method.name in OWN
    ]  # fmt: skip
    return {method.name: method for method in (*fixed, _FULL, *growing, DEFAULT, *own, *task.arms)}


def find_method(task: Task, name: str) -> Method:
    """A method by its name; ``"package.module:Class"`` is a strategy of the user's own, also from the current folder."""
    if ":" not in name:
        return methods(task)[name]
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does; processes that are started inherit it
    try:
        kind = strategy_class(name)
    except ValueError as error:
        raise BadComparison(f"--methods: {error}") from None
    code = inspect.getsource(inspect.getmodule(kind) or kind)  # another code gives other numbers
    source = hashlib.sha256(code.encode()).hexdigest()[:12]
    return Method(name, "", "rival", options={"strategy": name}, source=source)


def describe_method(method: Method) -> str:
    """What a method is, in one line: of a strategy the first sentence of its docstring."""
    if method.what:
        return method.what
    name = method.options["strategy"]
    words = " ".join((strategy_class(name).__doc__ or f"Grower(strategy={name!r})").split())
    return words.partition(". ")[0].removesuffix(".")


def choose_methods(task: Task, names: Sequence[str]) -> list[Method]:
    """The methods of these names, each once, in the order of `methods`; those of the user's own come last."""
    known = methods(task)
    given = {name: find_method(task, name) for name in names if ":" in name}
    for name in names:
        if name not in known and name not in given and name not in (*KINDS, "all"):
            raise BadComparison(f"--methods: {unknown_name('method', name, [*known, *KINDS, 'all'])}")
    wanted = [one for one in known.values() if "all" in names or one.kind in names or one.name in names]
    return [*wanted, *given.values()]
