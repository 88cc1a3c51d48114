"""What the layers of torch do with units: which axes of their parameters make, read or pass them on, and which attributes count them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


@dataclass(frozen=True)
class Role:
    """Of one module: for the units that it makes, those that it reads, or those that pass through it one by one."""

    channel: int  # the dimension of its values that holds the units
    makes: tuple[tuple[str, int], ...] = ()  # parameters and their axis
    reads: tuple[tuple[str, int], ...] = ()
    passes: tuple[tuple[str, int, str], ...] = ()  # and what new entries are filled with
    out_size: tuple[str, ...] = ()
    in_size: tuple[str, ...] = ()


def role_of(module: nn.Module) -> Role | None:
    """What a module does with units; None for a module without parameters along them, or one that is not known."""
    if _is(module, nn.Linear) or _is_conv1d_of_transformers(module):
        transposed = not isinstance(module, nn.Linear)
        out, given = (1, 0) if transposed else (0, 1)
        sizes = (("nf",), ("nx",)) if transposed else (("out_features",), ("in_features",))
        return Role(-1, (("weight", out), ("bias", 0)), (("weight", given),), (), *sizes)
    if _is(module, *_CONVS, *_TRANSPOSED):
        return _conv(module)
    if _is(module, *_NORMS):
        fills = (("weight", "one"), ("bias", "zero"), ("running_mean", "zero"), ("running_var", "one"))
        return Role(1, passes=tuple((name, 0, fill) for name, fill in fills), in_size=("num_features",))
    if isinstance(module, nn.PReLU) and _is(module, nn.PReLU) and module.num_parameters > 1:
        return Role(1, passes=(("weight", 0, "mean"),), in_size=("num_parameters",))
    return None


def why_unknown(module: nn.Module) -> str:
    """Why a layer of torch's has no role that is known; empty if it has one, or is not such a layer."""
    if not isinstance(module, (nn.Linear, *_CONVS, *_TRANSPOSED)) or role_of(module) is not None:
        return ""
    if is_parametrized(module):
        return "its weights come from a parametrization (weight_norm, spectral_norm, ...), which has their shape too"
    if getattr(module, "groups", 1) > 1:
        return f"is a convolution in {module.groups} groups, and each channel belongs to one of them"
    return f"is a {type(module).__name__} with a forward pass of another kind than torch's"


def _is(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is one of torch's layers, or a subclass that computes the same."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds) and not (
        is_parametrized(module)
    )


def _conv(conv: nn.Module) -> Role | None:
    out, given = ("out_channels",), ("in_channels",)
    if conv.groups == 1:
        made, read = (1, 0) if isinstance(conv, _TRANSPOSED) else (0, 1)
        return Role(1, (("weight", made), ("bias", 0)), (("weight", read),), (), out, given)
    if conv.groups == conv.in_channels == conv.out_channels:
        return Role(1, passes=(("weight", 0, "row"), ("bias", 0, "row")), in_size=(*given, *out, "groups"))
    return None


def _is_conv1d_of_transformers(module: nn.Module) -> bool:
    """The linear map of GPT-2 and its like, whose weight lies the other way round."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def units_made(module: nn.Module) -> int:
    """How many units a layer makes; 0 if that is not known."""
    role = role_of(module)
    if role is None or not role.makes:
        return 0
    name, dim = role.makes[0]
    return int(getattr(module, name).shape[dim])
