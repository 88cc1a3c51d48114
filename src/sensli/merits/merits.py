"""The merit of a site, and the table of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

from sensli.errors import MeasurementError, WrongType, ZeroMerits
from sensli.merits.natural import NATURAL
from sensli.modules import checks
from sensli.moves.sites import Site
from sensli.text.extras import imported
from sensli.text.html_tables import html_table
from sensli.text.names import PER
from sensli.text.tables import short_number, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_per(per: str | None) -> None:
    """Refuse what merits cannot be compared by."""
    if per is not None:
        checks.one_of("per", per, PER, other="None")


@dataclass(frozen=True)
class Merit:
    """What a growth at a site would be worth: the squared norm of the gradient of the mean loss with respect to its new weights.

    Attributes:
        site: The site.
        value: The squared norm; with ``norm="natural"`` without the share of the noise, and at least 0.
        ratio: The merit divided by the mean over the existing weights, which is compared with the threshold tau. None if it was
            not measured.
        dead: The share of the new layer's units that were zero on all the data, or None.
        share: The merit divided by the sum over the existing weights: how much of their gradient it would add. None without a ratio.
    """

    site: Site
    value: float
    ratio: float | None = None  # to the mean over the existing weights: what the threshold tau is compared with
    dead: float | None = None  # share of units that were zero on all the data
    share: float | None = None  # of the sum over the existing weights: what `triggers.Pays` compares with the FLOPs

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
    ) -> None:
        self._merits = tuple(merits)
        self.norm = norm
        self.batches = batches
        self.samples = samples
        self.loss = loss  # the mean over the data; None where a probe did not see it
        self.confidence = confidence  # the level that was asked for
        self.tolerance = tolerance  # the share of the best merit that may be missed
        self.clear = clear  # whether the best site was clear at that level before the data ended
        self.compared = compared  # per what

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
        if cost is not None:
            checks.one_of("cost", cost, PER, other="None")
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
        return text_table(self._header, self._rows) + f"\n{self._measured}"

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        return html_table(self._header, self._rows, caption=self._measured)

    @property
    def _header(self) -> list[str]:
        return ["site", "merit", *PER.values(), "ratio", "+parameters", "+FLOPs", "dead units"]

    @property
    def _rows(self) -> list[list[str]]:
        return [
            [
                str(merit.site),
                f"{merit.value:.3e}",
                *(f"{worth_of(merit, cost):.3e}" for cost in PER),
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
            "merits": [merit.to_dict() for merit in self.ranked],
        }

    def to_pandas(self) -> Any:
        """A pandas DataFrame with one row for each site, best first.

        Raises:
            MissingExtra: If pandas is not installed.
        """
        return imported("pandas", "merits.to_pandas()").DataFrame([merit.to_dict() for merit in self.ranked])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the merits as horizontal bars, best on top; compared per parameter or per FLOP if `per` says so.

        Args:
            ax: The axes of matplotlib to draw on. None makes a new figure.

        Returns:
            The axes.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        pyplot = imported("matplotlib.pyplot", "merits.plot()", extra="plots")
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
