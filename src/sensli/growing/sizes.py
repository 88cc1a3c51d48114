"""How large a model is, for triggers that keep a budget and for the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from sensli.modules.engines.fsdp import reshard
from sensli.modules.flops import count_flops
from sensli.modules.wrappers import own_modules, own_parameters


class Sizes(Mapping[str, int]):
    """Sizes by name, counted when first asked for: most triggers never do, and they are asked every epoch."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._model = model
        self._known: dict[str, int] = {}
        self._rules: dict[str, Callable[[], int]] = {
            "parameters": lambda: sum(p.numel() for p in own_parameters(model)),
            "flops": lambda: int(count_flops(model, example)),
            "depth": lambda: sum(any(p.ndim >= 2 for p in m.parameters(recurse=False)) for _, m in own_modules(model)),
        }

    def __getitem__(self, name: str) -> int:
        if name not in self._known:
            self._known[name] = self._rules[name]()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def forget(self) -> None:
        """The model has grown: count again."""
        self._known.clear()

    def flops_for_log(self) -> int | None:
        """None where they cannot be counted, because no decision depends on them."""
        try:
            return self["flops"]
        except Exception:
            return None
        finally:
            reshard(self._model)  # a forward pass without a backward one leaves the parameters whole
