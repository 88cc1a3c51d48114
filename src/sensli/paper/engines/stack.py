"""Many networks of one shape as one: every parameter has a leading axis of runs, every product is a `bmm`.

Activations are [runs, features, samples]: with samples last, the products and the sums over samples run over
contiguous memory, which is four to seven times faster here than samples first. The backward pass is written out, since
for networks this small the bookkeeping of autograd costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sensli.paper.engines.networks import ResidualBlock

_relu_backward = torch.ops.aten.threshold_backward
_tanh_backward = torch.ops.aten.tanh_backward


@dataclass
class Affine:
    """`s(W x + b)` with s the identity, ReLU or tanh; W [R, out, in], b [R, out, 1]."""

    weight: Tensor
    bias: Tensor | None
    activation: str = ""

    def parameters(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def replaced(self, tensors: Sequence[Tensor]) -> Affine:
        return Affine(tensors[0], tensors[1] if len(tensors) > 1 else None, self.activation)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the backward pass needs of it."""
        y = torch.bmm(self.weight, x) if self.bias is None else torch.baddbmm(self.bias, self.weight, x)
        if self.activation == "relu":
            y.relu_()
        elif self.activation == "tanh":
            y.tanh_()
        return y, y

    def backward(self, x: Tensor, y: Tensor, g: Tensor, *, deeper: bool = True) -> tuple[list[Tensor], Tensor]:
        """Gradients in the order of `parameters`, and the cotangent of x (of no use where `deeper` is False)."""
        if self.activation == "relu":
            g = _relu_backward(g, y, 0)
        elif self.activation == "tanh":
            g = _tanh_backward(g, y)
        grads = [torch.bmm(g, x.transpose(1, 2))]
        if self.bias is not None:
            grads.append(g.sum(2, keepdim=True))
        return grads, torch.bmm(self.weight.transpose(1, 2), g) if deeper else g

    @staticmethod
    def weights_of(grads: list[Tensor]) -> list[Tensor]:
        return grads[:1]

    @staticmethod
    def merit_of(grads: list[Tensor]) -> Tensor:
        return grads[0]


@dataclass
class Residual:
    """`x + W2 tanh(W1 x + b)`."""

    inner: Tensor
    bias: Tensor
    outer: Tensor

    def parameters(self) -> list[Tensor]:
        return [self.inner, self.bias, self.outer]

    def replaced(self, tensors: Sequence[Tensor]) -> Residual:
        return Residual(*tensors)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.baddbmm(self.bias, self.inner, x).tanh_()
        return torch.baddbmm(x, self.outer, hidden), hidden

    def backward(self, x: Tensor, hidden: Tensor, g: Tensor, *, deeper: bool = True) -> tuple[list[Tensor], Tensor]:
        d_outer = torch.bmm(g, hidden.transpose(1, 2))
        inside = _tanh_backward(torch.bmm(self.outer.transpose(1, 2), g), hidden)
        grads = [torch.bmm(inside, x.transpose(1, 2)), inside.sum(2, keepdim=True), d_outer]
        return grads, torch.baddbmm(g, self.inner.transpose(1, 2), inside) if deeper else g

    @staticmethod
    def weights_of(grads: list[Tensor]) -> list[Tensor]:
        return [grads[0], grads[2]]

    @staticmethod
    def merit_of(grads: list[Tensor]) -> Tensor:
        return grads[2]


