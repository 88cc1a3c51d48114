"""The results folder: `<root>/<experiment>-<recipe>/<arm>-<digest>/runs-0000-0029.{json,pt}`.

The digest is computed from everything that decides the numbers, so results of a changed configuration have a separate
folder. A part is a range of runs trained together; its JSON is for people, its .pt contains the tensors.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensli.errors import brief_text
from sensli.text.commands import RESULTS
from sensli_lab.errors import BadExperiment, NoResults, StoreError
from sensli_lab.paper import planning
from sensli_lab.paper.engine import TrainingOutcome, engine
from sensli_lab.paper.machine import run_seed
from sensli_lab.paper.planning import Experiment, Plan, RunOptions, plan
from sensli_lab.paper.settings import RESULT_FORMAT, Settings, digest
from sensli_lab.work.store import Damaged, ResultsFolder, read_json, read_results, write_json, write_results


@dataclass(frozen=True)
class Result:
    """The stored runs 0 ... n - 1 of one arm, in order."""

    arm: str
    settings: Settings
    runs: dict[str, Tensor]
    axes: dict[str, Tensor]
    seconds: float
    facts: dict[str, Any]  # of the first part: commit, versions, counts

    def final(self, curve: str) -> Tensor:
        return self.runs[curve][:, -1].double()


_CURVES = {"train_loss", "test_loss", "test_error"}  # what every engine records


@dataclass(frozen=True)
class StoredPart:
    path: Path
    facts: dict[str, Any]

    @property
    def runs(self) -> list[int]:
        return list(self.facts["runs"])

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The runs, one in each row of every tensor, and the axes; or Damaged."""
        content = read_results(self.path.with_suffix(".pt"), self.facts["tensors"])
        for name in ("runs", "axes"):
            its = content.get(name)
            if not isinstance(its, dict) or not all(isinstance(value, Tensor) for value in its.values()):
                raise Damaged(f"{name!r} does not contain tensors")
        if any(
            value.ndim < 2 or len(value) != len(self.runs) or value.is_complex() for value in content["runs"].values()
        ):
            raise Damaged(f"not every tensor contains records of {len(self.runs)} runs")
        if not content["runs"].keys() >= _CURVES:
            raise Damaged("a curve is missing")
        return content


