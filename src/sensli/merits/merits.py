"""The merit of a site, the table of all of them, and which of them to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch

from sensli.errors import MeasurementError, WrongType, ZeroMerits
from sensli.merits.norms import NATURAL
from sensli.modules import checks
from sensli.moves.sites import Site
from sensli.text.commands import PER, import_optional
from sensli.text.tables import WIDTH, html_table, short_number, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_per(per: str | None, name: str = "per") -> None:
    """Refuse what merits cannot be compared by."""
    if per is not None:
        checks.one_of(name, per, PER, other="None")


@dataclass(frozen=True)
class Merit:
    """What a growth at a site would be worth: the squared norm of the gradient of the mean loss with respect to its new weights.

    Attributes:
        site: The site.
        value: The squared norm; with ``norm="natural"`` without the share of the noise, and at least 0.
        ratio: The merit divided by the mean over the existing weights, which is compared with the threshold tau. None if it was
            not measured.
        dead: The share of the new layer's units that were zero on all the data, or None.
        share: The merit divided by the sum over the existing weights: how much of their gradient it would add, which `triggers.Pays`
            compares with the FLOPs. None without a ratio.
    """

    site: Site
    value: float
    ratio: float | None = None
    dead: float | None = None
    share: float | None = None

    def __str__(self) -> str:
        ratio = f", {self.ratio:.3g} x the mean of the existing weights" if self.ratio is not None else ""
        return f"{self.site}: merit {self.value:.3e}{ratio}"

    def __repr__(self) -> str:
        return f"Merit({self})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the site as it prints, the merit also per added parameter and per added FLOP, and the costs."""
        site = self.site
        return {
            "site": str(site),
            "path": site.path,
            "side": site.side,
            "kind": site.kind,
            "merit": self.value,
            **{f"merit {name}": worth_of(self, cost) for cost, name in PER.items()},
            "ratio": self.ratio,
            "share": self.share,
            "parameters": site.parameters,
            "flops": site.flops,
            "dead": self.dead,
        }


def worth_of(merit: Merit, per: str | None) -> float:
    """A merit as it is, or for each parameter or FLOP that the growth adds."""
    return merit.value if per is None else merit.value / max(getattr(merit.site.cost, per), 1)


def as_site(name: str, value: Site | Merit) -> Site:
    """A site, or the site of a merit."""
    if isinstance(value, Merit):
        return value.site
    return checks.instance(name, value, Site, "a Site or a Merit (for example merits.best)")


def as_sites(name: str, value: Iterable[Site | Merit]) -> tuple[Site, ...]:
    """Several sites, or the sites of several merits."""
    if isinstance(value, (str, bytes, type, Mapping)) or not hasattr(value, "__iter__"):
        checks.refuse(name, "a sequence of sites (for example find_sites(model, example))", value, WrongType)
    return tuple(as_site(f"{name}[{index}]", each) for index, each in enumerate(value))


