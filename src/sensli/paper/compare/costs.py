"""What a decision costs each method: as counted and as timed in the runs, beside what its publication or its released code does.

Beside means that the two need not be the same thing: the strategies here look at the samples of a look, the publications often at the whole
training set, and some of their searches are replaced by what they converge to (the docstring of each strategy says so).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sensli.paper.compare.methods import Method
from sensli.paper.compare.run import Run
from sensli.paper.compare.summary import Runs
from sensli.paper.report.document import Table
from sensli.text.tables import short_number

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
class Cost:
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


def cost_of(runs: Sequence[Run]) -> Cost | None:
    """What the looks of these runs cost; None if they have none, or are records of a version that did not time them."""
    looks = [look for run in runs for look in run.costs]
    if not looks:
        return None
    total, seconds = sum(look.flops for look in looks), sum(look.seconds for look in looks)
    step = sum(run.step_seconds for run in runs) / sum(run.steps for run in runs)
    return Cost(
        looks=len(looks),
        flops=total / len(looks),
        share=total / sum(run.budget for run in runs),
        passes=total / sum(look.sweep for look in looks),
        seconds=seconds / len(looks),
        steps=seconds / len(looks) / step,
    )


def costs(methods: Sequence[Method], runs: Runs) -> dict[str, Cost]:
    """The cost of each growing method that has timed looks."""
    found = {one.name: cost_of(list(runs[one.name].values())) for one in methods if one.grows and one.name in runs}
    return {name: cost for name, cost in found.items() if cost is not None}


def table(methods: Sequence[Method], runs: Runs) -> Table:
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
