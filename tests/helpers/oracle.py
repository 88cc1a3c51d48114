"""The slow and obvious way: really insert a layer at every site, run one pass, read the gradients of the new weights.

Nothing here uses the measuring code; it is what the measuring code must agree with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sensli import Site, insert, undo
from sensli.modules.running import run


def extended(model: nn.Module, sites: Sequence[Site]) -> tuple[nn.Module, list[list[str]]]:
    """A copy of the model with a layer at every site, and the names of the measured weights of each."""
    # A site knows its module in the original, so insert there and copy, then put the original back.
    grown = [insert(model, site) for site in sites]
    big = copy.deepcopy(model)
    names = [[f"{g.name}.{m}" for m in site.move.measured] for g, site in zip(grown, sites, strict=True)]
    # a later wrap around the same anchor may have renamed an earlier layer
    for index in range(len(grown)):
        for later in grown[index + 1 :]:
            names[index] = [later.renames.get(name, name) for name in names[index]]
    for growth in reversed(grown):
        undo(model, growth)
    return big, names


def gradients(
    model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: Callable[[Any, Any], Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Gradients of the mean loss over all samples: of the new weights, and of all parameters of the extended network."""
    big, names = extended(model, sites)
    for parameter in big.parameters():
        parameter.grad = None
    batches = list(batches)
    total = sum(len(y) for _, y in batches)
    for x, y in batches:
        (loss_fn(run(big, x), y) * (len(y) / total)).backward()
    parameters = dict(big.named_parameters())
    new = [torch.cat([parameters[name].grad for name in group]) for group in names]
    return new, {name: p.grad for name, p in parameters.items() if p.grad is not None}
