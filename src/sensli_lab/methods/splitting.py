"""Units that split: splitting steepest descent, and Firefly, in which new units compete with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from sensli.errors import ZeroMerits
from sensli.growing.strategy import OptionalLoss
from sensli.merits.catching import scalar_loss, split_batch
from sensli.merits.merits import Merit, Merits
from sensli.modules.running import count_samples, device_of, to_device, untouched
from sensli.modules.wrappers import bare
from sensli.moves.sites import Site
from sensli.moves.stretching import FRESH, Stretch
from sensli.moves.width.confirming import width_of
from sensli.moves.width.widening import Widening, carry_entries, grown_value
from sensli.moves.width.width import Entries, Width, existing_entries, laid_out
from sensli_lab.methods.pairs import Pair, Rival, as_double, features, pairs_of, with_more
from sensli_lab.methods.searching import batch_loss, by_one

# ---- What methods have in common that split units: a unit becomes two, which share what read the one, and all layers
# compete for them.


@dataclass(frozen=True, eq=False)
class Candidates:
    """What could come at one width, each with its gain: splits of the units that are there first, then new units."""

    pair: Pair
    gains: Tensor  # what each would lower the loss by, in the method's own measure
    moved: Tensor  # of each unit that is there how its halves part: row + moved and row - moved
    rows: Tensor  # of new units
    columns: Tensor  # of new units

    def site(self, chosen: Sequence[int]) -> Site:
        """The site with these of them."""
        units = self.pair.width.units
        split = [index for index in chosen if index < units]
        new = [index - units for index in chosen if index >= units]
        return split_site(self.pair, split, self.moved[split], self.rows[new], self.columns[new])


class Competing(Rival):
    """The best candidates of all layers together, as many as ``units`` says: a number, or a share of all units."""

    start_of_sites: ClassVar[str] = "net2net"
    by_ones: ClassVar[bool] = True
    keeps: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = True

    @by_one
    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
        batches, name = list(batches), type(self).__name__
        found = self.candidates(model, sites, batches, loss_fn)
        there = sum(each.pair.width.units for each in found)
        wanted = self.units if isinstance(self.units, int) else max(1, int(self.units * there))
        ranked = sorted(
            (-float(gain), number, index)
            for number, each in enumerate(found)
            for index, gain in enumerate(each.gains)
            if gain > 0
        )
        if not ranked:
            raise ZeroMerits(f"{name} finds that no more units would help.")
        merits = []
        for number, each in enumerate(found):
            own = [index for _, its, index in ranked[:wanted] if its == number]
            merits.append(Merit(each.site(own) if own else each.pair.site, float(each.gains[own].sum())))
        return Merits(merits, norm=name, batches=len(batches), samples=found[0].pair.samples)

    def candidates(
        self, model: nn.Module, sites: Sequence[Site], batches: Sequence[Any], loss_fn: OptionalLoss
    ) -> list[Candidates]:
        """What could come at each of the sites."""
        raise NotImplementedError


def split_site(pair: Pair, units: Sequence[int], moved: Tensor, rows: Tensor, columns: Tensor) -> Site:
    """The site where these units part (row + moved stays, row - moved comes), and new ones come with these rows and columns."""
    shift = torch.zeros(pair.width.units, moved.shape[1], dtype=moved.dtype, device="cpu")
    shift = shift.index_copy(0, torch.tensor(units, dtype=torch.long, device="cpu"), moved)
    like = existing_entries(pair.width, pair.column)
    none = torch.zeros(len(units), columns.shape[1], dtype=columns.dtype, device="cpu")
    values, index = pair.rows(torch.cat([-moved, rows])), pair.width.axes.index(pair.column)
    values[index] = laid_out(torch.cat([none, columns]).to(like), pair.column, like)
    sources = (*units, *(FRESH for _ in rows))
    entries = Entries(tuple(values), tuple(pair.rows(shift)))
    grown = with_more(width_of(pair.site), len(sources), sources=sources, _entries=entries)
    return replace(pair.site, move=grown)


# ---- Splitting steepest descent (Liu, Wu, Wang 2019): the units whose halves, moved apart, lower the loss most at second
# order.
#
# With h the input of a layer, z_i the pre-activation of its unit i, s the activation and d_i the cotangent of the
# unit's output, the splitting matrix is S_i = E[d_i s''(z_i) h h']. A unit with row W becomes two with rows W + eps v
# and W - eps v, whose columns are half of what they were; with v the unit eigenvector of the smallest eigenvalue of
# S_i the loss changes by eps^2 / 2 lambda_min, to second order. Of all layers those units are split whose eigenvalue
# is smallest, if it is below zero: the paper stops there, while the released code never looks at the sign. From the
# code: eps = 0.01, and for a ReLU, which has no second derivative, that of a softplus with beta = 3, which predicts
# the order and not the value. Second derivatives come from autograd, with all that is between the two layers, so a
# batch norm is part of it as in the code. The smallest eigenvalue is found by Lanczos steps where a layer has many
# inputs, so S_i is never built: neither paper nor code do that, and it is cheaper than either. The function is not
# kept: it changes by the order of eps^2.

EPS = 0.01
BETA = 3.0
STEPS = 20  # of Lanczos


class Splitting(Competing):
    """Splits by the smallest eigenvalues; the gain of a split is the decrease that it predicts."""

    def candidates(
        self, model: nn.Module, sites: Sequence[Site], batches: Sequence[Any], loss_fn: OptionalLoss
    ) -> list[Candidates]:
        found = []
        for pair, curvature in curvatures(model, sites, batches, loss_fn):
            values, vectors = smallest_eigenvalues(pair.h, curvature, pair.samples, self.generator)
            none = (part.new_zeros(0, part.shape[1], dtype=torch.float64) for part in (pair.h, pair.existing_columns))
            found.append(Candidates(pair, -(EPS**2) / 2 * values, EPS * vectors, *none))
        return found


def curvatures(
    model: nn.Module, sites: Sequence[Site], batches: Sequence[Any], loss_fn: OptionalLoss
) -> list[tuple[Pair, Tensor]]:
    """Of each width what passed through it, and d s''(z) of each unit: [samples and positions, units]."""
    network = bare(model)
    pairs = pairs_of(network, sites)
    made: list[list[Tensor]] = [[] for _ in pairs]
    found: list[list[Tensor]] = [[] for _ in pairs]
    with ExitStack() as hooks, untouched(network), torch.inference_mode(False), torch.enable_grad(), Smooth():
        for pair, own in zip(pairs, made, strict=True):
            hooks.callback(pair.maker.register_forward_hook(_makes(pair, own)).remove)
            hooks.callback(pair.reader.register_forward_pre_hook(_reads(pair)).remove)
        for index, batch in enumerate(batches):
            loss = batch_loss(network, batch, index, loss_fn)
            reads = [pair.reads[-1] for pair in pairs]
            cotangents = torch.autograd.grad(loss, reads, retain_graph=True, allow_unused=True, materialize_grads=True)
            for pair, own, parts, cotangent in zip(pairs, made, found, cotangents, strict=True):
                served = (pair.reads[-1] * cotangent.detach()).sum()
                (slope,) = torch.autograd.grad(served, own[-1], create_graph=True)
                bent = torch.zeros_like(slope)
                if slope.requires_grad:
                    (bent,) = torch.autograd.grad(slope.sum(), own[-1], retain_graph=True, materialize_grads=True)
                parts.append(features(pair.maker, as_double(bent) * len(pair.inputs[-1])))
            for pair, own in zip(pairs, made, strict=True):
                pair.reads[-1] = as_double(pair.reads[-1])
                own.clear()
    return [(pair, torch.cat(parts)) for pair, parts in zip(pairs, found, strict=True)]


def smallest_eigenvalues(
    h: Tensor, curvature: Tensor, samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The smallest eigenvalue of sum(c h h') / samples for each column c of the curvature, and its vector: [units], [units, weights]."""
    width, steps = h.shape[1], min(h.shape[1], STEPS)
    if width <= 2 * STEPS:
        matrices = torch.stack([h.T @ (each[:, None] * h) / samples for each in curvature.T])
        values, vectors = torch.linalg.eigh(matrices)
        return values[:, 0], vectors[:, :, 0]
    vector = torch.randn(curvature.shape[1], width, generator=generator, dtype=h.dtype, device=generator.device)
    vector = vector / vector.norm(dim=1, keepdim=True)
    basis, diagonal, beside = vector.new_zeros(len(vector), steps, width), list[Tensor](), list[Tensor]()
    for step in range(steps):
        basis[:, step] = vector
        after = ((h @ vector.T) * curvature).T @ h / samples
        diagonal.append((after * vector).sum(1))
        for _ in range(2):  # twice is enough to be orthogonal
            after = after - (basis.transpose(1, 2) @ (basis @ after[:, :, None])).squeeze(2)
        length = after.norm(dim=1)
        scale = torch.stack([*diagonal, *beside]).abs().amax(0)
        beside.append(torch.where(length > 1e-12 * scale, length, 0.0))
        vector = torch.where(beside[-1][:, None] > 0, after / length.clamp_min(1e-300)[:, None], 0.0)
    small = torch.diag_embed(torch.stack(diagonal, 1))
    small = small + torch.diag_embed(torch.stack(beside[:-1], 1), 1) + torch.diag_embed(torch.stack(beside[:-1], 1), -1)
    values, weights = torch.linalg.eigh(small)
    found = (basis.transpose(1, 2) @ weights[:, :, :1]).squeeze(2)
    return values[:, 0], found / found.norm(dim=1, keepdim=True).clamp_min(1e-300)


