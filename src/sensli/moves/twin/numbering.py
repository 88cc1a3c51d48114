"""Numbers that blocks carry inside, such as ``layer_idx``: by them a cache, a table or a schedule tells the blocks apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from torch import nn

from sensli.moves.lists import Index, unwrapped

# How people call such a number; needed where the values alone do not tell.
_NAMES = ("idx", "index", "layer_id", "layer_number", "layer_num", "block_id")


def find_indices(blocks: Sequence[nn.Module]) -> tuple[Index, ...]:
    """Attributes that are the block's position, plus the same offset, in all blocks that have them.

    An attribute that some blocks lack (a model of attention and recurrent blocks numbers both) or that is alone must have a telling name.
    """
    found: list[Index] = []
    for (path, name), values in _numbers(blocks).items():
        offsets = {value - position for position, value in values.items()}
        if len(offsets) == 1 and (_is_telling(name) or 1 < len(values) == len(blocks)):
            found.append(Index(path, name, offsets.pop()))
    return tuple(found)


def own_numbers(blocks: Sequence[nn.Module]) -> list[list[tuple[str, str]]]:
    """For each block the numbers that tell it from the others, so that no copy of it may have the same: path within the block, name."""
    # Without an offset, which a key into a list of all blocks' states would not have: dilations of 1, 2, 3 are not numbers of blocks.
    counted = {(index.module, index.name) for index in find_indices(blocks) if index.offset == 0}
    found: list[list[tuple[str, str]]] = [[] for _ in blocks]
    for key, values in _numbers(blocks).items():
        if key in counted or (_is_telling(key[1]) and len(set(values.values())) == len(values)):
            for position in values:
                found[position].append(key)
    return found


def equal_blocks(blocks: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """For each block the first and the last that are built like it: classes, shapes, numbers and words inside but for their own number."""
    indices = {(index.module, index.name) for index in find_indices(blocks)}
    looks = [_looks(unwrapped(block), indices) for block in blocks]
    first = {look: position for position, look in reversed(list(enumerate(looks)))}
    last = {look: position for position, look in enumerate(looks)}
    return [(first[look], last[look]) for look in looks]


def _looks(block: nn.Module, indices: set[tuple[str, str]]) -> tuple[object, ...]:
    found: list[object] = [(name, tuple(p.shape)) for name, p in block.named_parameters()]
    for path, module in block.named_modules():
        plain = ((k, v) for k, v in vars(module).items() if isinstance(v, (int, str)) and not k.startswith("sensli_"))
        found.append((path, type(module), *sorted(pair for pair in plain if (path, pair[0]) not in indices)))
    return tuple(found)


def is_number(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(blocks: Sequence[nn.Module]) -> dict[tuple[str, str], dict[int, int]]:
    """Path within the block and name of every whole number in any of the blocks, with its value by the block's position."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    for position, block in enumerate(blocks):
        for path, module in unwrapped(block).named_modules():
            if type(module).__module__.startswith("torch."):
                continue  # sizes, and the padding_idx of a table
            for name, value in vars(module).items():
                if is_number(value) and not name.startswith("sensli_"):
                    found.setdefault((path, name), {})[position] = value
    return found


def _is_telling(name: str) -> bool:
    return name.endswith(_NAMES)
