"""Averages of a model or of a part of it (`torch.optim.swa_utils.AveragedModel`) grow with it.

An average pairs its parameters with the model's one by one. If it does not follow, its next update fails, or pairs the wrong ones where
shapes agree. What is new begins in the average with the model's values, from which it is averaged. A new layer is an identity in the
average too, and nothing reads new units, so the averaged function does not change either; unless units that are dead in the model are
still alive in the average.

`check_alike` plans: it refuses what could not follow and remembers what each is an average of. `follow` makes the growth in all of them,
`unfollow` takes it back with an `undo`. Both belong inside of an `AllOrNothing` that keeps what `kept_of` names.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from sensli.errors import UnsupportedModel
from sensli.modules.copies import copied_model
from sensli.modules.engines.distributed import Together
from sensli.modules.grown import Chain, grown_modules
from sensli.modules.running import sharded_like, whole_tensor
from sensli.modules.wrappers import averages_in, bare, is_sharded, own_modules
from sensli.moves.point import Ref
from sensli.moves.stretching import is_own
from sensli.surgery.growth import repeat, undo
from sensli.surgery.history import Growth

Averaged: TypeAlias = nn.Module | Sequence[nn.Module] | None

# What an averaged network is an average of, by the module itself: values differ later, and a growth may change its path.
_SOURCES: weakref.WeakKeyDictionary[nn.Module, Ref] = weakref.WeakKeyDictionary()


def check_alike(model: nn.Module, averaged: Averaged) -> None:
    """Refuse an average that is not one of this model or of a part of it, before anything changes; those in the model count too."""
    own = bare(model)
    inside = averages_in(own)
    for average in as_averages(averaged):
        if not any(average is each for each in inside.values()):
            _remember(own, average, "averaged= holds")
    for path, average in inside.items():
        _remember(own, average, f"'{path}' of the model holds")


def follow(averaged: Averaged, growth: Growth, model: nn.Module) -> None:
    """Make the growth of the model in each average, at the same place; what is new begins as the model's."""
    own, averages, taking = bare(model), as_averages(averaged), list[Any]()
    with Together(own if averages and is_sharded(own) else None, "let the averages follow") as together:
        for average in averages:
            if not _has_made(average, growth, own):  # one that the model holds has grown with it
                taking.append(_grow(average, growth, own))
        together.agree()  # before parameters are put together for their values, for which all ranks are needed
    for target, again, trains in taking:
        _take_values(target, again, own, trains)


def unfollow(averaged: Averaged, growth: Growth, model: nn.Module) -> None:
    """Take the last growth back in each average that has made it. The model still has it."""
    own = bare(model)
    for average in as_averages(averaged):
        if _has_made(average, growth, own):
            network = network_of(average)
            source = _source(own, network)
            target = _around(own, source[1], network) if _is_part(source, own) else network
            undo(target, growth)
            if not any(module is network for module in target.modules()):
                _become(average, network.get_submodule("anchor"), source)


def as_averages(averaged: Averaged) -> list[nn.Module]:
    """The averages; what is none is refused."""
    several = isinstance(averaged, Sequence) and not isinstance(averaged, str)
    given: Any = averaged if several else [] if averaged is None else [averaged]
    for each in given:
        network_of(each)
    return list(given)


def kept_of(averaged: Averaged) -> list[nn.Module]:
    """What a change keeps of averages: themselves, and the networks that a wrapper may hide."""
    averages = as_averages(averaged)
    return [*averages, *map(network_of, averages)]


def network_of(average: Any) -> nn.Module:
    """The averaged network itself: that of torch's and of other libraries' averages is called ``module``."""
    inner = getattr(average, "module", None)
    return bare(inner if isinstance(inner, nn.Module) else average, "averaged")


def _form(network: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, parameter.shape) for name, parameter in network.named_parameters()]


