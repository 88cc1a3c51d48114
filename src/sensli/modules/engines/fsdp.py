"""FSDP2 (`fully_shard`) follows a changed module: a new layer is sharded like the modules around it, a resized parameter as it was.

`fully_shard` works in place: it swaps the class of a module and keeps a state beside it. The root finds its parts at the first forward
pass, so after a change it has to look again; that is private to torch, done only here, and checked to be as expected. Merits are measured
in the model's own passes, where a block is whole while it runs; a search without a sibling takes an unsharded copy.

Whether a model is sharded is asked where a call begins (`wrappers.is_sharded`): of others nothing comes here.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sensli.errors import UnsupportedModel, UnsupportedSite
from sensli.modules.running import whole_tensor
from sensli.modules.wrappers import is_a, spread_error

# Of what torch keeps of a parameter, the part that a new shape changes.
_OF_A_PARAMETER = (
    "_init_sharded_param", "_init_sharded_post_forward_param_metadata", "_orig_param_uid", "_orig_size", "_setattr_on_modules",
    "all_gather_outputs", "device", "fsdp_placement", "mesh_info", "post_forward_mesh_info", "reset_sharded_param", "sharded_param",
)  # fmt: skip
# What methods of a sharded module set: how gradients are divided and when they are summed.
_SETTINGS = (
    "gradient_divide_factor", "force_sum_reduction_for_comms", "reduce_scatter_unused_params", "reduce_scatter_max_input_buffers",
    "reduce_grads", "all_reduce_grads", "reshard_after_backward", "unshard_async_op",
)  # fmt: skip
_DIVISOR = "gradient_divide_factor"  # of a group: None is the number of processes
_STATE = "__composable_api_state_key"  # the prefix of the names under which torch keeps the state in the module itself


def _sharded_modules(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """The modules that `fully_shard` was applied to: the path, the module, and the state that torch keeps of it."""
    for path, module in model.named_modules():
        if is_a(module, "FSDPModule"):
            yield path, module, module._get_fsdp_state()


def check_sharded(model: nn.Module) -> None:
    """Refuse what could not follow a growth, before anything changes."""
    if not is_a(model, "FSDPModule"):
        raise UnsupportedModel(
            "parts of the model are sharded but the model itself is not, so no root manages all of them. Call fully_shard(model) too."
        )
    for path, _, state in _sharded_modules(model):
        if not all(hasattr(state, name) for name in ("_is_root", "_state_ctx", "_modules")):
            raise _unknown()
        where = f"'{path}'" if path else "the model"
        if len(getattr(state, "_fsdp_param_groups", [0])) > 1:
            raise UnsupportedModel(
                f"{where} has parameters on several meshes (shard_placement_fn), and none of them tells where a new layer belongs. "
                "Shard all of its parameters on one mesh."
            )
        group = state._fsdp_param_group
        if group is None:
            continue
        for info in (each._module_info for each in group.fsdp_params if each.is_dtensor):
            holder = next(name for name, part in model.named_modules() if part is info.module)
            raise spread_error(f"{holder}.{info.param_name}" if holder else info.param_name)
        mesh, world = group.mesh_info.mesh, dist.get_world_size()
        if mesh.ndim > 1 and mesh.size() != world:
            raise UnsupportedModel(
                f"{where} is sharded on a mesh of {mesh.ndim} dimensions with {mesh.size()} of the {world} processes of the job. Such a "
                "mesh must hold all of them: make it by init_device_mesh with their number."
            )


def _unknown() -> UnsupportedModel:
    return UnsupportedModel(
        f"torch {torch.__version__} keeps the state of fully_shard in a way unknown to this version of sensli, so it cannot "
        "follow a growth. Use a version of torch that this version of sensli was tested with, or grow before sharding."
    )


def mesh_group(model: nn.Module) -> Any:
    """The processes that hold the model: among those of a row it is sharded, and each row of a mesh of two dimensions holds all of it."""
    groups = (state._fsdp_param_group for _, _, state in _sharded_modules(model))
    mesh = next((group.mesh_info.mesh for group in groups if group is not None), None)
    if mesh is None or mesh.ndim == 1:
        return None if mesh is None else mesh.get_group()
    # One that does not hold all processes is refused, by those that are at hand.
    return dist.group.WORLD if mesh.size() == dist.get_world_size() else mesh.get_group(mesh.ndim - 1)


def shard_like(layer: nn.Module, model: nn.Module, path: str) -> None:
    """Shard a new layer beside a module: a copy of the module as that one is, another layer as the innermost sharded module around it."""
    beside = model.get_submodule(path)
    if is_a(beside, "FSDPModule") and type(layer) is type(beside).__bases__[1]:
        _shard_copy(layer, beside)
        return
    groups = {id(module): state._fsdp_param_group for _, module, state in _sharded_modules(model)}
    # Where the paths of the modules around the place end, the innermost first: 'a.b', 'a' and '' for 'a.b.c'.
    for end in reversed([0, *(index for index, letter in enumerate(path) if letter == ".")]):
        group = groups.get(id(model.get_submodule(path[:end])))
        if group is not None:
            _shard([layer], group, group.post_forward_mesh_info is not None or None)
            return
    raise UnsupportedModel(f"no module around '{path}' is sharded, so it is unclear how to shard a layer there.")


def _shard_copy(copied: nn.Module, block: nn.Module) -> None:
    """Shard a copy of a block, and what is inside of it, as the block and its parts are."""
    parts: dict[int, tuple[Any, list[str]]] = {}
    for path, _, state in _sharded_modules(block):
        parts.setdefault(id(state), (state, []))[1].append(path)
    there, along = dict(copied.named_modules()), dict[int, Any]()
    for name, parameter in copied.named_parameters():
        along[id(parameter)] = next((p for p in block.get_parameter(name).placements if p.is_shard()), None)  # type: ignore[attr-defined]
    for state, paths in reversed(parts.values()):  # the inner ones first
        group, modules = state._fsdp_param_group, [there[path] for path in paths if path in there]
        if group is None or not modules:
            continue
        after: Any = None  # as torch chooses
        if not state._auto_reshard_after_forward:
            info = group.post_forward_mesh_info
            after = info is not None and (info is group.mesh_info or info.shard_mesh_size)
        _shard(modules, group, after, lambda parameter: along[id(parameter)])


def _shard(
    modules: list[nn.Module],
    like: Any,
    reshard_after_forward: Any,
    placement: Callable[[nn.Parameter], Any] | None = None,
) -> None:
    """Shard modules together, with the mesh, the policies and the settings of another group."""
    from torch.distributed.fsdp import fully_shard

    given = modules[0] if len(modules) == 1 else modules
    fully_shard(
        given,
        mesh=like.mesh_info.mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=placement,
        mp_policy=like.mp_policy,
        offload_policy=like.offload_policy,
    )
    group = modules[0]._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    for name in _SETTINGS if group is not None else ():
        if hasattr(like, name):
            setattr(group, name, getattr(like, name))


def reshard(model: nn.Module) -> None:
    """Every module holds its shards again; after an evaluation the root may still hold whole parameters."""
    for _, module, _ in _sharded_modules(model):
        module.reshard()


def look_again(model: nn.Module) -> None:
    """Make the root find its parts again at the next forward pass."""
    reshard(model)
    for _, _, state in _sharded_modules(model):
        state._is_root = None
        state._state_ctx.all_states.clear()
        if state._fsdp_param_group is not None:
            state._fsdp_param_group._module_fqn = None  # a name for messages, which would be appended to


@contextmanager
def as_written(model: nn.Module) -> Iterator[dict[int, Any]]:
    """Modules are of the user's classes meanwhile; what a copy gets instead of the hooks and states of `fully_shard`, by id."""
    sharded = [(module, type(module), state) for _, module, state in _sharded_modules(model)]
    try:
        for module, cls, _ in sharded:
            module.__class__ = cls.__bases__[1]  # the class made by fully_shard is (FSDPModule, the user's class)
        yield {key: value for module, _, state in sharded for key, value in _without_hooks(module, state).items()}
    finally:
        for module, cls, _ in sharded:
            module.__class__ = cls


