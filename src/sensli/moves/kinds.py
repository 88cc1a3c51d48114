"""The registry of the ways to grow, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sensli.errors import one_of
from sensli.moves.dead.kind import NarrowKind, RecycleKind
from sensli.moves.layer.kind import LayerKind
from sensli.moves.move import Kind, Move
from sensli.moves.stack.kind import StackKind
from sensli.moves.twin.kind import TwinKind
from sensli.moves.width.kind import WidthKind

# Twins before layers: between two blocks a copy of a block fits better than any layer.
KINDS: list[Kind] = [TwinKind(), LayerKind(), WidthKind(), RecycleKind(), NarrowKind(), StackKind()]


def move_from_dict(data: Mapping[str, Any]) -> Move:
    """A move from its plain data, by its tag."""
    known = {kind.move.tag: kind.move for kind in KINDS}
    if not isinstance(data, Mapping):
        raise TypeError(f"a move must be a mapping, got a {type(data).__name__}")
    tag = data["tag"]
    if tag not in known:
        raise ValueError(one_of("tag", tag, tuple(known)))
    move: Move = known[tag].from_dict({key: value for key, value in data.items() if key != "tag"})
    return move


def asked_for(grow: str) -> list[Kind]:
    """The kinds that grow layers, units or both."""
    return [kind for kind in KINDS if grow in ("both", kind.grows)]
