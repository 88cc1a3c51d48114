"""The kinds of what becomes of dead units. They are not found by a search, which sees an example: data tell which units are dead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from sensli.moves.dead.dead import Narrow, Recycle
from sensli.moves.search import Search
from sensli.moves.sites import Site
from sensli.moves.trace.flow import Call


class _Reading:
    """Reads its moves from JSON, and proposes none."""

    grows: ClassVar[str] = "nothing"

    def propose(self, search: Search) -> None:
        """Nothing to find."""

    def at(self, search: Search, call: Call, side: str, seen: Any) -> Iterator[Site]:
        return iter(())

    def otherwise(self, search: Search) -> None:
        """Nothing to find."""


class RecycleKind(_Reading):
    """New rows for dead units."""

    move: ClassVar[type[Recycle]] = Recycle


class NarrowKind(_Reading):
    """Dead units removed."""

    move: ClassVar[type[Narrow]] = Narrow
