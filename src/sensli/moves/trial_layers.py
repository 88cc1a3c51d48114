"""The layers of a trial: put into the copy of a model at every site, watched while it runs, and taken out again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sensli.modules.arguments import first_tensor, value_at
from sensli.modules.nearness import equal
from sensli.modules.running import undrawn
from sensli.moves.cutting import Cut, apply_cut, plan_cut, take_out
from sensli.moves.inserting import Inserts
from sensli.moves.layer.stand_in import StandIn
from sensli.moves.sites import Site
from sensli.moves.trace.stacks import manner


@dataclass
class New:
    """A layer in the copy, and what was seen of it in one run."""

    site: Site
    layer: nn.Module
    cut: Cut
    calls: int = 0
    same: bool = True
    output: Tensor | None = None
    given: GradientEdge | None = None  # where its input comes from in the graph


class Layers:
    """The layers for the sites of one copy, built once and used in every run. ``returns_tensor``: the modules that return one."""

    def __init__(self, model: nn.Module, returns_tensor: Collection[str]) -> None:
        self.model, self._returns_tensor = model, returns_tensor
        self._layers: dict[tuple[Site, bool, int], nn.Module] = {}

    @contextmanager
    def inserted(self, sites: Sequence[Site], *, themselves: bool = False) -> Iterator[list[New]]:
        """The copy with a layer at every site, in their order: with what stands in for it, or with the layers ``themselves``."""
        bound = [replace(site, point=site.point.on(self.model)) for site in sites]
        real = _shown(self.model, sites)
        standing: Counter[Site] = Counter()
        layers: list[nn.Module] = []
        for index, site in enumerate(bound):  # before the first goes in: a block is copied as it is
            layer = self._layer(site, site.find(self.model)[1], index in real, standing[site])
            layers.append(layer.layer if themselves and isinstance(layer, StandIn) else layer)
            standing[site] += 1
        new: list[New] = []
        try:
            for site, layer in reversed(
                list(zip(bound, layers, strict=True))
            ):  # from the end: what comes before keeps its name
                path, _ = site.find(self.model)
                cut = plan_cut(self.model, site.point, path, takes_call=move_of(site).takes_call)
                apply_cut(self.model, cut, layer)
                new.append(New(site, layer, cut))
            yield new[::-1]
        finally:
            for each in reversed(new):
                take_out(self.model, each.cut.path, each.cut.place)

    def _layer(self, site: Site, anchor: nn.Module, real: bool, number: int) -> nn.Module:
        """The layer for a site, the first time built, then used again; ``number``: how many of them are there already."""
        # Of equal twins in one container some will do: that the others are identities too follows, here it is about their places.
        real = real or site.path not in self._returns_tensor
        if (site, real, number) not in self._layers:
            layer = move_of(site).stand_in(self.model, site, anchor, real=real)
            for parameter in layer.parameters():
                parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
            self._layers[site, real, number] = layer
        return self._layers[site, real, number]


def move_of(site: Site) -> Inserts:
    """A trial puts modules in: it is for the moves that do so."""
    assert isinstance(site.move, Inserts)
    return site.move


def _shown(model: nn.Module, sites: Sequence[Site]) -> set[int]:
    """Of the equal copies of blocks in one container the first: it is really inserted, and represents the others."""
    first: dict[object, int] = {}
    for index, site in enumerate(sites):
        if move_of(site).takes_call:
            key = (site.path.rpartition(".")[0], site.move, manner(model.get_submodule(site.path)))
            first.setdefault(key, index)
    return set(first.values())


def watched(each: New) -> list[Any]:
    """Hooks that see whether a layer runs once and gives what it is given."""
    each.calls, each.same, each.output, each.given = 0, True, None, None
    given: list[Tensor] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        value = value_at(args, kwargs, each.site.point.slot if move_of(each.site).takes_call else 0)
        given.append(value.detach().clone())
        # The place in the graph, not the tensor, which somebody may work on in place.
        each.given = get_gradient_edge(value) if value.requires_grad and torch.is_grad_enabled() else None
        each.calls += 1

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        value, result = given.pop(), first_tensor(output)
        each.output = result
        each.same = each.same and result is not None and equal(result.detach(), move_of(each.site).gives(value))

    layer = each.layer
    return [
        *undrawn(layer),
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after, with_kwargs=True),
    ]


def locally_wrong(new: list[New], mode: str) -> dict[int, str]:
    wrong: dict[int, str] = {}
    for index, each in enumerate(new):
        if each.calls == 0:
            wrong[index] = (
                "a layer there did not run when it was tried: the forward pass uses the module under another name, without calling it, or "
                "only for some inputs"
            )
        elif each.calls > 1:
            wrong[index] = f"a layer there would run {each.calls} times in one forward pass"
        elif not each.same:
            wrong[index] = f"a layer there would change the values in {mode} mode"
    return wrong
