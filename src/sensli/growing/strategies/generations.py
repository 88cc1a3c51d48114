"""Separate learning rates for the weights of each growth, although they are parts of one parameter.

An optimizer knows one rate for a parameter. What a step did to it is therefore scaled entry by entry after the step, which is the same
as a separate rate for every optimizer whose step is proportional to its rate: SGD with momentum, Adam, AdamW with its decay.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.errors import SensliError
from sensli.moves.stretching import Resize
from sensli.moves.width.widening import resizes
from sensli.moves.width.width import Width
from sensli.surgery.history.history import History


class GenerationRates:
    """Of the weights of generation k the rate is that of the first ones times |W_k| / |W_0|, of each layer and as the norms are now."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._seen: Any = None
        self._maps: list[tuple[nn.Parameter, Tensor]] = []
        self._before: dict[int, Tensor] = {}

    def attend(self, model: nn.Module, optimizers: Sequence[Optimizer], history: History) -> None:
        """Follow the steps of these optimizers from now on, and of no others."""
        for handle in self._handles:
            handle.remove()
        self._model, self._history, self._seen = weakref.ref(model), history, None
        self._handles = [optimizer.register_step_pre_hook(self._remember) for optimizer in optimizers]
        self._handles += [optimizer.register_step_post_hook(self._scale) for optimizer in optimizers]

    def maps(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The weights that have grown, with the generation of each entry."""
        model = self._model()
        # Shapes too: after `undo` another growth may have the same number and name, or the history still the growth.
        now = [(growth.number, growth.name, growth.resized) for growth in self._history]
        if now != self._seen or any(parameter.shape != its.shape for parameter, its in self._maps):
            self._maps = [] if model is None else generations(model, self._history)
            self._seen = now
        return self._maps

    def _remember(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, _ in self.maps():
            if id(parameter) in own:
                self._before[id(parameter)] = parameter.detach().clone()

    @torch.no_grad()
    def _scale(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, generation in self.maps():
            before = self._before.pop(id(parameter), None)
            if before is not None:
                parameter.copy_(before + rates(before, generation) * (parameter - before))


def generations(model: nn.Module, history: History) -> list[tuple[nn.Parameter, Tensor]]:
    """Of every weight matrix or kernel that has got units the growth that each entry came with; 0 for the first ones."""
    made: dict[int, tuple[nn.Parameter, list[tuple[int, Resize]]]] = {}
    for number, growth in enumerate(history, 1):
        if not isinstance(growth.site.move, Width):
            continue
        try:
            changed = resizes(model, growth.site.move.by_path().on(model), made=True)
        except (
            SensliError
        ):  # its layers are called otherwise by now, after a growth of another kind: they keep one rate
            continue
        for each in changed:
            if isinstance(each.tensor, nn.Parameter) and each.tensor.dim() > 1:
                made.setdefault(id(each.tensor), (each.tensor, []))[1].append((number, each))
    found = []
    for parameter, changes in made.values():
        shape = list(parameter.shape)
        for stretch in (stretch for _, each in changes for stretch in each.stretches):
            shape[stretch.dim] -= stretch.change
        generation = torch.zeros(shape, device=parameter.device)
        for number, each in changes:
            generation = each.stretched(generation, float(number), along=range(generation.dim()))
        if generation.shape == parameter.shape:
            found.append((parameter, generation.long()))
    return found


def rates(weight: Tensor, generation: Tensor) -> Tensor:
    """The factor of each entry: the norm of its generation over that of the first; 1 where that is zero."""
    place = generation.flatten()
    squares = weight.new_zeros(int(place.max()) + 1).index_add(0, place, weight.detach().flatten().square())
    first = squares[0]
    ratios = (squares / first).sqrt() if first > 0 else torch.ones_like(squares)
    return ratios[generation]