def _remember(own: nn.Module, average: nn.Module, holds: str) -> None:
    """Find out what this is an average of."""
    network = network_of(average)
    named = type(network).__name__
    if any(network is module for _, module in own_modules(own)):
        raise UnsupportedModel(
            f"{holds} a {named} that is a part of the model itself. Make it an average of that part: "
            "torch.optim.swa_utils.AveragedModel(part)."
        )
    known = _source(own, network)
    found = [known] if known is not None and _form(known[1]) == _form(network) else averaged_parts(own, network)
    if not found:
        raise UnsupportedModel(
            f"{holds} a {named} whose parameters are not those of the model, a {type(own).__name__}, or of a part of it, so it cannot grow "
            "with it. Make the average of the model as it is now (after replay or load_checkpoint, not before)."
        )
    if len(found) > 1:
        raise UnsupportedModel(
            f"{holds} a {named} that may be an average of '{found[0][0]}' or of '{found[1][0]}'. Make the Grower as long as the average "
            "still has the values of the one, or average the whole model."
        )
    path, module = found[0]
    if module is not own and network is average:
        raise UnsupportedModel(
            f"{holds} a copy of '{path}', to which a growth may give another module. Make it an average of torch: "
            "torch.optim.swa_utils.AveragedModel(part)."
        )
    if module is not own and is_sharded(own):
        raise UnsupportedModel(
            f"{holds} an average of '{path}', and the model is sharded by fully_shard: its parts cannot be copied. Average the whole model."
        )
    _SOURCES[network] = Ref.to(path, module)


def averaged_parts(own: nn.Module, network: nn.Module) -> list[tuple[str, nn.Module]]:
    """What a network may be an average of: the model, or its parts of the same class; if several, those with the same values."""
    form = _form(network)
    if not form:
        return []
    if _form(own) == form:
        return [("", own)]
    found = [
        (path, module)
        for path, module in own_modules(own)
        if type(module) is type(network) and module is not network and _form(module) == form
    ]
    return [each for each in found if same_values(each[1], network)] or found if len(found) > 1 else found


