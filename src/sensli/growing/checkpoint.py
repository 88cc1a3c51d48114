"""`save_checkpoint` and `load_checkpoint`: a grown network comes back from the user's own factory, and training goes on to the bit.

The file (of a sharded model: the folder) holds no code and no module: the factory builds the small network, the history is replayed on
it, then the tensors go in.
Parameters of the optimizer are known by name, because an optimizer built anew holds them in another order than one that followed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from sensli.errors import CheckpointError, WrongType, brief
from sensli.growing import shards, storage
from sensli.growing.grower import Grower
from sensli.modules import checks, random_state
from sensli.modules.engines.distributed import Together, numbered
from sensli.modules.engines.fsdp import distributed_like, empty_like, is_sharded, reshard, whole
from sensli.modules.marks import count_growths
from sensli.modules.running import mapped, tensors
from sensli.modules.wrappers import bare
from sensli.surgery.history.history import Growth, History, as_growths
from sensli.surgery.replaying import replay
from sensli.surgery.state.optim import as_optimizers
from sensli.surgery.state.saved_state import check_optimizer_state, check_scheduler_state


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
        extra: Anything of your own: numbers, strings and tensors, nested in lists and dicts.

    Raises:
        CheckpointError: If the checkpoint cannot be written. An earlier file is left as it was.
    """
    together = Together(model, "save a checkpoint")
    with together:
        bare(model)
        path = checks.path("path", path)
        if grower is not None:
            checks.instance("grower", grower, Grower, "a Grower")
        if history is not None and not isinstance(history, History):
            history = History(as_growths("history", history))
        _check_schedulers(scheduler)
        content = _content(model, optimizer, scheduler, grower, history, extra)
        together.agree_on({"the number of tensors": sum(1 for _ in tensors(content))}, last=False)
        if not is_sharded(bare(model)):
            content.update({part: mapped(content[part], whole) for part in ("model", "optimizers")})
        content["random"] = together.agree(random_state.capture())  # each rank's own, for dropout and the like
    with Together(model, "write a checkpoint") as together:
        if is_sharded(bare(model)):
            shards.write(path, content, together)
        elif together.rank == 0:
            storage.write(path, content)
        together.agree()


def _content(
    model: nn.Module, optimizer: Any, scheduler: Any, grower: Grower | None, history: History | None, extra: Any
) -> dict[str, Any]:
    network = bare(model)
    reshard(network)
    history = _history_of(network, grower, history)
    return {
        "history": history.to_dict(),
        "model": dict(network.state_dict()),
        "evaluating": [name for name, module in network.named_modules() if not module.training],
        "frozen": [name for name, parameter in network.named_parameters() if not parameter.requires_grad],
        "optimizers": [
            {"names": names_in(each, network), "state": each.state_dict()} for each in as_optimizers(optimizer)
        ],
        "schedulers": [each.state_dict() for each in _several(scheduler)],
        "grower": None if grower is None else grower.state_dict(),
        "extra": extra,
    }


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
            for name, made, returns in (
                ("make_optimizer", make_optimizer, "an optimizer, given the model"),
                ("make_scheduler", make_scheduler, "a scheduler, given the optimizer"),
                ("make_grower", make_grower, "a Grower, given model, optimizer and scheduler"),
                ("wrap", wrap, "the wrapped model, given the model"),
            ):
                if made is not None:
                    checks.factory(name, made, returns)
            checks.flag("random", random)
            return _load(path, together, make_model, make_optimizer, make_scheduler, make_grower, wrap, random)
    except BaseException:
        random_state.restore(before)  # the factories have drawn from it
        raise


