"""Where exactly a layer goes in and comes out again: the only code that touches the containers of a model, but for lists."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from sensli.errors import HistoryError
from sensli.modules.arguments import Slot
from sensli.modules.chain import Chain
from sensli.moves.lists import ListPlace, list_renames, put_into_list, take_from_list
from sensli.moves.point import Point

_GROWN_NAME = re.compile(r"grown\d+")


@dataclass(frozen=True)
class Cut:
    """Where exactly a layer goes: into a container that runs its children in order, into a list, or around the anchor."""

    parent: str
    key: str  # the anchor's key in its parent
    side: str
    way: str  # "sequence", "list" or "wrap"
    new: str  # key of the new layer
    slot: Slot = 0
    takes_call: bool = False  # the layer takes all arguments of the anchor's call
    place: ListPlace | None = None

    @property
    def path(self) -> str:
        """The path of the new module."""
        return join(join(self.parent, self.key) if self.way == "wrap" else self.parent, self.new)


def plan_cut(model: nn.Module, point: Point, path: str, *, takes_call: bool = False) -> Cut:
    if path == "":
        raise HistoryError(
            "a layer cannot wrap the whole model, because the caller holds the model itself. Use a site inside it."
        )
    parent_path, _, key = path.rpartition(".")
    chained = point.chained
    # After the last module of an inserted layer means after that layer, and before the first one before it: however often a place
    # grows, its layers are siblings.
    while _GROWN_NAME.fullmatch(parent_path.rpartition(".")[2]) and _is_end(
        model.get_submodule(parent_path), key, point.side
    ):
        parent_path, _, key = parent_path.rpartition(".")
        chained = True
    if point.place is not None:
        # A block that has been wrapped since is a chain in its list; the list takes the twin next to that chain.
        while isinstance(model.get_submodule(parent_path), Chain):
            parent_path, _, key = parent_path.rpartition(".")
        number = int(key) + (point.side == "after")
        place = point.place.moved(point.path.rpartition(".")[0], parent_path)
        return Cut(parent_path, key, point.side, "list", str(number), point.slot, takes_call, place)
    parent = model.get_submodule(parent_path)
    into = isinstance(parent, Chain) or (chained and isinstance(parent, nn.Sequential))
    number = 1
    while into and f"grown{number}" in parent._modules:
        number += 1
    return Cut(parent_path, key, point.side, "sequence" if into else "wrap", f"grown{number}", point.slot, takes_call)


def apply_cut(model: nn.Module, cut: Cut, layer: nn.Module) -> None:
    container = model.get_submodule(cut.parent)
    key = cut.key
    if cut.way == "list":
        assert cut.place is not None
        put_into_list(model, cut.parent, cut.place, int(cut.new), int(cut.key), layer)
        return
    if cut.way == "wrap":
        anchor = container._modules[cut.key]
        assert anchor is not None
        chain = Chain(anchor, cut.slot)
        chain.training = anchor.training
        container._modules[cut.key] = chain
        container, key = chain, "anchor"
    entries = list(container._modules.items())
    entries.insert(list(container._modules).index(key) + (cut.side == "after"), (cut.new, layer))
    # In place: the container's dictionary may be held elsewhere.
    container._modules.clear()
    container._modules.update(entries)
    if isinstance(container, Chain) and cut.takes_call:
        container.takes_call.add(cut.new)


def take_out(model: nn.Module, path: str, place: ListPlace | None) -> None:
    """Take a module out; a chain that is left with its anchor alone goes too."""
    parent_path, _, key = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    if place is not None:
        take_from_list(model, parent_path, place, int(key))
        return
    del parent._modules[key]
    if isinstance(parent, Chain):
        parent.takes_call.discard(key)
        if len(parent._modules) == 1:
            above, _, place_key = parent_path.rpartition(".")
            model.get_submodule(above)._modules[place_key] = parent._modules["anchor"]


def renames_of(model: nn.Module, cut: Cut) -> dict[str, str]:
    """Names that change: a wrapped module's parameters and buffers move one level down, the later blocks of a list move up by one."""
    if cut.way == "list":
        return list_renames(model, cut.parent, int(cut.new))
    if cut.way == "sequence":
        return {}
    path = join(cut.parent, cut.key)
    anchor = model.get_submodule(path)
    names = [name for name, _ in (*anchor.named_parameters(), *anchor.named_buffers())]
    return {join(path, name): join(path, f"anchor.{name}") for name in names}


def nested(path: str) -> bool:
    """Whether a module was inserted into one that was inserted too."""
    return sum(1 for name in path.split(".") if _GROWN_NAME.fullmatch(name)) > 1


def _is_end(container: nn.Module, key: str, side: str) -> bool:
    """Whether what comes after this module of a layer comes after the layer, or what comes before it before the layer."""
    if not isinstance(container, nn.Sequential):
        return side == "before" and key == getattr(container, "begins_with", None)
    keys = list(container._modules)
    return key == (keys[-1] if side == "after" else keys[0])


def join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
