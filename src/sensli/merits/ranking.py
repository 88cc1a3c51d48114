"""Which of several sites to take: by merit, and what people do without measuring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sensli.merits.merits import Merit, Merits
from sensli.modules import checks
from sensli.text.tables import text_table


def by_merit(merits: Merits, count: int) -> list[Merit]:
    """The largest merits."""
    return merits.ranked[:count]


def evenly(merits: Merits, count: int) -> list[Merit]:
    """Evenly spaced along the data flow, the ends left out: one layer goes into the middle."""
    last = len(merits) - 1
    places = {round((j + 1) * last / (count + 1)) for j in range(count)}
    return [merits[place] for place in sorted(places)]


def at_the_top(merits: Merits, count: int) -> list[Merit]:
    """The places nearest to the output."""
    return list(merits[-count:])


def at_the_bottom(merits: Merits, count: int) -> list[Merit]:
    """The places nearest to the input."""
    return list(merits[:count])


CHOICES: dict[str, Callable[[Merits, int], Sequence[Merit]]] = {
    "by merit": by_merit,
    "even spacing": evenly,
    "top only": at_the_top,
    "bottom only": at_the_bottom,
}


def compare_choices(merits: Merits, count: int) -> str:
    """A table of the choices for so many new layers, with the merit that each would reach."""
    checks.instance("merits", merits, Merits, "the Merits that measure returned")
    count = checks.whole("count", count, 3)
    rows = []
    for name, choose in CHOICES.items():
        chosen = choose(merits, count)
        places = ", ".join(f"{merit.site.side} {merit.site.path}" for merit in chosen)
        rows.append([name, places, f"{sum(merit.value for merit in chosen):.3e}"])
    return text_table([f"choice of {count}", "places", "sum of merits"], rows, left=(0, 1))
