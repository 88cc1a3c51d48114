"""The natural gradient by the diagonal of the empirical Fisher matrix, which needs the gradient of every single sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from sensli.errors import MeasurementError
from sensli.merits.backward import LossFunction, scalar_loss, split
from sensli.merits.measuring import EMPTY
from sensli.modules.running import capable, device_of, mapped, run, tensors, to_device, untouched
from sensli.modules.samples import count_samples

AT_ONCE = 128  # samples whose gradients are in memory together
Gradients = dict[str, Tensor]  # by the name of the weight, the samples first


def natural_gradient(model: nn.Module, batches: Sequence[Any], loss_fn: LossFunction | None) -> float:
    """The sum over all weights of (mean gradient)^2 / (mean squared gradient) over single samples. The model is put into eval mode."""
    model.eval()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    first, second = ({name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(2))
    samples = 0
    with untouched(model), torch.inference_mode(False), torch.enable_grad():
        for index, batch in enumerate(batches):
            size = count_samples(batch)
            for gradients in _Samples(model, weights, loss_fn).gradients(batch, size, index):
                for name, gradient in gradients.items():
                    first[name] += gradient.sum(0)
                    second[name] += gradient.square().sum(0)
            samples += size
    if not samples:
        raise MeasurementError(EMPTY)
    values = [
        capable(torch.where(second[name] > 0, first[name].square() / (samples * second[name]), 0.0)).double().sum()
        for name in weights
    ]
    return float(torch.stack(values).sum()) if values else 0.0


class _Samples(nn.Module):
    """A model with its loss, called with one sample."""

    def __init__(self, model: nn.Module, weights: dict[str, nn.Parameter], loss_fn: LossFunction | None) -> None:
        super().__init__()
        self.model, self._loss_fn = model, loss_fn
        self._weights = {name: weight.detach() for name, weight in weights.items()}

    def forward(self, given: Any, target: Any, index: int) -> Tensor:
        return scalar_loss(run(self.model, given), target, self._loss_fn, index)

    def gradients(self, batch: Any, size: int, index: int) -> Iterator[Gradients]:
        """The gradients of all samples of a batch: many at once, or, where the model allows only that, one after the other."""
        nest = split(batch, index, self.model if self._loss_fn is not None else None)
        nest = to_device(nest, device_of(self.model))
        leaves = [x for x in tensors(nest) if _by_sample(x, size)]

        def loss(weights: Gradients, *samples: Tensor) -> Tensor:
            left = iter(samples)
            given, target = mapped(nest, lambda x: next(left).unsqueeze(0) if _by_sample(x, size) else x)
            named = {f"model.{name}": weight for name, weight in weights.items()}
            found: Tensor = functional_call(self, named, (given, target, index))
            return found

        each = grad(loss)
        together = vmap(each, (None, *(0 for _ in leaves)), randomness="different")
        for some in zip(*(leaf.split(AT_ONCE) for leaf in leaves), strict=True):
            try:
                yield together(self._weights, *some)
            except RuntimeError:  # of vmap: what depends on values, or changes something in place
                rows = [each(self._weights, *one) for one in zip(*some, strict=True)]
                yield {name: torch.stack([row[name] for row in rows]) for name in self._weights}


def _by_sample(x: Tensor, size: int) -> bool:
    """Whether a tensor has one entry for each sample."""
    return x.dim() > 0 and len(x) == size
