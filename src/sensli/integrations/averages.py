"""Averages and other copies of the model that callbacks of a trainer keep: those that can follow a growth are found, others refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from sensli.errors import UnsupportedModel
from sensli.modules.wrappers import bare, is_average
from sensli.surgery.averaging import averaged_parts, network_of, same_values


def kept_by(callbacks: Iterable[Any], model: nn.Module, cure: str) -> list[nn.Module]:
    """What the callbacks keep that follows a growth: averages of torch, and whole copies of the model, which are paired one by one.

    Values of the parameters that are kept in another way would be out of step after a growth: refused, with a ``cure``.
    """
    own = bare(model)
    mine = {id(parameter) for parameter in own.parameters()}
    found: list[nn.Module] = []
    for callback in callbacks:
        for name, value in vars(callback).items():
            place = f"{type(callback).__name__}.{name}"
            for each in _modules(value):
                if any(id(parameter) in mine for parameter in each.parameters()) or any(each is one for one in found):
                    continue  # the model itself, or a part of it
                if is_average(each) and not averaged_parts(own, network_of(each)):
                    raise UnsupportedModel(
                        f"{place} is an average whose parameters are not those of this {type(own).__name__} or of one of its parts, so it "
                        f"cannot follow a growth. {cure}"
                    )
                inner = getattr(each, "module", None)
                if is_average(each) or _is_copy(inner, own) or (_is_copy(each, own) and type(each) is type(own)):
                    found.append(each)
                elif any(_is_copy(one, own) for one in (each, *each.children())):
                    raise _refused(place, cure)
            if any(_are_values(each, own) for each in (value, *_inner(value))):
                raise _refused(place, cure)
    return found


def _refused(place: str, cure: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{place} keeps the values of the model's parameters in a way that cannot follow a growth. {cure}"
    )


def _modules(value: Any) -> Iterator[nn.Module]:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
    return (each for each in parts if isinstance(each, nn.Module))


def _is_copy(value: Any, own: nn.Module) -> bool:
    """Whether this is a copy of the model, or of a part of it, of which it still has the values."""
    if not isinstance(value, nn.Module) or len(list(value.parameters())) < 2:
        return False
    parts = averaged_parts(own, value)
    return any(type(part) is type(value) and (part is own or same_values(part, value)) for _, part in parts)


def _inner(value: Any) -> list[Any]:
    """What an object of another library holds: an average that keeps a list of tensors."""
    if (
        isinstance(value, (nn.Module, Tensor, type))
        or hasattr(value, "callback_handler")
        or hasattr(value, "callbacks")
    ):
        return []
    return [each for each in getattr(value, "__dict__", {}).values() if isinstance(each, (list, tuple, dict))]


def _are_values(value: Any, own: nn.Module) -> bool:
    """Whether these are other tensors for all parameters of the model, by name or in their order."""
    given = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(given, (list, tuple)) or not given or not isinstance(given[0], Tensor):
        return False
    named = dict(own.named_parameters())
    mine = {id(parameter) for parameter in named.values()}
    if any(id(each) in mine or not isinstance(each, Tensor) for each in given):
        return False
    if isinstance(value, Mapping):
        return all(name in value and value[name].shape == parameter.shape for name, parameter in named.items())
    trained = [parameter.shape for parameter in named.values() if parameter.requires_grad]
    return [each.shape for each in given] in ([parameter.shape for parameter in named.values()], trained)
