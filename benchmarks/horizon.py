"""The study of the horizon: how long must a trial be to tell which network is best in the end, and does racing by halves help?

From the same state of a training the model without a growth and with each of the three best candidates train on for equal FLOPs. Their
order after each share of the time is compared with their order at the end.

    python -m benchmarks.horizon --data DIR             # both tasks; about two minutes on one core
    python -m benchmarks.horizon --show horizon.json    # the tables again
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.horizon_tasks import TASKS, Batch, Task, step
from sensli import find_sites, grow, measure
from sensli.text.tables import text_table
from sensli_lab.paper.image_sets import folder
from sensli_lab.work.statistics import interval

STEPS = 1024  # of the model without a growth, until the end
SHARES = tuple(2.0**-power for power in range(7, -1, -1))  # of the time; the last one is the end
MOMENTS = (2, 10)  # epochs before the look
CANDIDATES = 3
SEEDS = 6
KEPT = 2  # networks that a race keeps after a quarter of its time
Run = dict[str, Any]  # one look: names, and for each part of the data the losses [networks][shares]


def study(task: Task, seed: int, moment: int) -> Run:
    """One look: all networks from one state, to the end."""
    torch.manual_seed(seed)
    model = task.network()
    optimizer, batches = task.optimizer(model), task.batches(torch.Generator().manual_seed(seed))
    for batch in itertools.islice(batches, moment * task.epoch):
        step(model, optimizer, batch)
    x, y = task.train
    sites = find_sites(model, x[:1], what="both")
    merits = measure(model, sites, [(x[:500], y[:500])], cross_entropy, ratio=False)
    candidates = [merit.site for merit in merits.ranked[:CANDIDATES]]
    drawn, budget = list(itertools.islice(batches, STEPS)), STEPS * task.flops(model)
    run: Run = {"networks": ["no growth", *map(str, candidates)], "training": [], "held out": []}
    for site in (None, *candidates):
        fork, its = copy.deepcopy((model, optimizer))
        if site is not None:
            grow(fork, site.in_model(fork), optimizer=its)
        curve = _trained(task, fork, its, drawn, budget)
        for part in ("training", "held out"):
            run[part].append([losses[part] for losses in curve])
    return run


def _trained(
    task: Task, model: torch.nn.Module, optimizer: Any, batches: Sequence[Batch], budget: int
) -> list[dict[str, float]]:
    """The losses after each share of the FLOPs."""
    cost, taken, curve = task.flops(model), 0, []
    for share in SHARES:
        steps = max(1, int(share * budget) // cost)
        for batch in batches[taken:steps]:
            step(model, optimizer, batch)
        taken = max(taken, steps)
        curve.append(task.losses(model))
    return curve


# --- what comes of it ---


def agreement(early: Sequence[float], end: Sequence[float]) -> float:
    """Kendall's: the share of pairs in the same order minus that of pairs in the other one."""
    pairs = list(itertools.combinations(range(len(end)), 2))
    signs = [(early[a] - early[b]) * (end[a] - end[b]) for a, b in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs)


def winner(losses: Sequence[Sequence[float]], index: int) -> int:
    """The network with the smallest loss after a share."""
    return min(range(len(losses)), key=lambda network: losses[network][index])


def raced(losses: Sequence[Sequence[float]], index: int) -> int:
    """The winner of a race: after a quarter of the time the better ones go on."""
    kept = sorted(range(len(losses)), key=lambda network: losses[network][index - 2])[:KEPT]
    return min(kept, key=lambda network: losses[network][index])


def table(runs: Sequence[Run], part: str) -> str:
    """One task: for each horizon the agreement of ranks, how often the winner is right, and the regret, also of a race."""
    rows = []
    for index, share in enumerate(SHARES[:-1]):
        rows.append([f"{share * STEPS:.0f} ({share:.1%})", *_row(runs, part, index)])
    never = [_regret(run[part], 0) for run in runs]
    always = [_regret(run[part], 1) for run in runs]
    networks = [run[part] for run in runs]
    grew = sum(winner(each, -1) > 0 for each in networks) / len(runs)
    cost = (len(networks[0]) + 3 * KEPT) / (4 * len(networks[0]))
    header = ["steps", "rank agreement", "winner right", "growth won", "regret", "regret, raced"]
    return (
        f"{text_table(header, rows)}\n{len(runs)} looks; regret: loss at the end / that of the best, geometric mean and 95 % interval\n"
        f"never growing {_factor(never)}, always the best merit {_factor(always)}\n"
        f"a growth is best at the end in {grew:.0%}; a race costs {cost:.0%} of a trial"
    )


