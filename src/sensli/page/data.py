"""From the record of a training to what the page shows: plain data, in which every number is the record's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sensli import __version__
from sensli.errors import HistoryError
from sensli.modules import checks
from sensli.page.film import Film
from sensli.page.growths import apart, growths_of
from sensli.page.words import caption
from sensli.surgery.history.history import History
from sensli.surgery.history.record import Look

FRAMES = 150  # positions of the slider, besides the decisions


@dataclass(frozen=True)
class Curve:
    """One line of the chart: a network's loss or metric, call by call."""

    name: str
    calls: Sequence[int]
    values: Sequence[float | None]
    role: str = "grown"  # "grown", "baseline" or "extended": the colour


def page_data(
    history: History,
    *,
    title: str = "A network grows",
    intro: str = "",
    measure: str | None = None,
    curves: Sequence[Curve] = (),
    films: Sequence[Film] = (),
    results: Sequence[dict[str, Any]] = (),
    points: Sequence[tuple[float, float, int]] = (),
) -> dict[str, Any]:
    """Collect what the page shows of a history.

    Args:
        history: The history of a `Grower`.
        title: The title of the page (default: "A network grows").
        intro: A paragraph below the title (default: "").
        measure: What the metric is called. None takes the name in the record, which the callbacks write there, or "metric".
        curves: The lines of the chart. Without any, the metric of the record.
        films: The decision boundary and the weights of small networks on the plane, call by call.
        results: The rows of a table at the end, with the same keys in each.
        points: The data on the plane, as (x, y, class).

    Returns:
        Plain data for `write_page`.

    Raises:
        HistoryError: If the history has no record of the training.
    """
    record = checks.instance("history", history, History, "a History (for example grower.history)").record
    if not record:
        raise HistoryError(
            "the history contains growths but no record of the training, so there is nothing to show. A Grower writes the record "
            "itself; a History made by hand or by an earlier version does not have one."
        )
    measure = measure or record.metric or "metric"
    if not curves and record.metrics:
        calls, values = zip(*record.metrics, strict=True)
        curves = [Curve(measure, calls, values)]
    numbers = {growth.number for growth in history}
    return {
        "version": __version__,
        "title": title,
        "intro": intro,
        "measure": measure,
        "caption": caption(measure),
        "unit": record.unit,
        "calls": record.calls,
        "frames": list(films[0].calls) if films else _frames(history),
        "curves": [asdict(curve) for curve in curves],
        "looks": [_look(look, numbers) for look in record.looks],
        "growths": growths_of(history),
        "outlines": [
            {"call": call, "units": [asdict(unit) for unit in apart(units, call, history)]}
            for call, units in record.outlines
        ],
        "films": [film.to_dict() for film in films],
        "points": [list(point) for point in points],
        "results": list(results),
    }


def _frames(history: History) -> list[int]:
    """Where the slider stops: evenly spread, and at each look just before it and at it."""
    record = history.record
    step = max(1, record.calls // FRAMES)
    stops = {0, record.calls, *range(0, record.calls, step)}
    for look in record.looks:
        stops |= {look.call - 1, look.call}
    return sorted(stops)


def _look(look: Look, numbers: set[int]) -> dict[str, Any]:
    """A look with its line, and the mean over the existing weights, of which the threshold is a multiple."""
    mean = next((m.value / m.ratio for m in look.merits if m.ratio and not math.isnan(m.ratio)), None)
    return {
        **look.to_dict(),
        "line": str(look),
        "mean": mean,
        "undone": [number for number in look.inserted if number not in numbers],
    }
