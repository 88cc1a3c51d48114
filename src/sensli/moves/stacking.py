"""Copies of all blocks of a stack: blocks 0, 1, 2 become 0, 1, 2, 0, 1, 2, or 0, 0, 1, 1, 2, 2.

The copies are plain ones, with noise if that is wanted. Unlike a twin, which is an identity, a copy acts at once, so the function is
not kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from sensli.errors import SensliError, UnknownSite, UnsupportedSite, unknown_choice
from sensli.modules import checks, random_state
from sensli.modules.engines.distributed import readable_part
from sensli.modules.grown import grown_modules, new_in
from sensli.modules.running import device_of, note, run, tensors, to_device
from sensli.modules.wrappers import bare, block_inside, compile_like
from sensli.moves.inserting import (
    Cut,
    apply_cut,
    example_parameter,
    join_path,
    new_parameters,
    plan_cut,
    renames_of,
    take_out,
)
from sensli.moves.point import Bind, ListPlace, Point, Ref, list_renames, number_after
from sensli.moves.search import Refused, Request, Search
from sensli.moves.sites import Cost, Edit, Kind, New, Site, Sites, Skipped
from sensli.moves.trace.flow import ModuleCall, check_values, record
from sensli.moves.trace.stacks import Stack, parent_of
from sensli.moves.twin.finding import TwinFinder, block_flops
from sensli.moves.twin.twins import Twin
from sensli.text.records import Plain

ORDERS = ("stack", "interleave")  # the whole stack once more after its last block, or each block once more after itself


def check_copies(factor: Any, order: Any, spare: Any, noise: Any) -> tuple[int, str, int, float]:
    """How blocks are copied: how many times as many there will be, in which order, how many are spared at each end, with what noise."""
    return (
        checks.whole("factor", factor, 2, least=2),
        checks.one_of("order", order, ORDERS),
        checks.whole("spare", spare, 0, least=0),
        checks.at_least("noise", noise, 0, 0.01),
    )


@dataclass(frozen=True)
class StackCopy(Plain):
    """Copies of blocks of a stack, in their order: all after the last of them, which is the point's anchor, or each after its own."""

    tag: ClassVar[str] = "stack"
    kind: ClassVar[str] = "block"
    tolerance: ClassVar[float | None] = None

    block: str  # class of the blocks, for people
    blocks: tuple[Ref, ...]  # what is copied
    copies: int  # how often
    parameters: int = 0
    flops: int = 0  # of one forward pass, per sample
    order: str = field(default="stack", metadata={"sparse": True})
    noise: float = field(default=0.0, metadata={"sparse": True})  # on each tensor, as a share of its standard deviation
    seed: int = field(default=0, metadata={"sparse": True})  # of the noise

    def __str__(self) -> str:
        times = "a copy" if self.copies == 1 else f"{self.copies} copies"
        count = "block" if len(self.blocks) == 1 else f"{len(self.blocks)} blocks"
        each = "each of " if self.order == "interleave" else ""
        noise = f", noise {self.noise:g}, seed {self.seed}" if self.noise else ""
        return f"{times} of {each}{count} ({self.block}{noise})"

    def line(self, point: Point) -> str:
        return f"{self} up to {point.path}" if self.order == "interleave" else f"{self} {point}"

    def times(self, copies: int, *, noise: float = 0.0, seed: int = 0) -> StackCopy:
        """The same, copied so many times, with this noise."""
        parameters, flops = (number * copies // self.copies for number in (self.parameters, self.flops))
        return replace(self, copies=copies, parameters=parameters, flops=flops, noise=noise, seed=seed if noise else 0)

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
        if self.order not in ORDERS:
            raise ValueError(unknown_choice("order", self.order, ORDERS))
        if not (0 <= self.noise < math.inf and self.seed >= 0):
            raise ValueError(f"a noise of {self.noise} with seed {self.seed} cannot be drawn")


class Stacking(Edit):
    """The copies go in one after the other, each where a twin of the block before it would go."""

    copies = True

    def __init__(
        self, model: nn.Module, site: Site, stack: StackCopy, made: tuple[str, nn.Module] | None = None
    ) -> None:
        self._model, self._stack = model, stack
        if made is None:
            self._plan(model, site, stack)
            return
        # Later growths are gone when copies are taken out.
        self.site, self.renames, self.beside = site, {}, {}
        self.name, self.module = made
        number = new_in(self.module)
        found = [(path, module) for its, path, module in grown_modules(model) if its == number]
        self._paths, self.added = [path for path, _ in found], [module for _, module in found]

    def _plan(self, model: nn.Module, site: Site, stack: StackCopy) -> None:
        path, anchor = site.find(model)
        blocks = stack.sources(model)
        self._around = site.point.around(model)
        # Whose copies come after which block.
        groups = [(path, site.point, blocks * stack.copies)]
        if stack.order == "interleave":
            points = [replace(site.point, anchor=ref) for ref in stack.blocks]
            groups = [(own[0], point, [own] * stack.copies) for own, point in zip(blocks, points, strict=True)]
        planned = [plan_cut(model, point, after, takes_call=True) for after, point, _ in groups]
        self._sources = [source for _, _, sources in groups for source in sources]
        self._cuts = _cuts(
            model, [(cut, [name for name, _ in group[2]]) for cut, group in zip(planned, groups, strict=True)]
        )
        bound = tuple(Ref.to(*found) for found in self._around)
        point = replace(site.point, anchor=Ref.to(path, anchor), neighbours=bound, place=planned[-1].place)
        self.site = replace(site, point=point, move=replace(stack, blocks=tuple(Ref.to(*found) for found in blocks)))
        self._paths = [cut.path for cut in self._cuts]
        self.name = self._paths[0]
        self.renames = _renames(model, self._cuts)
        self.beside = {
            join_path(place, name): tuple(p.shape)
            for place, module in self._around
            for name, p in module.named_parameters(recurse=False)
        }

    def build(self) -> None:
        example_parameter(self._model, [module for _, module in self._sources])
        plain = Twin(self._stack.block, ())  # nothing in it is zero
        self.added = [plain.build(readable_part(self._model, block), self._model) for _, block in self._sources]
        for (_, source), copied in zip(self._sources, self.added, strict=True):
            compile_like(copied, source)
        if self._stack.noise:
            _add_noise(self.added, self._stack.noise, self._stack.seed)
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


def _cuts(model: nn.Module, groups: Sequence[tuple[Cut, Sequence[str]]]) -> list[Cut]:
    """Where each of the copies goes, as the model is when those before it are there: a group begins at the cut that was planned for it."""
    cuts: list[Cut] = []
    for first, sources in groups:
        if first.way == "list":
            start = number_after(int(first.key), _positions(cuts, first.parent)) + 1
            for position, source in enumerate(sources, start):
                source_now = number_after(int(_key_in(first.parent, source)), _positions(cuts, first.parent))
                cuts.append(replace(first, key=str(source_now), new=str(position)))
            continue
        wraps = first.way == "wrap"
        parent = join_path(first.parent, first.key) if wraps else first.parent
        taken = (
            set()
            if wraps
            else {*model.get_submodule(parent)._modules, *(cut.new for cut in cuts if cut.parent == parent)}
        )
        for index in range(len(sources)):
            new = next(name for number in count(1) if (name := f"grown{number}") not in taken)
            taken.add(new)
            after = replace(first, parent=parent, key=cuts[-1].new, side="after", way="sequence") if index else first
            cuts.append(replace(after, new=new))
    return cuts


def _positions(cuts: Sequence[Cut], container: str) -> list[int]:
    """Where cuts put blocks into a list, one after the other."""
    return [int(cut.new) for cut in cuts if cut.way == "list" and cut.parent == container]


def _renames(model: nn.Module, cuts: Sequence[Cut]) -> dict[str, str]:
    """The names that change: of what is wrapped, and of the blocks of lists that move up."""
    renames: dict[str, str] = {}
    for container in dict.fromkeys(cut.parent for cut in cuts if cut.way == "list"):
        renames.update(list_renames(model, container, *_positions(cuts, container)))
    for cut in cuts:
        if cut.way == "wrap":
            renames.update(renames_of(model, cut))
    return renames


def _add_noise(modules: Sequence[nn.Module], share: float, seed: int) -> None:
    """Move every parameter by noise whose standard deviation is this share of its own. The global random state stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (each for module in modules for each in module.parameters() if each.is_floating_point()):
            values = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
            drawn = torch.randn(parameter.shape, generator=generator, device="cpu", dtype=values.dtype)
            parameter.copy_(values + share * values.std(correction=0) * drawn.to(values.device))


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

NO_STACK = "it has no stack of equal blocks that the example runs through, one after the other"


def find_stack_copies(model: nn.Module, example: Any, *, order: str = "stack", spare: int = 0) -> Sites:
    """For each stack of equal blocks the site that copies it once, but for so many blocks at each of its ends. The model is only read."""
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
                site = _site(search, finder, stack, order, spare)
                _try(flow.model, site, example, flow.output)
            except Refused as refusal:
                skipped.append(Skipped(last.path, str(refusal)))
            else:
                found.append(replace(site, _root=Ref.to("", model)))
    if not search.stacks:
        skipped.append(Skipped("", NO_STACK))
    return Sites(found, skipped, model_name=type(model).__name__)


def after_blocks(found: Sites, name: str) -> Sites:
    """Of the sites of a model of this name those that put a copy of a block after it."""
    sites = [site for site in found if isinstance(site.move, Twin) and site.side == "after"]
    why = [] if sites else [Skipped("", f"select='least' copies blocks, and {NO_STACK}")]
    return Sites(sites, [*found.skipped, *why], notes=found.notes, model_name=name)


def _site(search: Search, finder: TwinFinder, stack: Stack, order: str, spare: int) -> Site:
    model, copied = search.model, stack.blocks[spare : len(stack.blocks) - spare]
    if not copied:
        raise Refused(f"its stack has {len(stack.blocks)} blocks, and spare={spare} leaves out so many at each end")
    last = copied[-1]
    for block in copied if order == "interleave" else (last,):
        assert block.result is not None
        search.check(block, "after", block.result, block=True)
    assert last.result is not None
    chained, place = _place(search, finder, stack, last)
    point = search.point(last, "after", last.result, block=True, chained=chained, place=place)
    blocks = [(call.path, model.get_submodule(call.path)) for call in copied]
    parameters = sum(parameter.numel() for _, block in blocks for parameter in block.parameters())
    flops = sum(map(block_flops, copied))
    refs = tuple(Ref.to(*block) for block in blocks)
    return Site(point, StackCopy(type(block_inside(last.module)).__name__, refs, 1, parameters, flops, order))


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


class StackKind(Kind):
    """Reads its moves from JSON, and proposes none: `find_sites` finds what keeps the function. `find_stack_copies` finds these."""

    move: ClassVar[type[StackCopy]] = StackCopy
