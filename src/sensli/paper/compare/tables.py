"""The table of a task, and what it says in words."""

from __future__ import annotations

from collections.abc import Sequence

from sensli.paper.compare.summary import Row
from sensli.paper.report.document import Table
from sensli.paper.report.statistics import CONFIRMED, OPPOSITE, Interval, Paired, number
from sensli.text.tables import short_number


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
