"""For a block of a stack: its twin, and where the twin would go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sensli.modules.chain import Chain
from sensli.moves.layer.modules import ParametricLayer, ResidualLayer
from sensli.moves.lists import ListPlace
from sensli.moves.trace.flow import Call, Flow, Seen
from sensli.moves.trace.stacks import is_list, likeness, manner, signature
from sensli.moves.trace.surroundings import never_negative
from sensli.moves.twin.block_trial import NoTwin
from sensli.moves.twin.counting import plan_list
from sensli.moves.twin.numbering import equal_blocks, own_numbers
from sensli.moves.twin.twins import Twin
from sensli.moves.twin.zeroing import find_null, find_twin, plain_copy, twin_like


class TwinFinder:
    """Finds twins in one model; what was learned on a block is tried first on its equals."""

    def __init__(self, example: Any, init: str) -> None:
        self._example, self._init = example, init
        self._plans: dict[object, Twin] = {}  # by what is alike
        self._sized: dict[object, Twin] = {}  # by what is equal
        self._refused: dict[object, str] = {}
        # Of a list: for each block the first and the last of its equals, and what must follow when the list takes a twin of them.
        self._equals: dict[str, list[tuple[int, int]]] = {}
        self._places: dict[tuple[str, tuple[int, int]], ListPlace | None] = {}
        self._numbers: dict[str, dict[str, list[tuple[str, str]]]] = {}  # of a container: what tells its blocks apart

    def find(self, flow: Flow, call: Call, seen: Seen, *, chained: bool) -> tuple[Twin, ListPlace | None]:
        """The layer and, where it goes into a list, what must follow. Raises `NoTwin` with the reason."""
        if isinstance(call.module, (ResidualLayer, ParametricLayer)):
            raise NoTwin("is an inserted layer, not an original block of the model")
        kind = (signature(call.module), manner(call.module))
        twin = self._twin(flow, call, seen, kind)
        place = None if chained else self._place(flow, call, twin)
        if place is None:
            self._check_unnumbered(flow, call, twin)
        return replace(twin, init=self._init), place

    def find_null(self, flow: Flow, call: Call, *, chained: bool) -> tuple[Twin, ListPlace | None]:
        """The same for a loop that adds what its blocks give, so that the new one must give zero."""
        kind = (signature(call.module), manner(call.module))
        if kind in self._refused:
            raise NoTwin(self._refused[kind])
        try:
            twin = self._plans.get(kind) or find_null(call)
            place = None if chained else self._place(flow, call, twin)
            if place is None:
                self._check_unnumbered(flow, call, twin)
            if place is None and not chained:
                raise NoTwin("is in a list that cannot take another block: a trial with one more changed the output")
        except NoTwin as refusal:
            self._refused[kind] = str(refusal)
            raise
        self._plans[kind] = twin
        return replace(twin, init=self._init), place

    def find_plain(self, flow: Flow, call: Call, *, chained: bool) -> ListPlace | None:
        """Where a plain copy of a block goes that has no twin: what must follow in a list. Raises `NoTwin` with the reason."""
        plain = plain_copy(call)
        place = None if chained else self._place(flow, call, plain)
        if place is None:
            self._check_unnumbered(flow, call, plain)
        return place

    def _twin(self, flow: Flow, call: Call, seen: Seen, kind: object) -> Twin:
        """The plan, found on the first of all blocks that are alike; a trial in the model tells whether it holds for the others."""
        sign = never_negative(seen)
        if (kind, sign) in self._sized:
            return self._sized[kind, sign]
        alike = (likeness(call.module), manner(call.module), sign)
        if alike in self._refused:
            raise NoTwin(self._refused[alike])
        try:
            known = self._plans.get(alike)
            twin = find_twin(flow, call, seen) if known is None else twin_like(call, known)
        except NoTwin as refusal:
            self._refused[alike] = str(refusal)
            raise
        self._plans[alike] = self._sized[kind, sign] = twin
        return twin

    def _check_unnumbered(self, flow: Flow, call: Call, twin: Twin) -> None:
        """A twin beside its neighbour would have the neighbour's number, and with it the neighbour's entry in every cache."""
        parent, _, key = call.path.rpartition(".")
        while isinstance(flow.model.get_submodule(parent), Chain):
            parent, _, key = parent.rpartition(".")
        if parent not in self._numbers:
            siblings = {name: m for name, m in flow.model.get_submodule(parent)._modules.items() if m is not None}
            own = own_numbers(list(siblings.values()))
            self._numbers[parent] = dict(zip(siblings, own, strict=True))
        numbers = self._numbers[parent][key]
        if numbers:
            raise NoTwin(
                f"has its own number ({'.'.join(filter(None, numbers[0]))}), which a cache may use as a key, and no trial confirmed that "
                "its container can take another block and renumber all of them: the twin would share the entry of its neighbour"
            )
        if twin.remembers:
            raise NoTwin(
                "takes a stateful object, such as a key-value cache, and no trial confirmed that its list can take another block: "
                "the twin would share the entry of its neighbour"
            )

    def _place(self, flow: Flow, call: Call, twin: Twin) -> ListPlace | None:
        container, _, key = call.path.rpartition(".")
        parent = flow.model.get_submodule(container)
        if not is_list(parent) or isinstance(flow.model.get_submodule(call.path), Chain):
            return None
        if container not in self._equals:
            self._equals[container] = equal_blocks(list(parent.children()))
        alike = self._equals[container][int(key)]
        if (container, alike) not in self._places:
            self._places[container, alike] = plan_list(flow, self._example, container, alike, twin)
        return self._places[container, alike]
