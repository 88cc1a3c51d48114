"""A group: the layers that make the same units, and all that reads or passes them on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

from sensli.moves.width.marking import Layout, columns


@dataclass
class Group:
    """Layers that make the same units, with the layout of the units in each of them and in all that reads or passes them."""

    units: int
    makers: dict[str, tuple[Layout, ...]] = field(
        default_factory=dict
    )  # several where keys and values are fewer than the queries before them
    reads: dict[str, Layout] = field(default_factory=dict)
    passes: dict[str, Layout] = field(default_factory=dict)
    heads: int = (
        0  # of an attention that make one unit: several queries' where they share keys and values; 0: single units
    )
    other: Group | None = None  # what it may be instead, if the trial refuses it

    def touches(self, other: Group) -> bool:
        """Whether two groups have entries of some axis in common."""
        return any(overlap for overlap, _ in self._common(other))

    def agrees(self, other: Group) -> bool:
        """Whether the units of two groups are the same units."""
        same = all(equal for overlap, equal in self._common(other) if overlap)
        return self.units == other.units and self.heads == other.heads and same

    def take(self, other: Group) -> None:
        """Become one group with another one."""
        self.makers.update(other.makers)
        self.reads.update(other.reads)
        self.passes.update(other.passes)

    def _common(self, other: Group) -> list[tuple[bool, bool]]:
        """Of every axis that both groups have: whether they share entries, and whether the units lie alike."""
        found = []
        for these, those in ((self.reads, other.reads), (self.passes, other.passes)):
            for path in these.keys() & those.keys():
                overlap = bool(_all(these[path], self.units) & _all(those[path], other.units))
                found.append((overlap, these[path] == those[path]))
        return found


def _all(where: Layout, units: int) -> set[int]:
    return {place for unit in range(units) for place in columns(where, units, unit)}
