"""`expansion`: what expansion.json in an expanded folder says, the lines to train only what is new, and the way back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sensli.errors import ExpansionError

RECORD = "expansion.json"  # in the folder of an expanded model
_NEEDED = (
    "format", "base", "architecture", "stack", "prefix", "blocks_before", "places", "sources", "new_blocks", "new_parameters", "units",
    "longer", "fields", "hashes", "earlier",
)  # fmt: skip


@dataclass(frozen=True)
class ExpansionRecord:
    """What was added to a saved model.

    Attributes:
        folder: The folder of the expanded model.
        data: All that expansion.json says.
    """

    folder: Path
    data: dict[str, Any]

    @property
    def new_blocks(self) -> list[int]:
        """The numbers of the new blocks."""
        return list(self.data["new_blocks"])

    @property
    def new_parameters(self) -> list[str]:
        """The names of the parameters of the new blocks, as ``model.named_parameters()`` has them."""
        return list(self.data["new_parameters"])

    def describe(self) -> str:
        """What was added, in words."""
        parts = []
        if self.new_blocks:
            before, after = self.data["blocks_before"], self.data["blocks_before"] + len(self.new_blocks)
            numbers = ", ".join(map(str, self.new_blocks))
            parts.append(f"{after} instead of {before} blocks in {self.data['stack']} (new: {numbers})")
        if self.data["units"]:
            parts.append(f"{', '.join(map(str, self.data['units']))} more units in the feed-forward part of each block")
        return " and ".join(parts)

    def freeze(self, model: nn.Module) -> None:
        """Let only the new blocks train: ``requires_grad`` of every other parameter becomes False.

        Args:
            model: The expanded model, or one that holds it.

        Raises:
            ExpansionError: If the model lacks a parameter of a new block. Nothing was changed.
        """
        if not self.new_blocks:
            raise ExpansionError(f"{self.folder} got units and no blocks: no parameter is new as a whole.")
        named = dict(model.named_parameters())
        wanted = {
            name: [own for own in named if own == name or own.endswith(f".{name}")] for name in self.new_parameters
        }
        lacking = [name for name, found in wanted.items() if not found]
        if lacking:
            raise ExpansionError(
                f"the model lacks {lacking[0]}: it is not the one in {self.folder}. Nothing was changed."
            )
        new = {own for found in wanted.values() for own in found}
        for name, parameter in named.items():
            parameter.requires_grad_(name in new)

    def lines(self) -> Iterator[tuple[str, str]]:
        """What to paste to train only the new blocks, by the tool that it is for."""
        if not self.new_blocks:
            return
        blocks, stack = self.new_blocks, self.data["stack"]
        numbers, pattern = ", ".join(map(str, blocks)), stack.rpartition(".")[2]
        choice = "|".join(map(str, blocks))
        yield (
            "plain torch, Trainer",
            f"new = {tuple(f'{stack}.{number}.' for number in blocks)!r}\n"
            "for name, parameter in model.named_parameters():\n"
            "    parameter.requires_grad_(name.startswith(new))",
        )
        modules = self.data["linear_modules"]
        yield (
            "PEFT",
            f"LoraConfig(target_modules={modules!r}, layers_to_transform=[{numbers}], layers_pattern={pattern!r})",
        )
        yield "axolotl", f"unfrozen_parameters:\n  - ^{re.escape(stack)}\\.({choice})\\."
        total = self.data["blocks_before"] + len(blocks)
        stride = total // len(blocks)
        if total % len(blocks) == 0 and blocks == list(range(stride - 1, total, stride)):
            yield (
                "LLaMA-Factory",
                f"finetuning_type: freeze\nuse_llama_pro: true\nfreeze_trainable_layers: {len(blocks)}",
            )
        else:
            yield (
                "LLaMA-Factory",
                "# its options can only express blocks at the end of equal parts, which these are not",
            )


def expansion(folder: str | Path) -> ExpansionRecord:
    """What was added to the model in a folder that `expand` wrote.

    Args:
        folder: The folder of the expanded model.

    Raises:
        ExpansionError: If it has no intact expansion.json.
    """
    path = Path(folder) / RECORD
    if not path.is_file():
        raise ExpansionError(f"{folder} has no {RECORD}: it was not written by sensli expand.")
    try:
        data = json.loads(path.read_text())
        missing = [name for name in _NEEDED if name not in data]
    except (ValueError, TypeError) as error:
        raise ExpansionError(f"{path} cannot be read: {error}. Use an intact copy.") from error
    if missing:
        raise ExpansionError(f"{path} lacks {missing[0]!r}. Use an intact copy.")
    return ExpansionRecord(Path(folder), data)
