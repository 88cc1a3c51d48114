"""`sensli paper list | run | show | report`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sensli.errors import MissingExtra
from sensli.paper.engines.engine import engine
from sensli.paper.errors import BadExperiment, NoResults
from sensli.paper.plans import catalog
from sensli.paper.plans.config import Experiment, Options, Plan, plan
from sensli.paper.plans.machine import DEVICES, Machine
from sensli.paper.plans.presets import PRESETS
from sensli.paper.report import tables
from sensli.paper.report.document import Table
from sensli.paper.running import runner
from sensli.paper.running.store import Store, readable

RESULTS = Path("results")


def add_parser(subparsers: Any) -> None:
    """Add `paper` to a parser's subcommands; `args.run(args)` then does the work and raises if something goes wrong."""
    text = "the paper's experiments: list, run, show, report"
    parser = subparsers.add_parser(
        "paper",
        help=text,
        description=text.capitalize() + ".",
        epilog="example: sensli paper run 2, then sensli paper report",
    )
    add_commands(parser)


def add_commands(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=execute)
    commands = parser.add_subparsers(dest="paper_command", required=True, metavar="list|run|show|report")

    def command(name: str, text: str, example: str) -> argparse.ArgumentParser:
        epilog = f"example: sensli paper {name}{example}"
        one: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, epilog=epilog)
        one.add_argument(
            "--out", type=Path, default=RESULTS, metavar="DIR", help=f"results folder (default: {RESULTS})"
        )
        one.add_argument("--seed", type=int, default=0, metavar="S", help="random seed (default: 0)")
        one.add_argument("--runs", type=int, metavar="N", help="runs per arm (default: the paper's)")
        scale = "scales epochs and insertion times together (default: 1)"
        one.add_argument("--epochs-scale", type=float, default=1.0, metavar="F", help=scale)
        sizes = "; ".join(f"{key}: {preset.words}" for key, preset in PRESETS.items())
        one.add_argument(
            "--preset", default="paper", metavar="|".join(PRESETS), help=f"size of the CNN experiments. {sizes}"
        )
        one.add_argument("--bf16", action="store_true", help="train the CNNs in bfloat16, if the device supports it")
        return one

    command("list", "List all experiments: what they show, what they cost, what is already computed.", "")
    for name, text, example in (
        (
            "run",
            "Compute what is missing, then show it. An interrupted run resumes where it stopped.",
            " 2 --as run --runs 10",
        ),
        ("show", "Show figures and tables from stored results.", " 2"),
    ):
        one = command(name, text, example)
        targets = (
            "a number, a name, 'all' (the paper's), 'spirals' or 'cnn' (the paper's of that kind), 'further' (ours), or "
            "an experiment file (.json, .toml)"
        )
        one.add_argument("experiments", nargs="+", metavar="EXPERIMENT", help=targets)
        recipe = "'stated' or 'run' (as the authors' scripts ran it), or another recipe (default: all of them)"
        one.add_argument("--as", dest="recipe", metavar="RECIPE", help=recipe)
        if name == "run":
            one.set_defaults(resumes=True)
            where = "folder of CIFAR-10, or where to download it to (default: SENSLI_DATA, otherwise data)"
            one.add_argument("--data", type=Path, metavar="DIR", help=where)
            one.add_argument(
                "--device", choices=DEVICES, default="auto", help="device of the CNN experiments (default: auto)"
            )
            one.add_argument("--compile", action="store_true", help="compile the CNNs with torch.compile")
            places = "'here' (one after another in this process, the default) or 'ray' (in parallel as Ray tasks)"
            one.add_argument("--on", choices=("here", "ray"), default="here", help=f"where to compute: {places}")
            head = "with --on ray: HOST:PORT of a cluster's head, or 'auto' (default: RAY_ADDRESS, otherwise a Ray on this machine)"
            one.add_argument("--ray-address", metavar="ADDRESS", help=head)
            cpus = "with --on ray: CPUs and threads of each task (default: 1 for spirals, an equal share for CNNs)"
            one.add_argument("--ray-cpus", type=int, metavar="N", help=cpus)
    report = command("report", "Write the claims, each with its verdict, as Markdown and HTML.", " --to page")
    report.add_argument("--to", type=Path, metavar="DIR", help="folder for the report (default: report in the results)")


def execute(args: argparse.Namespace) -> None:
    {"list": _list, "run": _run, "show": _show, "report": _report}[args.paper_command](args)


