"""Averages that a model keeps and its owner updates by hand: they cannot follow a growth, and are recognised by what they do."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations
from typing import Any

import torch
from torch import nn

from sensli.errors import UnsupportedModel
from sensli.modules.engines.fsdp import is_sharded
from sensli.modules.wrappers import bare, own_modules


class Copies:
    """Parts of a model that are alike when this is made. One that changes later without a gradient is an average made by hand.

    Such are a teacher or a target network (``copy.deepcopy(self.student)``): what updates them pairs their parameters with the student's,
    and would pair the wrong ones after a growth. A copy that stays as it is (a reference model) is none.
    """

    def __init__(self, model: nn.Module) -> None:
        own, forms = bare(model), dict[Any, list[tuple[str, nn.Module]]]()
        for path, module in own_modules(own) if not is_sharded(own) else ():
            parameters = list(module.parameters())
            if path and len(parameters) > 1 and all(p.is_floating_point() and not p.is_meta for p in parameters):
                forms.setdefault((type(module), tuple(p.shape for p in parameters)), []).append((path, module))
        alike, known = dict[Any, list[tuple[str, nn.Module]]](), dict[int, tuple[float, float]]()
        for form, members in forms.items():
            for path, module in members if len(members) > 1 else ():
                sums = _sums(module, known)
                if any(deviation > 0 for _, deviation in sums):  # ones and zeros are alike by chance
                    alike.setdefault((form, tuple(sums)), []).append((path, module))
        self._pairs = [pair for members in alike.values() for pair in permutations(members, 2)]
        self._sums = {path: _sums(module, known) for _, (path, module) in self._pairs}

    def check(self, optimizers: Iterable[Any]) -> None:
        """Refuse an average that was made by hand."""
        if not self._pairs:
            return
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        known = dict[int, tuple[float, float]]()
        for (source, module), (path, other) in self._pairs:
            mine, its = list(module.parameters()), list(other.parameters())
            trained = any(p.requires_grad and id(p) in held for p in its)
            if trained and any(p.grad is not None for p in mine):
                trained = any(p.grad is not None for p in its)
            if not trained and self._sums[path] != _sums(other, known):
                raise UnsupportedModel(
                    f"'{path}' began as a copy of '{source}' and changes without a gradient, as an average does. It cannot follow a "
                    f"growth. Make it one that can: torch.optim.swa_utils.AveragedModel({source})."
                )


def _sums(module: nn.Module, known: dict[int, tuple[float, float]]) -> list[tuple[float, float]]:
    """The sum and the spread of each parameter, computed once."""
    for parameter in module.parameters():
        if id(parameter) not in known:
            values = parameter.detach()
            spread = float(values.max() - values.min()) if values.numel() else 0.0
            known[id(parameter)] = float(values.sum(dtype=torch.float64)), spread
    return [known[id(parameter)] for parameter in module.parameters()]