def unsharded_copy(model: nn.Module, only: Container[int] | None = None) -> nn.Module:
    """A copy of the model as it was before `fully_shard`, with whole parameters. All processes must call it together.

    ``only``: ids of the parameters whose values are needed; all others are zeros that take no memory.
    """
    check_sharded(model)
    reshard(model)
    with as_written(model) as memo, torch.no_grad():
        for each in model.parameters():
            if only is None or id(each) in only:
                value = whole_tensor(each).clone()
            else:
                value = torch.zeros((), dtype=each.dtype, device=each.device).expand(each.shape)
            memo[id(each)] = nn.Parameter(value, each.requires_grad)
        return copy.deepcopy(model, memo)


# ---- A pass of the model itself that is measured. FSDP2 makes a block whole for its forward and for its backward pass,
# on all processes at once; gradients are summed over them as soon as they are there, and each keeps its shard.


@contextmanager
def measured_passes(model: nn.Module) -> Iterator[None]:
    """Around passes that are not the user's: afterwards all modules hold their shards, whatever has happened inside."""
    try:
        yield
    finally:
        forget_pass(model)


@contextmanager
def gathered(model: nn.Module, part: nn.Module, *, leave: bool = False) -> Iterator[None]:
    """A part of the model has whole parameters meanwhile. All processes must come here together.

    ``leave``: they stay whole, because the backward pass of the part is next, and shards them afterwards.
    """
    inner, found = {id(module) for module in part.modules()}, dict[int, Any]()
    for _, module, state in _sharded_modules(model):
        group = state._fsdp_param_group
        held = () if group is None or group.is_unsharded else (each._module_info for each in group.fsdp_params)
        if any(id(holder) in inner for info in held for holder in (info.module, *info.shared_modules)):
            found[id(group)] = module
    for module in found.values():
        module.unshard()
    try:
        yield
    finally:
        for module in () if leave else found.values():
            module.reshard()


