"""FSDP2 (`fully_shard`) follows a changed module: a new layer is sharded like the modules around it.

`fully_shard` works in place: it swaps the class of a module and keeps a state beside it. The root finds its parts at the first forward
pass, so after a change it has to look again; that is private to torch, done only here, and checked to be as expected. A look at the
model (sites, merits) runs on an unsharded copy, which every process holds for as long as it takes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import UnsupportedModel
from sensli.modules.wrappers import is_a

_STATE = "__composable_api_state_key"  # the prefix of the names under which torch keeps the state in the module itself


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model or to a part of it."""
    return any(is_a(module, "FSDPModule") for module in model.modules())


def check(model: nn.Module) -> None:
    """Refuse what could not follow a growth, before anything changes."""
    if not is_a(model, "FSDPModule"):
        raise UnsupportedModel(
            "parts of the model are sharded but the model itself is not, so no root manages all of them. Call fully_shard(model) too."
        )
    for path, module in model.named_modules():
        if not is_a(module, "FSDPModule"):
            continue
        state = module._get_fsdp_state()
        if not all(hasattr(state, name) for name in ("_is_root", "_state_ctx", "_modules")):
            raise UnsupportedModel(
                f"torch {torch.__version__} keeps the state of fully_shard in a way unknown to this version of sensli, so it cannot "
                "follow a growth. Use a version of torch that this version of sensli was tested with, or grow before sharding."
            )
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


def process_group(model: nn.Module) -> Any:
    """The processes among which the model is sharded."""
    for module in model.modules():
        if is_a(module, "FSDPModule"):
            group = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
            if group is not None:
                return group.mesh_info.mesh.get_group()
    return None


def shard_like(layer: nn.Module, model: nn.Module, path: str) -> None:
    """Shard a new layer with the arguments of the innermost sharded module around its place."""
    from torch.distributed.fsdp import fully_shard

    around = [model.get_submodule(path[:end]) for end in _prefixes(path)]
    sharded = [module for module in around if is_a(module, "FSDPModule")]
    groups = [module._get_fsdp_state()._fsdp_param_group for module in sharded]  # type: ignore[operator]
    for group in [each for each in groups if each is not None][::-1]:
        fully_shard(
            layer,
            mesh=group.mesh_info.mesh,
            reshard_after_forward=group.post_forward_mesh_info is not None or None,
            mp_policy=group.mp_policy,
            offload_policy=group.offload_policy,
        )
        return
    raise UnsupportedModel(f"no module around '{path}' is sharded, so there is no telling how to shard a layer there.")


def reshard(model: nn.Module) -> None:
    """Every module holds its shards again; after an evaluation the root may still hold whole parameters."""
    for module in model.modules():
        if is_a(module, "FSDPModule"):
            module.reshard()  # type: ignore[operator]


def look_again(model: nn.Module) -> None:
    """Make the root find its parts again at the next forward pass."""
    for module in model.modules():
        if is_a(module, "FSDPModule"):
            state = module._get_fsdp_state()  # type: ignore[operator]
            state._is_root = None
            state._state_ctx.all_states.clear()
            if state._fsdp_param_group is not None:
                state._fsdp_param_group._module_fqn = None  # a name for messages, which would be appended to


def readable_part(model: nn.Module, part: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model and a part of it, or, where it is sharded, an unsharded copy and the same part of that."""
    if not is_sharded(model):
        return model, part
    path = next(path for path, module in model.named_modules() if module is part)
    whole = unsharded(model)
    return whole, whole.get_submodule(path)


def unsharded(model: nn.Module) -> nn.Module:
    """A copy of the model as it was before `fully_shard`, with whole parameters. All processes must call it together."""
    check(model)
    reshard(model)
    memo: dict[int, Any] = {}
    classes: list[tuple[nn.Module, type]] = []
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                memo[id(parameter)] = nn.Parameter(whole(parameter).clone(), requires_grad=parameter.requires_grad)
        if is_a(module, "FSDPModule"):
            classes.append((module, type(module)))
            memo.update(_without_hooks(module))
    try:
        for module, cls in classes:
            module.__class__ = cls.__bases__[1]  # the class made by fully_shard is (FSDPModule, the user's class)
        with torch.no_grad():
            return copy.deepcopy(model, memo)
    finally:
        for module, cls in classes:
            module.__class__ = cls


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor (all processes must call together), or the tensor itself."""
    full = getattr(tensor, "full_tensor", None)
    return tensor.detach() if full is None else full().detach()


def distributed_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor of the shape of a parameter, sharded as the parameter is; anything else as it is."""
    if not hasattr(parameter, "full_tensor") or hasattr(tensor, "full_tensor") or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]


def empty_like(tensor: Tensor, parameter: Tensor | None) -> Tensor:
    """Room for a tensor that belongs to a parameter: sharded as the parameter is if it has its shape, else whole."""
    if parameter is not None and tensor.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=None if parameter is None else parameter.device)


def _without_hooks(module: nn.Module) -> dict[int, Any]:
    """What a copy gets instead of the hooks and states of fully_shard; the user's own hooks stay."""
    state = module._get_fsdp_state()  # type: ignore[operator]
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


def _prefixes(path: str) -> list[int]:
    """Where the paths of the modules around a place end, the outermost first: '' , 'a', 'a.b' for 'a.b.c'."""
    return [0, *(index for index, letter in enumerate(path) if letter == ".")]
