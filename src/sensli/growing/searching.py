"""The sites of a model: searched for again only after a change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor, nn

from sensli.modules.engines.distributed import Together
from sensli.modules.engines.fsdp import is_sharded
from sensli.modules.failing import noting
from sensli.modules.wrappers import bare
from sensli.moves.choosing import Where, chosen
from sensli.moves.finding import find_sites
from sensli.moves.sites import Sites

_PLAIN = (bool, int, float, complex, str, bytes, type(None), FunctionType, BuiltinFunctionType)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Search:
    """The sites of a model, remembered for as long as the model is the same."""

    def __init__(self, *, where: Where, find: Callable[..., Sites] | None = None, **request: Any) -> None:
        self._find, self._request = find, request  # as `find_sites` takes it
        self._where = where
        self._seen: list[Any] | None = None
        self._found = Sites(())
        self._failures: list[str] = []  # of the model's code, in the last search

    def sites(self, model: nn.Module, example: Any) -> Sites:
        """All sites of the model. All ranks search, or none."""
        network = bare(model)
        now = fingerprint(network)
        known = now == self._seen
        if is_sharded(network):  # a search puts the parameters together, for which all ranks are needed
            with Together(model, "find sites") as together:
                known = all(together.agree(known))
        if not known:
            self._seen = None
            with noting() as failures:
                self._found = (self._find or find_sites)(model, example, **self._request)
            # What the model's code failed at may pass at the next look, unless it fails there again.
            if not failures or (self._found and failures == self._failures):
                self._seen = now
            self._failures = failures
        # Asked at every look: what a function says may depend on more than the model.
        sites, found = chosen(self._found, self._where), self._found
        return Sites(sites, found.skipped, notes=found.notes, model_name=type(network).__name__)


def fingerprint(model: nn.Module) -> list[Any]:
    """What a search depends on, as far as it is cheap to read: the modules and their order, mode, hooks and plain settings; shapes."""
    numbers: dict[int, int] = {}  # tied tensors have one number

    def form(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        number = numbers.setdefault(id(tensor), len(numbers))
        return number, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad

    return [
        (
            path,
            weakref.ref(module),  # not the number of an object, which another one may get after it
            type(module),
            [(name, value) for name, value in vars(module).items() if isinstance(value, _PLAIN)],
            [(name, form(tensor)) for name, tensor in (*module._parameters.items(), *module._buffers.items())],
            [tuple(getattr(module, name)) for name in _HOOKS],
        )
        for path, module in model.named_modules(remove_duplicate=False)
    ]