def is_synchronised(model: nn.Module) -> bool:
    """Whether a backward pass sums the gradients over all processes at once, and none is waiting to be summed."""
    groups = (state._fsdp_param_group for _, _, state in _sharded_modules(model) if state._fsdp_param_group is not None)
    return not has_waiting(model) and all(
        group.reduce_grads and group.all_reduce_grads and hasattr(group, _DIVISOR) for group in groups
    )


def has_waiting(model: nn.Module) -> bool:
    """Whether gradients of earlier passes wait to be summed over the processes."""
    waiting = any(each.unsharded_accumulated_grad is not None for each in _sharded_parameters(model))
    return waiting or any(parameter.grad is not None for parameter in whole_leaves(model))


def divisors(model: nn.Module) -> dict[int, float]:
    """What the sum over all processes of the gradient of each sharded parameter is divided by, by the id of the parameter."""
    groups = (state._fsdp_param_group for _, _, state in _sharded_modules(model) if state._fsdp_param_group is not None)
    sizes = ((group, float(getattr(group, _DIVISOR) or group.mesh_info.mesh.size())) for group in groups)
    return {id(each.sharded_param): size for group, size in sizes for each in group.fsdp_params}


def whole_leaves(model: nn.Module) -> list[nn.Parameter]:
    """The whole parameters that passes run with, to which gradients come."""
    found = (getattr(each, "_unsharded_param", None) for each in _sharded_parameters(model))
    return [parameter for parameter in found if parameter is not None and parameter.requires_grad]