class Merits(Sequence[Merit]):
    """The merits of sites in the order in which the sites were given; prints as a table, best first.

    Layers and units are in one table: all merits are squared norms of gradients of the same loss.

    Attributes:
        norm: The name of the norm; ``"none"`` where nothing was measured, so that the values are no merits.
        batches: How many batches were used.
        samples: How many samples were used, if known.
        loss: The mean loss over the data. None if a probe did not see it.
        confidence: The confidence level that was asked for, or None.
        tolerance: The share of the best merit that may be missed.
        clear: Whether the best site was clear at that level before the data ended. None without a level.
        spread: How far a merit may be off because large gradients were summed as sketches, as a share of it (one standard deviation, of
            the site where it is largest); 0.0 where all are exact.
        compared: Compared per added ``"parameters"`` or ``"flops"``; None if as they are. See `per`.
    """

    def __init__(
        self,
        merits: Sequence[Merit],
        *,
        norm: str,
        batches: int,
        samples: int | None = None,
        loss: float | None = None,
        confidence: float | None = None,
        tolerance: float = 0.0,
        clear: bool | None = None,
        compared: str | None = None,
        spread: float = 0.0,
    ) -> None:
        self._merits = tuple(merits)
        self.norm = norm
        self.batches = batches
        self.samples = samples
        self.loss = loss
        self.confidence = confidence
        self.tolerance = tolerance
        self.clear = clear
        self.compared = compared
        self.spread = spread

    @overload
    def __getitem__(self, index: int) -> Merit: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Merit, ...]: ...
    def __getitem__(self, index: int | slice) -> Merit | tuple[Merit, ...]:
        return self._merits[index]

    def __len__(self) -> int:
        return len(self._merits)

    def per(self, cost: str | None) -> Merits:
        """The same merits compared by what they cost: `ranked`, `best`, `worst` and the table go by the merit per added parameter or FLOP.

        Args:
            cost: ``"parameters"``, ``"flops"``, or None to compare the merits as they are.

        Returns:
            The merits, each with the value that it had.
        """
        check_per(cost, "cost")
        again = copy(self)
        again.compared = cost
        return again

    def with_sites(self, sites: Sequence[Site]) -> Merits:
        """The same values for other sites, such as those that `measure` was given, which do not carry the rows that it found.

        Args:
            sites: As many sites, in the same order.

        Returns:
            The merits of these sites.
        """
        again = copy(self)
        again._merits = tuple(replace(merit, site=site) for merit, site in zip(self, sites, strict=True))
        return again

    def _worth(self, merit: Merit) -> float:
        return worth_of(merit, self.compared)

    @property
    def ranked(self) -> list[Merit]:
        """The merits from largest to smallest; among equal ones the first in the data flow comes first."""
        return sorted(self._merits, key=lambda merit: -self._worth(merit))

    @property
    def best(self) -> Merit:
        """The largest merit."""
        return max(self._merits, key=self._worth)

    @property
    def worst(self) -> Merit:
        """The smallest merit."""
        return min(self._merits, key=self._worth)

    def __repr__(self) -> str:
        return f"Merits({len(self)} sites, norm={self.norm!r}, best: {self.best})"

    def __str__(self) -> str:
        header, *rows = self._table
        table = text_table(header, rows)
        if table.index("\n") > WIDTH:  # dead units have room beside short names only
            table = text_table(header[:-1], [row[:-1] for row in rows], width=WIDTH)
        measured = self._measured
        if len(measured) > WIDTH:
            measured = measured.replace("; ", ";\n")
        return f"{table}\n{measured}"

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        header, *rows = self._table
        return html_table(header, rows, caption=self._measured)

    @property
    def _table(self) -> list[list[str]]:
        """The header and a row for each merit, best first."""
        per = [self.compared] if self.compared else []
        header = ["site", "merit", *(PER[cost] for cost in per), "ratio", "+parameters", "+FLOPs", "dead units"]
        return [header] + [
            [
                str(merit.site),
                f"{merit.value:.3e}",
                *(f"{worth_of(merit, cost):.3e}" for cost in per),
                "" if merit.ratio is None else f"{merit.ratio:.2f}",
                short_number(merit.site.parameters),
                short_number(merit.site.flops),
                "" if merit.dead is None else f"{merit.dead:.0%}",
            ]
            for merit in self.ranked
        ]

    @property
    def _measured(self) -> str:
        samples = f" ({self.samples:,} samples)" if self.samples is not None else ""
        what = "natural merit" if self.norm == NATURAL else f"{self.norm} norm, squared"
        text = f"{what}, over {self.batches} {'batch' if self.batches == 1 else 'batches'}{samples}"
        if self.spread:
            text += f"; from sketches of large gradients, each within about {self.spread:.1%}"
        if self.compared:
            text += f"; ordered by the merit {PER[self.compared]} that the growth adds"
        if self.clear is not None:
            text += f"; the best is {'clear' if self.clear else 'not clear'} at the level {self.confidence:g}"
            text += f", {self.tolerance:.0%} allowed" if self.tolerance else ""
        return text

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: how it was measured, and one entry for each site, best first."""
        return {
            "norm": self.norm,
            "batches": self.batches,
            "samples": self.samples,
            "loss": self.loss,
            "compared": self.compared,
            **({"spread": self.spread} if self.spread else {}),
            "merits": [merit.to_dict() for merit in self.ranked],
        }

    def to_pandas(self) -> Any:
        """A pandas DataFrame with one row for each site, best first.

        Raises:
            MissingExtra: If pandas is not installed.
        """
        return import_optional("pandas", "merits.to_pandas()").DataFrame([merit.to_dict() for merit in self.ranked])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the merits as horizontal bars, best on top; compared per parameter or per FLOP if `per` says so.

        Args:
            ax: The axes of matplotlib to draw on. None makes a new figure.

        Returns:
            The axes.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        pyplot = import_optional("matplotlib.pyplot", "merits.plot()", extra="plots")
        if ax is None:
            _, ax = pyplot.subplots(figsize=(8, 1 + 0.3 * len(self)), layout="constrained")
        assert ax is not None
        ax.barh([str(merit.site) for merit in self.ranked], [self._worth(merit) for merit in self.ranked])
        ax.invert_yaxis()
        ax.set(xlabel=f"merit {PER[self.compared]}" if self.compared else "merit", title=self._measured)
        return ax

    def check(self) -> Merits:
        """The merits themselves, if they can carry a decision."""
        for merit in self:
            if not math.isfinite(merit.value):
                raise MeasurementError(
                    f"the merit of '{merit.site}' is {merit.value}: the gradient there is not finite although the loss is. "
                    "Lower the learning rate, clip gradients, or measure in a wider float type."
                )
        if all(merit.value == 0 for merit in self) and self.norm == NATURAL:
            raise ZeroMerits(
                f"all {len(self)} natural merits are zero: none is larger than noise alone would make it. Measure on more batches; "
                "if that does not help, nothing is to be gained at any of the sites."
            )
        if all(merit.value == 0 for merit in self):
            raise ZeroMerits(
                f"all {len(self)} merits are zero: the loss does not change at any of the sites. Every unit before them is "
                "dead on this data, or the loss is flat (already zero), or it does not depend on the model's output."
            )
        return self


# ---- Which of several sites to take: the one registry of selections, by merit and by what people do without measuring.


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
LEAST = "least"  # takes the block that matters least, and copies it: no merit tells which, so `Grower` measures it


def check_selection(select: str | Selection) -> None:
    """Refuse what is neither registered nor a function."""
    if not callable(select) and select != LEAST:
        checks.one_of(
            "select", select, SELECTIONS, other="a function of Merits that returns one of them, or 'least' for blocks"
        )


def is_control(select: str | Selection) -> bool:
    """Whether the largest merit decides *whether* to insert, and something else *where*."""
    return not callable(select) and select not in BY_MERIT


def order_merits(
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


def choose_sites(
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
        passing: Sequence[Merit] = merits
        if select in BY_MERIT:  # what passes is decided by the merit itself, the order by what it costs
            stacks = {merit.site.stack for merit in worth if select == "auto"} - {None}
            passing = [merit for merit in merits if merit in worth or merit.site.stack in stacks]
        return order_merits(select, passing, min(count, len(worth)), generator, per=per)[: len(worth)]
    choice = select(merits)
    for merit in merits:
        if choice is merit or choice is merit.site:
            return [merit] if merit in worth else []
    raise TypeError(f"select must return one of the merits it was given, or its site, got {choice!r}.")


# --- compared with each other ---


def _choice(select: str, merits: Merits, count: int) -> list[Merit]:
    return order_merits(select, merits, count, per=merits.compared)[:count]


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
