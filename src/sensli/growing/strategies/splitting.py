"""Splitting steepest descent (Liu, Wu, Wang 2019): the units whose halves, moved apart, lower the loss most at second order.

With h the input of a layer, z_i the pre-activation of its unit i, s the activation and d_i the cotangent of the unit's output, the
splitting matrix is S_i = E[d_i s''(z_i) h h']. A unit with row W becomes two with rows W + eps v and W - eps v, whose columns are half of
what they were; with v the unit eigenvector of the smallest eigenvalue of S_i the loss changes by eps^2 / 2 lambda_min, to second order.
Of all layers those units are split whose eigenvalue is smallest, if it is below zero: the paper stops there, while the released code
never looks at the sign. From the code: eps = 0.01, and for a ReLU, which has no second derivative, that of a softplus with beta = 3,
which predicts the order and not the value. Second derivatives come from autograd, with all that is between the two layers, so a batch
norm is part of it as in the code. The smallest eigenvalue is found by Lanczos steps where a layer has many inputs, so S_i is never built:
neither paper nor code do that, and it is cheaper than either. The function is not kept: it changes by the order of eps^2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sensli.growing.strategies.pairs import Pair, features, pairs_of
from sensli.growing.strategies.splits import Candidates, Competing
from sensli.merits.backward import LossFunction, scalar_loss, split
from sensli.modules.running import device_of, run, to_device, untouched
from sensli.modules.wrappers import bare
from sensli.moves.sites import Site

EPS = 0.01
BETA = 3.0
STEPS = 20  # of Lanczos


class Splitting(Competing):
    """Splits by the smallest eigenvalues; the gain of a split is the decrease that it predicts."""

    def candidates(
        self, model: nn.Module, sites: Sequence[Site], batches: Sequence[Any], loss_fn: LossFunction | None
    ) -> list[Candidates]:
        found = []
        for pair, curvature in curvatures(model, sites, batches, loss_fn):
            values, vectors = smallest(pair.h, curvature, pair.samples, self.generator)
            none = (part.new_zeros(0, part.shape[1], dtype=torch.float64) for part in (pair.h, pair.existing_columns))
            found.append(Candidates(pair, -(EPS**2) / 2 * values, EPS * vectors, *none))
        return found


def curvatures(
    model: nn.Module, sites: Sequence[Site], batches: Sequence[Any], loss_fn: LossFunction | None
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
            given, target = split(batch, index, network if loss_fn is not None else None)
            device = device_of(network)
            loss = scalar_loss(run(network, to_device(given, device)), to_device(target, device), loss_fn, index)
            reads = [pair.reads[-1] for pair in pairs]
            cotangents = torch.autograd.grad(loss, reads, retain_graph=True, allow_unused=True, materialize_grads=True)
            for pair, own, parts, cotangent in zip(pairs, made, found, cotangents, strict=True):
                served = (pair.reads[-1] * cotangent.detach()).sum()
                (slope,) = torch.autograd.grad(served, own[-1], create_graph=True)
                bent = torch.zeros_like(slope)
                if slope.requires_grad:
                    (bent,) = torch.autograd.grad(slope.sum(), own[-1], retain_graph=True, materialize_grads=True)
                parts.append(features(pair.maker, bent.detach().cpu().double() * len(pair.inputs[-1])))
            for pair, own in zip(pairs, made, strict=True):
                pair.reads[-1] = pair.reads[-1].detach().cpu().double()
                own.clear()
    return [(pair, torch.cat(parts)) for pair, parts in zip(pairs, found, strict=True)]


def smallest(h: Tensor, curvature: Tensor, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
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
        pair.inputs.append(args[0].detach().cpu().double())
        made = output.clone()
        own.append(made if made.requires_grad else made.requires_grad_())
        return own[-1]

    return hook


def _reads(pair: Pair) -> Callable[..., tuple[Any, ...]]:
    def hook(module: nn.Module, args: Any) -> tuple[Any, ...]:
        pair.reads.append(args[0].clone())
        return (pair.reads[-1], *args[1:])

    return hook