def plans_for(names: Sequence[str], recipe: str | None, options: Options) -> list[Plan]:
    """The recipes of the named experiments, each once, checked before anything is computed."""
    wanted: dict[str, Experiment] = {}
    for name in names:
        for one in catalog.GROUPS[name]() if name in catalog.GROUPS else [name]:
            found = catalog.find(one)
            wanted[found.name] = found
    plans = []
    for experiment in wanted.values():
        for chosen in _recipes(experiment, recipe):
            plans.append(plan(experiment, chosen, options))
    for one_plan in plans:
        for settings in one_plan.arms.values():
            engine(settings)
    return plans


def _recipes(experiment: Experiment, recipe: str | None) -> list[str]:
    if recipe is None:
        return list(experiment.recipes)
    if recipe == "run" and "run" not in experiment.recipes and "stated" in experiment.recipes:
        return ["stated"]  # no difference is known: what was run is what is stated
    if recipe not in experiment.recipes:
        known = ", ".join(experiment.recipes)
        raise BadExperiment(f"--as: experiment {experiment.name} has no recipe {recipe!r}. It has: {known}.")
    return [recipe]


def _options(args: argparse.Namespace) -> Options:
    return Options(args.runs, args.epochs_scale, args.seed, args.preset, args.bf16)


def _list(args: argparse.Namespace) -> None:
    store = readable(args.out)
    rows = []
    refused: list[BadExperiment] = []
    for experiment in catalog.bundled().values():
        try:
            plans = [plan(experiment, recipe, _options(args)) for recipe in experiment.recipes]
        except BadExperiment as error:
            refused.append(error)
            continue  # too short for this one at that scale; the others are still listed
        cost = sum(engine(s).estimate(s, one.runs) for one in plans for s in one.arms.values())
        recipes = ", ".join(experiment.recipes) if len(plans) < 4 else f"{len(plans)} recipes"
        runs = "/".join(dict.fromkeys(str(one.runs) for one in plans))
        what = (experiment.title, experiment.shows, _networks(plans[0]))
        rows.append((experiment.name, *what, recipes, runs, _duration(cost), _computed(plans, store)))
    if refused and (args.epochs_scale == 1.0 or not rows):
        raise refused[0]
    header = ("experiment", "setting", "shows", "networks", "recipes", "runs", "cost", "computed")
    print(tables.plain(Table(header, tuple(rows))))


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _computed(plans: list[Plan], store: Store) -> str:
    arms = [not store.missing(one, arm, verify=False) for one in plans for arm in one.arms]
    return "yes" if all(arms) else f"{sum(arms)} of {len(arms)} arms" if any(arms) else "no"


def _networks(one: Plan) -> str:
    names: dict[str, None] = {}
    for settings in one.arms.values():
        network = settings.network
        size = (
            f"{len(network.widths)}x{network.widths[0]}"
            if network.kind != "cnn"
            else "-".join(map(str, network.channels))
        )
        names[f"{network.kind} {size}"] = None
    return ", ".join(names)


def _run(args: argparse.Namespace) -> None:
    plans = plans_for(args.experiments, args.recipe, _options(args))
    store = readable(args.out)
    if runner.run(plans, store, Machine(args.data, args.device, args.compile), _place(args)) == 0:
        print("everything was already computed")
    _show_plans(plans, store)


def _place(args: argparse.Namespace) -> runner.Place:
    if args.on == "ray":
        from sensli.paper.running.on_ray import ray_place

        return ray_place(args.ray_address, args.ray_cpus)
    for name in ("ray_address", "ray_cpus"):
        if getattr(args, name) is not None:
            raise BadExperiment(f"--{name.replace('_', '-')} needs --on ray. Add --on ray, or leave it out.")
    return runner.here


def _show(args: argparse.Namespace) -> None:
    plans = plans_for(args.experiments, args.recipe, _options(args))
    _show_plans(plans, readable(args.out))


def _show_plans(plans: list[Plan], store: Store) -> None:
    from sensli.paper.report import figures

    shown = 0
    missing: NoResults | None = None
    for one in plans:
        try:
            results = store.load_all(one)
        except NoResults as error:
            missing = error
            continue
        shown += 1
        size = "" if one.preset == "paper" else f", {one.preset} preset"
        print(f"\nExperiment {one.experiment.name}, recipe '{one.recipe}'{size}: {one.experiment.title}. {one.note}")
        for table in (tables.counts(one), tables.measured(one, results)):
            print(f"\n{tables.plain(table)}")
        for line in tables.remarks(one, results):
            print(f"\n{line}")
        try:
            for path in figures.draw(one, results, store.root / "figures"):
                print(f"\nfigure: {path} (and .pdf)")
        except MissingExtra as error:
            print(f"\nno figure: {error}")
    if missing is not None and shown == 0:
        raise missing


def _report(args: argparse.Namespace) -> None:
    from sensli.paper.report import report

    folder = args.to or args.out / "report"
    for path in report.write(readable(args.out), _options(args), folder):
        print(path)
