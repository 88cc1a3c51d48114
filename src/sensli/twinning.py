"""For a block of a stack: its twin, and where the twin would go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from sensli.chain import Chain
from sensli.counting import plan_list
from sensli.flow import Call, Flow, Seen
from sensli.layers import Layer, ParametricLayer, ResidualLayer
from sensli.lists import ListPlace
from sensli.stacks import likeness, signature
from sensli.twins import Twin
from sensli.zeroing import NoTwin, find_null, find_twin, never_negative, twin_like


class TwinFinder:
    """Finds twins in one model; what was learned on a block is tried first on its equals."""

    def __init__(self, model: nn.Module, example: Any, init: str) -> None:
        self._model, self._example, self._init = model, example, init
        self._plans: dict[object, Twin] = {}  # by what is alike
        self._sized: dict[object, Twin] = {}  # by what is equal
        self._refused: dict[object, str] = {}
        self._places: dict[tuple[str, object], ListPlace | None] = {}

    def find(self, flow: Flow, call: Call, seen: Seen, *, chained: bool) -> tuple[Layer, ListPlace | None]:
        """The layer and, where it goes into a list, what must follow. Raises `NoTwin` with the reason."""
        if isinstance(call.module, (ResidualLayer, ParametricLayer)):
            raise NoTwin("is a layer that was inserted, which is no block of the model's own")
        kind = signature(call.module)
        twin = self._twin(flow, call, seen, kind)
        place = None if chained else self._place(call, kind, twin)
        if twin.remembers and place is None:
            raise NoTwin(
                "takes an object with a memory, such as a key-value cache, and its list cannot take a twin with a number of its own "
                "(no trial confirmed it): two blocks would write to the same entry"
            )
        return Layer("twin", "block", twin=replace(twin, init=self._init)), place

    def find_null(self, flow: Flow, call: Call, *, chained: bool) -> tuple[Layer, ListPlace | None]:
        """The same for a loop that adds what its blocks give, so that the new one must give zero."""
        kind = signature(call.module)
        if kind in self._refused:
            raise NoTwin(self._refused[kind])
        try:
            twin = self._plans.get(kind) or find_null(call)
            place = None if chained else self._place(call, (kind, "null"), twin)
            if place is None and not chained:
                raise NoTwin(
                    "stands in a list that cannot take another block: a trial with one more changed the output"
                )
        except NoTwin as refusal:
            self._refused[kind] = str(refusal)
            raise
        self._plans[kind] = twin
        return Layer("twin", "block", twin=replace(twin, init=self._init)), place

    def _twin(self, flow: Flow, call: Call, seen: Seen, kind: object) -> Twin:
        """The plan, found on the first of all blocks that are alike; a trial in the model tells whether it holds for the others."""
        sign = never_negative(seen)
        if (kind, sign) in self._sized:
            return self._sized[kind, sign]
        alike = (likeness(call.module), sign)
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

    def _place(self, call: Call, kind: object, twin: Twin) -> ListPlace | None:
        container, _, key = call.path.rpartition(".")
        parent = self._model.get_submodule(container)
        if not isinstance(parent, nn.ModuleList) or isinstance(self._model.get_submodule(call.path), Chain):
            return None
        if any(isinstance(child, Chain) for child in parent.children()):
            return None  # numbering goes through the blocks themselves, and a stand-in hides them
        if (container, kind) not in self._places:
            self._places[container, kind] = plan_list(self._model, self._example, container, int(key), twin)
        return self._places[container, kind]