class Store(ResultsFolder):
    """The results of plans, arm by arm."""

    @property
    def typed(self) -> str:
        """The folder as it is typed, after a space; nothing if it is the default."""
        return "" if self.root == Path(RESULTS) else f" --out {shlex.quote(str(self.root))}"

    def folder(self, plan: Plan, arm: str) -> Path:
        return self.root / plan.key / f"{arm}-{digest(plan.arms[arm], plan.seed)}"

    def parts(self, plan: Plan, arm: str, *, verify: bool = True) -> tuple[list[StoredPart], list[tuple[Path, str]]]:
        """The whole parts of an arm, and the damaged ones with the reason; `verify=False` leaves the tensors unread.

        Other experiments may have computed the same arm, as its digest tells: what they have counts as well.
        """
        good, bad = [], []
        own = self.folder(plan, arm)
        others = self.root.glob(f"*/*-{digest(plan.arms[arm], plan.seed)}")
        for folder in (own, *sorted(folder for folder in others if folder != own)):
            for path in sorted(folder.glob("runs-*.json")):
                try:
                    part = StoredPart(path, _checked_facts(read_json(path)))
                    if verify:
                        part.tensors()
                    good.append(part)
                except Damaged as error:
                    if folder == own:
                        bad.append((path, str(error)))
        return good, bad

    def missing(self, plan: Plan, arm: str, *, verify: bool = True) -> list[int]:
        have = {run for part in self.parts(plan, arm, verify=verify)[0] for run in part.runs}
        return [run for run in range(plan.runs) if run not in have]

    def discard(self, path: Path) -> None:
        """Take a damaged part out of the way; its runs count as missing from then on."""
        for suffix in (".json", ".pt"):
            path.with_suffix(suffix).unlink(missing_ok=True)

    def load(self, plan: Plan, arm: str) -> Result:
        """The runs of one arm, or NoResults with the command that computes them."""
        parts, damaged = self.parts(plan, arm)
        rows: dict[int, tuple[dict[str, Tensor], int]] = {}
        axes: dict[str, Tensor] = {}
        seconds = 0.0
        for part in parts:
            if all(run in rows for run in part.runs):  # another experiment has them too
                continue
            content = part.tensors()
            axes = content["axes"]
            seconds += part.facts["seconds"]
            for row, run in enumerate(part.runs):
                rows.setdefault(run, (content["runs"], row))
        have = sum(run in rows for run in range(plan.runs))
        if have < plan.runs:
            lost = f" ({len(damaged)} damaged left out)" if damaged else ""
            raise NoResults(
                f"{self.root}: experiment {plan.experiment.name} ({plan.words}), arm {arm}: {have} of {plan.runs} runs are stored for "
                f"this configuration{lost}. Compute the rest with: sensli paper run {plan.command}{self.typed}"
            )
        first = rows[0][0]
        try:
            runs = {name: torch.stack([rows[run][0][name][rows[run][1]] for run in range(plan.runs)]) for name in first}
        except (KeyError, RuntimeError) as error:
            raise StoreError(
                f"{self.folder(plan, arm)}: its files contain different records ({error}). Delete the folder and run again."
            ) from None
        return Result(arm, plan.arms[arm], runs, axes, seconds, parts[0].facts)

    def load_all(self, plan: Plan) -> dict[str, Result]:
        return {arm: self.load(plan, arm) for arm in plan.arms}

    def recorded(self, plan: Plan, arm: str, run: int) -> dict[str, Tensor]:
        """What one run of an arm recorded."""
        for part in self.parts(plan, arm, verify=False)[0]:
            if run in part.runs:
                try:
                    return {name: values[part.runs.index(run)] for name, values in part.tensors()["runs"].items()}
                except Damaged:
                    continue
        raise NoResults(f"{self.root}: run {run + 1} of {arm} is not stored, but another arm needs it.")

    def save(self, plan: Plan, arm: str, runs: list[int], outcome: TrainingOutcome) -> None:
        """Write the tensors first and the JSON last: a part without its JSON does not exist."""
        path = self._path(plan, arm, runs, "runs").with_suffix(".json")
        settings = plan.arms[arm]
        tensors = write_results(path.with_suffix(".pt"), {"runs": outcome.runs, "axes": outcome.axes})
        write_json(
            path,
            {
                "experiment": plan.experiment.name,
                "title": plan.experiment.title,
                "recipe": plan.recipe,
                "preset": plan.preset,
                "arm": arm,
                "runs": runs,
                "seed": plan.seed,
                "seeds": [run_seed(plan.seed, run, "weights") for run in runs],
                "settings": dataclasses.asdict(settings),
                "counts": dataclasses.asdict(engine(settings).count_arm(settings)),
                "seconds": round(outcome.seconds, 3),
                "format": RESULT_FORMAT,
                "tensors": tensors,
                **outcome.origin,
            },
        )
        self._path(plan, arm, runs, "unfinished").unlink(missing_ok=True)

    def save_state(self, plan: Plan, arm: str, runs: list[int], state: dict[str, Any]) -> None:
        write_results(self._path(plan, arm, runs, "unfinished"), state)

    def load_state(self, plan: Plan, arm: str, runs: list[int]) -> dict[str, Any] | None:
        """Where a stopped training of exactly these runs was, if it left a whole file."""
        try:
            state = read_results(self._path(plan, arm, runs, "unfinished"))
        except Damaged:
            return None
        kept = state.get("runs")
        whole = isinstance(state.get("engine"), dict) and isinstance(state.get("seconds"), float)
        return state if whole and isinstance(kept, list) and all(type(run) is int for run in kept) else None

    def _path(self, plan: Plan, arm: str, runs: list[int], kind: str) -> Path:
        return self.folder(plan, arm) / f"{kind}-{runs[0]:04d}-{runs[-1]:04d}.pt"


