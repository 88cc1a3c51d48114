"""The page on tables shows what is stored."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.frames import REPORTED, SETS, Fold, summary

RESULTS = Path(__file__).parents[2] / "docs/results"


def test_the_page_shows_what_is_stored() -> None:
    stored = [Fold(**json.loads(line)) for line in (RESULTS / "tables.jsonl").read_text().splitlines()]
    page = (RESULTS / "tables.md").read_text()
    for tables in SETS.values():
        names = {table.name for table in tables}
        there = [fold for fold in stored if fold.table in names]
        assert summary(there, tables) in page
        ours = [fold for fold in there if fold.model == "growing"]
        assert len(ours) == 3 * len(tables)
        kept = sum(not fold.shape.endswith(" 0 growths") for fold in ours)
        several = sum(fold.shape.startswith("6 x") for fold in ours)
        assert re.search(rf"{kept} of {len(ours)} fits .*kept a growth, and {several} kept six networks", page)
        took, network, grid = (
            sum(fold.seconds for fold in there if fold.model == model) for model in ("growing", "mlp", "grid")
        )
        assert re.search(rf"{took / network:.1f} times as long as .*, and {took / grid:.2f} of the grid's time", page)


def test_equal_scores_share_their_rank() -> None:
    made = [
        Fold(REPORTED[0].name, model, None, score, 0.5, 1.0)
        for model, score in (("growing", 0.9), ("linear", 0.7), ("mlp", 0.7))
    ]
    assert "| mean rank | 1.00 | 2.50 | 2.50 |" in summary(made, REPORTED)
