"""Which of several sites to take: the one registry of selections, by merit and by what people do without measuring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from sensli.merits.merits import Merit, Merits, worth_of
from sensli.modules import checks
from sensli.moves.sites import Site
from sensli.text.tables import text_table

# From the merits in the order of the data flow and a number of layers to the order in which to take the places. Those after so many
# step in where a limit leaves no room for an earlier one.
Order = Callable[[Sequence[float], int, torch.Generator], list[int]]
Selection = Callable[[Merits], Merit | Site]  # a user's own


def _largest(merits: Sequence[float], count: int, generator: torch.Generator) -> list[int]:
    """The largest merits; of equal ones the first in the data flow."""
    return sorted(range(len(merits)), key=lambda place: -merits[place])


def _smallest(merits: Sequence[float], count: int, generator: torch.Generator) -> list[int]:
    """The smallest merits; of equal ones the first in the data flow."""
    return sorted(range(len(merits)), key=lambda place: merits[place])


def _random(merits: Sequence[float], count: int, generator: torch.Generator) -> list[int]:
    order: list[int] = torch.randperm(len(merits), generator=generator).tolist()
    return order


def _first(merits: Sequence[float], count: int, generator: torch.Generator) -> list[int]:
    """The places nearest to the input."""
    return list(range(len(merits)))


def _last(merits: Sequence[float], count: int, generator: torch.Generator) -> list[int]:
    """The places nearest to the output."""
    start = max(len(merits) - count, 0)
    return [*range(start, len(merits)), *reversed(range(start))]


def _even(merits: Sequence[float], count: int, generator: torch.Generator) -> list[int]:
    """Evenly spaced along the data flow, the ends left out: one layer goes into the middle."""
    end = len(merits) - 1
    return sorted({round((j + 1) * end / (count + 1)) for j in range(count)})


SELECTIONS: dict[str, Order] = {
    "largest": _largest,
    "smallest": _smallest,
    "random": _random,
    "first": _first,
    "last": _last,
    "even": _even,
}


def check_selection(select: str | Selection) -> None:
    """Refuse what is neither registered nor a function."""
    if not callable(select):
        checks.one_of("select", select, SELECTIONS, other="a function of Merits that returns one of them")


def is_control(select: str | Selection) -> bool:
    """Whether the largest merit decides *whether* to insert, and something else *where*."""
    return not callable(select) and select != "largest"


def ordered(
    select: str, merits: Merits, count: int, generator: torch.Generator | None = None, *, per: str | None = None
) -> list[Merit]:
    """The merits in the order in which a registered selection takes them, if so many layers are wanted."""
    values = [worth_of(merit, per) for merit in merits]
    return [merits[place] for place in SELECTIONS[select](values, count, generator or torch.Generator())]


def chosen(
    select: str | Selection,
    merits: Merits,
    worth: Sequence[Merit],
    count: int,
    generator: torch.Generator,
    *,
    per: str | None = None,
) -> list[Merit]:
    """The merits that may be inserted, in that order, where those in ``worth`` pass the threshold.

    A control differs from the method in *where* alone: whether, and how many at most, the largest merits decide for it too.
    """
    if not callable(select):
        if (
            per is not None and select == "largest"
        ):  # what passes is decided by the merit itself, the order by what it costs
            return sorted(worth, key=lambda merit: -worth_of(merit, per))
        return ordered(select, merits, min(count, len(worth)), generator, per=per)[: len(worth)]
    choice = select(merits)
    for merit in merits:
        if choice is merit or choice is merit.site:
            return [merit] if merit in worth else []
    raise TypeError(f"select must return one of the merits it was given, or its site, got {choice!r}.")


# --- compared with each other ---


def _choice(select: str, merits: Merits, count: int) -> list[Merit]:
    return ordered(select, merits, count, per=merits.compared)[:count]


CHOICES: dict[str, Callable[[Merits, int], list[Merit]]] = {
    "by merit": partial(_choice, "largest"),
    "even spacing": partial(_choice, "even"),
    "top only": partial(_choice, "last"),
    "bottom only": partial(_choice, "first"),
}


def compare_choices(merits: Merits, count: int) -> str:
    """A table of the choices for so many growths, with the merit that each would reach; what is best is compared as the merits are."""
    checks.instance("merits", merits, Merits, "the Merits that measure returned")
    count = checks.whole("count", count, 3)
    rows = []
    for name, choose in CHOICES.items():
        found = choose(merits, count)
        places = ", ".join(merit.site.place for merit in found)
        rows.append([name, places, f"{sum(merit.value for merit in found):.3e}"])
    return text_table([f"choice of {count}", "places", "sum of merits"], rows, left=(0, 1))
