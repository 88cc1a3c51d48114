"""For a block of a stack: its twin, and where the twin would go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from sensli.chain import Chain
from sensli.counting import plan_list
from sensli.flow import Call, Flow, Seen
from sensli.layers import Layer
from sensli.lists import ListPlace
from sensli.numbering import equal_blocks, own_numbers
from sensli.stacks import signature
from sensli.twins import Twin
from sensli.zeroing import NoTwin, find_twin


class TwinFinder:
    """Finds twins in one model; what was learned on a block is tried first on its equals."""

    def __init__(self, model: nn.Module, example: Any, init: str) -> None:
        self._model, self._example, self._init = model, example, init
        self._plans: dict[object, Twin] = {}
        self._refused: dict[object, str] = {}
        # Of a list: for each block the first and the last of its equals, and what must follow when the list takes a twin of them.
        self._equals: dict[str, list[tuple[int, int]]] = {}
        self._places: dict[tuple[str, tuple[int, int]], ListPlace | None] = {}
        self._numbers: dict[str, dict[str, list[tuple[str, str]]]] = {}  # of a container: what tells its blocks apart

    def find(self, flow: Flow, call: Call, seen: Seen, *, chained: bool) -> tuple[Layer, ListPlace | None]:
        """The layer and, where it goes into a list, what must follow. Raises `NoTwin` with the reason."""
        kind = signature(call.module)
        side = seen is call.given
        if (kind, side) in self._refused:
            raise NoTwin(self._refused[kind, side])
        try:
            twin = find_twin(flow, call, seen, self._plans.get((kind, side)))
        except NoTwin as refusal:
            self._refused[kind, side] = str(refusal)
            raise
        self._plans[kind, side] = twin
        place = None if chained else self._place(call, twin)
        if place is None:
            self._check_unnumbered(call, twin)
        return Layer("twin", "block", twin=replace(twin, init=self._init)), place

    def _check_unnumbered(self, call: Call, twin: Twin) -> None:
        """A twin beside its neighbour would have the neighbour's number, and with it the neighbour's entry in every cache."""
        parent, _, key = call.path.rpartition(".")
        while isinstance(self._model.get_submodule(parent), Chain):
            parent, _, key = parent.rpartition(".")
        if parent not in self._numbers:
            siblings = {name: m for name, m in self._model.get_submodule(parent)._modules.items() if m is not None}
            own = own_numbers(list(siblings.values()))
            self._numbers[parent] = dict(zip(siblings, own, strict=True))
        numbers = self._numbers[parent][key]
        if numbers:
            raise NoTwin(
                f"has its own number ({'.'.join(filter(None, numbers[0]))}), which a cache may use as a key, and no trial confirmed that "
                "its container can take another block and number all of them again: the twin would share the entry of its neighbour"
            )
        if twin.remembers:
            raise NoTwin(
                "takes an object with a memory, such as a key-value cache, and no trial confirmed that its list can take another block: "
                "the twin would share the entry of its neighbour"
            )

    def _place(self, call: Call, twin: Twin) -> ListPlace | None:
        container, _, key = call.path.rpartition(".")
        parent = self._model.get_submodule(container)
        if not isinstance(parent, nn.ModuleList) or isinstance(self._model.get_submodule(call.path), Chain):
            return None
        if container not in self._equals:
            self._equals[container] = equal_blocks(list(parent.children()))
        alike = self._equals[container][int(key)]
        if (container, alike) not in self._places:
            self._places[container, alike] = plan_list(self._model, self._example, container, alike, twin)
        return self._places[container, alike]
