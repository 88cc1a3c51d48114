"""The results folder: `<root>/<experiment>-<recipe>/<arm>-<digest>/runs-0000-0029.{json,pt}`.

The digest is computed from everything that decides the numbers, so results of a changed configuration have a separate
folder. A part is a range of runs trained together; its JSON is for people, its .pt contains the tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensli import __version__
from sensli.checkpoint import storage
from sensli.errors import brief
from sensli.text.commands import RESULTS
from sensli.text.files import check_writable, write_bytes
from sensli_lab.errors import BadExperiment, NoResults, StoreError
from sensli_lab.paper import planning
from sensli_lab.paper.engine import TrainingOutcome, engine
from sensli_lab.paper.machine import Machine, run_seed
from sensli_lab.paper.planning import Experiment, Plan, RunOptions, plan
from sensli_lab.paper.settings import RESULT_FORMAT, Settings, digest

# ---- Files that are either whole or noticed: they carry their own checksum.


_MAGIC = b"file of sensli results\n"


class Damaged(Exception):
    """The file is not what was once written."""


def write_tensors(path: Path, content: dict[str, Any]) -> str:
    """Store tensors and plain values; returns the checksum of what was written."""
    return storage.write_tensors(path, content, _MAGIC, StoreError)


def read_tensors(path: Path, checksum: str | None = None) -> dict[str, Any]:
    """Read what `write_tensors` wrote, or raise Damaged; nothing in the file is executed."""
    try:
        content, found = storage.read_tensors(path, _MAGIC)
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from None
    except storage.Unusable as error:
        raise Damaged(str(error)) from None
    if checksum not in (None, found):
        raise Damaged("is not the file that was written with its facts: the checksum does not match")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    body = {**content, "checksum": _json_checksum(content)}
    write_bytes(path, (json.dumps(body, indent=2) + "\n").encode(), StoreError)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
        known = content.pop("checksum", None) if isinstance(content, dict) else None
        found = _json_checksum(content)
    except (OSError, ValueError, RecursionError):
        raise Damaged("it cannot be read as JSON") from None
    if not isinstance(content, dict) or known != found:
        raise Damaged("the checksum does not match")
    return content


def _json_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
        content = read_tensors(self.path.with_suffix(".pt"), self.facts["tensors"])
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


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root

    def check_writable(self) -> None:
        """Find out before the first hour of work, not after it."""
        check_writable(self.root / "results", StoreError)

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
            found, damaged = self._parts_in(folder, verify)
            good += found
            bad += damaged if folder == own else []
        return good, bad

    @staticmethod
    def _parts_in(folder: Path, verify: bool) -> tuple[list[StoredPart], list[tuple[Path, str]]]:
        good, bad = [], []
        for path in sorted(folder.glob("runs-*.json")):
            try:
                part = StoredPart(path, _checked_facts(read_json(path)))
                if verify:
                    part.tensors()
                good.append(part)
            except Damaged as error:
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
        tensors = write_tensors(path.with_suffix(".pt"), {"runs": outcome.runs, "axes": outcome.axes})
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
                "counts": dataclasses.asdict(engine(settings).counts(settings)),
                "seconds": round(outcome.seconds, 3),
                "format": RESULT_FORMAT,
                "tensors": tensors,
                **outcome.origin,
            },
        )
        self._path(plan, arm, runs, "unfinished").unlink(missing_ok=True)

    def save_state(self, plan: Plan, arm: str, runs: list[int], state: dict[str, Any]) -> None:
        write_tensors(self._path(plan, arm, runs, "unfinished"), state)

    def load_state(self, plan: Plan, arm: str, runs: list[int]) -> dict[str, Any] | None:
        """Where a stopped training of exactly these runs was, if it left a whole file."""
        try:
            state = read_tensors(self._path(plan, arm, runs, "unfinished"))
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
        "runs": list,
        "tensors": str,
        "seconds": (int, float),
        "commit": (str, type(None)),
        "versions": dict,
        "machine": str,
    }
    for name, kind in kinds.items():
        if not isinstance(facts.get(name), kind):
            raise Damaged(f"{name!r} is {brief(facts.get(name))}")
    runs = facts["runs"]
    if not runs or not all(type(run) is int and run >= 0 for run in runs) or len(set(runs)) != len(runs):
        raise Damaged(f"'runs' is {brief(runs)}")
    return facts


def readable(root: Path) -> Store:
    """A store to read from; a path that is not a folder is the user's mistake."""
    if root.exists() and not root.is_dir():
        raise StoreError(f"{root} is a file, not a results folder. Choose a folder with --out.")
    return Store(root)


# ---- What a results folder holds, in the words of the options that made it: for the case that something else was asked
# for.


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
    options = RunOptions(seed=int(facts["seed"]), preset=str(facts["preset"]), bf16=bf16)
    scale = _scale(facts, options, name, own)
    if scale is None:
        return f"{options.typed} and {int(facts['settings']['epochs']):,} epochs"
    return replace(options, epochs_scale=scale).typed


def _scale(facts: Mapping[str, Any], options: RunOptions, name: str, own: Experiment | None) -> float | None:
    """The shortest scale of the epochs that leads to the stored arm; None if there is none."""
    epochs, arm = int(facts["settings"]["epochs"]), facts["arm"]
    try:
        experiment = own or planning.find(facts["experiment"])
        exact = epochs / plan(experiment, facts["recipe"], options).arms[arm].epochs
        for digits in (1, 2, 3, 4):
            scaled = replace(options, epochs_scale=float(f"{exact:.{digits}g}"))
            if name == digest(plan(experiment, facts["recipe"], scaled).arms[arm], options.seed):
                return scaled.epochs_scale
    except (BadExperiment, KeyError):
        pass
    return None


# ---- Where a result comes from: which code, on which software, on which device.


def origin(settings: Settings, machine: Machine) -> dict[str, Any]:
    """The facts that are stored with a result. Called where the result was computed."""
    return {**provenance(), **({"device": str(machine)} if settings.engine == "cnn" else {})}


@lru_cache
def provenance() -> dict[str, Any]:
    """Which code on which software computed a result."""
    return {
        "commit": _commit(),
        "versions": {"sensli": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _commit() -> str | None:
    """The commit of the checkout this package runs from, marked where files differ from it; None if installed."""
    here = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        call = ["git", "-C", str(here), *arguments]
        return subprocess.run(call, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # an installed package may lie inside somebody else's repository: only our own source tree counts
        if Path(git("rev-parse", "--show-toplevel")) / "src" / "sensli_lab" != here:
            return None
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