def _load(
    path: str | os.PathLike[str],
    together: Together,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[Any], Any] | None,
    make_scheduler: Callable[[Any], Any] | None,
    make_grower: Callable[[Any, Any, Any], Grower] | None,
    wrap: Callable[[nn.Module], Any] | None,
    random: bool,
) -> Checkpoint:
    content = _checked(storage.read(path), path)
    shards.check_files(path, content, together)
    history = History.from_dict(content["history"])
    model: Any = checks.model("what make_model() returns", make_model())
    network = bare(replay(model, history))
    _load_model(network, content, path)
    together.agree_on(numbered("growth", (growth.name for growth in history)), last=False)
    if wrap is not None:
        model = wrap(model)
        network = bare(model)
    optimizer = make_optimizer(model) if make_optimizer is not None else None
    scheduler = make_scheduler(optimizer) if make_scheduler is not None else None
    add_own_groups(history, optimizer, scheduler)
    with _loading("what lies in shards"):
        content = _with_shards(path, content, network, as_optimizers(optimizer))
    together.agree(last=False)  # before the states are dealt out to the shards
    # After the scheduler was made: the constructors of schedulers write into the optimizer's groups.
    _load_each(
        "optimizer", as_optimizers(optimizer), content["optimizers"],
        lambda o, saved: load_optimizer(o, saved, network, content["model"]),
    )  # fmt: skip
    _load_each("scheduler", _several(scheduler), content["schedulers"], _load_scheduler)
    grower = make_grower(model, optimizer, scheduler) if make_grower is not None else None
    if grower is not None:
        checks.instance("what make_grower(...) returns", grower, Grower, "a Grower")
        if content["grower"] is None:
            raise CheckpointError(f"{path} was saved without grower=, so make_grower has nothing to restore.")
        with _loading("the grower"):
            grower.load_state_dict(content["grower"])
    together.agree()
    if random:
        states, rank = content["random"], dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        with _loading("the random states"):
            random_state.restore(states[rank] if rank < len(states) else states[0])
    return Checkpoint(model, optimizer, scheduler, grower, history, content["extra"])


