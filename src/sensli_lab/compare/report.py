"""The report: for each task that has results its verdict, table, figure and command; as Markdown, HTML and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sensli.text.tables import short_number
from sensli_lab.compare import figure
from sensli_lab.compare.front import Front, Row, Runs, best_fixed, end_costs, load_runs, rows
from sensli_lab.compare.jobs import Comparison, Run, RunStore
from sensli_lab.compare.methods import Method
from sensli_lab.compare.task import Task
from sensli_lab.errors import NoResults
from sensli_lab.work.pages import Block, Bullets, Heading, Paragraph, Picture, Table, without_empty, write_report
from sensli_lab.work.statistics import CONFIRMED, OPPOSITE, Paired, format_number

# ---- The table of a task, and what it says in words.


def table(rows: Sequence[Row]) -> Table:
    """Final losses at equal FLOPs, paired differences, front ratios, costs."""
    header = (
        "method", "seeds", "parameters", "validation loss", "test loss", "test error", "minus small", "minus large",
        "as good as large after", "front ratio at the end", "anywhere, at most", "on average", "worst of each run", "decisions",
    )  # fmt: skip
    return without_empty(Table(header, tuple(_line(row) for row in rows)), "test error")


def _line(row: Row) -> tuple[str, ...]:
    front = row.front
    return (
        row.method.name,
        str(row.seeds),
        short_number(round(row.parameters)),
        *("" if value is None else format_number(value.mean) for value in (row.validation, row.test, row.error)),
        *("" if pair is None else str(pair.difference) for pair in (row.to_small, row.to_large)),
        "" if row.matches is None else str(row.matches),
        *([""] * 4 if front is None else map(str, (front.end, front.most, front.mean, front.worst))),
        f"{row.decisions:.1%}" if row.method.grows else "",
    )


def verdict_lines(rows: Sequence[Row]) -> list[str]:
    """A sentence for each growing method, and one for the best fixed network; intervals decide the words."""
    fixed, growing = [row for row in rows if row.method.in_front], [row for row in rows if row.method.grows]
    lines = [_lowest("fixed sizes", fixed)] if fixed else []
    if len(growing) > 1:
        lines += [_lowest("growing methods", growing), *_groups(growing, "small"), *_groups(growing, "large")]
    if single := [f"`{row.method.name}`" for row in growing if row.seeds == 1]:
        lines.append(f"One seed, so nothing can be said of {', '.join(single)}.")
    for row in growing:
        if row.seeds > 1:
            parts = [_against("small", row.to_small), _against("large", row.to_large), _against_front(row)]
            if any(parts):
                lines.append(f"`{row.method.name}`: {'; '.join(filter(None, parts))}.")
    return lines


def _lowest(which: str, rows: Sequence[Row]) -> str:
    best = min(rows, key=lambda row: row.test.mean)
    return f"Of the {which}, `{best.method.name}` ended with the lowest test loss ({format_number(best.test.mean)})."


def _compared(pair: Paired | None) -> str:
    """A word for a difference; none of one seed."""
    if pair is None or pair.difference.runs < 2:
        return ""
    return {CONFIRMED: "better", OPPOSITE: "worse"}.get(pair.verdict(), "not clearly different")


def _groups(rows: Sequence[Row], other: str) -> list[str]:
    """Which methods are better, worse and not separated from a fixed network, in one sentence; of those with two seeds at least."""
    words = {row.method.name: _compared(row.to_small if other == "small" else row.to_large) for row in rows}
    said = []
    for word in ("better", "worse", "not clearly different"):
        if names := [f"`{name}`" for name, its in words.items() if its == word]:
            said.append(f"{word}: {', '.join(names)}")
    return [f"Beside `{other}`: {'; '.join(said)}."] if said else []


def _against(name: str, pair: Paired | None) -> str:
    word = _compared(pair)
    if pair is None or not word:
        return ""
    return f"{word} {'from' if word.endswith('different') else 'than'} `{name}` ({pair.difference})"


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

_OURS = "1 pass of the unmodified network"
_NOTHING = (
    "random-units", "net2net", "netmorph", "net2net-deeper", "netmorph-deeper", "random-place", "variance-transfer", "g-stack", "llama-pro",
    "stack",
)  # fmt: skip
# In passes over the training data, all places together, as the released code works where there is one. Strategy -> words.
PUBLISHED: Mapping[str, str] = {
    **dict.fromkeys(_NOTHING, "0"),
    "sensli": f"{_OURS}; in the paper's form of the network with new layers at all places",
    "random-start": _OURS,
    "autogrow": "0; the accuracy that decides is that of a pass",
    "autogrow-gauss": "0; the accuracy that decides is that of a pass",
    "autogrow-adam": "1 to 10 for a new block, and the accuracy that decides is that of a pass",
    "gradmax": "one batch of 128",
    "nest": "one large batch to 1",
    "tiny": "1, and at least 101 forward passes if its library searches the amplitude",
    "senn": "one batch for each place, then 100 candidates x 3,000 steps on cached features",
    "convsenn": "one for each candidate model: 2 x blocks + 1",
    "north": "a forward pass of a buffer and a singular value decomposition a layer, for every mini-batch",
    "splitting": "0.1 to 1 for each layer; 11 in its fast form",
    "firefly": "2, of a network with 70 more channels in each layer",
    "morphnet": "a whole training",
}


@dataclass(frozen=True)
class DecisionCost:
    """The mean look of a method over all its runs."""

    looks: int  # how many there were
    flops: float  # of one
    share: float  # of all FLOPs of the runs, what looks took
    # FLOPs of the looks divided by those of one forward and backward pass of the samples that each was given
    passes: float
    seconds: float  # of one, while it was counted
    steps: float  # seconds of one divided by those of a mean step of training of the same runs


def cost_of_looks(runs: Sequence[Run]) -> DecisionCost | None:
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
    found = {
        one.name: cost_of_looks(list(runs[one.name].values())) for one in methods if one.grows and one.name in runs
    }
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
            _rounded(one.steps), published_cost(known[name]),
        )
        for name, one in costs(methods, runs).items()
    )  # fmt: skip
    return Table(header, lines)


def _rounded(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def published_cost(method: Method) -> str:
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
class TaskReport:
    """What is stored of a task for one budget."""

    asked: Comparison
    runs: Runs

    @property
    def title(self) -> str:
        words = self.asked.task.title[0].upper() + self.asked.task.title[1:]
        return words if self.asked.budget == 1 else f"{words}, {self.asked.budget:g} times the FLOPs"

    @property
    def picture(self) -> str:
        size = "" if self.asked.budget == 1 else f"-x{self.asked.budget:g}"
        return f"{self.asked.task.name}{size}.png"

    @property
    def command(self) -> str:
        """What computes the runs that are shown."""
        size = "" if self.asked.budget == 1 else f" --budget {self.asked.budget:g}"
        seeds = max(len(own) for own in self.runs.values())
        return f"sensli compare run {self.asked.task.name} --methods {' '.join(self.runs)} --seeds {seeds}{size}"


def write_comparison(store: RunStore, folder: Path, asked: Sequence[Comparison]) -> list[Path]:
    """Write README.md with its figures, report.html and summary.json into `folder`."""
    stored = []
    for one in asked:
        with suppress(NoResults):
            stored.append(TaskReport(one, load_runs(one, store)))
    if not stored:
        budgets = " or ".join(f"x {budget:g}" for budget in sorted({one.budget for one in asked}))
        raise NoResults(
            f"{store.root}: no run with the budget {budgets} is stored. Compute some with: sensli compare run spirals"
        )
    blocks: list[Block] = [Heading(TITLE, 1), *(Paragraph(text) for text in _OPENING)]
    records = []
    for each in stored:
        found, path = rows(each.asked.methods, each.runs), folder / "figures" / each.picture
        figure.draw_task(each.title, each.asked.methods, each.runs, path, each.command)
        blocks += _section(each, found, path)
        records.append(_record(each, found))
    blocks += _end_costs(stored)
    return write_report(folder, TITLE, blocks, records)


def _section(one: TaskReport, rows: Sequence[Row], path: Path) -> list[Block]:
    task = one.asked.task
    spent = next(iter(next(iter(one.runs.values())).values())).budget
    return [
        Heading(one.title),
        Paragraph(
            f"{short_number(spent)} FLOPs each, {task.recipe}, {task.batch or 'all'} samples a step; looks after "
            f"{', '.join(f'{share:.0%}' for share in task.looks)} of the FLOPs, each given {task.looked_at:,} samples."
        ),
        Bullets(tuple(verdict_lines(rows))),
        Picture(path, f"{task.name}: validation loss over FLOPs. {one.command}"),
        table(rows),
        *_seen(one),
        *_costs(one),
        Paragraph("What grew, in the run of the first seed:"),
        _growths(one),
        Paragraph(f"Computed by `{one.command}`, written by `sensli compare report`."),
    ]


def seen_of(task: Task, run: Run) -> float:
    """Samples, or tokens of a text, that a run has trained on for each parameter that it ended with."""
    return run.steps * (task.batch or task.looked_at) * task.tokens / run.parameters


def _seen(one: TaskReport) -> list[Block]:
    """Of a long task, how long it was."""
    if not one.asked.task.long:
        return []
    means = {
        name: sum(seen_of(one.asked.task, run) for run in own.values()) / len(own) for name, own in one.runs.items()
    }
    what = "Tokens" if one.asked.task.tokens > 1 else "Samples"
    told = ", ".join(f"`{name}` {mean:,.0f}" for name, mean in means.items())
    rates = ", ".join(f"`{name}` {factor:g}" for name, factor in one.asked.task.rates.items() if name in one.runs)
    chosen = f" Factors on the learning rate, chosen on other seeds, where they are not 1: {rates}." if rates else ""
    return [Paragraph(f"{what} per parameter at the end: {told}.{chosen}")]


def _end_costs(reports: Sequence[TaskReport]) -> list[Block]:
    """Of the long tasks, what it takes to end where a fixed size ended with all FLOPs."""
    lines = []
    for one in (each for each in reports if each.asked.task.long and each.asked.budget == 1):
        budgets = {each.asked.budget: each.runs for each in reports if each.asked.task is one.asked.task}
        best = best_fixed(one.asked.methods, one.runs)
        costs = {other: {cost.method: cost for cost in end_costs(budgets, other)} for other in (best, "large")}
        lines += [
            (one.asked.task.name, name, best, str(cost), str(costs["large"].get(name, "")))
            for name, cost in costs[best].items()
        ]
    if not lines:
        return []
    header = ("task", "method", "best fixed size", "FLOPs to end as low", "FLOPs to end as low as large")
    words = (
        "Every run ends with a decay of its learning rate, so what counts is where it ends. Methods were trained again with fewer FLOPs, "
        "schedule and decay in proportion: how many, as a share, do they need to end at the test loss of a fixed size with all FLOPs?"
    )
    return [Heading("FLOPs to end as low"), Paragraph(words), Table(header, tuple(lines))]


def _costs(one: TaskReport) -> list[Block]:
    found = cost_table(one.asked.methods, one.runs)
    if not found.rows:
        return []
    words = (
        "What a decision costs, as counted and as timed, means over all looks. A *pass* is one forward and backward pass of the "
        "samples that the look is given, through the network as it was. Looks are timed while every operation is counted, which slows "
        "small networks down; steps of training are not counted one by one."
    )
    return [Paragraph(words), found]


def _growths(one: TaskReport) -> Table:
    lines = []
    for method in one.asked.methods:
        if method.grows and method.name in one.runs:
            run = next(iter(one.runs[method.name].values()))
            lines.append((method.name, "; ".join(f"{flops / run.budget:.0%}: {what}" for flops, what in run.grown)))
    return Table(("method", "share of the FLOPs: growth"), tuple(lines))


def _record(one: TaskReport, rows: Sequence[Row]) -> dict[str, Any]:
    """The numbers of a task for programs."""
    names = ("test_loss", "test_error", "parameters", "forward", "decisions", "budget", "steps", "uncounted", "data")
    runs = {
        method: {
            str(seed): {"validation_loss": run.validation[-1], **{name: getattr(run, name) for name in names}}
            for seed, run in own.items()
        }
        for method, own in one.runs.items()
    }
    return {
        "task": one.asked.task.name,
        "budget": one.asked.budget,
        "title": one.asked.task.title,
        "runs": runs,
        "front_ratios": {row.method.name: _factors(row.front) for row in rows if row.front is not None},
        "costs": {name: asdict(cost) for name, cost in costs(one.asked.methods, one.runs).items()},
    }


def _factors(front: Front) -> dict[str, Any]:
    factors = {name: str(getattr(front, name)) for name in ("end", "most", "mean", "worst")}
    return {**factors, "levels": [round(one.mean, 3) for one in front.levels]}
