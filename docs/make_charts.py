"""Draw the charts of the documentation: run `python docs/make_charts.py` from the repository. Needs the extra `dev`.

`does-it-pay.svg` and `triggers.svg` show docs/compare/when/summary.json, `other-methods.svg` docs/compare/summary.json; the others
the tables of the pages that they head.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes

DOCS = Path(__file__).parent
ORANGE, PALE, BLUE, GRAY = "#c85000", "#d9a37a", "#4878a8", "#555555"
TASKS = {
    "spirals": "two spirals",
    "fashion": "Fashion-MNIST",
    "vgg": "CIFAR-10",
    "text": "transformer",
    "teacher": "student-teacher",
}
METHODS = {
    "SENN": "senn",
    "ours: units at fixed times": "units",
    "GradMax": "gradmax",
    "random units": "random-units",
    "Firefly": "firefly",
    "NeST": "nest",
    "NORTH*": "north",
    "TINY": "tiny",
    "Splitting": "splitting",
    "Net2Net": "net2net",
    "NetMorph": "netmorph",
    "variance transfer": "variance-transfer",
}
Points = dict[str, tuple[float, float, float]]  # a row -> its value, and the ends of its interval


def numbers(text: str) -> list[float]:
    return [float(part) for part in re.findall(r"-?\d+(?:\.\d+)?", text)]


def results(summary: str) -> dict[str, Any]:
    """By task and arm, what is stored about its relative cost."""
    entries: list[Any] = json.loads((DOCS / "compare" / summary).read_text())
    return {entry["task"]: entry["front_ratios"] for entry in entries if entry["budget"] == 1}


def ratios(arm: str) -> Points:
    """For each task the relative cost at the end."""
    stored = results("when/summary.json")
    found: Points = {}
    for task, title in TASKS.items():
        value, low, high = numbers(stored[task][arm]["end"])
        found[title] = value, low, high
    return found


def table(page: str, head: str) -> list[list[str]]:
    """The cells of a table of a page, with its head."""
    lines = (DOCS / page).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(head))
    rows: list[list[str]] = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip(" `*") for cell in line.strip().strip("|").split("|")])
    return [rows[0], *rows[2:]]


def dots(axes: Axes, arms: dict[str, Points], looks: list[tuple[str, str, float]]) -> None:
    """One row for each entry, one mark with its interval for each arm."""
    rows = list(next(iter(arms.values())))
    for place, ((label, points), (color, marker, size)) in enumerate(zip(arms.items(), looks, strict=False)):
        for row, name in enumerate(rows):
            value, low, high = points[name]
            y = row + 0.16 * (place - (len(arms) - 1) / 2)
            axes.plot([low, high], [y, y], color=color, linewidth=1.6, alpha=0.65)
            axes.plot(value, y, marker, color=color, markersize=size, label=label if row == 0 else None)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


LOOKS = [(ORANGE, "o", 9.0), (PALE, "D", 6.0), (BLUE, "s", 7.0), (GRAY, "^", 7.0)]


def save(name: str, arms: dict[str, Points], label: str, *, line: float, log: list[float] | None = None) -> None:
    height = 1.1 + (0.6 if len(arms) > 2 else 0.34) * len(next(iter(arms.values())))
    figure, axes = pyplot.subplots(figsize=(8.4, height))
    dots(axes, arms, LOOKS)
    axes.axvline(line, color="#222222", linewidth=1)
    if log:
        axes.set_xscale("log")
        axes.set_xticks(log, [f"{tick:g}" for tick in log])
        axes.minorticks_off()
    axes.set_xlabel(label)
    if len(arms) > 1:
        figure.legend(loc="upper center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.56 / height if len(arms) > 1 else 1))
    figure.savefig(DOCS / "assets" / name, metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)


def curves(name: str) -> None:
    """Losses over the share of the FLOPs, means over the seeds, as `docs/compare/long/curves.json` has them."""
    figure, axes = pyplot.subplots(figsize=(8.4, 4.0))
    stored = json.loads((DOCS / "compare" / "long" / "curves.json").read_text())
    thin = {"1 block": BLUE, "2 blocks": "#2f4b6c", "4 blocks": GRAY, "8 blocks": "#999999"}
    looks = {"grown": (ORANGE, 2.6), **{label: (color, 1.4) for label, color in thin.items()}}
    for label, (color, width) in looks.items():
        axes.plot(stored[label]["share"], stored[label]["loss"], color=color, linewidth=width, label=label)
    axes.set_ylim(1.45, 2.2)
    axes.set_xlabel("share of the FLOPs")
    axes.set_ylabel("validation loss")
    axes.grid(color="#e4e4e4", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(DOCS / "assets" / name, metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)


COST = "compute to reach the same loss (best fixed size = 1; left is cheaper)"


def main() -> None:
    pyplot.rcParams.update({"font.size": 11, "svg.hashsalt": "sensli", "svg.fonttype": "path"})
    arms = {
        "grown: units when they pay": ratios("pays"),
        "grown: layers at fixed times": ratios("layers"),
        "small, never grown": ratios("small"),
        "large from the start": ratios("large"),
    }
    save("does-it-pay.svg", arms, COST, line=1, log=[0.25, 0.5, 1, 2, 4, 8, 16])
    arms = {
        "Pays() | Diminishing()": ratios("pays"),
        "Diminishing()": ratios("when"),
        "fixed times": ratios("units"),
    }
    save("triggers.svg", arms, COST, line=1, log=[0.25, 0.5, 1, 2, 4])

    curves("long-budgets.svg")

    stored = results("summary.json")
    methods: dict[str, Points] = {"two spirals": {}, "student-teacher": {}}
    for name, arm in METHODS.items():
        for title, task in (("two spirals", "spirals"), ("student-teacher", "teacher")):
            value, low, high = numbers(stored[task][arm]["end"])
            methods[title][name] = value, low, high
    save("other-methods.svg", methods, COST, line=1, log=[0.25, 0.5, 1, 2, 4, 8])

    head, *rows = table("results/merits.md", "| task | loss | frobenius | operator | natural | random")
    rules = ("frobenius", "natural", "random", "middle")
    regrets: dict[str, Points] = {rule: {} for rule in rules}
    task = ""
    for row in rows:
        task = row[0].removesuffix(" (chooses)") or task
        if row[1] == "validation":
            for rule in rules:
                value, half = numbers(row[head.index(rule)])
                regrets[rule][task] = value, max(0.0, value - half), value + half
    named = {f"largest merit, {rule}" if rule in ("frobenius", "natural") else rule: regrets[rule] for rule in rules}
    save("merits.svg", named, "loss above that of the best site, in thousandths (left is better)", line=0)

    rows = table("results/units.md", "| `init`")[1:]
    losses: Points = {}
    for row in rows:
        seeds = [float(cell) for cell in row[1:5]]
        losses[row[0].strip('"')] = float(row[5]), min(seeds), max(seeds)
    save("units.svg", {"": losses}, "training loss at the end: geometric mean and range of four seeds", line=0.1)

    rows = table("results/tables.md", "| table | growing |")[1:]
    gains: Points = {}
    for row in rows[:-2]:  # without the means
        gain = float(row[1]) - float(row[5])
        gains[row[0]] = gain, min(0.0, gain), max(0.0, gain)
    save("tables.svg", {"": gains}, "score minus that of gradient-boosted trees (right is better)", line=0)

    rows = table("benchmarks.md", "| figure")[1:]
    shares: Points = {}
    for row in rows:
        if (
            "stacked" in row[0] or "Growing" in row[0] or "three folds" in row[0]
        ):  # larger is better there, or below zero
            continue
        measured, target = numbers(row[1]), numbers(row[2])
        share = max(one / other for one, other in zip(measured, target * len(measured), strict=False))
        name = re.sub(r"[`\"]", "", re.split(r" / |, | of the ", row[0])[0]).replace("norm=natural", "natural merit")
        shares[name[:44]] = share, 0.0, share
    save("benchmarks.svg", {"": shares}, "measured / target (left of the line: met)", line=1)


if __name__ == "__main__":
    main()
