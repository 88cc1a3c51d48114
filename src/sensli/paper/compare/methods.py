"""The arms of a comparison: networks of fixed size, SensLI, its controls, every strategy that is registered, all of them under the
common schedule; and those that have a published schedule under their own."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sensli.growing.strategies import STRATEGIES, class_of
from sensli.paper.compare.errors import BadComparison
from sensli.paper.compare.schedules import OWN, Schedule
from sensli.paper.compare.task import Task
from sensli.paper.plans.reading import unknown


@dataclass(frozen=True)
class Method:
    """What trains: the network it begins with, and what it gives `Grower`; a network of fixed size gives nothing.

    ``schedule`` is None for what follows the schedule of the task. ``full`` spends more than the others: as many steps as the small network
    takes with the FLOPs of the task. ``trial`` is the share of the FLOPs that are left for which each network of a trial trains. What
    ``waits`` asks `Diminishing` when to look, instead of looking when the task says; what ``pays`` asks `Pays` as well. ``source`` is the
    digest of the code of a strategy that is not ours.
    """

    name: str
    what: str
    kind: str  # one of KINDS
    size: str = "small"
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule | None = None
    full: bool = False
    trial: float | None = None
    waits: bool = False
    pays: bool = False
    source: str = ""

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
KINDS = (
    "fixed",
    "reference",
    "sensli",
    "control",
    "rival",
    "own",
)  # each is also the name of all its methods; "all" is all of them


def methods(task: Task) -> dict[str, Method]:
    """All methods of a task, the networks of fixed size first."""
    words = {
        "small": "the network that every growth begins with",
        "large": "the largest network, from scratch, at equal FLOPs",
    }
    fixed = [Method(size, words.get(size, "a fixed size between them"), "fixed", size) for size in task.sizes]
    rivals = [
        Method(name, f"Grower(strategy={name!r})", "rival", options={"strategy": name})
        for name in STRATEGIES
        if name not in _KNOWN
    ]
    growing = (*_GROWING, *rivals)
    own = [_own(method, OWN[method.name]) for method in growing if method.name in OWN]
    return {method.name: method for method in (*fixed, _FULL, *growing, *own)}


def _own(method: Method, schedule: Schedule) -> Method:
    return Method(
        f"{method.name}-own", f"{method.name} under its published schedule", "own",
        options={**method.options, **schedule.options}, schedule=schedule,
    )  # fmt: skip


def named(task: Task, name: str) -> Method:
    """A method by its name; ``"package.module:Class"`` is a strategy of the user's own, also from the current folder."""
    if ":" not in name:
        return methods(task)[name]
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does; processes that are started inherit it
    try:
        kind = class_of(name)
    except ValueError as error:
        raise BadComparison(f"--methods: {error}") from None
    what = (kind.__doc__ or f"Grower(strategy={name!r})").strip().splitlines()[0]
    return Method(name, what, "rival", options={"strategy": name}, source=_digest(kind))


def _digest(kind: type) -> str:
    """Of the code of a strategy that is not ours: another code gives other numbers."""
    return hashlib.sha256(inspect.getsource(inspect.getmodule(kind) or kind).encode()).hexdigest()[:12]


def chosen(task: Task, names: Sequence[str]) -> list[Method]:
    """The methods of these names, each once, in the order of `methods`; those of the user's own come last."""
    known = methods(task)
    given = {name: named(task, name) for name in names if ":" in name}
    for name in names:
        if name not in known and name not in given and name not in (*KINDS, "all"):
            raise BadComparison(f"--methods: {unknown('method', name, [*known, *KINDS, 'all'])}")
    wanted = [one for one in known.values() if "all" in names or one.kind in names or one.name in names]
    return [*wanted, *given.values()]
