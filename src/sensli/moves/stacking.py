"""A stack of blocks once more, or several times, after itself: blocks 0, 1, 2 become 0, 1, 2, 0, 1, 2.

The copies are plain ones. Unlike a twin, which is an identity, a copy acts at once, so the function is not kept.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from sensli.errors import SensliError, UnknownSite, UnsupportedSite
from sensli.modules import random_state
from sensli.modules.engines.distributed import readable_part
from sensli.modules.running import device_of, note, run, tensors, to_device
from sensli.modules.wrappers import bare
from sensli.moves.inserting import (
    Cut,
    apply_cut,
    example_parameter,
    join,
    new_parameters,
    plan_cut,
    renames_of,
    take_out,
)
from sensli.moves.point import Bind, ListPlace, Point, Ref, list_renames
from sensli.moves.search import Refused, Request, Search
from sensli.moves.sites import Cost, Edit, Kind, New, Site, Sites, Skipped
from sensli.moves.trace.flow import ModuleCall, check_values, record
from sensli.moves.trace.stacks import Stack, parent_of
from sensli.moves.twin.finding import TwinFinder, block_flops
from sensli.moves.twin.twins import Twin
from sensli.text.records import Plain


@dataclass(frozen=True)
class StackCopy(Plain):
    """Copies of all blocks of a stack, in their order, after the last of them, which is the point's anchor."""

    tag: ClassVar[str] = "stack"
    kind: ClassVar[str] = "block"
    tolerance: ClassVar[float | None] = None

    block: str  # class of the blocks, for people
    blocks: tuple[Ref, ...]  # what is copied
    copies: int  # how often
    parameters: int = 0
    flops: int = 0  # of one forward pass, per sample

    def __str__(self) -> str:
        times = "a copy" if self.copies == 1 else f"{self.copies} copies"
        count = "block" if len(self.blocks) == 1 else f"{len(self.blocks)} blocks"
        return f"{times} of {count} ({self.block})"

    def line(self, point: Point) -> str:
        return f"{self} {point}"

    def times(self, copies: int) -> StackCopy:
        """The same, copied so many times."""
        numbers = (number * copies // self.copies for number in (self.parameters, self.flops))
        return StackCopy(self.block, self.blocks, copies, *numbers)

    def cost(self, point: Point) -> Cost:
        return Cost(self.parameters, self.flops, self.copies * len(self.blocks))

    def gauge(self, site: Site, model: nn.Module) -> NoReturn:
        raise UnsupportedSite(f"'{site}' cannot be measured: copies that act at once have no gradient beforehand.")

    def plan(self, model: nn.Module, site: Site) -> Edit:
        return Stacking(model, site, self)

    def made(self, model: nn.Module, site: Site, module: nn.Module, path: str) -> Edit:
        return Stacking(model, site, self, (path, module))

    def joining(self, model: nn.Module, site: Site) -> Sequence[New]:
        near = [module for _, module in site.point.around(model)]
        found: list[New] = []
        for _, block in self.sources(model):
            own = dict(block.named_parameters())
            like = {name: nn.Parameter(torch.empty(p.shape, device="meta")) for name, p in own.items()}
            found += new_parameters(own, site, like, near)
        return found

    def sources(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The blocks that are copied, with their paths today."""
        found = []
        for ref in self.blocks:
            place = ref.find(model)
            if place is None:
                raise UnknownSite(
                    f"'{ref.path}' is not part of this {type(model).__name__}, but is a block of the stack that would be copied. It was "
                    "removed or replaced since. Find the sites again."
                )
            found.append(place)
        return found

    def bound(self, bind: Bind) -> StackCopy:
        return replace(self, blocks=tuple(map(bind, self.blocks)))

    def by_path(self) -> StackCopy:
        return self.bound(lambda ref: Ref(ref.path))

    def check(self, point: Point) -> None:
        if not self.blocks or self.copies < 1:
            raise ValueError(f"{self.copies} copies of {len(self.blocks)} blocks are not a stack")


class Stacking(Edit):
    """The copies go in one after the other, each where a twin of the last block would go."""

    copies = True

    def __init__(
        self, model: nn.Module, site: Site, stack: StackCopy, made: tuple[str, nn.Module] | None = None
    ) -> None:
        self._model, self._stack = model, stack
        if made is None:
            self._plan(model, site, stack)
            return
        # Later growths are gone when copies are taken out, so they are neighbours as they were.
        self.site, self.renames, self.beside = site, {}, {}
        self.name, self.module = made
        parent, _, key = self.name.rpartition(".")
        keys = list(model.get_submodule(parent)._modules)
        count = stack.copies * len(stack.blocks)
        self._paths = [join(parent, each) for each in keys[keys.index(key) :][:count]]
        self.added = [model.get_submodule(each) for each in self._paths]

    def _plan(self, model: nn.Module, site: Site, stack: StackCopy) -> None:
        path, anchor = site.find(model)
        self._sources = stack.sources(model) * stack.copies
        self._around = site.point.around(model)
        first = plan_cut(model, site.point, path, takes_call=True)
        self._cuts = _cuts(model, first, [source for source, _ in self._sources])
        bound = tuple(Ref.to(*found) for found in self._around)
        point = replace(site.point, anchor=Ref.to(path, anchor), neighbours=bound, place=first.place)
        blocks = tuple(Ref.to(*found) for found in self._sources[: len(stack.blocks)])
        self.site = replace(site, point=point, move=replace(stack, blocks=blocks))
        self._paths = [cut.path for cut in self._cuts]
        self.name = self._paths[0]
        if first.way == "list":
            self.renames = list_renames(model, first.parent, int(first.new), more=len(self._cuts))
        else:
            self.renames = renames_of(model, first)
        self.beside = {
            join(place, name): tuple(p.shape)
            for place, module in self._around
            for name, p in module.named_parameters(recurse=False)
        }

    def build(self) -> None:
        example_parameter(self._model, [module for _, module in self._sources])
        whole, _ = readable_part(self._model, self._model)
        plain = Twin(self._stack.block, ())  # nothing in it is zero
        self.added = [plain.build(whole.get_submodule(path), whole) for path, _ in self._sources]
        self.module = self.added[0]
        self.prepared()

    def prepared(self) -> None:
        near = [module for _, module in self._around]
        self.new = [
            new
            for cut, (_, source), module in zip(self._cuts, self._sources, self.added, strict=True)
            for new in new_parameters(
                dict(source.named_parameters()), self.site, dict(module.named_parameters()), near, prefix=cut.path
            )
        ]

    def apply(self) -> None:
        for cut, module in zip(self._cuts, self.added, strict=True):
            apply_cut(self._model, cut, module)

    def revert(self) -> None:
        for path in reversed(self._paths):
            take_out(self._model, path, self.site.point.place)

    @property
    def gone(self) -> list[nn.Parameter]:
        return [parameter for module in self.added for parameter in module.parameters()]


def _cuts(model: nn.Module, first: Cut, sources: Sequence[str]) -> list[Cut]:
    """Where each of the copies goes, the first of them at a cut that was planned."""
    if first.way == "list":
        keys = [_key_in(first.parent, source) for source in sources]
        return [replace(first, key=key, new=str(int(first.new) + i)) for i, key in enumerate(keys)]
    wraps = first.way == "wrap"
    taken = {} if wraps else model.get_submodule(first.parent)._modules
    cuts, number = [first], 1
    while len(cuts) < len(sources):
        number += 1
        key = f"grown{number}"
        if key not in taken and key != first.new:
            parent = join(first.parent, first.key) if wraps else first.parent
            cuts.append(replace(first, parent=parent, key=cuts[-1].new, side="after", way="sequence", new=key))
    return cuts


def _key_in(container: str, path: str) -> str:
    """The number of a block in its list; layers inserted since may stand around it there."""
    inside = path[len(container) + 1 :] if container else path
    if container and not path.startswith(f"{container}."):
        raise UnsupportedSite(
            f"{path} is not in {container} any more, where a copy of it would go. Find the sites again."
        )
    return inside.split(".")[0]


# ---- Which stacks of blocks a model has that could be copied as a whole, and where the copies would go, found by trial on
# a copy.


def find_stacks(model: nn.Module, example: Any) -> Sites:
    """For each stack of equal blocks the site that copies it once, after its last block. The model is only read."""
    model = bare(model)
    check_values(example)
    with torch.inference_mode(False):
        example = to_device(example, device_of(model))
        flow = record(model, example)
        search = Search(model, example, flow, Request(form="twin"), [])
        finder = TwinFinder(flow, example, "copy")
        found, skipped = list[Site](), list[Skipped]()
        for stack in sorted(search.stacks, key=lambda stack: stack.blocks[0].began):
            last = stack.blocks[-1]
            try:
                site = _site(search, finder, stack)
                _try(flow.model, site, example, flow.output)
            except Refused as refusal:
                skipped.append(Skipped(last.path, str(refusal)))
            else:
                found.append(replace(site, _root=Ref.to("", model)))
    return Sites(found, skipped, model_name=type(model).__name__)


def _site(search: Search, finder: TwinFinder, stack: Stack) -> Site:
    model, last = search.model, stack.blocks[-1]
    assert last.result is not None
    search.check(last, "after", last.result, block=True)
    chained, place = _place(search, finder, stack, last)
    point = search.point(last, "after", last.result, block=True, chained=chained, place=place)
    blocks = [(call.path, model.get_submodule(call.path)) for call in stack.blocks]
    parameters = sum(parameter.numel() for _, block in blocks for parameter in block.parameters())
    flops = sum(map(block_flops, stack.blocks))
    refs = tuple(Ref.to(*block) for block in blocks)
    return Site(point, StackCopy(type(last.module).__name__, refs, 1, parameters, flops))


def _place(search: Search, finder: TwinFinder, stack: Stack, last: ModuleCall) -> tuple[bool, ListPlace | None]:
    """Whether the copies go into an ``nn.Sequential`` that is called as a whole, and what must follow if they go into a list."""
    assert last.result is not None
    if stack.added:
        in_sequential = isinstance(search.model.get_submodule(parent_of(last.path)), nn.Sequential)
        return True, finder.find_null(last, chained=in_sequential)[1]
    chained = search.around.chained(last.path)
    try:  # an identity in the list shows best whether the list can take a block: nothing may change
        return chained, finder.find(last, last.result, chained=chained)[1]
    except Refused:  # a block with a norm after its sum, say
        return chained, finder.find_plain(last, chained=chained)


def _try(trial: nn.Module, site: Site, example: Any, before: Any) -> None:
    """Refuse a stack whose copies would not each run once, or with which the model returns something of another shape."""
    here = replace(
        site,
        point=site.point.in_model(trial),
        move=site.move.bound(lambda r: Ref.to(r.path, trial.get_submodule(r.path))),
    )
    edit = here.move.plan(trial, here)
    edit.build()
    calls: list[nn.Module] = []
    handles = [module.register_forward_pre_hook(lambda module, _: calls.append(module)) for module in edit.added]
    for module in edit.added:
        module.eval()
    edit.apply()
    try:
        with random_state.kept(), torch.no_grad():
            after = run(trial, copy.deepcopy(example))
    except SensliError:
        raise
    except Exception as error:
        note(error)
        raise Refused(
            f"the forward pass fails with a copy of the stack after it ({type(error).__name__}: {error})"
        ) from error
    finally:
        edit.revert()
        for handle in handles:
            handle.remove()
    if any(calls.count(module) != 1 for module in edit.added):
        raise Refused("the forward pass would not run each block of a copy of the stack once")
    if _first(before) != _first(after):
        raise Refused("the model returns something else with a copy of the stack after it")


def _first(output: Any) -> tuple[int, ...] | None:
    """The shape of the first tensor that a model returns: others may be lists of all blocks' states."""
    return next((tuple(tensor.shape) for tensor in tensors(output)), None)


# ---- The kind of stacks that are copied as a whole.


class StackKind(Kind):
    """Reads its moves from JSON, and proposes none: `find_sites` finds what keeps the function. `find_stacks` finds these."""

    move: ClassVar[type[StackCopy]] = StackCopy
