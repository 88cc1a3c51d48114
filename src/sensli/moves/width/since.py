"""How layers have become wider since something was measured for them: measured entries follow with zeros, which change nothing.

At one look two neighbouring widths may grow. The second one's rows were measured for fewer inputs, and the new ones are nothing to them.
Where the new ones are copies, entries follow as the layer's own did: copied, or shared.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from sensli.modules.engines.all_or_nothing import about_to_change
from sensli.moves.copying import Copied
from sensli.moves.stretching import Stretch
from sensli.moves.width.width import Axis, Width

_DEEP = 64  # growths of one layer: nobody measures longer in advance

_MADE: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[str, int, Stretch], ...]] = weakref.WeakKeyDictionary()


def note(width: Width) -> None:
    """Before the axes of a width, bound to its modules, get longer."""
    about_to_change(_MADE)
    for axis in width.axes:
        module = axis.module.find_module()
        length = getattr(module, axis.name).shape[axis.dim]
        _MADE[module] = (*_MADE.get(module, ()), (axis.name, length, width.stretch(axis)))[-_DEEP:]


def forget(width: Width) -> None:
    """After they have become as before."""
    about_to_change(_MADE)
    for axis in reversed(width.axes):
        module = axis.module.find_module()
        made = _MADE.get(module)
        if made and made[-1][0] == axis.name and made[-1][2] == width.stretch(axis):
            _MADE[module] = made[:-1]


def carried(entries: Tensor, stretch: Stretch) -> Tensor:
    """Entries along one axis after another axis of their tensor has become longer."""
    return stretch.copied(entries) if isinstance(stretch, Copied) else stretch.applied(entries)


def followed(entries: Tensor, axis: Axis, shape: Sequence[int]) -> Tensor | None:
    """Entries that were measured along an axis with the shape that its layer has now; None if they do not fit, whatever was made since."""
    if list(entries.shape) == list(shape):
        return entries
    made = [
        (length, stretch)
        for name, length, stretch in _MADE.get(axis.module.find_module(), ())
        if name == axis.name and stretch.dim != axis.dim
    ]
    for first in reversed(range(len(made))):  # the fewest growths that explain the difference
        value = entries
        for length, stretch in made[first:]:
            if value.shape[stretch.dim] != length:
                break
            value = carried(value, stretch)
        if list(value.shape) == list(shape):
            return value
    return None
