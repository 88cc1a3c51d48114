"""What an experiment is: read from a file, found by name, one Settings for each arm."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sensli_lab.errors import BadExperiment
from sensli_lab.paper import presets
from sensli_lab.paper.reading import check_keys, merge, read_record, unknown_name
from sensli_lab.paper.settings import Settings, need, need_known

if TYPE_CHECKING:
    from importlib.abc import Traversable

# ---- What an experiment is: a record, read strictly from a file, resolved into one Settings per arm.
#
# A file holds `settings` (what all arms share), `arms` (name -> the settings that differ) and `recipes` (name -> the
# settings that differ from the file's). A Plan is what remains when recipe, arm and command-line options are applied.

FIGURES = ("curves", "times", "gradients", "heatmaps", "cost", "norms")
MOST_RUNS = 100_000  # each is listed, stored and shown


@dataclass(frozen=True)
class Recipe:
    """One reading of an experiment: as stated in the paper, as its scripts ran it, or a variation of ours."""

    note: str = ""
    runs: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One experiment file."""

    name: str
    title: str
    shows: str
    runs: int
    settings: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    recipes: dict[str, Recipe] = field(default_factory=lambda: {"stated": Recipe()})
    figures: tuple[str, ...] = ("curves",)
    smoothing: int = 1  # window of the moving average in the figures
    note: str = ""

    def __post_init__(self) -> None:
        need(self.runs > 0, f"runs must be at least 1, got {self.runs}.")
        need(self.smoothing > 0, f"smoothing must be at least 1, got {self.smoothing}.")
        need(len(self.arms) > 0, "arms is empty: name at least one.")
        need(len(self.recipes) > 0, "recipes is empty: leave the key out, or name at least one.")
        for figure in self.figures:
            need_known("figure", figure, FIGURES)
        for name in (*self.arms, *self.recipes, self.name):
            fine = name != "" and all(letter.isalnum() or letter in " @._+-" for letter in name) and name[0] != "."
            need(fine, f"the name {name!r} becomes a folder: use letters, digits, spaces and @ . _ + - only.")


@dataclass(frozen=True)
class RunOptions:
    """What the command line may change; part of what is stored through the settings it changes."""

    runs: int | None = None
    epochs_scale: float = 1.0
    seed: int = 0
    preset: str = "paper"
    bf16: bool = False

    @property
    def typed(self) -> str:
        """As they are typed, each after a space; what has its default is left out."""
        runs = "" if self.runs is None else f" --runs {self.runs}"
        short = f"{self.epochs_scale:g}"
        scale = short if float(short) == self.epochs_scale else repr(self.epochs_scale)
        scale = "" if self.epochs_scale == 1 else f" --epochs-scale {scale}"
        preset = "" if self.preset == "paper" else f" --preset {self.preset}"
        return f"{runs}{scale}{preset}{f' --seed {self.seed}' if self.seed else ''}{' --bf16' if self.bf16 else ''}"


@dataclass(frozen=True)
class Plan:
    """One recipe of one experiment, ready to run."""

    experiment: Experiment
    recipe: str
    note: str
    runs: int
    seed: int
    arms: dict[str, Settings]
    options: RunOptions = field(default_factory=RunOptions)  # that made it
    named: str = ""  # how the experiment was asked for, if not by its name

    @property
    def command(self) -> str:
        """What is typed after `sensli paper run` to compute it."""
        recipe = f" --as {shlex.quote(self.recipe)}" if len(self.experiment.recipes) > 1 else ""
        return f"{shlex.quote(self.named or self.experiment.name)}{recipe}{self.options.typed}"

    @property
    def preset(self) -> str:
        return next(iter(self.arms.values())).preset

    @property
    def key(self) -> str:
        return f"{self.experiment.name}-{self.recipe}" + ("" if self.preset == "paper" else f"-{self.preset}")

    @property
    def words(self) -> str:
        """The recipe, and the preset where it is not the paper's."""
        return self.recipe if self.preset == "paper" else f"{self.recipe}, {self.preset} preset"

    def grown_arm(self, arm: str) -> str:
        """The arm whose grown networks this arm (`from_start`) trains from scratch."""
        wanted = dataclasses.replace(self.arms[arm], from_start=False, record_gradients=False, record_norms=False)
        for name, settings in self.arms.items():
            if name == arm:
                break
            if dataclasses.replace(settings, record_gradients=False, record_norms=False) == wanted:
                return name
        raise BadExperiment(
            f"experiment {self.experiment.name}, arm {arm!r}: from_start needs an arm above it with the same settings "
            "except from_start, whose networks it takes over."
        )


def parse(data: Mapping[str, Any], where: str) -> Experiment:
    """Read one experiment and check every recipe of every arm, so that a mistake shows before anything runs."""
    experiment = read_record(Experiment, data, where)
    for recipe in experiment.recipes:
        plan(experiment, recipe, RunOptions(), where)
    return experiment


