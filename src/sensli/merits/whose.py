"""Whose backward pass a hook is called in: the one that is measured, or another one that the user's code takes by itself.

A loss or a forward method may take a gradient (a gradient penalty, forces, an adversarial example). Its backward pass calls the same
hooks, and is not what a merit is made of. Where the loss depends on such a gradient, the gradient of something new is more than one
product of an activation and a cotangent: `marked` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

NOWHERE = -1  # the number of the backward pass in progress where there is none


def task() -> int:
    """The number of the backward pass in progress."""
    number: int = torch._C._current_graph_task_id()
    return number


class Measured:
    """Only the backward pass that the measurement itself takes counts."""

    supersedes = False

    def __init__(self) -> None:
        self._own: int | None = None

    @contextmanager
    def of(self, loss: Tensor) -> Iterator[None]:
        """The pass that begins at this loss, as long as the context lasts."""

        def begins(cotangent: Tensor) -> None:
            self._own = task()

        loss.register_hook(begins)
        try:
            yield
        finally:
            self._own = None

    def counts(self, near: Any, born: int = NOWHERE) -> bool:
        """Whether the pass in progress does; ``born``: the one in which the forward pass was made once more, as for a checkpoint.

        ``near``: an operation before the one that the hook belongs to, or None.
        """
        return self._own is not None and (born != NOWHERE or task() == self._own)


class Stepped:
    """The backward passes of the user's own step: what they add to ``.grad`` is what counts.

    ``torch.autograd.grad`` counts where it is asked for gradients of the model's parameters and nobody calls ``backward()``. If somebody
    does later, the pass in progress ``supersedes`` what was counted before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.supersedes = model, False
        self._adds: dict[
            int, bool | None
        ] = {}  # by the number of a pass: whether it adds to .grad; None if it asks for nothing of ours
        self._taken = self._asked = False

    def counts(self, near: Any, born: int = NOWHERE) -> bool:
        """As in `Measured`."""
        number = task()
        if number not in self._adds:
            self._adds[number] = self._kind(near)
        # What is computed once more inside of a backward pass, and goes back there, is part of that one.
        adds = self._adds[number] or (self._adds[number] if born == NOWHERE else self._adds.get(born))
        if adds and not self._taken:
            self._taken, self.supersedes = True, self._asked
        self._asked = self._asked or adds is False
        return adds or (adds is False and not self._taken)

    def _kind(self, near: Any) -> bool | None:
        node = near
        while node is not None and node.next_functions:
            node = next((before for before, _ in node.next_functions if before is not None), None)
        found = None if node is None else _asks(node)
        if found:
            return True
        for parameter in self._model.parameters():
            found = _asks(get_gradient_edge(parameter).node) if parameter.requires_grad else None
            if found is not None:
                return found
        return None


def _asks(leaf: Any) -> bool | None:
    """Of the pass in progress whether it adds to the gradient of a leaf (True), only returns it (False), or does neither."""
    try:
        return True if torch._C._will_engine_execute_node(leaf) else None
    except RuntimeError:  # torch's way to say that the leaf is one of the inputs of autograd.grad
        return False


class Mark:
    """Tells whether a loss depends on a gradient that somebody took before."""

    def __init__(self) -> None:
        # To be asked for with the gradients of the loss: otherwise autograd leaves out the way to where nothing else is.
        self.leaf = torch.zeros((), requires_grad=True, device="cpu")

    def on(self, cotangent: Tensor, met: Callable[[Any], None]) -> Tensor:
        """The same cotangent of a pass that builds a graph; ``met`` is called, with a node near by, when a later one comes back to it."""
        marked: Tensor = _Marked.apply(cotangent, self.leaf, met)  # type: ignore[no-untyped-call]
        return marked


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cotangent: Tensor, leaf: Tensor, met: Callable[[Any], None]) -> Tensor:
        ctx.leaf, ctx.met = leaf, met
        return cotangent.view_as(cotangent)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (cotangent,) = cotangents
        ctx.met(get_gradient_edge(ctx.leaf).node)
        if torch.is_grad_enabled():  # second derivatives, which a loss may depend on too
            cotangent = _Marked.apply(cotangent, ctx.leaf, ctx.met)  # type: ignore[no-untyped-call]
        return cotangent, None, None