def _with_shards(
    path: Any, content: dict[str, Any], network: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """The content with what lies in shards read: weights into the model itself, states of optimizers into tensors like its parameters."""
    if "shards" not in content:
        return content
    reshard(network)
    # Keys are of sharded tensors only; of an optimizer that is not asked for nothing is read.
    wanted = {**content, "optimizers": content["optimizers"][: len(optimizers)]}
    parameters, weights = dict(network.named_parameters()), network.state_dict()
    owners = {
        shards.key_of_state(number, name, entry): parameters[name]
        for number, saved in enumerate(wanted["optimizers"])
        for index, name in enumerate(name for group in saved["names"] for name in group)
        for entry in saved["state"]["state"].get(index, ())
        if name in parameters
    }
    targets = {shards.key_of_weight(name): value for name, value in weights.items()}
    read: dict[str, torch.Tensor] = {}

    def target(key: str, saved: torch.Tensor) -> torch.Tensor:
        if shards.is_missing(saved):
            read[key] = targets[key] if key in targets else empty_like(saved, owners.get(key))
        return read.get(key, saved)

    wanted = shards.replaced(wanted, target)
    shards.read(path, content, read)
    return {
        **content,
        "model": wanted["model"],
        "optimizers": [*wanted["optimizers"], *content["optimizers"][len(optimizers) :]],
    }


def _check_schedulers(given: Any) -> None:
    """Whatever has a state and a step may be saved, including schedulers that are not torch's."""
    for each in _several(given):
        able = all(hasattr(each, name) for name in ("state_dict", "load_state_dict", "step"))
        if not able or isinstance(each, (type, Optimizer)):
            checks.refuse("scheduler", "a scheduler or a list of them", each, WrongType)


def add_own_groups(history: Iterable[Growth], optimizer: Any, scheduler: Any) -> None:
    """Give optimizers that were built anew, and their schedulers, the groups of layers that have a rate of their own (`own_rate`)."""
    for growth in history:
        if growth.own_rate is not None:
            growth.own_rate.add(optimizer, scheduler)


def load_optimizer(
    optimizer: Optimizer, saved: Mapping[str, Any], network: nn.Module, weights: Mapping[str, Any]
) -> None:
    """Load the state of an optimizer by the names of its parameters; ``weights`` are the saved ones."""
    arrange(optimizer, saved["names"], network)
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    check_optimizer_state(optimizer, saved["state"], ordered)
    state = dict(saved["state"])
    with _loading(f"the state of {type(optimizer).__name__}"):
        state["state"] = {index: _spread(its, ordered[index]) for index, its in state["state"].items()}
        keys = [set(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        for group, known in zip(optimizer.param_groups, keys, strict=True):
            if known - set(group):
                raise KeyError(*sorted(known - set(group)))
    # torch casts a state to the type of its parameter, and what it keeps in float32 (NAdam's mu_product, ASGD's eta) is another number then
    names = [name for group in saved["names"] for name in group]
    for index, its in state["state"].items():
        parameter = ordered[index]
        if getattr(weights.get(names[index]), "dtype", None) != parameter.dtype:
            continue  # the model has another precision than the saved one, and its optimizer follows it
        now = optimizer.state[parameter]
        for key, value in its.items():
            if isinstance(value, torch.Tensor) and now[key].dtype != value.dtype:
                now[key] = value.to(now[key].device)


def arrange(optimizer: Optimizer, names: Sequence[Sequence[str]], network: nn.Module) -> None:
    """Bring the optimizer's groups into the saved order, parameter by parameter and by name, so that a saved state fits.

    Groups that the factory filled otherwise (a rule by name may put a new layer elsewhere than its neighbour) become as they were.
    """
    parameters = dict(network.named_parameters())
    groups = optimizer.param_groups
    if len(groups) != len(names):
        raise CheckpointError(
            f"make_optimizer built a {type(optimizer).__name__} with {len(groups)} groups, but {len(names)} were saved. "
            "Build the optimizer as the saved one was built."
        )
    held = {id(p) for group in groups for p in group["params"]}
    wanted = {name for group in names for name in group}
    unknown = sorted(wanted - parameters.keys())
    missing = sorted(name for name in wanted & parameters.keys() if id(parameters[name]) not in held)
    new = sorted(name for name, p in parameters.items() if id(p) in held and name not in wanted)
    for what, which in (
        ("is not in the model", unknown),
        ("is not in the new optimizer", missing),
        ("was not saved", new),
    ):
        if which:
            raise CheckpointError(
                f"the optimizer does not fit the saved one: {which[0]} {what} ({len(which)} such). "
                "make_optimizer must take the same parameters as the optimizer that was saved."
            )
    for group, its_names in zip(groups, names, strict=True):
        group["params"] = [parameters[name] for name in its_names]
        if "param_names" in group:
            group["param_names"] = list(its_names)


def _spread(state: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """The state of one parameter, sharded as the parameter is."""
    return {key: distributed_like(v, parameter) if isinstance(v, torch.Tensor) else v for key, v in state.items()}


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


def _checked(content: dict[str, Any], path: Any) -> dict[str, Any]:
    """The parts of a checkpoint, or an error that names the one that is missing or of another kind."""
    for name, fine in _PARTS.items():
        if name not in content or not fine(content[name]):
            what = f"was altered: it is {brief(content[name])}" if name in content else "is missing"
            raise CheckpointError(f"the part {name!r} of {path} {what}. Use an intact copy, or an earlier checkpoint.")
    if "shards" not in content and any(map(shards.is_missing, tensors(content))):
        raise CheckpointError(f"the part 'shards' of {path} is missing. Use an intact copy, or an earlier checkpoint.")
    return content


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """What a part of somebody else's raises for a state that it does not know, in words."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}. Build it as it was when the checkpoint was saved; if it is, use an "
            "intact checkpoint."
        ) from error


def _load_scheduler(scheduler: Any, saved: Any) -> None:
    check_scheduler_state(scheduler, saved)
    with _loading(f"the state of {type(scheduler).__name__}"):
        scheduler.load_state_dict(saved)


def _load_model(network: nn.Module, content: Mapping[str, Any], path: Any) -> None:
    evaluating, frozen = set(content["evaluating"]), set(content["frozen"])
    modules, parameters = dict(network.named_modules()), dict(network.named_parameters())
    for name in sorted((evaluating - modules.keys()) | (frozen - parameters.keys())):
        raise CheckpointError(f"{path} tells of {name!r}, which this {type(network).__name__} does not have.")
    own = network.state_dict()
    weights = {
        # What lies in shards comes later, straight into the shards; here only its name and shape have to fit.
        name: own[name] if shards.is_missing(value) and name in own and own[name].shape == value.shape else value
        for name, value in content["model"].items()
    }
    try:
        network.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the weights in {path} do not fit the {type(network).__name__} that make_model built: {error} "
            "The factory must build the network that growing began with."
        ) from error
    for name, module in network.named_modules():
        module.training = name not in evaluating
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name not in frozen)


def _load_each(what: str, made: Iterable[Any], saved: list[Any], load: Callable[[Any, Any], None]) -> None:
    made = list(made)
    if not made:
        return  # not asked for
    if len(made) != len(saved):
        raise CheckpointError(
            f"make_{what} gave {len(made)}, but the checkpoint holds {len(saved)}. Save and load the same {what}s, in the same order."
        )
    for each, state in zip(made, saved, strict=True):
        load(each, state)


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


def names_in(optimizer: Optimizer, network: nn.Module) -> list[list[str]]:
    """The names of the parameters in each group, in their order."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"group {index} of {type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not part "
                    "of the model, so it has no name to be found by again. Make it a parameter of the model."
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _several(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]
