"""What edits took out of a model, for the way back: kept beside the modules, not in the record, which is plain data."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from sensli.modules.engines.all_or_nothing import about_to_change
from sensli.modules.engines.fsdp import whole
from sensli.modules.running import capable
from sensli.moves.stretching import Resize

_DEEP = 8  # edits of one module: in a long training nobody takes more of them back without a step in between


@dataclass(frozen=True, eq=False)
class _Kept:
    resized: Sequence[Resize]
    sizes: list[float]


_KEPT: weakref.WeakKeyDictionary[nn.Module, tuple[_Kept, ...]] = weakref.WeakKeyDictionary()


def remember(module: nn.Module, resized: Sequence[Resize]) -> None:
    """After an edit of this module: what it took is in `Resize.lost`."""
    about_to_change(_KEPT)
    _KEPT[module] = (*_KEPT.get(module, ()), _Kept(resized, _sizes(resized)))[-_DEEP:]


def recall(module: nn.Module, resized: Sequence[Resize]) -> Sequence[Resize]:
    """The same changes with what they took, if no step was taken since; otherwise as they are given."""
    last = _last(module, resized)
    return resized if last is None or last.sizes != _sizes(resized) else last.resized


def forget(module: nn.Module, resized: Sequence[Resize]) -> None:
    """After the edit was taken back."""
    if _last(module, resized) is not None:
        about_to_change(_KEPT)
        _KEPT[module] = _KEPT[module][:-1]


def _last(module: nn.Module, resized: Sequence[Resize]) -> _Kept | None:
    """The last edit of a module, if it is the one that made these changes."""
    known = _KEPT.get(module)
    same = known and [_change(each) for each in known[-1].resized] == [_change(each) for each in resized]
    return known[-1] if known and same else None


def _change(each: Resize) -> tuple[object, ...]:
    return id(each.tensor), each.stretches, each.old_shape


def _sizes(resized: Sequence[Resize]) -> list[float]:
    """How large the parameters are, which a step changes."""
    return [float(capable(whole(each.tensor).detach()).abs().double().sum()) for each in resized if each.is_parameter]