def same_values(one: nn.Module, other: nn.Module) -> bool:
    """Whether parameters of the same shapes have the same values."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.detach(), b.detach().to(a)) for a, b in pairs)


_Source: TypeAlias = tuple[str, nn.Module]


def _source(own: nn.Module, network: nn.Module) -> _Source | None:
    """What a network is known to be an average of, in this model: with the layers that stand around it since."""
    known = _SOURCES.get(network)
    found = None if known is None else known.find(own)
    if found is None:
        parts = averaged_parts(own, network)  # in a copy of the model, say
        if len(parts) != 1:
            return None
        _SOURCES[network] = Ref.to(*parts[0])
        return parts[0]
    path, module = found
    while path.endswith("anchor") and isinstance(own.get_submodule(path.rpartition(".")[0]), Chain):
        path = path.rpartition(".")[0]
        module = own.get_submodule(path)
    return path, module


def _is_part(source: _Source | None, own: nn.Module) -> TypeGuard[_Source]:
    """Whether this is a part of the model, and not all of it."""
    return source is not None and source[1] is not own


def _has_made(average: nn.Module, growth: Growth, own: nn.Module) -> bool:
    network = network_of(average)
    source, name = _source(own, network), growth.name
    if _is_part(source, own):
        if _form(network) != _form(source[1]):
            return False
        if not name.startswith(f"{source[0]}."):
            return True  # elsewhere: there is no more to make
        name = name.removeprefix(f"{source[0]}.")
    return any(number == growth.number and path == name for number, path, _ in grown_modules(network))


def _grow(average: nn.Module, growth: Growth, own: nn.Module) -> tuple[nn.Module, Growth, bool]:
    """The same growth once more in one average. What it grew in, and what `_take_values` needs."""
    network = network_of(average)
    trains = any(parameter.requires_grad for parameter in network.parameters())
    source = _source(own, network)
    if not _is_part(source, own):
        return network, repeat(network, growth), trains
    # The model as it was before, with the average in the place of its source: what else grew with it grows in a copy.
    before = copied_model(own, _without_averages(own))
    part = before.get_submodule(_SOURCES[network].find(own)[0])  # type: ignore[index]
    undo(before, growth)
    target = _around(before, part, network)
    again = repeat(target, growth)
    _become(average, target.get_submodule(source[0]), source)
    return target, again, trains


def _become(average: Any, network: nn.Module, source: _Source | None) -> None:
    """The averaged network is another one from now on, if a layer went around it or was taken away."""
    if source is None or network_of(average) is network:
        return
    path, module = source
    average.module = network
    _SOURCES[network] = Ref.to(path, module if isinstance(network, Chain) else module.get_submodule("anchor"))


def _without_averages(own: nn.Module) -> dict[int, Any]:
    return {id(average): nn.Identity() for average in averages_in(own).values()}


def _around(model: nn.Module, part: nn.Module, network: nn.Module) -> nn.Module:
    """A copy of the model with an average in the place of the part that it averages."""
    instead = _without_averages(model)
    for kind in ("named_modules", "named_parameters", "named_buffers"):
        mine, its = (dict(getattr(each, kind)(remove_duplicate=False)) for each in (part, network))
        instead.update({id(value): its[name] for name, value in mine.items() if name in its})
    return copied_model(model, instead)


def _take_values(target: nn.Module, growth: Growth, model: nn.Module, trains: bool) -> None:
    """Give what is new in an average the values that it has in the model. Copies are of what is there in the average."""
    edit = growth.site.move.made(target, growth.site, target.get_submodule(growth.name), growth.name)
    with torch.no_grad():
        if growth.parameters and not edit.copies:
            values = _values(model.get_submodule(growth.name))
            for name, tensor in _values(edit.module).items():
                tensor.copy_(sharded_like(whole_tensor(values[name]).to(tensor.device, tensor.dtype), tensor))
        values = _values(model)
        for each in edit.resized:
            old, value = whole_tensor(each.tensor), whole_tensor(values[each.name])
            each.tensor.copy_(sharded_like(torch.where(is_own(each), old, value.to(old)), each.tensor))
    for name in growth.parameters:
        target.get_parameter(name).requires_grad_(trains)
    edit.settled()


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# ---- Averages that a model keeps and its owner updates by hand: they cannot follow a growth, and are recognised by what
# they do.


class Copies:
    """Parts of a model that are alike when this is made. One that changes later without a gradient is an average made by hand.

    Such are a teacher or a target network (``copy.deepcopy(self.student)``): what updates them pairs their parameters with the student's,
    and would pair the wrong ones after a growth. A copy that stays as it is (a reference model) is none.
    """

    def __init__(self, model: nn.Module) -> None:
        own, forms = bare(model), dict[Any, list[tuple[str, nn.Module]]]()
        for path, module in own_modules(own) if not is_sharded(own) else ():
            parameters = list(module.parameters())
            if path and len(parameters) > 1 and all(p.is_floating_point() and not p.is_meta for p in parameters):
                forms.setdefault((type(module), tuple(p.shape for p in parameters)), []).append((path, module))
        alike, known = dict[Any, list[tuple[str, nn.Module]]](), dict[int, tuple[float, float]]()
        for form, members in forms.items():
            for path, module in members if len(members) > 1 else ():
                sums = _sums(module, known)
                if any(deviation > 0 for _, deviation in sums):  # ones and zeros are alike by chance
                    alike.setdefault((form, tuple(sums)), []).append((path, module))
        self._pairs = [pair for members in alike.values() for pair in permutations(members, 2)]
        self._sums = {path: _sums(module, known) for _, (path, module) in self._pairs}

    def check(self, optimizers: Iterable[Any]) -> None:
        """Refuse an average that was made by hand."""
        if not self._pairs:
            return
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        known = dict[int, tuple[float, float]]()
        for (source, module), (path, other) in self._pairs:
            mine, its = list(module.parameters()), list(other.parameters())
            trained = any(p.requires_grad and id(p) in held for p in its)
            if trained and any(p.grad is not None for p in mine):
                trained = any(p.grad is not None for p in its)
            if not trained and self._sums[path] != _sums(other, known):
                raise UnsupportedModel(
                    f"'{path}' began as a copy of '{source}' and changes without a gradient, as an average does. It cannot follow a "
                    f"growth. Make it one that can: torch.optim.swa_utils.AveragedModel({source})."
                )


def _sums(module: nn.Module, known: dict[int, tuple[float, float]]) -> list[tuple[float, float]]:
    """The sum and the spread of each parameter, computed once."""
    for parameter in module.parameters():
        if id(parameter) not in known:
            values = parameter.detach()
            spread = float(values.max() - values.min()) if values.numel() else 0.0
            known[id(parameter)] = float(values.sum(dtype=torch.float64)), spread
    return [known[id(parameter)] for parameter in module.parameters()]
