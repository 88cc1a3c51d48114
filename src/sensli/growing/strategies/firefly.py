"""Firefly (Wu, Liu, Stone, Liu 2020): old units that split and new units that come compete, each at its best after a short training.

In a copy every unit of every width is split, rows W + v and W - v and columns halved, and new units with rows p and columns o come beside
them. One pass over the batches trains v, p and o alone, everything else frozen and in evaluation mode; a second one takes the gradient of
a gate at each of them, d loss / d y at y = 0 where the perturbation is (1 + y) v or (1 + y) o. Of all layers the candidates with the most
negative gradients are taken, if they are below zero.

From the released code: v uniform in +-0.1, p normal with deviation 0.1, o uniform in +-0.01, RMSprop with rate 1e-3, momentum 0.1 and
alpha 0.9, the penalty 1e-2 (sum of v^2 + 1e-2 sum of p^2), and gates at the full size of the perturbation: the paper integrates over
sizes and bounds norms by eps, which the code does not do. From the paper: new units of every layer keep their columns, while the code
drops those that the classifier would read; and a batch norm between is part of it as it is. The paper's new layers are in neither the
code nor here. As many new units compete at a width as it has, at most 70, which is the number of the code. The function is not kept.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sensli.growing.strategies.pairs import Pair, pairs_of
from sensli.growing.strategies.splits import Candidates, Competing, split_site
from sensli.merits.backward import LossFunction, scalar_loss, split
from sensli.modules.running import device_of, to_device, untouched
from sensli.modules.samples import count_samples
from sensli.modules.wrappers import bare
from sensli.moves.sites import Site
from sensli.moves.stretching import Stretch
from sensli.moves.width.entries import Entries
from sensli.moves.width.since import carried
from sensli.moves.width.widening import Widening, grown_value
from sensli.moves.width.width import Width

NEW = 70  # units that compete at a width, at most
RATE, MOMENTUM, ALPHA = 1e-3, 0.1, 0.9
PENALTY, OF_ROWS = 1e-2, 1e-2


class Firefly(Competing):
    """Splits and new units by the gradients of their gates."""

    def candidates(
        self, model: nn.Module, sites: Sequence[Site], batches: Sequence[Any], loss_fn: LossFunction | None
    ) -> list[Candidates]:
        extended = Extended(bare(model), pairs_of(bare(model), sites), self.generator)
        extended.train(batches, loss_fn)
        gates = extended.gates(batches, loss_fn)
        pairs = zip(extended.pairs, gates, extended.free, strict=True)
        return [Candidates(pair, -gate, *(part.detach() for part in free)) for pair, gate, free in pairs]


class Extended:
    """A copy of a network with all candidates in it: v, p and o of every width as free tensors, everything else as it is."""

    def __init__(self, model: nn.Module, pairs: Sequence[Pair], generator: torch.Generator) -> None:
        self.pairs = list(pairs)
        self.free = [_drawn(pair, generator) for pair in pairs]
        self.network = copy.deepcopy(model).requires_grad_(False)
        self.network.eval()
        self._base = {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}
        self._base = {name: value.detach().clone() for name, value in self._base.items()}
        self._edits: list[Widening] = []
        for pair, free in zip(pairs, self.free, strict=True):
            site = _all_of(pair, free).by_path()
            assert isinstance(site.move, Width)
            edit = Widening(self.network, replace(site, move=replace(site.move, _entries=None)))
            edit.build()
            edit.apply()
            self._edits.append(edit)

    def values(self) -> dict[str, Tensor]:
        """All tensors of the copy, with a graph to what is free."""
        found, made = dict(self._base), dict[str, list[Stretch]]()
        for pair, free, edit in zip(self.pairs, self.free, self._edits, strict=True):
            move, width = _all_of(pair, free).move, edit.site.move
            assert isinstance(move, Width) and isinstance(width, Width) and move._entries is not None
            given = move._entries
            entries = Entries(_followed(given.values, width, made), _followed(given.shifts, width, made))
            for each in edit.resized:
                found[each.name] = grown_value(found[each.name], each, width, entries)
                made.setdefault(each.name, []).extend(
                    stretch for stretch in each.stretches if isinstance(stretch, Stretch)
                )
        return found

    def loss(self, batch: Any, index: int, loss_fn: LossFunction | None) -> Tensor:
        given, target = split(batch, index, self.network if loss_fn is not None else None)
        device = device_of(self.network)
        given = to_device(given, device)
        args = () if isinstance(given, dict) else tuple(given) if isinstance(given, (tuple, list)) else (given,)
        kwargs = given if isinstance(given, dict) else {}
        output = functional_call(self.network, self.values(), args, kwargs)
        return scalar_loss(output, to_device(target, device), loss_fn, index)

    def train(self, batches: Sequence[Any], loss_fn: LossFunction | None) -> None:
        """One pass."""
        parts = [part for free in self.free for part in free]
        optimizer = torch.optim.RMSprop(parts, lr=RATE, momentum=MOMENTUM, alpha=ALPHA)
        with untouched(self.network), torch.inference_mode(False), torch.enable_grad():
            for index, batch in enumerate(batches):
                sizes = [moved.square().sum() + OF_ROWS * rows.square().sum() for moved, rows, _ in self.free]
                optimizer.zero_grad()
                loss = self.loss(batch, index, loss_fn)
                (loss + PENALTY * torch.stack(sizes).sum().to(loss)).backward()
                optimizer.step()

    def gates(self, batches: Sequence[Any], loss_fn: LossFunction | None) -> list[Tensor]:
        """The gradient of each candidate's gate, over one pass: splits first, then new units."""
        total = [torch.zeros(len(moved) + len(rows), dtype=moved.dtype, device="cpu") for moved, rows, _ in self.free]
        samples = 0
        with untouched(self.network), torch.inference_mode(False), torch.enable_grad():
            for index, batch in enumerate(batches):
                size = count_samples(batch)
                asked = [part for moved, _, columns in self.free for part in (moved, columns)]
                found = torch.autograd.grad(self.loss(batch, index, loss_fn), asked)
                for own, (moved, _, columns), place in zip(total, self.free, range(0, len(found), 2), strict=True):
                    own += (
                        size * torch.cat([(found[place] * moved).sum(1), (found[place + 1] * columns).sum(1)]).detach()
                    )
                samples += size
        return [own / samples for own in total]


def _drawn(pair: Pair, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """v of each unit, p and o of new ones."""
    units, rows, columns = pair.width.units, pair.existing_rows.shape[1], pair.existing_columns.shape[1]
    new = min(NEW, units)

    def uniform(*shape: int) -> Tensor:
        return 2 * torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device) - 1

    normal = torch.randn(new, rows, generator=generator, dtype=torch.float64, device=generator.device)
    return tuple(
        part.requires_grad_() for part in (0.1 * uniform(units, rows), 0.1 * normal, 0.01 * uniform(new, columns))
    )  # type: ignore[return-value]


def _all_of(pair: Pair, free: tuple[Tensor, Tensor, Tensor]) -> Site:
    """The site where every unit is split and all new ones come."""
    return split_site(pair, range(pair.width.units), *free)


def _followed(
    parts: Sequence[Tensor | None], width: Width, made: Mapping[str, Sequence[Stretch]]
) -> tuple[Tensor | None, ...]:
    """Entries along the axes of a width after other widths have made its tensors longer, as in the growth itself."""
    found = []
    for axis, part in zip(width.axes, parts, strict=True):
        for stretch in made.get(f"{axis.module.path}.{axis.name}", ()):
            part = carried(part, stretch) if part is not None and stretch.dim != axis.dim else part
        found.append(part)
    return tuple(found)
