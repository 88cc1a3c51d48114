"""Widths that a configuration states once for all blocks (``intermediate_size``): one site widens all of them and the configuration.

A model that was built from a configuration can be saved and loaded by its library only as long as the configuration describes it. So
where all blocks have the same width and the class builds wider blocks from a changed configuration, that is the site: the model built
again must have exactly the shapes, and inside its modules the numbers, of the one that is really wider.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from torch import nn

from sensli.modules.failing import let_memory_through
from sensli.moves.point import Ref
from sensli.moves.sites import Site
from sensli.moves.twin.rebuilding import build_again, differences, shapes
from sensli.moves.width.confirming import Trial
from sensli.moves.width.heads import common_path, held_objects
from sensli.moves.width.starts.registry import STARTS
from sensli.moves.width.widening import covers_all_blocks, resizes
from sensli.moves.width.width import Size, Width, family

_AT_ONCE = 3  # numbers of a configuration that change together: heads, those of the keys and values, a total
_UNSAID = ("inner", "intermediate", "ffn", "mlp")  # in names of widths that a configuration may leave to a default


def as_configured(trial: Trial, model: nn.Module, sites: Sequence[Site]) -> list[Site]:
    """The sites, with those of equal blocks as one where a configuration states their width."""
    built = _Built(trial.model)
    found: list[Site] = []
    left: list[Site] = []
    for group in _alike(sites, family):
        together = _together(trial, model, group, built)
        found += [] if together is None else [together]
        left += group if together is None else []
    # One number may stand for the blocks of an encoder and a decoder.
    for group in _alike(left, lambda path: path.rpartition(".")[2]):
        together = _together(trial, model, group, built) if len({family(site.path) for site in group}) > 1 else None
        found += group if together is None else [together]
    return found


def _alike(sites: Sequence[Site], named: Callable[[str], str]) -> list[list[Site]]:
    """Sites by what they do, whatever block they do it in."""
    groups: dict[object, list[Site]] = {}
    for site in sites:
        move = _width(site)
        axes = tuple((named(axis.module.path), replace(axis, module=Ref(""))) for axis in move.axes)
        groups.setdefault((move.units, move.more, move.heads, axes), []).append(site)
    return list(groups.values())


class _Built:
    """Which modules of a model their class builds again from an object that they hold; each is tried once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[str, str] = {}

    def around(self, paths: Sequence[str]) -> tuple[str, str] | None:
        """The outermost such module around all paths, and the name of the object; nobody outside may hold the object too."""
        parts = common_path(paths).split(".")
        for owner in dict.fromkeys(("", *(".".join(parts[: n + 1]) for n in range(len(parts))))):
            if owner not in self._known:
                self._known[owner] = self._configuration(self._model.get_submodule(owner))
            if self._known[owner]:
                return owner, self._known[owner]
        return None

    def _configuration(self, module: nn.Module) -> str:
        if not hasattr(module, "save_pretrained"):
            return ""  # nobody saves it by its configuration, so every block may have its own width
        inside = {id(part) for part in module.modules()}
        outside = {id(o) for part in self._model.modules() if id(part) not in inside for _, o in held_objects(part)}
        for name, held in held_objects(module):
            if id(held) not in outside and vars(held):
                built = build_again(module, held)
                if built is not None and shapes(built).keys() == shapes(module).keys():
                    return name
        return ""


def _together(trial: Trial, model: nn.Module, group: list[Site], built: _Built) -> Site | None:
    if len(group) > 1 and not STARTS[_width(group[0]).start].together:
        return None
    described = built.around([axis.module.path for site in group for axis in _width(site).axes])
    return None if described is None else _Together(trial, model, group, *described).site()


