"""Which of several sites to take: the one registry of selections, by merit and by what people do without measuring."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from sensli.merits.merits import Merit, Merits, worth_of
from sensli.modules import checks
from sensli.moves.sites import Site
from sensli.text.tables import text_table

Stacks = Sequence[Hashable]  # the stack of blocks that each place belongs to; None for a place that is in none
# From the merits in the order of the data flow, their stacks and a number of layers to the order in which to take the places. Those
# after so many step in where a limit leaves no room for an earlier one, and are tried next in a trial.
Order = Callable[[Sequence[float], Stacks, int, torch.Generator], list[int]]
Selection = Callable[[Merits], Merit | Site]  # a user's own


def _auto(merits: Sequence[float], stacks: Stacks, count: int, generator: torch.Generator) -> list[int]:
    """The largest merits, but in a stack of blocks even spacing: there no merit is known to tell the better place.

    The merit of a place in a stack depends on the size of the residual stream there and is often largest before the first block, which
    is the worst place. So a stack competes with the merit at its middle, and what it wins is spread evenly.
    """
    claims, members = list(merits), stack_members(stacks)
    for own in members.values():
        middle = merits[own[spread(1, len(own))[0]]]
        for place in own:
            claims[place] = min(merits[place], middle)
    ranked = sorted(range(len(merits)), key=lambda place: (-claims[place], -merits[place]))
    wins = [stacks[place] for place in ranked[:count]]
    evenly = {stack: iter(spread(wins.count(stack), len(own))) for stack, own in members.items()}
    taken = [
        place if stack is None else members[stack][next(evenly[stack])]
        for place, stack in zip(ranked, wins, strict=False)
    ]
    return [*taken, *(place for place in ranked if place not in taken)]


def stack_members(stacks: Stacks) -> dict[Hashable, list[int]]:
    """The places of each stack, in the order of the data flow."""
    found: dict[Hashable, list[int]] = {}
    for place, stack in enumerate(stacks):
        if stack is not None:
            found.setdefault(stack, []).append(place)
    return found


def spread(count: int, places: int) -> list[int]:
    """So many of the places, evenly spaced: one is in the middle; of two middles it is the one nearer to the output."""
    return [math.floor((index + 1) * (places + 1) / (count + 1) + 0.5) - 1 for index in range(count)]


def _largest(merits: Sequence[float], stacks: Stacks, count: int, generator: torch.Generator) -> list[int]:
    """The largest merits; of equal ones the first in the data flow."""
    return sorted(range(len(merits)), key=lambda place: -merits[place])


def _smallest(merits: Sequence[float], stacks: Stacks, count: int, generator: torch.Generator) -> list[int]:
    """The smallest merits; of equal ones the first in the data flow."""
    return sorted(range(len(merits)), key=lambda place: merits[place])


def _random(merits: Sequence[float], stacks: Stacks, count: int, generator: torch.Generator) -> list[int]:
    order: list[int] = torch.randperm(len(merits), generator=generator, device=generator.device).tolist()
    return order


def _first(merits: Sequence[float], stacks: Stacks, count: int, generator: torch.Generator) -> list[int]:
    """The places nearest to the input."""
    return list(range(len(merits)))


def _last(merits: Sequence[float], stacks: Stacks, count: int, generator: torch.Generator) -> list[int]:
    """The places nearest to the output."""
    start = max(len(merits) - count, 0)
    return [*range(start, len(merits)), *reversed(range(start))]


def _even(merits: Sequence[float], stacks: Stacks, count: int, generator: torch.Generator) -> list[int]:
    """Evenly spaced along the data flow, the ends left out: one layer goes into the middle."""
    end = len(merits) - 1
    return sorted({round((j + 1) * end / (count + 1)) for j in range(count)})


SELECTIONS: dict[str, Order] = {
    "auto": _auto,
    "largest": _largest,
    "smallest": _smallest,
    "random": _random,
    "first": _first,
    "last": _last,
    "even": _even,
}


BY_MERIT = ("auto", "largest")  # those that take the place with the largest merit wherever merits compare


def check_selection(select: str | Selection) -> None:
    """Refuse what is neither registered nor a function."""
    if not callable(select):
        checks.one_of("select", select, SELECTIONS, other="a function of Merits that returns one of them")


def is_control(select: str | Selection) -> bool:
    """Whether the largest merit decides *whether* to insert, and something else *where*."""
    return not callable(select) and select not in BY_MERIT


def ordered(
    select: str,
    merits: Sequence[Merit],
    count: int,
    generator: torch.Generator | None = None,
    *,
    per: str | None = None,
) -> list[Merit]:
    """The merits in the order in which a registered selection takes them, if so many layers are wanted."""
    values, stacks = [worth_of(merit, per) for merit in merits], [merit.site.stack for merit in merits]
    return [merits[place] for place in SELECTIONS[select](values, stacks, count, generator or torch.Generator())]


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

    A control differs from the method in *where* alone: whether, and how many at most, the largest merits decide for it too. So do those
    of a stack under ``"auto"``: all of its places pass if one does.
    """
    if not callable(select):
        if select in BY_MERIT:  # what passes is decided by the merit itself, the order by what it costs
            stacks = {merit.site.stack for merit in worth if select == "auto"} - {None}
            passing = [merit for merit in merits if merit in worth or merit.site.stack in stacks]
            return ordered(select, passing, min(count, len(worth)), per=per)[: len(worth)]
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
    "as Grower": partial(_choice, "auto"),
    "by merit": partial(_choice, "largest"),
    "even spacing": partial(_choice, "even"),
    "top only": partial(_choice, "last"),
    "bottom only": partial(_choice, "first"),
}


BETWEEN_BLOCKS = (
    "Between the blocks of a stack no merit is known to tell the better place, and before the first block a large one misleads: there "
    "Grower takes the middle (select='auto')."
)


def compare_choices(merits: Merits, count: int) -> str:
    """A table of the choices for so many growths, with the merit that each would reach; what is best is compared as the merits are."""
    checks.instance("merits", merits, Merits, "the Merits that measure returned")
    count = checks.whole("count", count, 3)
    rows = []
    for name, choose in CHOICES.items():
        found = choose(merits, count)
        places = ", ".join(merit.site.place for merit in found)
        rows.append([name, places, f"{sum(merit.value for merit in found):.3e}"])
    table = text_table([f"choice of {count}", "places", "sum of merits"], rows, left=(0, 1))
    several = any(len(own) > 1 for own in stack_members([merit.site.stack for merit in merits]).values())
    return f"{table}\n{BETWEEN_BLOCKS}" if several else table