def finish_forward(model: nn.Module) -> None:
    """Gather what the rest of a forward pass would that has failed in this process: the others are in it, and wait for this one."""
    root: Any = model
    state = root._get_fsdp_state()
    state._lazy_init()
    passed = {id(group) for group in state._comm_ctx.post_forward_order}
    for each in state._state_ctx.all_states:
        group = each._fsdp_param_group
        if group is not None and id(group) not in passed and not group.is_unsharded:
            group.unshard()
            group.wait_for_unshard()
            group._to_sharded()


def forget_pass(model: nn.Module) -> None:
    """A pass without an end is over: nothing of it is left in what `fully_shard` keeps."""
    root: Any = model
    state = root._get_fsdp_state()
    if state._is_root:  # it has run before
        if hasattr(root, "reset_iter_state"):  # from torch 2.13
            root.reset_iter_state()
        state._comm_ctx.post_forward_order.clear()
    reshard(model)


def check_resized(model: nn.Module, shapes: Mapping[int, tuple[int, ...]]) -> None:
    """Refuse new shapes, by the id of the parameter, that `fully_shard` could not have divided or would not take."""
    if any(not _is_known(each) for each in _sharded_parameters(model) if id(each.sharded_param) in shapes):
        raise _unknown()
    for name, parameter in model.named_parameters():
        for axis, placement in enumerate(getattr(parameter, "placements", ()) if id(parameter) in shapes else ()):
            if not placement.is_shard():
                continue
            size, parts = shapes[id(parameter)][placement.dim], parameter.device_mesh.size(axis)  # type: ignore[attr-defined]
            if placement.dim > 0 and size % parts:
                raise UnsupportedSite(
                    f"{name} is sharded along axis {placement.dim}, which fully_shard divides into equal parts only: {size} entries do not "
                    f"fit {parts} processes. Add a number of units that does."
                )


def follow_shapes(model: nn.Module) -> None:
    """What `fully_shard` keeps of parameters that have got another shape is as if they had been sharded with it."""
    reshard(model)  # a run of the model may have left whole parameters of the old shape
    for each in _sharded_parameters(model):
        if each.sharded_param.shape != each._orig_size:
            _shard_again(each)


def _sharded_parameters(model: nn.Module) -> Iterator[Any]:
    """What `fully_shard` keeps of each parameter."""
    for _, _, state in _sharded_modules(model):
        if state._fsdp_param_group is not None:
            yield from state._fsdp_param_group.fsdp_params


def _is_known(each: Any) -> bool:
    """Whether torch keeps what belongs to a parameter as `_shard_again` expects."""
    if not all(hasattr(each, name) for name in _OF_A_PARAMETER):
        return False
    taken = inspect.signature(each._init_sharded_param).parameters
    return list(taken) == ["param", "device", "shard_placement_fn", "mesh_info"]


def _shard_again(each: Any) -> None:
    """Sizes and places as for a new parameter, from one without values; the parameter itself, with its shards, stays."""
    parameter, number, placement = each.sharded_param, each._orig_param_uid, each.fsdp_placement
    like = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)
    each._init_sharded_param(like, each.device, lambda _: placement, each.mesh_info)
    if each.post_forward_mesh_info is not None:
        each._init_sharded_post_forward_param_metadata(like)
    each.sharded_param, each._orig_param_uid = parameter, number
    each._setattr_on_modules(parameter)
    each.reset_sharded_param()
    each.all_gather_outputs = []  # room for the old whole
    vars(each).pop("_unsharded_param", None)


def _without_hooks(module: nn.Module, state: Any) -> dict[int, Any]:
    """What a copy gets instead of the hooks and states of fully_shard; the user's own hooks stay."""
    given = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    own = {each.id for handle in given for each in getattr(handle, "handles", (handle,))}  # a group has several
    instead: dict[int, Any] = {}
    for name in (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
    ):
        hooks = getattr(module, name)
        instead[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if key not in own)
    for name in ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks"):
        instead[id(getattr(module, name))] = OrderedDict()
    for name, value in module.__dict__.items():
        if name.startswith(_STATE):
            instead[id(value)] = {}
    return instead
