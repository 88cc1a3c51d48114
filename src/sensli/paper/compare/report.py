"""The report: for each task that has results its verdict, table, figure and command; as Markdown, HTML and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sensli.paper.compare import costs, figure, summary
from sensli.paper.compare.methods import Method, methods
from sensli.paper.compare.run import Run
from sensli.paper.compare.store import Store
from sensli.paper.compare.summary import Front, Row, Runs
from sensli.paper.compare.tables import table, verdict
from sensli.paper.compare.task import Task
from sensli.paper.errors import NoResults, StoreError
from sensli.paper.report.document import Block, Bullets, Heading, Paragraph, Picture, Table, markdown, page
from sensli.paper.report.figures import check_available
from sensli.text.strict_json import dumps as strict_json
from sensli.text.tables import short_number
from sensli.text.writing import write_bytes

TITLE = "Growth methods, side by side"
_OPENING = (
    "All methods of a task start from the same small network of a seed, see the same batches in the same order, follow one learning-rate "
    "schedule stated in shares of the FLOPs, and stop when the FLOPs are spent. What a look computes counts: it runs under a counter "
    "that sees every product. All methods look at the same moments and must grow while something fits, except that `when` asks a "
    "trigger and `tried` may decline; none may become larger than "
    "`large`. The test data are used once, at the end. Methods named `-own` follow the schedule of their publication instead, at the same "
    "FLOPs; `large-full` alone spends more, as many steps as `small` takes.",
    "**minus small**, **minus large**: the test loss of the method minus that of the small and of the large network, seed by seed, with a "
    "95 % interval; below 0 the method is better. **front ratio**: FLOPs that the growing run needs to reach a validation loss, divided by "
    "those of the best fixed network of the same seed, at 40 losses from that of the front after 5 % of the FLOPs to the lowest one that "
    "both reached, the *end*. Means are geometric and over the seeds. *Anywhere, at most*: at the loss where this mean is largest. *On "
    "average*: over all losses. *Worst of each run*: the mean of the largest ratio of each run, wherever that was. Below 1 growing was "
    "faster than knowing the best size in advance. **as good as large after**: the share of the FLOPs after which the validation loss "
    "was as low as that of the large network at its end. **decisions**: the share of the FLOPs that looks took.",
    "Curves are noisy, the front is the best of several of them at each moment, and the worst of a run is that of 40 moments: chance alone "
    "makes ratios above 1. The rows of the fixed sizes show by how much: their ratios are to the fronts of all *other* seeds, as if "
    "somebody had known the size in advance and trained it once. With few seeds the intervals are wide, and a difference that an interval "
    "does not separate from 0 is called unclear, not equal.",
)


@dataclass(frozen=True)
class Told:
    """A task with what is stored of it for one budget."""

    task: Task
    budget: float
    methods: list[Method]
    runs: Runs
    rows: list[Row]

    @property
    def seeds(self) -> int:
        return max(len(own) for own in self.runs.values())

    @property
    def title(self) -> str:
        words = self.task.title[0].upper() + self.task.title[1:]
        return words if self.budget == 1 else f"{words}, {self.budget:g} times the FLOPs"

    @property
    def picture(self) -> str:
        return f"{self.task.name}.png" if self.budget == 1 else f"{self.task.name}-x{self.budget:g}.png"


Wanted = Sequence[tuple[Task, int, float]]  # tasks, seeds of each, factors on its FLOPs


def gather(store: Store, wanted: Wanted) -> list[Told]:
    """What has results."""
    told = []
    for task, seeds, budget in wanted:
        known = list(methods(task).values())
        try:
            runs = summary.load(task, known, seeds, budget, store)
        except NoResults:
            continue
        told.append(Told(task, budget, known, runs, summary.rows(known, runs)))
    if not told:
        asked = " or ".join(f"x {budget:g}" for budget in sorted({budget for _, _, budget in wanted}))
        raise NoResults(
            f"{store.root}: no run with the budget {asked} is stored. Compute some with: sensli compare run spirals"
        )
    return told


def write(store: Store, folder: Path, wanted: Wanted) -> list[Path]:
    """Write README.md with its figures, report.html and summary.json into `folder`."""
    check_available()
    told = gather(store, wanted)
    blocks: list[Block] = [Heading(TITLE, 1), *(Paragraph(text) for text in _OPENING)]
    for one in told:
        path = folder / "figures" / one.picture
        figure.draw(one.title, one.methods, one.runs, path, _command(one))
        blocks += _section(one, path)
    files = {
        "README.md": markdown(blocks, folder),
        "report.html": page(blocks, TITLE),
        "summary.json": strict_json([_record(one) for one in told], indent=1) + "\n",
    }
    for name, content in files.items():
        write_bytes(folder / name, content.encode(), StoreError)
    return [folder / name for name in files]


def _command(one: Told) -> str:
    """What computes the runs that are shown."""
    size = "" if one.budget == 1 else f" --budget {one.budget:g}"
    return f"sensli compare run {one.task.name} --methods {' '.join(one.runs)} --seeds {one.seeds}{size}"


def _section(one: Told, path: Path) -> list[Block]:
    task = one.task
    command = _command(one)
    spent = next(iter(next(iter(one.runs.values())).values())).budget
    return [
        Heading(one.title),
        Paragraph(
            f"{short_number(spent)} FLOPs each, {task.recipe}, {task.batch or 'all'} samples a step; looks after "
            f"{', '.join(f'{share:.0%}' for share in task.looks)} of the FLOPs, each given {task.looked_at:,} samples."
        ),
        Bullets(tuple(verdict(one.rows))),
        Picture(path, f"{task.name}: validation loss over FLOPs. {command}"),
        table(one.rows),
        *_costs(one),
        Paragraph("What grew, in the run of the first seed:"),
        _grown(one),
        Paragraph(f"Computed by `{command}`, written by `sensli compare report`."),
    ]


def _costs(one: Told) -> list[Block]:
    found = costs.table(one.methods, one.runs)
    if not found.rows:
        return []
    words = (
        "What a decision costs, as counted and as timed, means over all looks. A *pass* is one forward and backward pass of the "
        "samples that the look is given, through the network as it was. Looks are timed while every operation is counted, which slows "
        "small networks down; steps of training are not counted one by one."
    )
    return [Paragraph(words), found]


def _grown(one: Told) -> Table:
    lines = []
    for method in one.methods:
        if method.grows and method.name in one.runs:
            run = next(iter(one.runs[method.name].values()))
            lines.append((method.name, "; ".join(f"{flops / run.budget:.0%}: {what}" for flops, what in run.grown)))
    return Table(("method", "share of the FLOPs: growth"), tuple(lines))


def _record(one: Told) -> dict[str, Any]:
    def plain(run: Run) -> dict[str, Any]:
        names = ("test_loss", "test_error", "parameters", "forward", "decisions", "budget", "steps", "uncounted")
        last = {"validation_loss": run.validation[-1]}
        return {**last, **{name: getattr(run, name) for name in names}}

    runs = {name: {str(seed): plain(run) for seed, run in own.items()} for name, own in one.runs.items()}
    spent = {name: asdict(cost) for name, cost in costs.costs(one.methods, one.runs).items()}
    ratios = {row.method.name: _factors(row.front) for row in one.rows if row.front is not None}
    return {
        "task": one.task.name,
        "budget": one.budget,
        "title": one.task.title,
        "runs": runs,
        "front_ratios": ratios,
        "costs": spent,
    }


def _factors(front: Front) -> dict[str, Any]:
    named = {"end": front.end, "most": front.most, "mean": front.mean, "worst": front.worst}
    return {
        **{name: str(factor) for name, factor in named.items()},
        "levels": [round(one.mean, 3) for one in front.levels],
    }
