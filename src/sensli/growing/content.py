"""What a checkpoint holds: its parts as they are saved, and as they must look when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sensli.errors import CheckpointError, WrongType, brief
from sensli.growing import shards
from sensli.growing.by_name import frozen_in, saved_optimizer
from sensli.growing.grower import Grower
from sensli.growing.storage import check_plain
from sensli.modules import checks
from sensli.modules.engines.fsdp import reshard
from sensli.modules.marks import count_growths
from sensli.modules.running import tensors
from sensli.modules.wrappers import bare
from sensli.surgery.history.history import History
from sensli.surgery.state.optim import as_list


def content_of(
    model: nn.Module, optimizer: Any, scheduler: Any, grower: Grower | None, history: History | None, extra: Any
) -> dict[str, Any]:
    """All parts but the random states, which are each process's own."""
    network = bare(model)
    reshard(network)
    history = _history_of(network, grower, history)
    return {
        "history": history.to_dict(),
        "model": dict(network.state_dict()),
        "evaluating": [name for name, module in network.named_modules() if not module.training],
        "frozen": frozen_in(network),
        "optimizers": [saved_optimizer(each, network) for each in as_list(optimizer)],
        "schedulers": [each.state_dict() for each in as_list(scheduler)],
        "grower": None if grower is None else grower.state_dict(),
        "extra": check_plain(extra, "extra"),  # before anything else goes through it
    }


def _history_of(network: nn.Module, grower: Grower | None, history: History | None) -> History:
    if grower is not None and history is not None and grower.history != history:
        raise CheckpointError("the grower has its own history. Give grower= or history=, not both.")
    found = grower.history if grower is not None else history if history is not None else History()
    grown = count_growths(network)
    if grown != len(found):
        raise CheckpointError(
            f"this {type(network).__name__} has grown {grown} times, but the history tells of {len(found)}: it could not be rebuilt. "
            "Give grower=, or history= with every Growth that insert returned."
        )
    return found


def check_schedulers(given: Any) -> None:
    """Whatever has a state and a step may be saved, including schedulers that are not torch's."""
    for each in as_list(given):
        able = all(hasattr(each, name) for name in ("state_dict", "load_state_dict", "step"))
        if not able or isinstance(each, (type, Optimizer)):
            checks.refuse("scheduler", "a scheduler or a list of them", each, WrongType)


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, kind) for value in values)


def _is_optimizer(saved: Mapping[str, Any]) -> bool:
    names: Any = saved.get("names")
    if "state" not in saved or not _are(list, names) or not all(_are(str, group) for group in names):
        return False
    flat = [name for group in names for name in group]
    return len(set(flat)) == len(flat)


_PARTS: dict[str, Callable[[Any], bool]] = {  # of a checkpoint, and what each must look like
    "history": lambda part: isinstance(part, dict),
    "model": lambda part: isinstance(part, dict) and _are(str, list(part)),
    "evaluating": lambda part: _are(str, part),
    "frozen": lambda part: _are(str, part),
    "optimizers": lambda part: _are(dict, part) and all(_is_optimizer(saved) for saved in part),
    "schedulers": lambda part: _are(dict, part),
    "grower": lambda part: part is None or isinstance(part, dict),
    "extra": lambda part: True,
    "random": lambda part: _are(dict, part) and bool(part),
}


def checked(content: dict[str, Any], path: Any) -> dict[str, Any]:
    """The parts of a checkpoint, or an error that names the one that is missing or of another kind."""
    for name, fine in _PARTS.items():
        if name not in content or not fine(content[name]):
            what = f"was altered: it is {brief(content[name])}" if name in content else "is missing"
            raise CheckpointError(f"the part {name!r} of {path} {what}. Use an intact copy, or an earlier checkpoint.")
    if "shards" not in content and any(map(shards.is_missing, tensors(content))):
        raise CheckpointError(f"the part 'shards' of {path} is missing. Use an intact copy, or an earlier checkpoint.")
    return content