def _checked_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """What people and the report read of a part; a file with the right checksum may still not be one of ours."""
    kinds: dict[str, Any] = {
        "runs": list, "tensors": str, "seconds": (int, float), "commit": (str, type(None)), "versions": dict, "machine": str
    }  # fmt: skip
    for name, kind in kinds.items():
        if not isinstance(facts.get(name), kind):
            raise Damaged(f"{name!r} is {brief_text(facts.get(name))}")
    runs = facts["runs"]
    if not runs or not all(type(run) is int and run >= 0 for run in runs) or len(set(runs)) != len(runs):
        raise Damaged(f"'runs' is {brief_text(runs)}")
    return facts


# ---- What a results folder holds, in the words of the options that made it: for the case that something else was asked for.

_MOST = 6  # entries in one line


def describe_results(root: Path, other_than: list[Plan] | None = None, known: Iterable[Plan] = ()) -> str:
    """What the folder holds in one sentence; of that only what none of the given plans asks for. Empty if that is nothing.

    ``known`` has the experiments of the user's files. Nothing is verified, and what cannot be read is left out.
    """
    files = {one.experiment.name: one for one in known}
    held: dict[tuple[str, str, str], dict[str, set[int]]] = {}  # experiment, recipe, options -> arm -> runs
    digests: dict[tuple[str, str, str], set[str]] = {}
    for path in sorted(root.glob("*/*/runs-*.json")):
        try:
            facts, name = read_json(path), path.parent.name.rpartition("-")[2]
            own = files.get(facts["experiment"])
            typed = str(facts["experiment"]) if own is None else own.named or own.experiment.name
            made = (typed, str(facts["recipe"]), _options(facts, name, None if own is None else own.experiment))
            arm, runs = str(facts["arm"]), set(facts["runs"])
        except (Damaged, KeyError, TypeError, ValueError):
            continue  # what is damaged is told where it is read
        held.setdefault(made, {}).setdefault(arm, set()).update(runs)
        digests.setdefault(made, set()).add(name)
    if not held:
        return f"{root} holds no results." if other_than is None else ""
    asked = [({digest(arm, one.seed) for arm in one.arms.values()}, one.runs) for one in other_than or ()]
    others = []
    for made, arms in held.items():
        count = len(set.intersection(*arms.values()))  # the runs that all arms have
        if not any(digests[made] <= names and count >= least for names, least in asked):
            experiment, recipe, options = made
            others.append(f"experiment {experiment} ({recipe}) with --runs {count}{options}")
    more = f" and {len(others) - _MOST} more" if len(others) > _MOST else ""
    return f"{root} holds {'; '.join(others[:_MOST])}{more}." if others else ""


def _options(facts: Mapping[str, Any], name: str, own: Experiment | None) -> str:
    """As one would type them, with the shortest scale of the epochs that leads to the stored arm; if there is none, the epochs."""
    settings, arm = facts["settings"], facts["arm"]
    epochs = int(settings["epochs"])
    options = RunOptions(seed=int(facts["seed"]), preset=str(facts["preset"]), bf16=settings.get("dtype") == "bfloat16")
    try:
        experiment = own or planning.find_experiment(facts["experiment"])
        exact = epochs / plan(experiment, facts["recipe"], options).arms[arm].epochs
        for digits in (1, 2, 3, 4):
            scaled = replace(options, epochs_scale=float(f"{exact:.{digits}g}"))
            if name == digest(plan(experiment, facts["recipe"], scaled).arms[arm], options.seed):
                return scaled.typed
    except (BadExperiment, KeyError):  # an experiment that nobody knows any more
        pass
    return f"{options.typed} and {epochs:,} epochs"
