"""How much blocks that are there matter: what the loss would lose with their weights, to first order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from sensli.errors import MeasurementError, UnsupportedModel
from sensli.merits.catching import LossFunction, scalar_loss, split_batch
from sensli.merits.measuring import EMPTY
from sensli.modules.engines.distributed import Together
from sensli.modules.running import count_samples, device_of, gradients_kept, run, to_device, untouched
from sensli.modules.wrappers import bare, is_sharded


def measure_importance(
    model: nn.Module, blocks: Sequence[nn.Module], batches: Iterable[Any], loss_fn: LossFunction | None = None
) -> list[float]:
    """How much each block's own weights matter: the sum of ``|weight * gradient|``, in the mean over the batches.

    It is the first-order estimate of what the loss would lose with each weight (Molchanov et al., 2019), summed over a block as Shortened
    LLaMA (Kim et al., 2024) does to find blocks that can be left out. Gradients, buffers, the random state, and which parameters train, are
    as before afterwards.

    Args:
        model: The model, or its DistributedDataParallel wrapper; then all processes call it, each with its own batches.
        blocks: Parts of the model.
        batches: Dicts of keyword arguments, or pairs of input and target. Each counts by its number of samples.
        loss_fn: As for `measure`.

    Returns:
        The importance of each block.

    Raises:
        UnsupportedModel: If the model is sharded (``fully_shard``).
    """
    network = bare(model)
    with Together(model, "measure the importance of blocks") as together:
        if is_sharded(network):
            raise UnsupportedModel(
                "the importance of blocks needs whole gradients, but the model is sharded (fully_shard). Use DistributedDataParallel, or "
                "another select."
            )
        sums, samples = _sums(network, blocks, batches, loss_fn)
        told = together.agree((sums, samples))
    samples = sum(count for _, count in told)
    if samples == 0:
        raise MeasurementError(EMPTY)
    return [sum(values) / samples for values in zip(*(sums for sums, _ in told), strict=True)]


def _sums(
    network: nn.Module, blocks: Sequence[nn.Module], batches: Iterable[Any], loss_fn: LossFunction | None
) -> tuple[list[float], int]:
    """The importance of each block, summed over the samples, and how many samples there were."""
    weights = [[weight for weight in block.parameters() if weight.is_floating_point()] for block in blocks]
    trained = [(parameter, parameter.requires_grad) for parameter in network.parameters()]
    sums, samples, device = [0.0] * len(weights), 0, device_of(network)
    with gradients_kept(network.parameters()), untouched(network), torch.enable_grad():
        try:
            network.requires_grad_(False)
            for weight in (weight for own in weights for weight in own):
                weight.requires_grad_(True)
            for index, batch in enumerate(batches):
                given, target = split_batch(batch, index, network)
                output = run(network, to_device(given, device))
                loss = scalar_loss(output, to_device(target, device), loss_fn, index)
                network.zero_grad(set_to_none=True)
                loss.backward()
                size = count_samples(batch if isinstance(batch, dict) else batch[0])
                samples += size
                for number, own in enumerate(weights):
                    products = (weight.detach() * weight.grad for weight in own if weight.grad is not None)
                    sums[number] += size * sum(each.abs().sum(dtype=torch.float64).item() for each in products)
        finally:
            for parameter, asked in trained:
                parameter.requires_grad_(asked)
    return sums, samples