Layer = Affine | Residual


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass: all that training and measuring read off it."""

    loss: Tensor  # [R]
    grads: list[list[Tensor]]  # per layer, in the order of its parameters
    activations: list[Tensor]  # input of each layer; [i + 1] is the output of layer i
    cotangents: list[Tensor]  # of the output of each layer but the last


@dataclass(frozen=True)
class Looks:
    """What a measurement found, all places of all runs."""

    merits: Tensor  # [R, places]: squared Frobenius norm of the virtual layer's weight gradient
    ratios: Tensor  # [R, places]: merit over the mean squared gradient norm of the existing weights
    dead: Tensor  # [R, places, width]: units that are zero on all data


class Stack:
    """The networks of all runs: a first map, `inner` layers of one shape, a last map."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = list(layers)

    @classmethod
    def of(cls, models: Sequence[nn.Sequential]) -> Stack:
        """Stack plain networks of one architecture; their parameters are copied."""
        layers: list[Layer] = []
        for modules in zip(*models, strict=True):
            kind = modules[0]
            if isinstance(kind, nn.Linear):
                bias = None if kind.bias is None else _stacked([m.bias for m in modules]).unsqueeze(2)
                layers.append(Affine(_stacked([m.weight for m in modules]), bias))
            elif isinstance(kind, ResidualBlock):
                inner, outer = [m.inner for m in modules], [m.outer for m in modules]
                bias = _stacked([m.bias for m in inner]).unsqueeze(2)
                layers.append(Residual(_stacked([m.weight for m in inner]), bias, _stacked([m.weight for m in outer])))
            else:
                affine = layers[-1]
                assert isinstance(affine, Affine) and isinstance(kind, (nn.ReLU, nn.Tanh))
                affine.activation = "relu" if isinstance(kind, nn.ReLU) else "tanh"
        return cls(layers)

    def parameters(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in layer.parameters()]

    def logits(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer.forward(x)
        return x

    def run(self, x: Tensor, targets: Tensor) -> Pass:
        """Mean cross-entropy and all gradients; x [R, features, N], targets one-hot [R or 1, classes, N]."""
        activations, kept = [x], []
        for layer in self.layers:
            y, hidden = layer.forward(activations[-1])
            activations.append(y)
            kept.append(hidden)
        samples = x.shape[2]
        log_p = torch.log_softmax(activations[-1], 1)
        loss = (log_p * targets).sum((1, 2)).div_(-samples)
        g = log_p.exp_().sub_(targets).div_(samples)
        grads: list[list[Tensor]] = []
        cotangents: list[Tensor] = []
        for i in range(len(self.layers) - 1, -1, -1):
            own, g = self.layers[i].backward(activations[i], kept[i], g, deeper=i > 0)
            grads.append(own)
            if i > 0:
                cotangents.append(g)
        return Pass(loss, grads[::-1], activations, cotangents[::-1])

    def new_layer(self) -> Layer:
        """An identity layer for every run: relu(I x + 0) in a ReLU network, else x + 0 tanh(0.8 I x + 0)."""
        first = self.layers[0]
        assert isinstance(first, Affine)
        runs, width = first.weight.shape[:2]
        like = first.weight.new_zeros
        eye = torch.eye(width, dtype=first.weight.dtype, device="cpu").expand(runs, width, width)
        if self.is_relu():
            return Affine(eye.clone(), like(runs, width, 1), "relu")
        return Residual(0.8 * eye, like(runs, width, 1), like(runs, width, width))

    def is_relu(self) -> bool:
        first = self.layers[0]
        return isinstance(first, Affine) and first.activation == "relu"

    def measure(self, x: Tensor, targets: Tensor) -> Looks:
        """Merits of all places from one pass of the networks as they are: an identity changes no activation and no
        cotangent, so the gradient of a layer that is not there follows from those at its place."""
        done = self.run(x, targets)
        new = self.new_layer()
        merits, dead = [], []
        for at, g in zip(done.activations[1:-1], done.cotangents, strict=True):
            _, hidden = new.forward(at)
            grads, _ = new.backward(at, hidden, g, deeper=False)
            merits.append(new.merit_of(grads).square().sum((1, 2)))
            dead.append((at == 0).all(2))
        weights = [w for layer, own in zip(self.layers, done.grads, strict=True) for w in layer.weights_of(own)]
        existing = torch.stack([w.square().sum((1, 2)) for w in weights]).mean(0)
        merit = torch.stack(merits, 1)
        return Looks(merit, merit / existing.unsqueeze(1), torch.stack(dead, 1))

    def insert(self, places: Tensor) -> None:
        """One identity layer per run, after layer `places[r]`; the inner layers that follow it in each run move up."""
        first, *inner, last = self.layers
        new = self.new_layer()
        grown: list[Layer] = []
        for i in range(len(inner) + 1):
            here = (places == i).view(-1, 1, 1)
            before = (places > i).view(-1, 1, 1)
            stay = inner[i].parameters() if i < len(inner) else new.parameters()
            moved = inner[i - 1].parameters() if i > 0 else new.parameters()
            parts = zip(new.parameters(), stay, moved, strict=True)
            tensors = [torch.where(here, fresh, torch.where(before, a, b)) for fresh, a, b in parts]
            grown.append(new.replaced(tensors))
        self.layers = [first, *grown, last]

    def recycle(self, x: Tensor, sources: Sequence[torch.Generator]) -> Tensor:
        """Give all units that are zero on ``x`` new rows and no outgoing weights; returns how many those were in each run.

        Their new rows are drawn as `nn.Linear` draws its own. What reads them ignores them, so the function on ``x`` stays.
        """
        counts = torch.zeros(x.shape[0], dtype=torch.long, device="cpu")
        for layer, reader in zip(self.layers, self.layers[1:], strict=False):
            assert isinstance(layer, Affine) and isinstance(reader, Affine) and layer.bias is not None
            dead = (layer.forward(x)[0] == 0).all(2, keepdim=True)  # [R, units, 1]
            shape = (layer.weight.shape[1], layer.weight.shape[2] + 1)
            drawn = torch.stack(
                [torch.rand(shape, dtype=x.dtype, generator=source, device="cpu") for source in sources]
            )
            rows = (2 * drawn - 1) * layer.weight.shape[2] ** -0.5
            for _ in range(2):  # rows that are dead again are replaced by their opposite, which is not
                layer.weight = torch.where(dead, rows[:, :, :-1], layer.weight)
                layer.bias = torch.where(dead, rows[:, :, -1:], layer.bias)
                given, _ = layer.forward(x)
                rows = torch.where((given == 0).all(2, keepdim=True), -rows, rows)
            reader.weight = reader.weight.masked_fill(dead.transpose(1, 2), 0.0)
            counts += dead.sum((1, 2))
            x = given
        return counts

    def wake(self, places: Tensor, dead: Tensor, incoming: Tensor) -> None:
        """Give the dead units of the layers just inserted random incoming weights and no outgoing ones.

        places [R], dead [R, width], incoming [R, width, width]. A unit that was zero on all data contributed nothing,
        so neither does its successor with zero outgoing weights: the function on the data stays, the unit can learn.
        """
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, Affine):
                continue
            new = (places + 1 == i).view(-1, 1, 1) & dead.unsqueeze(2)
            after = (places + 2 == i).view(-1, 1, 1) & dead.unsqueeze(1)
            if bool(new.any()):
                layer.weight = torch.where(new, incoming, layer.weight)
            if bool(after.any()):
                layer.weight = layer.weight.masked_fill(after, 0.0)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.detach() for tensor in tensors])
