"""The figures we promise, measured on this machine: ratios within one run, because machines are shared and noisy.

A benchmark is a function that returns `Figure`s; `BENCHMARKS` lists them by name.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import (
    cnn,
    estimators,
    finding,
    measuring,
    memory,
    natural,
    resume,
    sharded,
    starts,
    transformers,
    watching,
    widths,
)
from benchmarks.figure import Figure
from benchmarks.random_models import random_models
from benchmarks.spirals import spirals
from sensli import __version__
from sensli.errors import SensliError, unknown_choice
from sensli.text.files import check_writable, write_bytes
from sensli.text.records import dumps as strict_json
from sensli.text.tables import text_table

BENCHMARKS: dict[str, Callable[[], list[Figure]]] = {
    "find": finding.search_cost,
    "measure": measuring.measure_against_extended,
    "norms": measuring.norm_cost,
    "natural": natural.natural_cost,
    "memory": lambda: [*measuring.memory(), *memory.model_memory()],
    "sharded": sharded.sharded_memory,
    "probe": measuring.probe,
    "watch": watching.watching_cost,
    "linear": measuring.linear_cost,
    "confidence": measuring.confidence,
    "spirals": spirals,
    "resume": resume.resume,
    "tables": estimators.growing_estimators,
    "transformer": transformers.transformer_cost,
    "pipeline": cnn.pipeline_cost,
    "looking": cnn.look_cost,
    "exp1": cnn.exp1,
    "widths": widths.widths,
    "starts": starts.starts,
    "random-models": random_models,
}


def run_benchmarks(only: Sequence[str] | None, out: Path) -> list[Figure]:
    """Run the benchmarks one after another, print a table as they come, write all of them as JSON."""
    for name in only or ():
        if name not in BENCHMARKS:
            raise SensliError(unknown_choice("benchmark", name, BENCHMARKS))
    check_writable(out)
    figures: list[Figure] = []
    for name in only or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        figures += BENCHMARKS[name]()
        facts = {"machine": _machine(), "figures": [asdict(figure) for figure in figures]}
        write_bytes(out, strict_json(facts, indent=1).encode())
    rows = [[figure.name, figure.shown, figure.bar_shown, figure.verdict, figure.detail] for figure in figures]
    print(text_table(["figure", "measured", "bar", "", "how"], rows, left=(0, 3, 4)))
    print(f"written to {out}")
    return figures


def _machine() -> dict[str, object]:
    return {
        "sensli": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }
