"""The tables of an experiment: exact counts beside the paper's, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping

from sensli_lab.paper.engine import engine
from sensli_lab.paper.evidence import at_chance, pair, ratios
from sensli_lab.paper.planning import Plan, RunOptions
from sensli_lab.paper.planning import plan as make_plan
from sensli_lab.paper.store import Result
from sensli_lab.work.pages import Table, without_empty
from sensli_lab.work.statistics import format_number, interval

# What the paper prints: experiment -> arm -> FLOPs per training sample in total, of which measuring.
_FNN = {"FNN1": (222_000, 0), "FNN2": (499_500, 0), "FNN LI": (432_270, 270)}
PRINTED: dict[str, dict[str, tuple[int, int]]] = {
    "1": {"CNN": (3 * 46_996_684_800, 0), "CNN LI": (3 * 33_063_616_512, 3 * 914_460_672)},
    "2": _FNN,
    "3": {"ResNet1": (333_000, 0), "ResNet2": (532_000, 0), "ResNet LI": (484_488, 288)},
    "4": _FNN,
    "5": {"CNN1": (25_196_544_000, 0), "CNN2": (47_845_785_600, 0), "CNN LI": (37_452_607_488, 931_442_688)},
    "13": {"ResNet1": (90_000, 0), "ResNet2": (252_000, 0), "ResNet LI": (188_712, 1_512)},
}

# The looks that inserted a layer in the paper's single run of an experiment with a threshold.
ACCEPTED: dict[str, tuple[int, ...]] = {"1": (50, 150)}

MISPRINTS = (
    "Experiment 3, ResNet2: printed 532,000 FLOPs; 3 x 96 x 1850 = 532,800.",
    "Experiments 3 and 13, measuring: the tables count one new place per residual block (288 and 1,512); a layer can "
    "also go before the first block, which the experiments do use, and then it is 396 and 1,836.",
    "Experiment 13: learning rate 0.1 in the appendix, 0.01 in the text; both are recipes here.",
    "Experiments 3 and 4: the appendix and the caption disagree about the number of runs, 30 or 40.",
    "Experiment 1, CNN LI: printed 3 x 33,063,616,512 FLOPs of which 3 x 914,460,672 for measuring. With the insertions of the "
    "paper's table (after 50 and 150 epochs) the rule of the other tables gives 3 x 33,130,622,976 of which 3 x 1,233,432,576: the "
    "printed total mixes conventions. The ratio to the extended network is 0.70 by both.",
    "CNN tables: the baseline counts one per element for bias, ReLU and pooling beside two per multiply-add (83,988,480 "
    "for a forward pass); an inserted convolution counts its multiply-adds alone (75,497,472 at every place).",
    "Experiment 12, baseline: printed 2,674,368 parameters, which leaves out the 448 biases of the convolutions.",
)


def counts_table(plan: Plan) -> Table:
    """Parameters and FLOPs of every arm; both counts of places where they differ."""
    header = ("arm", "parameters", "FLOPs per sample", "of which measuring", "by the paper's count", "printed", "")
    rows = []
    unscaled = make_plan(plan.experiment, plan.recipe, RunOptions())  # what is printed holds for the full length only
    for arm, settings in plan.arms.items():
        full = unscaled.arms[arm] == settings
        own = engine(settings).count_arm(settings, ACCEPTED.get(plan.experiment.name) if full else None)
        total, measuring, paper = own.flops, own.measuring, ""
        if own.flops_printed is not None and own.measuring_printed is not None:
            total, measuring = own.flops_printed, own.measuring_printed
            paper = f"{total:,} ({measuring:,})"
        printed = PRINTED.get(plan.experiment.name, {}).get(arm) if full else None
        remark = "" if printed is None else "equal" if printed == (total, measuring) else "misprint"
        if settings.tau > 0 and not full:
            remark = "if every look inserts"
        rows.append(
            (
                arm,
                " → ".join(f"{size:,}" for size in own.parameters),
                f"{own.flops:,}",
                f"{own.measuring:,}" if own.measuring else "",
                paper,
                "" if printed is None else f"{printed[0]:,}" + (f" ({printed[1]:,})" if printed[1] else ""),
                remark,
            )
        )
    return without_empty(Table(header, tuple(rows)))


def measured_table(plan: Plan, results: Mapping[str, Result]) -> Table:
    """Final losses and errors, mean over the runs with a 95 % interval."""
    header = (
        "arm", "training loss", "test loss", "test error", "places chosen", "dead units", "FLOPs per sample", "seconds", ""
    )  # fmt: skip
    rows = []
    for arm, result in results.items():
        finals = [str(interval(result.final(curve))) for curve in ("train_loss", "test_loss", "test_error")]
        flops = f"{result.final('flops').mean().item():.3e}" if "flops" in result.runs else ""
        # Hours on a machine with other work compare nothing: times of CNNs are shown where the experiment is about time.
        timed = "flops" not in result.runs or "cost" in plan.experiment.figures
        seconds = f"{result.seconds:.1f}" if timed else ""
        remark = "chance level: did not learn" if at_chance(result) else ""
        rows.append((arm, *finals, _places(result), _dead(result), flops, seconds, remark))
    return without_empty(Table(header, tuple(rows)))


def remarks(plan: Plan, results: Mapping[str, Result]) -> list[str]:
    """Sentences on what a table does not say: the ratios of the paper's experiment 1, and which networks did not learn."""
    lines = []
    both = pair(plan)
    if both is not None:
        lines.append(f"{both[0]} over {both[1]}: {ratios(results[both[0]], results[both[1]])}.")
    idle = [arm for arm, result in results.items() if at_chance(result)]
    if idle:
        lines.append(
            f"At chance level to the end, as this recipe leaves them: {', '.join(idle)}. Comparing networks that did not "
            "learn says nothing."
        )
    return lines


def _places(result: Result) -> str:
    """How often each place was chosen, insertion by insertion: `0: 12, 1: 18`."""
    if "place" not in result.runs:
        return ""
    texts = []
    for k, chosen in enumerate(result.runs["place"].T):
        available = int((~result.runs["merits"][:, k].isnan()).sum(1).max())
        rejected = int((chosen < 0).sum())
        if available > 1 or rejected:
            names = [f"{p + 1}: {int((chosen == p).sum())}" for p in range(available)]
            texts.append(", ".join(names + ([f"none: {rejected}"] if rejected else [])))
    return "; ".join(texts)


def _dead(result: Result) -> str:
    if "dead" not in result.runs or result.settings.network.kind != "fnn":
        return ""
    return format_number(result.runs["dead"].double().mean().item())
