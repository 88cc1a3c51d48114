"""Small models of many shapes, all in float64, and ways to see that a call left one of them untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def alive(model: nn.Module) -> nn.Module:
    """Biases up, so that no seed leaves a layer of these few units dead; in float64."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.uniform_(module.bias, 0.3, 0.9)
    return model.double()


def fnn(activation: Callable[[], nn.Module] = nn.ReLU, width: int = 4) -> nn.Module:
    return alive(
        nn.Sequential(nn.Linear(3, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, 2))
    )


def deep(layers: int = 4) -> nn.Module:
    parts = [nn.Linear(3, 4), nn.ReLU()]
    for _ in range(layers - 1):
        parts += [nn.Linear(4, 4), nn.ReLU()]
    return alive(nn.Sequential(*parts, nn.Linear(4, 2)))


class Named(nn.Module):
    """Named layers with activation modules: the container does not run its children itself."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.fc1, self.act1 = nn.Linear(3, 4), activation()
        self.fc2, self.act2 = nn.Linear(4, 5), activation()
        self.head = nn.Linear(5, 2)
        alive(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act2(self.fc2(self.act1(self.fc1(x)))))


class Functional(nn.Module):
    """Activations by function: a layer can only go before the next layer."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)
        self.activation = activation
        alive(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.fc2(self.activation(self.fc1(x)))))


class Listed(nn.Module):
    """A ModuleList and a ModuleDict, run in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4)])
        self.ends = nn.ModuleDict({"act": nn.ReLU(), "head": nn.Linear(4, 2)})
        alive(self)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.ends["head"](self.ends["act"](x))


class Block(nn.Module):
    """The paper's residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def residual(blocks: int = 2, width: int = 3) -> nn.Module:
    """The paper's residual network: W x, blocks, W x."""
    stack = [Block(width) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(3, width, bias=False), *stack, nn.Linear(width, 2, bias=False)).double()


def cnn(dims: int = 2, activation: Callable[[], nn.Module] = nn.ReLU, groups: int = 1, norm: bool = False) -> nn.Module:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1]
    batch_norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    parts: list[nn.Module] = []
    for before, after, g in ((2, 4, 1), (4, 4, groups)):
        parts += [conv(before, after, 3, padding=1, groups=g), *([batch_norm(after)] if norm else []), activation()]
        parts.append(pool(2))
    return nn.Sequential(nn.Sequential(*parts), nn.Flatten(), nn.Linear(4 * 1, 2)).double()


def images(n: int = 5, dims: int = 2) -> Tensor:
    return torch.randn(n, 2, *([4, 5, 4][:dims]), dtype=torch.float64)


def points(n: int = 6) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64)


def labels(n: int = 6) -> Tensor:
    return torch.randint(0, 2, (n,))


def batches(sizes: tuple[int, ...] = (6, 6, 3), make: Callable[[int], Tensor] = points) -> list[tuple[Tensor, Tensor]]:
    return [(make(n), labels(n)) for n in sizes]


loss_fn = F.cross_entropy


def snapshot(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a call could touch, by value and by identity, in a form that compares with ==."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

    def bits(tensor: Tensor | None) -> Any:
        return None if tensor is None else (tuple(tensor.shape), tensor.detach().double().flatten().tolist())

    return {
        "modules": [(path, id(m), m.training, list(m._modules)) for path, m in model.named_modules()],
        "hooks": [(path, [tuple(getattr(m, kind)) for kind in hooks]) for path, m in model.named_modules()],
        "parameters": [
            (name, id(p), p.requires_grad, bits(p), bits(p.grad), len(p._backward_hooks or ()))
            for name, p in model.named_parameters()
        ],
        "buffers": [(name, id(b), bits(b)) for name, b in model.named_buffers()],
        "random": torch.get_rng_state().tolist(),
        "groups": [
            [{k: [id(p) for p in v] if k == "params" else repr(v) for k, v in g.items()} for g in o.param_groups]
            for o in optimizers
        ],
        "state": [
            {id(p): {k: bits(v) if isinstance(v, Tensor) else v for k, v in s.items()} for p, s in o.state.items()}
            for o in optimizers
        ],
    }


@contextmanager
def untouched(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Iterator[None]:
    """What runs inside must leave model, optimizers and random state exactly as they were, whether it raises or not."""
    before = snapshot(model, *optimizers)
    try:
        yield
    finally:
        after = snapshot(model, *optimizers)
        for part in before:
            assert after[part] == before[part], f"{part} changed"
