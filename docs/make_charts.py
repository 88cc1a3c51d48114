"""Draw the charts of the documentation from the stored results: run `python docs/make_charts.py` from the repository.

Needs the extra `dev`. Writes docs/assets/does-it-pay.svg, by docs/compare/when/summary.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

DOCS = Path(__file__).parent
TASKS = {
    "spirals": "two spirals",
    "fashion": "Fashion-MNIST",
    "vgg": "CIFAR-10",
    "text": "transformer",
    "teacher": "student-teacher",
}
ARMS = {
    "pays": ("grown: units when they pay", "#c85000", "o", 9),
    "layers": ("grown: layers at fixed epochs", "#d9a37a", "D", 6),
    "small": ("small, never grown", "#4878a8", "s", 7),
    "large": ("large from the start", "#555555", "^", 7),
}


def ratios() -> dict[str, dict[str, list[float]]]:
    """For each task and arm the relative cost at the end, and the ends of its interval."""
    found: dict[str, dict[str, list[float]]] = {}
    entries: list[Any] = json.loads((DOCS / "compare" / "when" / "summary.json").read_text())
    for entry in entries:
        if entry["budget"] == 1:
            arms = entry["front_ratios"]
            found[entry["task"]] = {
                arm: [float(part) for part in re.findall(r"[\d.]+", arms[arm]["end"])] for arm in arms
            }
    return found


def does_it_pay(path: Path) -> None:
    values = ratios()
    pyplot.rcParams.update({"font.size": 11, "svg.hashsalt": "sensli", "svg.fonttype": "path"})
    figure, axes = pyplot.subplots(figsize=(8.4, 4.0))
    for row, task in enumerate(TASKS):
        for place, (arm, (label, color, marker, size)) in enumerate(ARMS.items()):
            value, low, high = values[task][arm]
            y = row + 0.16 * (place - 1.5)
            axes.plot([low, high], [y, y], color=color, linewidth=1.6, alpha=0.65)
            axes.plot(value, y, marker, color=color, markersize=size, label=label if row == 0 else None)
    axes.axvline(1, color="#222222", linewidth=1)
    axes.set_xscale("log")
    ticks = [0.25, 0.5, 1, 2, 4, 8, 16]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(TASKS)), TASKS.values())
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("compute to reach the same loss (best fixed size = 1; left is cheaper)")
    figure.legend(loc="upper center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.86))
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    does_it_pay(DOCS / "assets" / "does-it-pay.svg")