class Smooth(TorchFunctionMode):
    """Inside of it a ReLU has the second derivative of a softplus, and its own value and slope."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (F.relu, torch.relu, Tensor.relu, F.leaky_relu):
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        slope = (args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)) if func is F.leaky_relu else 0.0
        share = torch.sigmoid(BETA * x.detach())
        bend = (1 - slope) * BETA * share * (1 - share)
        return F.leaky_relu(x, slope) + bend / 2 * (x - x.detach()) ** 2


def _makes(pair: Pair, own: list[Tensor]) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        pair.inputs.append(as_double(args[0]))
        made = output.clone()
        own.append(made if made.requires_grad else made.requires_grad_())
        return own[-1]

    return hook


def _reads(pair: Pair) -> Callable[..., tuple[Any, ...]]:
    def hook(module: nn.Module, args: Any) -> tuple[Any, ...]:
        pair.reads.append(args[0].clone())
        return (pair.reads[-1], *args[1:])

    return hook


# ---- Firefly (Wu, Liu, Stone, Liu 2020): old units that split and new units that come compete, each at its best after a
# short training.
#
# In a copy every unit of every width is split, rows W + v and W - v and columns halved, and new units with rows p and
# columns o come beside them. One pass over the batches trains v, p and o alone, everything else frozen and in
# evaluation mode; a second one takes the gradient of a gate at each of them, d loss / d y at y = 0 where the
# perturbation is (1 + y) v or (1 + y) o. Of all layers the candidates with the most negative gradients are taken, if
# they are below zero.
#
# From the released code: v uniform in +-0.1, p normal with deviation 0.1, o uniform in +-0.01, RMSprop with rate
# 1e-3, momentum 0.1 and alpha 0.9, the penalty 1e-2 (sum of v^2 + 1e-2 sum of p^2), and gates at the full size of the
# perturbation: the paper integrates over sizes and bounds norms by eps, which the code does not do. From the paper:
# new units of every layer keep their columns, while the code drops those that the classifier would read; and a batch
# norm between is part of it as it is. The paper's new layers are in neither the code nor here. As many new units
# compete at a width as it has, at most 70, which is the number of the code. The function is not kept.

NEW = 70  # units that compete at a width, at most
RATE, MOMENTUM, ALPHA = 1e-3, 0.1, 0.9
PENALTY, OF_ROWS = 1e-2, 1e-2


class Firefly(Competing):
    """Splits and new units by the gradients of their gates."""

    def candidates(
        self, model: nn.Module, sites: Sequence[Site], batches: Sequence[Any], loss_fn: OptionalLoss
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
            site = _site_of_all(pair, free).by_path()
            edit = Widening(self.network, replace(site, move=replace(width_of(site), _entries=None)))
            edit.build()
            edit.apply()
            self._edits.append(edit)

    def values(self) -> dict[str, Tensor]:
        """All tensors of the copy, with a graph to what is free."""
        found, made = dict(self._base), dict[str, list[Stretch]]()
        for pair, free, edit in zip(self.pairs, self.free, self._edits, strict=True):
            given, width = width_of(_site_of_all(pair, free))._entries, width_of(edit.site)
            assert given is not None
            entries = Entries(_followed(given.values, width, made), _followed(given.shifts, width, made))
            for each in edit.resized:
                found[each.name] = grown_value(found[each.name], each, width, entries)
                made.setdefault(each.name, []).extend(
                    stretch for stretch in each.stretches if isinstance(stretch, Stretch)
                )
        return found

    def loss(self, batch: Any, index: int, loss_fn: OptionalLoss) -> Tensor:
        given, target = split_batch(batch, index, self.network if loss_fn is not None else None)
        device = device_of(self.network)
        given = to_device(given, device)
        args = () if isinstance(given, dict) else tuple(given) if isinstance(given, (tuple, list)) else (given,)
        kwargs = given if isinstance(given, dict) else {}
        output = functional_call(self.network, self.values(), args, kwargs)
        return scalar_loss(output, to_device(target, device), loss_fn, index)

    def train(self, batches: Sequence[Any], loss_fn: OptionalLoss) -> None:
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

    def gates(self, batches: Sequence[Any], loss_fn: OptionalLoss) -> list[Tensor]:
        """The gradient of each candidate's gate, over one pass: splits first, then new units."""
        total = [torch.zeros(len(moved) + len(rows), dtype=moved.dtype, device="cpu") for moved, rows, _ in self.free]
        samples = 0
        with untouched(self.network), torch.inference_mode(False), torch.enable_grad():
            for index, batch in enumerate(batches):
                size = count_samples(batch)
                asked = [part for moved, _, columns in self.free for part in (moved, columns)]
                found = torch.autograd.grad(self.loss(batch, index, loss_fn), asked)
                for own, (moved, _, columns), by_moved, by_columns in zip(
                    total, self.free, found[::2], found[1::2], strict=True
                ):
                    own += size * torch.cat([(by_moved * moved).sum(1), (by_columns * columns).sum(1)]).detach()
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


def _site_of_all(pair: Pair, free: tuple[Tensor, Tensor, Tensor]) -> Site:
    """The site where every unit is split and all new ones come."""
    return split_site(pair, range(pair.width.units), *free)


def _followed(
    parts: Sequence[Tensor | None], width: Width, made: Mapping[str, Sequence[Stretch]]
) -> tuple[Tensor | None, ...]:
    """Entries along the axes of a width after other widths have made its tensors longer, as in the growth itself."""
    found = []
    for axis, part in zip(width.axes, parts, strict=True):
        for stretch in made.get(f"{axis.module.path}.{axis.name}", ()):
            part = carry_entries(part, stretch) if part is not None and stretch.dim != axis.dim else part
        found.append(part)
    return tuple(found)
