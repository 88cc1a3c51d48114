"""The optimizer of a saved training follows an expansion: moments go with their parameters to new names, new blocks have none yet.

Three kinds of saved optimizers are known: a file of torch with the ``state_dict`` of an optimizer, a checkpoint folder of the Trainer of
Hugging Face, and a folder of ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import importlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sensli.errors import ExpansionError
from sensli.expanding.checking import build_empty
from sensli.expanding.sibling import Described
from sensli.expanding.weights import load_tensor, read_weights

if TYPE_CHECKING:
    from sensli.expanding.expanding import ExpansionPlan

OPTIMIZER = "optimizer.pt"  # in a checkpoint folder of the Trainer
_BESIDE = ("scheduler.pt", "trainer_state.json", "training_args.bin", "rng_state*.pth", "scaler.pt")


@dataclass(frozen=True)
class Moves:
    """Where parameters go."""

    before: dict[str, tuple[int, ...]]  # the shapes of all parameters of the base by their names, in the model's order
    after: dict[str, tuple[int, ...]]  # those of the expanded model
    planned: ExpansionPlan  # what was expanded

    def origin(self, name: str) -> tuple[str, bool]:
        """The parameter of the base that one of the expanded model comes from, and whether it is new."""
        stack = self.planned.stack
        match = re.match(rf"{re.escape(stack.rule.path)}\.(\d+)\.(.+)", name) if stack else None
        if stack is None or match is None:
            return name, False
        source, new = stack.order[int(match[1])]
        return f"{stack.rule.path}.{source}.{match[2]}", new

    def stretch(self, name: str, value: Any) -> Any:
        """A moment of a parameter of the expanded model: where this got units, zeros for them."""
        old, _ = self.origin(name)
        if (
            not isinstance(value, Tensor)
            or tuple(value.shape) != self.before[old]
            or self.before[old] == self.after[name]
        ):
            return value
        units = self.planned.units
        known = units.longer if units is not None else {}
        each = next(
            each for file, each in known.items() if old == file or old.endswith(f".{file}") or file.endswith(f".{old}")
        )
        parts = value.chunk(each.parts, each.axis)
        shape = list(parts[0].shape)
        shape[each.axis] = each.more
        return torch.cat([part for old in parts for part in (old, old.new_zeros(shape))], each.axis)


def find_moves(described: Described, planned: ExpansionPlan, config: Mapping[str, Any]) -> Moves:
    """What the class calls its parameters before and after."""
    before, after = (
        {name: tuple(parameter.shape) for name, parameter in build_empty(described, each).named_parameters()}
        for each in (described.stored, config)
    )
    return Moves(before, after, planned)


def check_optimizer(path: Path) -> int:
    """How many bytes a saved optimizer takes. Raises if it is of no known kind."""
    if (path / ".metadata").is_file():
        return sum(each.stat().st_size for each in path.iterdir())
    file = path / OPTIMIZER if path.is_dir() else path
    if not file.is_file():
        raise ExpansionError(
            f"optimizer must be a file of torch, a checkpoint folder of the Trainer (with {OPTIMIZER}) or one of "
            f"torch.distributed.checkpoint, got {path}. Nothing was written."
        )
    return file.stat().st_size


def move_optimizer(
    path: Path, part: Path, described: Described, planned: ExpansionPlan, config: Mapping[str, Any]
) -> str:
    """Write the optimizer that fits the expanded model into its folder; returns the name of what was written."""
    moves = find_moves(described, planned, config)
    if (path / ".metadata").is_file():
        _move_distributed(path, part / path.name, part, moves)
        return path.name
    file = path / OPTIMIZER if path.is_dir() else path
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        groups, state = saved["param_groups"], saved["state"]
    except Exception as error:
        raise ExpansionError(
            f"{file} is not the state_dict of an optimizer: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
    empty = build_empty(described, described.stored)
    names = _names_in(groups, state, moves, empty, file)
    torch.save({**saved, **_move_groups(groups, state, names, moves)}, part / file.name)
    if path.is_dir():
        for pattern in _BESIDE:
            for beside in path.glob(pattern):
                shutil.copy2(beside, part / beside.name)
    return file.name


# ---- The state_dict of an optimizer, which numbers its parameters.


def _names_in(
    groups: list[dict[str, Any]], state: Mapping[Any, Any], moves: Moves, empty: nn.Module, file: Path
) -> dict[int, str]:
    """The name of every numbered parameter: as the file says it, or in the order in which optimizers are built."""
    for order in _orders(groups, moves, empty):
        if [len(part) for part in order] == [len(group["params"]) for group in groups]:
            pairs = (
                (number, name)
                for part, group in zip(order, groups, strict=True)
                for number, name in zip(group["params"], part, strict=True)
            )
            names = dict(pairs)
            if all(_fits(state.get(number), moves.before.get(name)) for number, name in names.items()):
                return names
    counts = ", ".join(str(len(group["params"])) for group in groups)
    raise ExpansionError(
        f"{file} has groups of {counts} parameters, which are not those of the model ({len(moves.before)}) in its own order, and not the "
        "two that the Trainer makes. Build the optimizer of model.named_parameters(), which stores the names. Nothing was written."
    )


def _orders(groups: list[dict[str, Any]], moves: Moves, empty: nn.Module) -> Iterator[list[list[str]]]:
    """How the parameters may have been divided into groups."""
    if all("param_names" in group for group in groups):
        yield [list(group["param_names"]) for group in groups]
    everything = list(moves.before)
    if len(groups) == 1:
        yield [everything]
    else:
        trainer: Any = importlib.import_module("transformers").Trainer
        decayed = set(trainer.get_decay_parameter_names(None, empty))
        yield [[name for name in everything if name in decayed], [name for name in everything if name not in decayed]]
        whole: list[list[str]] = []
        for group in groups:  # one after another
            start = sum(map(len, whole))
            whole.append(everything[start : start + len(group["params"])])
        yield whole


def _fits(state: Mapping[str, Any] | None, shape: tuple[int, ...] | None) -> bool:
    values = [value for value in (state or {}).values() if isinstance(value, Tensor) and value.dim() > 0]
    return shape is not None and all(tuple(value.shape) == shape for value in values)


def _move_groups(
    groups: list[dict[str, Any]], state: Mapping[Any, Any], names: Mapping[int, str], moves: Moves
) -> dict[str, Any]:
    """The same groups for the expanded model; a new parameter is in the group of the one that it is a copy of."""
    numbers = {name: number for number, name in names.items()}
    new_groups, new_state = [], {}
    count = 0
    for group in groups:
        own = {names[number] for number in group["params"]}
        chosen = [name for name in moves.after if moves.origin(name)[0] in own]
        places = list(range(count, count + len(chosen)))
        count += len(chosen)
        named = {"param_names": chosen} if "param_names" in group else {}
        new_groups.append({**group, **named, "params": places})
        for place, name in zip(places, chosen, strict=True):
            old, new = moves.origin(name)
            if not new and numbers[old] in state:
                new_state[place] = {key: moves.stretch(name, value) for key, value in state[numbers[old]].items()}
    return {"param_groups": new_groups, "state": new_state}


# ---- A folder of torch.distributed.checkpoint, which names them.


def _move_distributed(path: Path, target: Path, part: Path, moves: Moves) -> None:
    """Rename what it has; moments of new blocks are zero, which is where they begin, because loading asks for all of them."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")  # its names carry no types

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        values: dict[str, Any] = {
            key: torch.empty(each.size, dtype=each.properties.dtype, device="cpu") if hasattr(each, "size") else None
            for key, each in stored.items()
        }
        dcp.load(values, checkpoint_id=path, no_dist=True)
        found = dict(_moved_values(values, part, moves))
        dcp.save(found, checkpoint_id=target, no_dist=True)


