"""Hooks of the user that change what passes a module: they change what candidates for new units give, too.

Which hooks do is seen in the pass itself. Only those run on the copy as well: the others record, count or print, and what they see there
would not be what the model did.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.modules.copies import made_by
from sensli.modules.running import mapped, tensors

_KINDS = ("_forward_pre_hooks", "_forward_hooks")
_GLOBAL = "of all modules"
_KNOWN = ("torch", "sensli", "transformers")  # parts of how modules work, or of a measurement

Key = tuple[int, str, int]  # the id of a module, the kind of a hook, its number there


class UserHooks:
    """The hooks of one model, while it is measured."""

    def __init__(self) -> None:
        self.changing: set[Key] = set()  # those that have changed something in the pass
        self._lent: list[tuple[nn.Module, weakref.ref[Tensor]]] = []  # what such hooks were given of the copy

    @contextmanager
    def seen(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """See which hooks change something as long as the context lasts."""
        put_back: list[tuple[Any, int, Any, Any]] = []
        tables = [(getattr(module, kind), kind) for module in modules for kind in _KINDS]
        for hooks, kind in (*tables, (torch.nn.modules.module._global_forward_hooks, _GLOBAL)):
            for key, hook in list(hooks.items()) if hooks else ():
                if made_by(hook) not in _KNOWN:
                    hooks[key] = seeing = _Seeing(hook, kind, key, self.changing)
                    put_back.append((hooks, key, hook, seeing))
        try:
            yield
        finally:
            for hooks, key, hook, seeing in put_back:
                if hooks.get(key) is seeing:  # nobody has removed it
                    hooks[key] = hook

    def install(self, mine: nn.Module, its: nn.Module, *, after: bool) -> None:
        """Have a part of the copy run the hooks of its original that change something; ``after``: those on what it gives, too."""
        for kind in _KINDS if after else _KINDS[:1]:
            own, hooks = getattr(mine, kind), getattr(its, kind)
            if not any(isinstance(hook, _Seeing) for hook in hooks.values()):
                continue
            kept = dict(own)
            own.clear()
            for key, hook in hooks.items():  # in their order
                if isinstance(hook, _Seeing):
                    own[key] = self._lending(hook.hook, (id(its), kind, key), its)
                    if key in getattr(its, f"{kind}_with_kwargs"):
                        getattr(mine, f"{kind}_with_kwargs")[key] = True
                elif key in kept:
                    own[key] = kept[key]

    def changes_all(self, module: nn.Module) -> bool:
        """Whether a hook of all modules has changed what this one gave."""
        return any(number == id(module) and kind == _GLOBAL for number, kind, _ in self.changing)

    def check(self) -> None:
        """Refuse a hook that has kept what it was given of the copy: the loss may read it, and takes it for what the model did."""
        lent, self._lent = self._lent, []
        for module, value in lent:
            if value() is not None:
                raise MeasurementError(
                    f"a forward hook on a {type(module).__name__} changes values and keeps them, so it cannot run with candidates for new "
                    "units. Keep them in a hook that returns None, or measure only layers (grow='layers')."
                )

    def _lending(self, hook: Callable[..., Any], key: Key, its: nn.Module) -> Callable[..., Any]:
        def lent(value: Tensor) -> Tensor:
            alias = value.view_as(value)
            self._lent.append((its, weakref.ref(alias)))
            return alias

        def run(module: nn.Module, *given: Any) -> Any:
            return hook(module, *(mapped(each, lent) for each in given)) if key in self.changing else None

        return run


class _Seeing:
    """A hook of the user, called as it was; remembered if it changes what passes."""

    def __init__(self, hook: Callable[..., Any], kind: str, key: int, changing: set[Key]) -> None:
        self.hook, self._kind, self._key, self._changing = hook, kind, key, changing

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        before = _versions(given)
        result = self.hook(module, *given)
        known = {number for number, _ in before}
        if _versions(given) != before or (
            result is not None and any(id(each) not in known for each in tensors(result))
        ):
            self._changing.add((id(module), self._kind, self._key))
        return result


def _versions(given: Any) -> list[tuple[int, int]]:
    return [(id(each), 0 if torch.is_inference(each) else each._version) for each in tensors(given)]
