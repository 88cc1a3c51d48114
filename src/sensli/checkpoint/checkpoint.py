"""`save_checkpoint` and `load_checkpoint`: a grown network comes back from the user's own factory, and training continues to the bit.

The file (of a sharded model: the folder) holds no code and no module: the factory builds the small network, the history is replayed on
it, then the tensors go in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from sensli.checkpoint import states, storage
from sensli.checkpoint.states import loading, pair_saved
from sensli.errors import CheckpointError, WrongType, brief_text
from sensli.growing.grower import Grower
from sensli.modules import checks, random_state
from sensli.modules.engines.distributed import Together, number_facts
from sensli.modules.engines.fsdp import reshard
from sensli.modules.grown import count_growths
from sensli.modules.running import map_tensors, tensors, whole_tensor
from sensli.modules.wrappers import bare, is_sharded
from sensli.surgery.growth import replay
from sensli.surgery.history import History, as_growths
from sensli.surgery.optimizers import as_list, as_optimizers


def content_of(
    model: nn.Module, optimizer: Any, scheduler: Any, grower: Grower | None, history: History | None, extra: Any
) -> dict[str, Any]:
    """All parts but the random states, which are each process's own."""
    network = bare(model)
    if is_sharded(network):
        reshard(network)
    history = _history_of(network, grower, history)
    return {
        "history": history.to_dict(),
        "model": dict(network.state_dict()),
        "evaluating": [name for name, module in network.named_modules() if not module.training],
        "frozen": states.frozen_in(network),
        "optimizers": [states.saved_optimizer(each, network) for each in as_list(optimizer)],
        "schedulers": [each.state_dict() for each in as_list(scheduler)],
        "grower": None if grower is None else grower.state_dict(),
        "extra": storage.check_plain(extra, "extra"),  # before anything else goes through it
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


def check_parts(content: Mapping[str, Any], path: Any) -> None:
    """Refuse a checkpoint with an error that names the part that is missing or of another kind."""
    for name, fine in _PARTS.items():
        if name not in content or not fine(content[name]):
            what = f"was altered: it is {brief_text(content[name])}" if name in content else "is missing"
            raise CheckpointError(f"the part {name!r} of {path} {what}. {storage.REMEDY}")
    if "shards" not in content and any(map(storage.is_missing, tensors(content))):
        raise CheckpointError(f"the part 'shards' of {path} is missing. {storage.REMEDY}")


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` restored; None where no factory was given or nothing was saved.

    Attributes:
        model: The grown network, wrapped if ``wrap`` was given.
        optimizer: What ``make_optimizer`` returned, with its state.
        scheduler: What ``make_scheduler`` returned, with its state.
        grower: What ``make_grower`` returned, with its state.
        history: The growths of the model.
        extra: What was saved as ``extra``.
    """

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    grower: Grower | None = None
    history: History = field(default_factory=History)
    extra: Any = None


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    grower: Grower | None = None,
    history: History | None = None,
    extra: Any = None,
) -> None:
    """Write all that is needed to resume training to one file, which is replaced only when the new one is complete.

    A model sharded by ``fully_shard`` becomes a folder instead, to which each process writes its own shards; none gathers the model.
    The random states of torch, Python and numpy are included; gradients are not, so call it between two steps. With several
    processes call it on all of them; rank 0 writes.

    Args:
        path: The file to write; for a sharded model the folder.
        model: The network, or its wrapper.
        optimizer: The optimizer or optimizers.
        scheduler: The scheduler or schedulers.
        grower: The `Grower` of the model, if there is one.
        history: The growths of a model that was grown by `insert` without a `Grower`.
        extra: Anything of your own: numbers, strings and tensors, nested in lists and dicts. Tensors come back on the CPU.

    Raises:
        CheckpointError: If the checkpoint cannot be written. An earlier file is left as it was.
    """
    with Together(model, "save a checkpoint") as together:
        bare(model)
        path = checks.path("path", path)
        if grower is not None:
            checks.instance("grower", grower, Grower, "a Grower")
        if history is not None and not isinstance(history, History):
            history = History(as_growths("history", history))
        check_schedulers(scheduler)
        content = content_of(model, optimizer, scheduler, grower, history, extra)
        together.agree_on({"the number of tensors": sum(1 for _ in tensors(content))}, last=False)
        if not together.sharded:
            content.update({part: map_tensors(content[part], whole_tensor) for part in ("model", "optimizers")})
        content["random"] = together.agree(random_state.capture())  # each rank's own, for dropout and the like
    with Together(model, "write a checkpoint") as together:
        if together.sharded:
            storage.write_shards(path, content, together)
        elif together.rank == 0:
            storage.write_checkpoint(path, content)
        together.agree()


def load_checkpoint(
    path: str | os.PathLike[str],
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[Any], Any] | None = None,
    *,
    make_scheduler: Callable[[Any], Any] | None = None,
    make_grower: Callable[[Any, Any, Any], Grower] | None = None,
    wrap: Callable[[nn.Module], Any] | None = None,
    random: bool = True,
) -> Checkpoint:
    """Rebuild what `save_checkpoint` saved, using the factories that a training script has anyway.

    With several processes and ``wrap``, call it on all of them: a failure on one is raised on all. A file that cannot be used
    is refused with the reason, and the random states stay as they were.

    Args:
        path: The file or folder that `save_checkpoint` wrote.
        make_model: ``make_model()`` builds the network as it was before its first growth.
        make_optimizer: ``make_optimizer(model)``, called with the grown model.
        make_scheduler: ``make_scheduler(optimizer)``.
        make_grower: ``make_grower(model, optimizer, scheduler)``.
        wrap: ``wrap(model)``, such as ``DistributedDataParallel`` or a function that calls ``fully_shard``; called before the
            optimizer is made. The weights are in the model by then, unless they come from a folder of shards, which go straight into
            the sharded model.
        random: Whether to restore the random states (default: True).

    Returns:
        The model and everything that a factory was given for.

    Raises:
        CheckpointError: If the file cannot be used, or does not fit what the factories make.
    """
    what = "load a checkpoint"
    before = random_state.capture()
    try:
        with Together.of_the_job(what) if wrap is not None else Together(None, what) as together:
            path = checks.path("path", path)
            checks.factory("make_model", make_model, "the model that growing began with")
            for name, factory, returns in (
                ("make_optimizer", make_optimizer, "an optimizer, given the model"),
                ("make_scheduler", make_scheduler, "a scheduler, given the optimizer"),
                ("make_grower", make_grower, "a Grower, given model, optimizer and scheduler"),
                ("wrap", wrap, "the wrapped model, given the model"),
            ):
                if factory is not None:
                    checks.factory(name, factory, returns)
            checks.flag("random", random)

            content = storage.read_checkpoint(path)
            check_parts(content, path)
            storage.check_files(path, content, together)
            history = History.from_dict(content["history"])
            model: Any = checks.model("what make_model() returns", make_model())
            network = bare(replay(model, history))
            states.load_weights(network, content, path)
            together.agree_on(number_facts("growth", (growth.name for growth in history)), last=False)
            if wrap is not None:
                model = wrap(model)
                network = bare(model)
            optimizer = make_optimizer(model) if make_optimizer is not None else None
            scheduler = make_scheduler(optimizer) if make_scheduler is not None else None
            names = [saved["names"] for saved in content["optimizers"]]
            states.follow_groups(history, optimizer, scheduler, names, network)
            with loading("what lies in shards"):
                content = states.with_shards(path, content, network, as_optimizers(optimizer))
            together.agree(last=False)  # before the states are dealt out to the shards
            # After the scheduler was made: the constructors of schedulers write into the optimizer's groups.
            for each, saved in pair_saved("optimizer", optimizer, content["optimizers"]):
                states.load_optimizer(each, saved, network, content["model"])
            for each, saved in pair_saved("scheduler", scheduler, content["schedulers"]):
                states.load_scheduler(each, saved)
            grower = make_grower(model, optimizer, scheduler) if make_grower is not None else None
            if grower is not None:
                checks.instance("what make_grower(...) returns", grower, Grower, "a Grower")
                if content["grower"] is None:
                    raise CheckpointError(f"{path} was saved without grower=, so make_grower has nothing to restore.")
                with loading("the grower"):
                    grower.load_state_dict(content["grower"])
            together.agree()
            if random:
                saved = content["random"]
                rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
                with loading("the random states"):
                    random_state.restore(saved[rank] if rank < len(saved) else saved[0])
            return Checkpoint(model, optimizer, scheduler, grower, history, content["extra"])
    except BaseException:
        random_state.restore(before)  # the factories have drawn from it
        raise
