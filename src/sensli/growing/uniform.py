"""`Grower(what="uniform")`: all widths of a model grow by the same share, as one decision.

At a check they are one site: its merit is the sum of theirs, so thresholds, triggers and limits apply to the whole. When it is taken, its
parts grow one after the other, and are one group in the history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

from torch import nn

from sensli.errors import UnsupportedSite
from sensli.merits.merits import Merit, Merits
from sensli.moves.point import Bind, Point
from sensli.moves.sites import Cost, New, Site, Sites, plural
from sensli.moves.width.confirming import width_of
from sensli.moves.width.widening import resizes
from sensli.moves.width.width import TOLERANCE, Width


@dataclass(frozen=True)
class Uniform:
    """More units for several widths at once; the parts in the order of the data flow, with what was measured of each."""

    tag: ClassVar[str] = "uniform"
    kind: ClassVar[str] = "units"
    tolerance: ClassVar[float | None] = TOLERANCE

    parts: tuple[Merit, ...]
    added: int  # parameters, of all together: more than the sum where neighbours grow
    flops: int  # of one forward pass, per sample

    def line(self, point: Point) -> str:
        widths = [width_of(part.site) for part in self.parts]
        units = sum(width.more for width in widths if not width.heads)
        heads = sum(width.more * width.heads for width in widths if width.heads)
        what = " and ".join(plural(number, word) for number, word in ((units, "unit"), (heads, "head")) if number)
        return f"+{what} in {plural(len(widths), 'width')}, from {point.path} to {self.parts[-1].site.path}"

    def cost(self, point: Point) -> Cost:
        return Cost(self.added, self.flops)

    def gauge(self, site: Site, model: nn.Module) -> NoReturn:
        raise UnsupportedSite(f"'{site}' is measured part by part. Measure the sites of find_sites(..., what='units').")

    def plan(self, model: nn.Module, site: Site) -> NoReturn:
        raise UnsupportedSite(f"'{site}' is grown by a Grower, part by part. Grow at the sites in site.move.parts.")

    def made(self, model: nn.Module, site: Site, module: nn.Module, path: str) -> NoReturn:
        self.plan(model, site)

    def joining(self, model: nn.Module, site: Site) -> Sequence[New]:
        return ()

    def bound(self, bind: Bind) -> Uniform:
        return self._with(lambda site: replace(site, point=site.point.bound(bind), move=site.move.bound(bind)))

    def by_path(self) -> Uniform:
        return self._with(Site.by_path)

    def _with(self, change: Callable[[Site], Site]) -> Uniform:
        return replace(self, parts=tuple(replace(part, site=change(part.site)) for part in self.parts))

    def check(self, point: Point) -> None:
        for part in self.parts:
            part.site.check()

    def to_dict(self) -> dict[str, Any]:
        return {"parts": [part.site.to_dict() for part in self.parts]}


def parts_of_decision(merit: Merit) -> tuple[Merit, ...]:
    """The growths that one decision is made of, each with its own merit."""
    return merit.site.move.parts if isinstance(merit.site.move, Uniform) else (merit,)


def parts_of_sites(sites: Iterable[Site]) -> list[Site]:
    """The sites that are measured: of one that is several at once, its parts."""
    return [part.site for site in sites for part in parts_of_decision(Merit(site, 0.0))]


def make_uniform(network: nn.Module, found: Sites) -> Sites:
    """All widths as the one site of a search; none if there are none."""
    parts = [Merit(site, 0.0) for site in found]
    sites = [_whole(network, parts)] if parts else []
    return Sites(sites, found.skipped, notes=found.notes, model_name=type(network).__name__)


def add_up(network: nn.Module, merits: Merits) -> Merits:
    """What all widths together are worth, from what each of them is."""
    ratios, shares = ([getattr(merit, name) for merit in merits] for name in ("ratio", "share"))
    whole = Merit(
        _whole(network, merits),
        sum(merit.value for merit in merits),
        None if None in ratios else sum(ratios),
        share=None if None in shares else sum(shares),
    )
    return Merits([whole], norm=merits.norm, batches=merits.batches, samples=merits.samples, loss=merits.loss)


def site_after(site: Site, before: Sequence[Site]) -> Site:
    """A width after others of its decision have grown: where several lie along one axis of a tensor, the later ones have moved."""
    axes, width = [], width_of(site)
    for axis in width.axes:
        start, length = axis.start, axis.length
        for other in map(width_of, before):
            for its in other.axes:
                if (its.module.path, its.name, its.dim) == (axis.module.path, axis.name, axis.dim):
                    change = other.stretch(its).change
                    length, start = length + change, start + change * (its.start < start)
        axes.append(replace(axis, start=start, length=length))
    return replace(site, move=replace(width, axes=tuple(axes)))


def _whole(network: nn.Module, parts: Sequence[Merit]) -> Site:
    first = parts[0].site
    added, flops = _cost(network, [width_of(part.site) for part in parts])
    return replace(first, move=Uniform(tuple(parts), added, flops))


def _cost(network: nn.Module, widths: Sequence[Width]) -> tuple[int, int]:
    """Parameters and FLOPs of all widths together: what is new in both directions of a matrix is in no part's own cost."""
    shapes: dict[int, tuple[list[int], list[int]]] = {}  # of each parameter, before and after
    matrices_alone = 0
    for width in widths:
        for each in resizes(network, width):
            if each.is_parameter:
                old, new = shapes.setdefault(id(each.tensor), (list(each.old_shape), list(each.old_shape)))
                for stretch in each.stretches:
                    new[stretch.dim] += stretch.change
                matrices_alone += (len(old) > 1) * (math.prod(each.new_shape) - math.prod(each.old_shape))
    more = [(len(old) > 1, math.prod(new) - math.prod(old)) for old, new in shapes.values()]
    matrices = sum(count for matrix, count in more if matrix)
    flops = sum(width.flops for width in widths) * matrices / max(matrices_alone, 1)  # biases count no FLOPs
    return sum(count for _, count in more), round(flops)
