"""The kind of stacks that are copied as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from sensli.moves.search import Search
from sensli.moves.sites import Site
from sensli.moves.stack.stack import Stack
from sensli.moves.trace.flow import Call


class StackKind:
    """Reads its moves from JSON, and proposes none: `find_sites` finds what keeps the function. `find_stacks` finds these."""

    grows: ClassVar[str] = "nothing"
    move: ClassVar[type[Stack]] = Stack

    def propose(self, search: Search) -> None:
        """Nothing to find."""

    def at(self, search: Search, call: Call, side: str, seen: Any) -> Iterator[Site]:
        return iter(())

    def otherwise(self, search: Search) -> None:
        """Nothing to find."""