def draw(results: dict[str, list[Run]], file: Path) -> None:
    """The agreement of ranks over the length of a trial, a panel for each task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    panels: Any = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for panel, (name, runs) in zip(panels, results.items(), strict=True):
        for part, colour in (("training", "#1f6fb4"), ("held out", "#d1652c")):
            found = [
                interval(torch.tensor(_agreements(runs, part, index), dtype=torch.float64))
                for index in range(len(SHARES) - 1)
            ]
            panel.plot(
                SHARES[:-1],
                [each.mean for each in found],
                "o-",
                color=colour,
                markersize=3,
                label=f"loss on {part} data",
            )
            panel.fill_between(
                SHARES[:-1], [e.low for e in found], [e.high for e in found], color=colour, alpha=0.15, linewidth=0
            )
        panel.axhline(0, color="grey", linewidth=0.5)
        panel.set(title=name, xscale="log", xlabel="length of the trial / time to the end", ylim=(-0.6, 1.05))
        panel.set_xticks(SHARES[:-1], [f"1/{round(1 / share)}" for share in SHARES[:-1]], minor=False)
        panel.minorticks_off()
    panels[0].set_ylabel("agreement of ranks")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(file, metadata={"Date": None})


def _agreements(runs: Sequence[Run], part: str, index: int) -> list[float]:
    return [agreement([each[index] for each in run[part]], [each[-1] for each in run[part]]) for run in runs]


def _row(runs: Sequence[Run], part: str, index: int) -> list[str]:
    losses = [run[part] for run in runs]
    agreed = _agreements(runs, part, index)
    right = sum(winner(one, index) == winner(one, -1) for one in losses) / len(losses)
    grew = sum(winner(one, index) > 0 for one in losses) / len(losses)
    race = _factor([_regret(one, raced(one, index)) for one in losses]) if index >= 2 else ""
    return [
        _shown(agreed), f"{right:.0%}", f"{grew:.0%}", _factor([_regret(one, winner(one, index)) for one in losses]), race,
    ]  # fmt: skip


def _regret(losses: Sequence[Sequence[float]], network: int) -> float:
    """The logarithm of how many times the loss at the end is that of the best network."""
    return math.log(losses[network][-1] / min(each[-1] for each in losses))


def _shown(values: Sequence[float]) -> str:
    found = interval(torch.tensor(values, dtype=torch.float64))
    return f"{found.mean:.2f} ± {found.high - found.mean:.2f}"


def _factor(values: Sequence[float]) -> str:
    found = interval(torch.tensor(values, dtype=torch.float64))
    return f"{math.exp(found.mean):.3f} ({math.exp(found.low):.2f} to {math.exp(found.high):.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study, or show what it gave."""
    parser = argparse.ArgumentParser("benchmarks.horizon", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, help="folder with fashion_mnist (default: $SENSLI_DATA)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("horizon.json"), help="default: %(default)s")
    parser.add_argument("--show", type=Path, help="only print the tables of a file that was written before")
    parser.add_argument("--draw", type=Path, help="also draw the agreement of ranks into this file (needs matplotlib)")
    args = parser.parse_args(arguments)
    results: dict[str, list[Run]] = json.loads(args.show.read_text()) if args.show else {}
    tasks = {} if args.show else {name: TASKS[name](folder(args.data)) for name in args.tasks}
    for seed, moment, name in itertools.product(range(args.seeds), MOMENTS, tasks):
        results.setdefault(name, []).append(study(tasks[name], seed, moment))
        args.out.write_text(json.dumps(results, indent=1))
        print(f"{name}, seed {seed}, after {moment} epochs", file=sys.stderr, flush=True)
    for name, runs in results.items():
        for part in ("training", "held out"):
            print(f"\n{name}, loss on {part} data\n{table(runs, part)}")
    if args.draw:
        draw(results, args.draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
