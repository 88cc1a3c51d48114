"""What a results folder holds, in the words of the options that made it: for the case that something else was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sensli.paper.errors import BadExperiment
from sensli.paper.plans import catalog
from sensli.paper.plans.config import Experiment, Options, Plan, plan
from sensli.paper.plans.settings import digest
from sensli.paper.running.files import Damaged, read_json

_MOST = 6  # entries in one line


@dataclass
class Held:
    """Stored runs of one recipe, all made with the same options."""

    experiment: str  # as it is typed, where that is known
    recipe: str
    options: str  # as they are typed, without the number of runs
    runs: dict[str, set[int]] = field(default_factory=dict)  # by arm
    digests: set[str] = field(default_factory=set)

    @property
    def count(self) -> int:
        """The runs that all its arms have."""
        return len(set.intersection(*self.runs.values()))

    def __str__(self) -> str:
        return f"experiment {self.experiment} ({self.recipe}) with --runs {self.count}{self.options}"

    def answers(self, one: Plan) -> bool:
        """Whether this is what the plan asks for."""
        asked = {digest(settings, one.seed) for settings in one.arms.values()}
        return self.digests <= asked and self.count >= one.runs


def held_in(root: Path, known: Iterable[Plan] = ()) -> list[Held]:
    """Everything in a results folder that can be read; nothing is verified. ``known`` has the experiments of the user's files."""
    asked = {one.experiment.name: one for one in known}
    found: dict[tuple[str, str, str], Held] = {}
    for path in sorted(root.glob("*/*/runs-*.json")):
        try:
            facts = read_json(path)
            name = path.parent.name.rpartition("-")[2]
            own = asked.get(facts["experiment"])
            typed = str(facts["experiment"]) if own is None else own.named or own.experiment.name
            made = (typed, str(facts["recipe"]), _options(facts, name, None if own is None else own.experiment))
            entry = found.setdefault(made, Held(*made))
            entry.runs.setdefault(str(facts["arm"]), set()).update(facts["runs"])
        except (Damaged, KeyError, TypeError, ValueError):
            continue  # what is damaged is told where it is read
        entry.digests.add(name)
    return list(found.values())


def told(root: Path, other_than: list[Plan] | None = None, known: Iterable[Plan] = ()) -> str:
    """What the folder holds in one sentence; of that only what none of the given plans asks for. Empty if that is nothing."""
    held = held_in(root, known)
    if not held:
        return f"{root} holds no results." if other_than is None else ""
    others = [str(each) for each in held if not any(each.answers(one) for one in other_than or ())]
    more = f" and {len(others) - _MOST} more" if len(others) > _MOST else ""
    return f"{root} holds {'; '.join(others[:_MOST])}{more}." if others else ""


def _options(facts: Mapping[str, Any], name: str, own: Experiment | None) -> str:
    """As one would type them; of an experiment that nobody knows any more the epochs instead of their scale."""
    bf16 = facts["settings"].get("dtype") == "bfloat16"
    options = Options(seed=int(facts["seed"]), preset=str(facts["preset"]), bf16=bf16)
    scale = _scale(facts, options, name, own)
    if scale is None:
        return f"{options.typed} and {int(facts['settings']['epochs']):,} epochs"
    return replace(options, epochs_scale=scale).typed


def _scale(facts: Mapping[str, Any], options: Options, name: str, own: Experiment | None) -> float | None:
    """The shortest scale of the epochs that leads to the stored arm; None if there is none."""
    epochs, arm = int(facts["settings"]["epochs"]), facts["arm"]
    try:
        experiment = own or catalog.find(facts["experiment"])
        exact = epochs / plan(experiment, facts["recipe"], options).arms[arm].epochs
        for digits in (1, 2, 3, 4):
            scaled = replace(options, epochs_scale=float(f"{exact:.{digits}g}"))
            if name == digest(plan(experiment, facts["recipe"], scaled).arms[arm], options.seed):
                return scaled.epochs_scale
    except (BadExperiment, KeyError):
        pass
    return None
