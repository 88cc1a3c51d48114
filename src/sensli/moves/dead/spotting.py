"""Which units of a width are dead: exactly zero wherever they are read, on all data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sensli.modules.arguments import first_tensor
from sensli.modules.dropout import NoDropout
from sensli.modules.running import device_of, run, to_device
from sensli.modules.wrappers import eager
from sensli.moves.roles import role_of
from sensli.moves.sites import Site
from sensli.moves.width.width import Axis, Width, found


class Spotting:
    """Watches the readers of widths, in the mode the model is in. Without dropout, since that would make every unit look dead at times."""

    def __init__(self, model: nn.Module, sites: Sequence[Site]) -> None:
        self._model = model
        self._widths = [site.move for site in sites if isinstance(site.move, Width)]
        # By width, and by its readers in their order: whether each unit was ever alive; None for a reader that was never called.
        self._alive: list[list[Tensor | None]] = [[None] * len(_readers(width)) for width in self._widths]

    def watch(self, given: Any, *, dropout: bool = False) -> None:
        """Run an input through the model. Buffers and random numbers are the caller's to keep.

        With ``dropout`` some units may come to life that are dead without: those are not dead either.
        """
        handles = []
        try:
            for number, width in enumerate(self._widths):
                for place, axis in enumerate(_readers(width)):
                    module = found(self._model, axis.module)[1]
                    hook = self._hook(number, place, axis, width.units)
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            with torch.no_grad(), eager(), nullcontext() if dropout else NoDropout():
                run(self._model, to_device(given, device_of(self._model)))
        finally:
            for handle in handles:
                handle.remove()

    def dead(self) -> list[tuple[int, ...]]:
        """The dead units of each width."""
        result: list[tuple[int, ...]] = []
        for seen in self._alive:
            masks = [mask for mask in seen if mask is not None]
            if not masks or len(masks) < len(seen):  # what is read unseen may be alive
                result.append(())
            else:
                result.append(tuple(torch.stack(masks).any(0).logical_not().nonzero().flatten().tolist()))
        return result

    def _hook(self, number: int, place: int, axis: Axis, units: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x, role = first_tensor(args) if args else first_tensor(tuple(kwargs.values())), role_of(module)
            if x is None or role is None:
                return
            entries = x.detach().movedim(role.channel, 0).flatten(1).ne(0).any(1)
            own = entries.narrow(0, axis.start, axis.outer * units * axis.inner)
            alive = own.unflatten(0, (axis.outer, units, axis.inner)).any(2).any(0).cpu()
            known = self._alive[number][place]
            self._alive[number][place] = alive if known is None else known | alive

        return hook


def _readers(width: Width) -> list[Axis]:
    return [axis for axis in width.axes if axis.fill == "column"]
