"""FSDP2 (`fully_shard`) follows a changed module: a new layer is sharded like the modules around it, a resized parameter as it was.

`fully_shard` works in place: it swaps the class of a module and keeps a state beside it. The root finds its parts at the first forward
pass, so after a change it has to look again; that is private to torch, done only here, and checked to be as expected. A look at the
model (sites, merits) runs on an unsharded copy, which every process holds for as long as it takes.

Whether a model is sharded is asked where a call begins (`wrappers.is_sharded`): of others nothing comes here.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sensli.errors import UnsupportedModel, UnsupportedSite
from sensli.modules.running import whole
from sensli.modules.wrappers import is_a

# Of what torch keeps of a parameter, the part that a new shape changes.
_OF_A_PARAMETER = (
    "_init_sharded_param", "_init_sharded_post_forward_param_metadata", "_orig_param_uid", "_orig_size", "_setattr_on_modules",
    "all_gather_outputs", "device", "fsdp_placement", "mesh_info", "post_forward_mesh_info", "reset_sharded_param", "sharded_param",
)  # fmt: skip
_STATE = "__composable_api_state_key"  # the prefix of the names under which torch keeps the state in the module itself


def _sharded_modules(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """The modules that `fully_shard` was applied to: the path, the module, and the state that torch keeps of it."""
    for path, module in model.named_modules():
        if is_a(module, "FSDPModule"):
            yield path, module, module._get_fsdp_state()


def check(model: nn.Module) -> None:
    """Refuse what could not follow a growth, before anything changes."""
    if not is_a(model, "FSDPModule"):
        raise UnsupportedModel(
            "parts of the model are sharded but the model itself is not, so no root manages all of them. Call fully_shard(model) too."
        )
    for path, _, state in _sharded_modules(model):
        if not all(hasattr(state, name) for name in ("_is_root", "_state_ctx", "_modules")):
            raise _unknown()
        where = f"'{path}'" if path else "the model"
        if len(state._modules) > 1 or len(getattr(state, "_fsdp_param_groups", [0])) > 1:
            raise UnsupportedModel(
                f"{where} shares a group of fully_shard with other modules, which is not supported. Call fully_shard on it alone."
            )
        group = state._fsdp_param_group
        if group is not None and group.mesh_info.mesh.ndim != 1:
            raise UnsupportedModel(
                f"{where} is sharded on a mesh of {group.mesh_info.mesh.ndim} dimensions. Only one-dimensional meshes are supported."
            )


def _unknown() -> UnsupportedModel:
    return UnsupportedModel(
        f"torch {torch.__version__} keeps the state of fully_shard in a way unknown to this version of sensli, so it cannot "
        "follow a growth. Use a version of torch that this version of sensli was tested with, or grow before sharding."
    )


def process_group(model: nn.Module) -> Any:
    """The processes among which the model is sharded."""
    groups = (state._fsdp_param_group for _, _, state in _sharded_modules(model))
    return next((group.mesh_info.mesh.get_group() for group in groups if group is not None), None)


def shard_like(layer: nn.Module, model: nn.Module, path: str) -> None:
    """Shard a new layer with the arguments of the innermost sharded module around its place."""
    from torch.distributed.fsdp import fully_shard

    groups = {id(module): state._fsdp_param_group for _, module, state in _sharded_modules(model)}
    # Where the paths of the modules around the place end, the innermost first: 'a.b', 'a' and '' for 'a.b.c'.
    for end in reversed([0, *(index for index, letter in enumerate(path) if letter == ".")]):
        group = groups.get(id(model.get_submodule(path[:end])))
        if group is not None:
            fully_shard(
                layer,
                mesh=group.mesh_info.mesh,
                reshard_after_forward=group.post_forward_mesh_info is not None or None,
                mp_policy=group.mp_policy,
                offload_policy=group.offload_policy,
            )
            return
    raise UnsupportedModel(f"no module around '{path}' is sharded, so it is unclear how to shard a layer there.")


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


def unsharded(model: nn.Module) -> nn.Module:
    """A copy of the model as it was before `fully_shard`, with whole parameters. All processes must call it together."""
    check(model)
    reshard(model)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(whole(parameter).clone(), requires_grad=parameter.requires_grad)
    classes: list[tuple[nn.Module, type]] = []
    for _, module, state in _sharded_modules(model):
        classes.append((module, type(module)))
        memo.update(_without_hooks(module, state))
    try:
        for module, cls in classes:
            module.__class__ = cls.__bases__[1]  # the class made by fully_shard is (FSDPModule, the user's class)
        with torch.no_grad():
            return copy.deepcopy(model, memo)
    finally:
        for module, cls in classes:
            module.__class__ = cls


def check_resized(model: nn.Module, shapes: Mapping[int, tuple[int, ...]]) -> None:
    """Refuse new shapes, by the id of the parameter, that `fully_shard` could not have divided or would not take."""
    if any(not _is_known(each) for each in _sharded_parameters(model) if id(each.sharded_param) in shapes):
        raise _unknown()
    for name, parameter in model.named_parameters():
        for placement in getattr(parameter, "placements", ()) if id(parameter) in shapes else ():
            size, parts = shapes[id(parameter)][placement.dim], parameter.device_mesh.size()  # type: ignore[attr-defined]
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
    own = {getattr(handle, "id", None) for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle)}
    instead: dict[int, Any] = {}
    for name in (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
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
