"""The study of places: does the merit tell where a layer helps most?

From the same trained state a layer is inserted at every place in turn, and each network trains on with the same batches. Each merit is
compared with the losses at the end: by rank correlation over the places, and by the regret of taking the place with the largest merit.

    python -m benchmarks.places --data DIR            # all tasks, three seeds
    python -m benchmarks.places --show places.json    # the tables again
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.places_tasks import TASKS, Batch, Task
from sensli.merits.measuring import measure
from sensli.moves.finding import find_sites
from sensli.moves.sites import Site
from sensli.surgery.growth import insert
from sensli.text.tables import text_table
from sensli_lab.paper.image_sets import folder
from sensli_lab.work.statistics import interval

NORMS = ("frobenius", "operator", "natural")
SEEDS = 3
Run = dict[str, Any]  # of one seed: merits by name and losses by part, each a number for every place


def study(task: Task, seed: int) -> Run:
    """All places from one trained state."""
    torch.manual_seed(seed)
    model = task.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=0.0)
    for x, y in task.batches(task.before, seed):
        _step(model, optimizer, task, x, y)
    sites = _sites(model, task)
    run: Run = {"places": [str(site) for site in sites], "training": [], "validation": []}
    for norm in NORMS:
        merits = measure(model, sites, task.training, task.loss, norm=norm, ratio=False)
        run[norm] = [merit.value for merit in merits]
        run[f"{norm} per parameter"] = [merit.value / merit.site.parameters for merit in merits]
    run["unchanged"] = _continued(model, optimizer, task, seed)
    for place in range(len(sites)):
        grown, its = copy.deepcopy((model, optimizer))
        insert(grown, _sites(grown, task)[place], optimizer=its)
        for part, loss in _continued(grown, its, task, seed).items():
            run[part].append(loss)
    return run


def _sites(model: nn.Module, task: Task) -> Sequence[Site]:
    return find_sites(model, task.training[0][0][:2], where=task.kind)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    task.loss(model(x), y).backward()
    optimizer.step()


def _continued(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, seed: int) -> dict[str, float]:
    """The losses after the rest of the training, whose rate falls to zero; what was given stays as it is."""
    model, optimizer = copy.deepcopy((model, optimizer))
    for step, (x, y) in enumerate(task.batches(task.after, seed + 1000)):
        for group in optimizer.param_groups:
            group["lr"] = task.rate * (1 - step / task.after)
        _step(model, optimizer, task, x, y)
    return {"training": _loss(model, task, task.training), "validation": _loss(model, task, task.validation)}


@torch.no_grad()
def _loss(model: nn.Module, task: Task, batches: Sequence[Batch]) -> float:
    return sum(task.loss(model(x), y).item() * len(x) for x, y in batches) / sum(len(x) for x, _ in batches)


# --- what comes of it ---


def ranks(values: Sequence[float]) -> Tensor:
    """Ranks from 0; equal values share theirs."""
    given = torch.tensor(values, dtype=torch.float64)
    return ((given[:, None] > given).double().sum(1) + (given[:, None] >= given).double().sum(1) - 1) / 2


def correlation(merits: Sequence[float], losses: Sequence[float]) -> float:
    """Spearman's: 1 where a larger merit means a smaller loss at every place, 0 where the merits are all alike."""
    a, b = ranks(merits), -ranks(losses)
    a, b = a - a.mean(), b - b.mean()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else 0.0


def chosen(run: Run, rule: str) -> int:
    """The place that a rule takes."""
    count = len(run["places"])
    fixed = {"first": 0, "middle": round((count - 1) / 2), "last": count - 1}
    return fixed[rule] if rule in fixed else max(range(count), key=lambda place: run[rule][place])


def regret(run: Run, rule: str, part: str) -> float:
    """How much larger the loss is than at the best place; of a random place on average."""
    losses = run[part]
    taken = sum(losses) / len(losses) if rule == "random" else losses[chosen(run, rule)]
    return float(taken - min(losses))


def _rules() -> Iterator[str]:
    for norm in NORMS:
        yield norm
        yield f"{norm} per parameter"
    yield from ("random", "first", "middle", "last")


def table(runs: Sequence[Run]) -> str:
    """One task: correlations and regrets with their 95 % intervals over seeds. Regrets are in thousandths of the loss."""
    rows = []
    for rule in _rules():
        row = [rule]
        for part in ("training", "validation"):
            by_merit = rule in runs[0]
            related = [correlation(run[rule], run[part]) for run in runs] if by_merit else []
            row += [_shown(related, 1.0) if related else "", _shown([regret(run, rule, part) for run in runs], 1e3)]
        rows.append(row)
    growing = [min(run["validation"]) - run["unchanged"]["validation"] for run in runs]
    header = ["place by", "rank corr. training", "regret", "rank corr. validation", "regret"]
    note = f"{len(runs)} seeds, {len(runs[0]['places'])} places; best place - no insertion, validation: {_shown(growing, 1e3)}"
    return f"{text_table(header, rows)}\n{note}"


def _shown(values: Sequence[float], unit: float) -> str:
    found = interval(torch.tensor(values, dtype=torch.float64) * unit)
    return f"{found.mean:.2f} ± {found.half:.2f}" if unit == 1 else f"{found.mean:.1f} ± {found.half:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study, or show what it gave."""
    parser = argparse.ArgumentParser("benchmarks.places", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--data", type=Path, help="folder with fashion_mnist and cifar-10-batches-bin (default: $SENSLI_DATA)"
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("places.json"), help="default: %(default)s")
    parser.add_argument("--show", nargs="+", type=Path, help="only print the tables of files that were written before")
    args = parser.parse_args(arguments)
    results: dict[str, list[Run]] = {}
    for file in args.show or ():
        results.update(json.loads(file.read_text()))
    tasks = {} if args.show else {name: TASKS[name](folder(args.data)) for name in args.tasks}
    for seed in range(args.seeds):
        for name, task in tasks.items():
            results.setdefault(name, []).append(study(task, seed))
            args.out.write_text(json.dumps(results, indent=1))
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    for name, runs in results.items():
        print(f"\n{name}\n{table(runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