class _Together:
    """Sites of equal blocks, and the configuration that may state their width."""

    def __init__(self, trial: Trial, model: nn.Module, group: list[Site], owner: str, name: str) -> None:
        self.trial, self.model, self.owner, self.name = trial, model, owner, name
        self.module = trial.model.get_submodule(owner)
        moves = [_width(site) for site in group]
        self.point = group[0].point
        self.move = replace(
            moves[0],
            axes=tuple(axis for move in moves for axis in move.axes),
            sizes=tuple({self._number(size): size for move in moves for size in move.sizes}.values()),
            readers=tuple(reader for move in moves for reader in move.readers),
            added=sum(move.added for move in moves),
            flops=sum(move.flops for move in moves),
            blocks=len(moves),
        )

    def site(self) -> Site | None:
        """All blocks wider and the configuration with them; None where it does not state the width."""
        before = build_again(self.module, getattr(self.module, self.name))
        if before is None or not covers_all_blocks(self.model, self.move):
            return None
        wanted, quiet = self._wider(shapes(before)), differences(self.module, before)
        for numbers in self._guesses():
            changed = self._changed(numbers)
            built = build_again(self.module, changed)
            if built is None or shapes(built) != wanted or not _is_valid(changed):
                continue
            move = replace(self.move, sizes=(*self.move.sizes, *numbers))
            site = Site(self.point, replace(move, sizes=(*move.sizes, *self._inside(before, built, move))))
            with self.trial.widened([site]):
                left = differences(self.module, build_again(self.module, getattr(self.module, self.name)))
            if left <= quiet and not self.trial.of([site]):
                return site
        return None

    def _wider(self, built: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shapes that the configuration must give: those that it gives now, wider."""
        wider = {id(each.tensor): each.new_shape for each in resizes(self.trial.model, self.move.by_path())}
        ours = self.module.state_dict(keep_vars=True)
        return {name: wider.get(id(ours[name]), shape) for name, shape in built.items()}

    def _guesses(self) -> Iterator[tuple[Size, ...]]:
        """Numbers of the configuration that may state the width, as few as do."""
        owner, units = self.model.get_submodule(self.owner), self.move.units
        held = getattr(owner, self.name)
        said, unsaid = [], []
        for through, holder in [((self.name,), held), *(((self.name, name), part) for name, part in _parts(held))]:
            for name, value in vars(holder).items():
                size = Size(Ref.to(self.owner, owner), name, 1, through)
                if self.move.heads:
                    if type(value) is int and "head" in name and value in (units, units * self.move.heads):
                        said.append(replace(size, per_unit=value // units))
                elif type(value) is int and value == units:
                    said.append(size)
                elif value is None and any(word in name for word in _UNSAID):
                    unsaid.append(replace(size, unsaid=True))
        for count in range(1, _AT_ONCE + 1):
            yield from combinations(said, count)
        yield from ((size,) for size in unsaid)

    def _changed(self, numbers: Sequence[Size]) -> Any:
        """A copy of the configuration with other numbers."""
        configuration = copy.deepcopy(getattr(self.module, self.name))
        for size in numbers:
            holder = configuration
            for name in size.through[1:]:
                holder = getattr(holder, name)
            setattr(holder, size.name, (self.move.units + self.move.more) * size.per_unit)
        return configuration

    def _inside(self, before: nn.Module, built: nn.Module, move: Width) -> list[Size]:
        """Numbers inside the modules that the configuration gives, though nothing reads them."""
        known = {self._number(size) for size in move.sizes}
        there = dict(built.named_modules())
        found = []
        for path, module in before.named_modules():
            for name, value in vars(module).items():
                target = vars(there[path]).get(name) if path in there else None
                more = target - value if type(value) is int and type(target) is int else 0
                if more and more % move.more == 0:
                    full = ".".join(part for part in (self.owner, path) if part)
                    found.append(Size(Ref.to(full, self.model.get_submodule(full)), name, more // move.more))
        return [size for size in found if self._number(size) not in known]

    def _number(self, size: Size) -> tuple[int, str]:
        """The same for one number that several modules reach."""
        return id(size.holder(self.model.get_submodule(size.module.path))), size.name


def _is_valid(configuration: Any) -> bool:
    """Whether the library reads the configuration back: it may refuse numbers that the model itself would take."""
    if not hasattr(configuration, "to_dict") or not hasattr(type(configuration), "from_dict"):
        return True
    try:
        type(configuration).from_dict(configuration.to_dict())
    except Exception as error:
        let_memory_through(error)
        return False
    return True


def _parts(held: Any) -> Iterator[tuple[str, Any]]:
    for name, part in vars(held).items():
        if hasattr(part, "__dict__") and hasattr(part, "to_dict"):
            yield name, part


def _width(site: Site) -> Width:
    assert isinstance(site.move, Width)
    return site.move