def plan(experiment: Experiment, recipe: str, options: RunOptions, where: str | None = None, named: str = "") -> Plan:
    where = where or f"experiment {experiment.name}"
    if recipe not in experiment.recipes:
        raise BadExperiment(f"{where}: {unknown_name('recipe', recipe, experiment.recipes)}")
    if options.runs is not None and not 1 <= options.runs <= MOST_RUNS:
        raise BadExperiment(f"{where}: --runs must be between 1 and {MOST_RUNS:,}, got {options.runs}.")
    if not 0 < options.epochs_scale <= 100:
        raise BadExperiment(f"{where}: --epochs-scale must be positive and at most 100, got {options.epochs_scale}.")
    chosen = experiment.recipes[recipe]
    base = merge(experiment.settings, chosen.settings)
    check_keys(base, [f.name for f in dataclasses.fields(Settings)], f"{where}, recipe {recipe!r}")
    arms = {}
    for name, changes in experiment.arms.items():
        spot = f"{where}, arm {name!r} ({recipe})"
        settings = presets.apply(options.preset, read_record(Settings, merge(base, changes), spot), spot)
        try:
            settings = presets.shorten_settings(settings, options.epochs_scale)
        except ValueError as error:
            raise BadExperiment(f"{spot}: --epochs-scale {options.epochs_scale} is too small: {error}") from None
        bf16 = options.bf16 and presets.apply_to(settings)
        arms[name] = dataclasses.replace(settings, dtype="bfloat16") if bf16 else settings
    _check_figures(experiment, arms, where)
    runs = options.runs or presets.runs(options.preset, arms, chosen.runs or experiment.runs)
    result = Plan(experiment, recipe, chosen.note, runs, options.seed, arms, options, named)
    for name, settings in arms.items():
        if settings.from_start:
            result.grown_arm(name)
    return result


def _check_figures(experiment: Experiment, arms: dict[str, Settings], where: str) -> None:
    """A figure needs something to draw; better said before the training than after it."""
    growing = [arm for arm in arms.values() if arm.insert_at]
    recorded = any(arm.record_gradients and len(arm.insert_at) == 1 for arm in growing)
    needs = {
        "heatmaps": (len(growing) > 0, "an arm that grows (insert_at)"),
        "norms": (any(arm.record_norms for arm in growing), "an arm that grows with record_norms"),
        "cost": (all(map(presets.apply_to, arms.values())), "the engine 'cnn', which keeps the time"),
        "gradients": (recorded, "an arm with record_gradients and one insertion"),
    }
    for figure, (fulfilled, what) in needs.items():
        if figure in experiment.figures and not fulfilled:
            raise BadExperiment(f"{where}: the figure {figure!r} needs {what}.")


# ---- Finding experiments: the paper's by number, ours by name, the user's by path.

PAPER = tuple(str(number) for number in range(1, 15))


@lru_cache
def _files() -> dict[str, Traversable]:
    """The experiments that come with the package, by name, the paper's first. None of them is read."""
    folder = resources.files("sensli_lab.paper") / "experiments"
    entries = [entry for entry in folder.iterdir() if entry.name.endswith(".json")]
    names = {re.sub(r"^exp0*(\d+)$", r"\1", entry.name.removesuffix(".json")): entry for entry in entries}
    order = sorted(names, key=lambda name: (0, int(name), "") if name in PAPER else (1, 0, name))
    return {name: names[name] for name in order}


@lru_cache
def _read(name: str) -> Experiment:
    entry = _files()[name]
    return parse(json.loads(entry.read_text("utf-8")), entry.name)


def bundled_experiments() -> dict[str, Experiment]:
    """All experiments that come with the package, in that order."""
    return {name: _read(name) for name in _files()}


def paper_names() -> list[str]:
    return [name for name in _files() if name in PAPER]


def further_names() -> list[str]:
    return [name for name in _files() if name not in PAPER]


def _of_engine(engine: str, names: list[str]) -> list[str]:
    return [name for name in names if _read(name).settings.get("engine", "stacked") == engine]


GROUPS: dict[str, Callable[[], list[str]]] = {
    "all": paper_names,
    "spirals": lambda: _of_engine("stacked", paper_names()),
    "cnn": lambda: _of_engine("cnn", paper_names()),
    "further": lambda: _of_engine("stacked", further_names()),  # minutes; a CNN, which takes days, only by its name
}


def find_experiment(name: str) -> Experiment:
    """An experiment by number or name, or from a user's file."""
    if name.endswith((".json", ".toml")):
        return load_experiment(Path(name))
    if name in _files():
        return _read(name)
    raise BadExperiment(unknown_name("experiment", name, [*_files(), *GROUPS]))


def export(name: str, new: str | None = None) -> str:
    """The file of an experiment of the package under another name, to be changed and run: ``my-13`` unless one is given."""
    if name not in _files():
        raise BadExperiment(unknown_name("experiment", name, _files()))
    new = new or f"my-{name}"
    if new in _files():
        raise BadExperiment(
            f"--name must not be that of an experiment of the package, got {new!r}. Choose another name."
        )
    text = _files()[name].read_text("utf-8").replace(f'"name": {json.dumps(name)}', f'"name": {json.dumps(new)}', 1)
    parse(json.loads(text), f"{new}.json")  # which also checks the name
    return text


def load_experiment(path: Path) -> Experiment:
    """Read one experiment file, JSON or TOML."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or "" if isinstance(error, OSError) else "not UTF-8 text"
        raise BadExperiment(f"{path} cannot be read ({reason}). Check the path.") from None
    try:
        try:
            data = _toml(text) if path.suffix == ".toml" else json.loads(text)
        except ValueError as error:
            raise BadExperiment(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from None
        experiment = parse(data, path.name)
    except RecursionError:
        raise BadExperiment(f"{path} is nested too deeply for an experiment. Use an intact copy.") from None
    if experiment.name in _files():
        raise BadExperiment(
            f"{path.name}: the name {experiment.name!r} belongs to an experiment of the package, and their results would "
            "be mixed up. Choose another name."
        )
    return experiment


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)
    raise BadExperiment("TOML files need Python 3.11 or newer. Write the experiment as JSON.")
