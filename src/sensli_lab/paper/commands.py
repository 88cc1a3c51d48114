"""What `sensli paper list | run | show | report | export` do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sensli.errors import MissingExtra
from sensli_lab.errors import BadExperiment, NoResults
from sensli_lab.paper import planning, runner, tables
from sensli_lab.paper.engine import engine
from sensli_lab.paper.machine import Machine
from sensli_lab.paper.planning import Experiment, Plan, RunOptions, plan
from sensli_lab.paper.store import Store, describe_results
from sensli_lab.work.cli import place_of
from sensli_lab.work.pages import Table, terminal_table


def plans_for(names: Sequence[str], recipe: str | None, options: RunOptions) -> list[Plan]:
    """The recipes of the named experiments, each once, checked before anything is computed."""
    wanted: dict[str, tuple[Experiment, str]] = {}
    for name in names:
        for one in planning.GROUPS[name]() if name in planning.GROUPS else [name]:
            found = planning.find_experiment(one)
            wanted[found.name] = found, one
    plans = [
        plan(experiment, chosen, options, named=named)
        for experiment, named in wanted.values()
        for chosen in _recipes(experiment, recipe)
    ]
    for settings in (settings for one_plan in plans for settings in one_plan.arms.values()):
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


def _options(args: argparse.Namespace) -> RunOptions:
    return RunOptions(args.runs, args.epochs_scale, args.seed, args.preset, args.bf16)


def _list(args: argparse.Namespace) -> None:
    store = Store(args.out)
    rows, asked = [], list[Plan]()
    refused: list[BadExperiment] = []
    for experiment in planning.bundled_experiments().values():
        try:
            plans = [plan(experiment, recipe, _options(args)) for recipe in experiment.recipes]
        except BadExperiment as error:
            refused.append(error)
            continue  # too short for this one at that scale; the others are still listed
        asked += plans
        cost = sum(engine(s).estimate_seconds(s, one.runs) for one in plans for s in one.arms.values())
        recipes = ", ".join(experiment.recipes) if len(plans) < 4 else f"{len(plans)} recipes"
        runs = "/".join(dict.fromkeys(str(one.runs) for one in plans))
        what = (experiment.title, experiment.shows, _networks(plans[0]))
        rows.append((experiment.name, *what, recipes, runs, _duration(cost), _computed(plans, store)))
    if refused and (args.epochs_scale == 1.0 or not rows):
        raise refused[0]
    header = ("experiment", "setting", "shows", "networks", "recipes", "runs", "cost", "computed")
    print(terminal_table(Table(header, tuple(rows))))
    others = describe_results(store.root, asked)
    if others:
        print(f"\nComputed with other options: {others}")


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
    store = Store(args.out)
    if runner.run_plans(plans, store, Machine(args.data, args.device, args.compile), place_of(args)) == 0:
        print("everything was already computed")
    _show_plans(plans, store)


def _show(args: argparse.Namespace) -> None:
    plans = plans_for(args.experiments, args.recipe, _options(args))
    _show_plans(plans, Store(args.out))


def _show_plans(plans: list[Plan], store: Store) -> None:
    from sensli_lab.paper import figures

    missing: dict[str, NoResults] = {}
    for one in plans:
        try:
            results = store.load_all(one)
        except NoResults as error:
            missing[f"{one.experiment.name} ({one.words})"] = error
            continue
        size = "" if one.preset == "paper" else f", {one.preset} preset"
        print(f"\nExperiment {one.experiment.name}, recipe '{one.recipe}'{size}: {one.experiment.title}. {one.note}")
        for table in (tables.counts_table(one), tables.measured_table(one, results)):
            print(f"\n{terminal_table(table)}")
        for line in tables.remarks(one, results):
            print(f"\n{line}")
        try:
            for path in figures.draw_figures(one, results, store.root / "figures"):
                print(f"\nfigure: {path} (and .pdf)")
        except MissingExtra as error:
            print(f"\nno figure: {error}")
    if len(missing) == len(plans):
        raise NoResults(f"{next(iter(missing.values()))}. {describe_results(store.root, known=plans)}")
    if missing:
        held = describe_results(store.root, plans, plans)
        print(f"\nNot shown, because it is not computed with these options: {', '.join(missing)}. {held}")


def _report(args: argparse.Namespace) -> None:
    from sensli_lab.paper import report

    folder = args.to or args.out / "report"
    for path in report.write_replication(Store(args.out), _options(args), folder):
        print(path)


def _export(args: argparse.Namespace) -> None:
    print(planning.export(args.experiment, args.name), end="")


COMMANDS = {"list": _list, "run": _run, "show": _show, "report": _report, "export": _export}
