"""Several networks of one shape, trained as one: their weights are stacked, so a step of all takes little longer than a step of one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sensli.modules.running import to_device

HORIZON = 100  # steps that the running average of the weights looks back, and a fifth of all as long as there are few


class Stacked:
    """The weights of plain networks (`nn.Linear` and `nn.ReLU`), stacked for training, and their running average.

    All of them lie in one flat tensor, which the optimizer and the average see: with small networks it is the number of operations
    that costs. The networks themselves change only in `write`.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        learning_rate: float,
        weight_decay: float,
        device: torch.device | None = None,
    ) -> None:
        """``device``: where to train (default: that of the networks, which stay where they are)."""
        self._networks = networks
        layers = list(zip(*map(_linear, networks), strict=True))
        self._relus = [isinstance(after, nn.ReLU) for after in _after_linear(networks[0])]
        stacked = [torch.stack([layer.weight.detach() for layer in same]) for same in layers]
        stacked += [torch.stack([layer.bias.detach() for layer in same]).unsqueeze(1) for same in layers]
        self._shapes = [tensor.shape for tensor in stacked]
        self.flat = torch.cat([tensor.flatten() for tensor in stacked]).to(device)
        self.average = self.flat.clone()
        self.flat.grad = torch.zeros_like(self.flat)
        self._weights = self._parts(self.flat)
        for weight, gradient in zip(self._weights, self._parts(self.flat.grad), strict=True):
            weight.requires_grad_().grad = gradient
        self.optimizer = torch.optim.AdamW([self.flat], lr=learning_rate, weight_decay=weight_decay, fused=True)
        self._steps = 0

    def __getstate__(self) -> dict[str, Any]:
        # Tensors that share their memory would come back as separate ones. On the CPU: every machine can read them there.
        state = {"flat": self.flat.detach().clone(), "average": self.average, "optimizer": self.optimizer.state_dict()}
        return {"networks": self._networks, "steps": self._steps, **to_device(state, torch.device("cpu"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, torch.device("cpu"))

    def on(self, device: torch.device) -> Stacked:
        """The same training on a device; itself if it is there."""
        if self.flat.device == device:
            return self
        made = object.__new__(Stacked)
        made._restore(self.__getstate__(), device)
        return made

    def _restore(self, state: dict[str, Any], device: torch.device) -> None:
        networks = [copy.deepcopy(network).to(state["flat"].dtype) for network in state["networks"]]
        Stacked.__init__(self, networks, 0.0, 0.0, device)  # the rate and the decay are the optimizer's
        self._networks = state["networks"]
        self.flat.copy_(state["flat"])
        self.average.copy_(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._steps = state["steps"]

    def forward(self, x: Tensor, *, average: bool = False) -> Tensor:
        """The outputs of all networks, each for its own inputs: (networks, samples, features) to (networks, samples, outputs)."""
        tensors, layers = self._parts(self.average) if average else self._weights, len(self._relus)
        for weight, bias, relu in zip(tensors[:layers], tensors[layers:], self._relus, strict=True):
            x = torch.baddbmm(bias, x, weight.mT)
            x = x.relu() if relu else x
        return x

    def step(self, loss: Tensor) -> None:
        """One step of the optimizer on a loss of `forward`, after which the average follows."""
        assert self.flat.grad is not None
        self.flat.grad.zero_()
        loss.backward()
        self.optimizer.step()
        self._steps += 1
        self.average.lerp_(self.flat, 1 / min(HORIZON, 1 + self._steps / 5))

    def write(self, flat: Tensor) -> None:
        """Give the networks these weights: `flat`, `average` or an earlier copy of one."""
        parts, layers = self._parts(flat), len(self._relus)
        with torch.no_grad():
            for place, network in enumerate(self._networks):
                for index, layer in enumerate(_linear(network)):
                    layer.weight.copy_(parts[index][place])
                    layer.bias.copy_(parts[layers + index][place, 0])

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = flat.detach().split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _linear(network: nn.Module) -> list[nn.Linear]:
    return [module for module in network.modules() if isinstance(module, nn.Linear)]


def _after_linear(network: nn.Module) -> Iterator[nn.Module | None]:
    """What comes after each linear layer in the data flow, which is the order in which the modules were given."""
    leaves = [module for module in network.modules() if not list(module.children())]
    for module, after in zip(leaves, [*leaves[1:], None], strict=True):
        if isinstance(module, nn.Linear):
            yield after