def _moved_values(values: Mapping[str, Any], part: Path, moves: Moves) -> Iterator[tuple[str, Any]]:
    weights = read_weights(part)
    ending: Callable[[str], str] = lambda name: rf"(?P<before>|.*\.){re.escape(name)}(?P<after>|\..*)"  # noqa: E731
    targets: dict[str, list[str]] = {}
    for name in moves.after:
        targets.setdefault(moves.origin(name)[0], []).append(name)
    patterns = {name: re.compile(ending(name)) for name in moves.before}
    for key, value in values.items():
        if isinstance(value, list) and value and all(each in moves.before for each in value):  # the names in a group
            yield key, [name for name in moves.after if moves.origin(name)[0] in value]
            continue
        old, match = next(((name, m) for name, each in patterns.items() if (m := each.fullmatch(key))), ("", None))
        if match is None:
            yield key, value
            continue
        for name in targets[old]:
            _, new = moves.origin(name)
            own = f"{match['before']}{name}{match['after']}"
            if not isinstance(value, Tensor):
                yield own, value
            elif not match["after"]:  # the parameter itself
                file = next(
                    each for each in weights if each == name or name.endswith(f".{each}") or each.endswith(f".{name}")
                )
                yield own, load_tensor(weights[file]).to(value.dtype)
            else:
                moved = moves.stretch(name, value)
                yield own, torch.zeros_like(moved) if new else moved
