"""The report: for each task that has results its verdict, table, figure and command; as Markdown, HTML and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sensli.text.files import write_bytes
from sensli.text.records import dumps as strict_json
from sensli.text.tables import short_number
from sensli_lab.compare import figure, front
from sensli_lab.compare.front import Front, Row, Runs
from sensli_lab.compare.jobs import Run, RunStore
from sensli_lab.compare.methods import Method, methods
from sensli_lab.compare.task import Task
from sensli_lab.errors import NoResults, StoreError
from sensli_lab.paper.figures import check_available
from sensli_lab.paper.statistics import CONFIRMED, OPPOSITE, Interval, Paired, number
from sensli_lab.paper.tables import Block, Bullets, Heading, Paragraph, Picture, Table, markdown, page

# ---- The table of a task, and what it says in words.


def table(rows: Sequence[Row]) -> Table:
    """Final losses at equal FLOPs, paired differences, front ratios, costs."""
    header: tuple[str, ...] = (
        "method", "seeds", "parameters", "validation loss", "test loss", "test error", "minus small", "minus large",
        "as good as large after", "front ratio at the end", "anywhere, at most", "on average", "worst of each run", "decisions",
    )  # fmt: skip
    errors = any(row.error is not None for row in rows)
    lines = tuple(_line(row) for row in rows)
    if not errors:
        place = header.index("test error")
        header, lines = _without(header, place), tuple(_without(line, place) for line in lines)
    return Table(header, lines)


def _line(row: Row) -> tuple[str, ...]:
    return (
        row.method.name,
        str(row.seeds),
        short_number(round(row.parameters)),
        _mean(row.validation),
        _mean(row.test),
        _mean(row.error),
        _difference(row.to_small),
        _difference(row.to_large),
        "" if row.matches is None else str(row.matches),
        *(
            [""] * 4
            if row.front is None
            else map(str, (row.front.end, row.front.most, row.front.mean, row.front.worst))
        ),
        f"{row.decisions:.1%}" if row.method.grows else "",
    )


def _without(cells: tuple[str, ...], place: int) -> tuple[str, ...]:
    return cells[:place] + cells[place + 1 :]


def _mean(value: Interval | None) -> str:
    return "" if value is None else number(value.mean)


def _difference(value: Paired | None) -> str:
    return "" if value is None else str(value.difference)


def verdict(rows: Sequence[Row]) -> list[str]:
    """A sentence for each growing method, and one for the best fixed network; intervals decide the words."""
    fixed = [row for row in rows if row.method.in_front]
    lines = []
    if fixed:
        best = min(fixed, key=lambda row: row.test.mean)
        lines.append(
            f"Of the fixed sizes, `{best.method.name}` ended with the lowest test loss ({number(best.test.mean)})."
        )
    growing = [row for row in rows if row.method.grows]
    if len(growing) > 1:
        lowest = min(growing, key=lambda row: row.test.mean)
        lines.append(
            f"Of the growing methods, `{lowest.method.name}` ended with the lowest test loss ({number(lowest.test.mean)})."
        )
        lines += _groups(growing, "small") + _groups(growing, "large")
    if single := [f"`{row.method.name}`" for row in growing if row.seeds == 1]:
        lines.append(f"One seed, so nothing can be said of {', '.join(single)}.")
    for row in growing:
        if row.seeds > 1:
            parts = [_against("small", row.to_small), _against("large", row.to_large), _against_front(row)]
            if any(parts):
                lines.append(f"`{row.method.name}`: {'; '.join(filter(None, parts))}.")
    return lines


def _groups(rows: Sequence[Row], other: str) -> list[str]:
    """Which methods are better, worse and not separated from a fixed network, in one sentence; of those with two seeds at least."""
    found: dict[str, list[str]] = {"better": [], "worse": [], "not clearly different": []}
    for row in rows:
        difference = row.to_small if other == "small" else row.to_large
        if difference is not None and difference.difference.runs > 1:
            word = {CONFIRMED: "better", OPPOSITE: "worse"}.get(difference.verdict(), "not clearly different")
            found[word].append(f"`{row.method.name}`")
    said = [f"{word}: {', '.join(names)}" for word, names in found.items() if names]
    return [f"Beside `{other}`: {'; '.join(said)}."] if said else []


def _against(name: str, difference: Paired | None) -> str:
    if difference is None or difference.difference.runs < 2:
        return ""
    word = {CONFIRMED: "better than", OPPOSITE: "worse than"}.get(difference.verdict(), "not clearly different from")
    return f"{word} `{name}` ({difference.difference})"


def _against_front(row: Row) -> str:
    if row.front is None:
        return ""
    return (
        f"needs {row.front.end} times the FLOPs of the best fixed network at the end, {row.front.most} at most anywhere"
    )


# ---- What a decision costs each method: as counted and as timed in the runs, beside what its publication or its released
# code does.
#
# Beside means that the two need not be the same thing: the strategies here look at the samples of a look, the
# publications often at the whole training set, and some of their searches are replaced by what they converge to (the
# docstring of each strategy says so).


_NONE = "0"
_OURS = "1 pass of the unmodified network"
# In passes over the training data, all places together, as the released code works where there is one. Strategy -> words.
PUBLISHED: Mapping[str, str] = {
    "sensli": f"{_OURS}; in the paper's form of the network with new layers at all places",
    "random-start": _OURS,
    "random-units": _NONE,
    "net2net": _NONE,
    "netmorph": _NONE,
    "net2net-deeper": _NONE,
    "netmorph-deeper": _NONE,
    "random-place": _NONE,
    "variance-transfer": _NONE,
    "autogrow": f"{_NONE}; the accuracy that decides is that of a pass",
    "autogrow-gauss": f"{_NONE}; the accuracy that decides is that of a pass",
    "autogrow-adam": "1 to 10 for a new block, and the accuracy that decides is that of a pass",
    "g-stack": _NONE,
    "llama-pro": _NONE,
    "gradmax": "one batch of 128",
    "nest": "one large batch to 1",
    "tiny": "1, and at least 101 forward passes if its library searches the amplitude",
    "senn": "one batch for each place, then 100 candidates x 3,000 steps on cached features",
    "convsenn": "one for each candidate model: 2 x blocks + 1",
    "north": "a forward pass of a buffer and a singular value decomposition a layer, for every mini-batch",
    "splitting": "0.1 to 1 for each layer; 11 in its fast form",
    "firefly": "2, of a network with 70 more channels in each layer",
    "morphnet": "a whole training",
}  # fmt: skip


@dataclass(frozen=True)
class DecisionCost:
    """The mean look of a method over all its runs.

    Args:
        looks: How many there were.
        flops: FLOPs of one.
        share: Of all FLOPs of the runs, what looks took.
        passes: FLOPs of the looks divided by those of one forward and backward pass of the samples that each was given.
        seconds: Of one, while it was counted.
        steps: Seconds of one divided by those of a mean step of training of the same runs.
    """

    looks: int
    flops: float
    share: float
    passes: float
    seconds: float
    steps: float


def cost_of(runs: Sequence[Run]) -> DecisionCost | None:
    """What the looks of these runs cost; None if they have none, or are records of a version that did not time them."""
    looks = [look for run in runs for look in run.costs]
    if not looks:
        return None
    total, seconds = sum(look.flops for look in looks), sum(look.seconds for look in looks)
    step = sum(run.step_seconds for run in runs) / sum(run.steps for run in runs)
    return DecisionCost(
        looks=len(looks),
        flops=total / len(looks),
        share=total / sum(run.budget for run in runs),
        passes=total / sum(look.sweep for look in looks),
        seconds=seconds / len(looks),
        steps=seconds / len(looks) / step,
    )


def costs(methods: Sequence[Method], runs: Runs) -> dict[str, DecisionCost]:
    """The cost of each growing method that has timed looks."""
    found = {one.name: cost_of(list(runs[one.name].values())) for one in methods if one.grows and one.name in runs}
    return {name: cost for name, cost in found.items() if cost is not None}


def cost_table(methods: Sequence[Method], runs: Runs) -> Table:
    """One line for each growing method."""
    header = (
        "method", "FLOPs of a look", "of all FLOPs", "in passes of its samples", "seconds of a look", "in steps of training",
        "published: passes over the training data",
    )  # fmt: skip
    known = {method.name: method for method in methods}
    lines = tuple(
        (
            name, short_number(round(one.flops)), f"{one.share:.1%}", _rounded(one.passes), f"{one.seconds:.3f}",
            _rounded(one.steps), published(known[name]),
        )
        for name, one in costs(methods, runs).items()
    )  # fmt: skip
    return Table(header, lines)


def _rounded(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def published(method: Method) -> str:
    """What is known of a decision's cost in the publication or its code; nothing for a strategy that is not listed."""
    strategy = method.options.get("strategy", "sensli")
    return PUBLISHED.get(strategy, "") if isinstance(strategy, str) else ""


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


def gather(store: RunStore, wanted: Wanted) -> list[Told]:
    """What has results."""
    told = []
    for task, seeds, budget in wanted:
        known = list(methods(task).values())
        try:
            runs = front.load(task, known, seeds, budget, store)
        except NoResults:
            continue
        told.append(Told(task, budget, known, runs, front.rows(known, runs)))
    if not told:
        asked = " or ".join(f"x {budget:g}" for budget in sorted({budget for _, _, budget in wanted}))
        raise NoResults(
            f"{store.root}: no run with the budget {asked} is stored. Compute some with: sensli compare run spirals"
        )
    return told


def write(store: RunStore, folder: Path, wanted: Wanted) -> list[Path]:
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
    found = cost_table(one.methods, one.runs)
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
    spent = {name: asdict(cost) for name, cost in costs(one.methods, one.runs).items()}
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
