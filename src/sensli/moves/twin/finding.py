"""How blocks are found: which parameters of a copy must be zero for it to be an identity, and where the copy goes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import SensliError
from sensli.modules import random_state
from sensli.modules.copies import copied_block
from sensli.modules.flops import count_flops
from sensli.modules.grown import Chain, ParametricLayer, ResidualLayer
from sensli.modules.running import Slot, first_samples, first_tensor, is_plain, note, with_value, without_memory
from sensli.modules.wrappers import block_inside
from sensli.moves.point import ListPlace, first_number
from sensli.moves.search import Refused, Search
from sensli.moves.sites import Kind, Site
from sensli.moves.trace.flow import Flow, ModuleCall, SeenTensor
from sensli.moves.trace.graph import nearest_parameters
from sensli.moves.trace.stacks import is_list, likeness, manner, never_negative, parent_of, signature
from sensli.moves.twin.counting import ListPlanner, equal_blocks, own_numbers
from sensli.moves.twin.twins import Twin

# ---- Finding by trial which parameters of a block must be zero for it to be an identity.
#
# The parameters are tried in the order of their distance from the output in the autograd graph, which also sees those
# whose module's forward is bypassed. Where no set of zeros does it, modules on the main path (the norm of a post-norm
# block, a trailing activation, a shortcut) are replaced by identities in the twin. Equality is to the bit, on several
# inputs, in eval and in training mode.


_LARGE = 2**12  # numbers of one sample that are enough for statistics of their own
_LOCKS = 3  # how many first choices are taken back before giving up


class BlockSearch:
    """Which zeros and identities make a block give its input back.

    The block is copied, and called again and again with its arguments and changed between the calls.
    """

    def __init__(self, call: ModuleCall, seen: SeenTensor, *, null: bool = False) -> None:
        assert call.slot is not None and call.given is not None and call.result is not None
        self.call, self.slot, self.null = call, call.slot, null
        self.block = copied_block(call.module)
        self._verdicts: dict[bool, bool] = {}  # by whether it trains, until the block changes again
        # Never chained: somebody's eval() returns None.
        self.block.eval()
        self.remembers = _remembers(call)
        self._others = without_memory(_other_arguments(call))
        few = self._reproduce(call.given, call.result)
        generator = torch.Generator().manual_seed(0)
        self._make_general(generator)
        # What the search changes, as it was: by another memory, and never in place.
        self._values = {name: p.detach() for name, p in self.block.named_parameters()}
        self._originals: dict[str, nn.Module] = {}
        value = seen.tensor.detach()[:few]
        stretched = value * _uniform(value, generator, 0.5, 1.5)  # keeps every sign, so the value of a ReLU stays one
        self.inputs = [value, stretched]
        if not never_negative(seen):
            self.inputs.append(-value)  # nothing proves that values here are never negative, so these must pass too

    def _reproduce(self, given: SeenTensor, result: SeenTensor) -> int:
        """A second call must give what the first gave, or nothing here means anything. How many samples do for the search."""
        count = len(given.tensor) if given.tensor.dim() else 0
        self.args, self.kwargs = self._others
        if given.overwritten or result.overwritten:
            if self.remembers:
                raise Refused("works in place on its input and takes a stateful object, so its call cannot be repeated")
            return count
        for few in dict.fromkeys((min(_few(given.tensor), count), count)):
            self.args, self.kwargs = first_samples(self._others, few, count)
            again = self.run(given.tensor.detach()[:few])
            # Not to the bit: some kernels depend on how memory is aligned.
            if again is not None and torch.allclose(again, result.tensor[:few], rtol=1e-4, atol=1e-5):
                return few
        raise Refused("is not deterministic (two calls with the same input differ), so a twin cannot be verified")

    def _make_general(self, generator: torch.Generator) -> None:
        """No parameter may be zero or one by chance of its initialisation: what is trained later would not be."""
        with torch.no_grad():
            for parameter in self.block.parameters():
                if parameter.is_floating_point():
                    spread = parameter.float().std().item() if parameter.numel() > 1 else 0.0
                    size = 0.1 * (spread if 0 < spread < 1 else 1.0)
                    parameter.add_(size * _uniform(parameter, generator, 0.2, 1.0))

    # --- what a state of the block is worth ---

    def run(self, value: Tensor, *, graph: bool = False) -> Tensor | None:
        """What the block hands on for a value; None where it fails or gives no number."""
        args, kwargs = with_value(self.args, self.kwargs, self.slot, value.clone())
        try:
            with torch.set_grad_enabled(graph):
                output = first_tensor(self.block(*args, **kwargs))
        except Exception as error:
            note(error)
            return None
        if output is None or output.shape != value.shape or not torch.isfinite(output).all():
            return None
        return output

    def _gives_back(self, value: Tensor) -> bool:
        """Whether the block gives its input back, or zero where that is wanted."""
        output = self.run(value)
        return output is not None and torch.equal(output, torch.zeros_like(value) if self.null else value)

    def _gives_back_in_training(self) -> bool:
        """The same with batch statistics and dropout."""
        buffers = {name: buffer.clone() for name, buffer in self.block.named_buffers()}
        self.block.train()
        try:
            # A batch too small for batch statistics proves nothing either way.
            return self._gives_back(self.inputs[1]) or self.run(self.inputs[1]) is None
        finally:
            self.block.eval()
            with torch.no_grad():
                for name, buffer in self.block.named_buffers():
                    buffer.copy_(buffers[name])

    def is_done(self, *, training: bool = False) -> bool:
        """Whether the block gives all inputs back, in evaluation or in training mode."""
        if training not in self._verdicts:
            done = self._gives_back_in_training() if training else all(map(self._gives_back, self.inputs))
            self._verdicts[training] = done
        return self._verdicts[training]

    def _holds(self) -> bool:
        return self.is_done() and self.is_done(training=True)

    def _is_progress(self, before: Tensor | None, after: Tensor | None) -> bool:
        """Whether a change shows and the output still depends on the input."""
        if before is None or after is None or torch.equal(before, after):
            return False
        other = self.run(self.inputs[1])
        return other is not None and not torch.equal(after, other)

    def without_gradient(self, names: list[str]) -> str | None:
        """A zeroed parameter that would get no gradient, if there is one: it could never leave zero."""
        output = self.run(self.inputs[0], graph=True)
        assert output is not None
        generator = torch.Generator().manual_seed(1)
        named = dict(self.block.named_parameters())
        wanted = [named[name].requires_grad_() for name in names]
        loss = (output * _uniform(output, generator, 0.2, 1.0)).sum()
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(names)
        return next((n for n, g in zip(names, gradients, strict=True) if g is None or not g.any()), None)

    # --- changes that can be taken back ---

    def _zero(self, name: str) -> None:
        self._fill(name, torch.zeros_like(self._values[name]))

    def _restore(self, name: str) -> None:
        self._fill(name, self._values[name])

    def _fill(self, name: str, value: Tensor) -> None:
        self.block.get_parameter(name).data = value
        self._verdicts.clear()

    def _replace(self, path: str) -> None:
        self._originals.setdefault(path, self.block.get_submodule(path))
        self._put(path, nn.Identity())

    def _put_back(self, path: str) -> None:
        self._put(path, self._originals[path])

    def _put(self, path: str, module: nn.Module) -> None:
        parent, _, key = path.rpartition(".")
        self.block.get_submodule(parent)._modules[key] = module
        self._verdicts.clear()

    def _undo(self) -> None:
        """Take all changes back."""
        for path in sorted(self._originals, key=lambda path: path.count(".")):  # what contains others first
            self._put_back(path)
        self._originals.clear()
        for name in self._values:
            self._restore(name)

    # --- the search ---

    def search(self, replaceable: list[str]) -> Twin:
        """The plan of a twin that gives its input back, with no needless zero and no needless identity."""
        order = self._nearest_first()
        problem = (
            "cannot be made an identity by zeroing parameters: it has no connection that passes its input on unchanged"
        )
        locked: set[str] = set()
        for _ in range(_LOCKS):
            free = [name for name in order if name not in locked]
            zeroed = self._change_greedily(free, self._zero, self._restore)
            replaced: list[str] = []
            if not self._holds():  # identities for the modules that are still between the input and the output
                between = [path for path in replaceable if not self._ends_branch(path, zeroed)]
                replaced = self._change_greedily(between, self._replace, self._put_back)
            if self.is_done() and not self.is_done(training=True):
                # Something on the main path rests in eval mode: a dropout.
                replaced += self._replace_resting(replaceable, replaced)
            zeroed = [name for name in zeroed if not any(name.startswith(f"{path}.") for path in replaced)]
            if self._holds():
                self._take_back_needless(zeroed, replaced)
                size = sum(p.numel() for path in replaced for p in self._originals[path].parameters())
                if not zeroed:
                    problem = "is an identity only without all of its parameters, so a twin would learn nothing"
                elif (stuck := self.without_gradient(zeroed)) is not None:
                    problem = f"is an identity with zeros that get no gradient ({stuck}), so a twin would learn nothing"
                elif 2 * size >= sum(value.numel() for value in self._values.values()):
                    problem = "is an identity only if most of it is replaced by identities"
                else:
                    return self._twin(zeroed, replaced)
            self._undo()
            if not zeroed:
                break
            locked |= {name for name in order if parent_of(name) == parent_of(zeroed[0])}
        raise Refused(problem)

    def search_null(self) -> Twin:
        """The plan of a twin that gives zero, for a loop that adds what its blocks give: its last map is zero, as a rule."""
        zeroed: list[str] = []
        for name in self._nearest_first():
            self._zero(name)
            zeroed.append(name)
            if self._gives_back(self.inputs[0]):
                break
        if not self._holds():
            raise Refused(
                "does not give zero when its parameters are zero, so a copy of it would change what the loop adds up"
            )
        self._take_back_needless(zeroed, [])
        stuck = self.without_gradient(zeroed)
        if stuck is not None:
            raise Refused(f"gives zero only with zeros that get no gradient ({stuck}), so a twin would learn nothing")
        return self._twin(zeroed, [])

    def _twin(self, zeroed: list[str], replaced: list[str]) -> Twin:
        """The plan that came of the search; the block has been left as it says."""
        return Twin(
            block=type(block_inside(self.call.module)).__name__,
            zeroed=tuple(zeroed),
            replaced=tuple(replaced),
            parameters=sum(p.numel() for p in self.block.parameters()),
            flops=block_flops(self.call),
            remembers=self.remembers,
            null=self.null,
        )

    def _nearest_first(self) -> list[str]:
        """The parameters in the order of their distance from the output."""
        for parameter in self.block.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        output = self.run(self.inputs[0], graph=True)
        if output is None or output.grad_fn is None:
            raise Refused("does not run on its own output, or no gradient passes through it")
        names = {id(p): name for name, p in self.block.named_parameters()}
        return list(dict.fromkeys(nearest_parameters(names, output.grad_fn, limit=100_000)))

    def _change_greedily(
        self, candidates: Iterable[str], change: Callable[[str], None], take_back: Callable[[str], None]
    ) -> list[str]:
        """Make one change after another that shows and leaves the output a function of the input, until the block holds."""
        made: list[str] = []
        now = self.run(self.inputs[0])
        for each in candidates:
            if now is not None and torch.equal(now, self.inputs[0]) and self._holds():
                break
            if any(each.startswith(f"{done}.") or done.startswith(f"{each}.") for done in made):
                continue
            change(each)
            after = self.run(self.inputs[0])
            if self._is_progress(now, after):
                made.append(each)
                now = after
            else:
                take_back(each)
        return made

    def _ends_branch(self, path: str, zeroed: Collection[str]) -> bool:
        """Whether all of a module's parameters are zero: an identity in its place would open the branch again."""
        own = {f"{path}.{name}" for name, _ in self.block.get_submodule(path).named_parameters()}
        return bool(own) and own <= set(zeroed)

    def _replace_resting(self, candidates: list[str], replaced: list[str]) -> list[str]:
        """Put identities for modules without parameters that do nothing in eval mode; what is not needed is taken back later."""
        resting: list[str] = []
        for path in candidates:
            if any(path == done or path.startswith(f"{done}.") for done in (*replaced, *resting)):
                continue
            module = self.block.get_submodule(path)
            if any(True for _ in module.parameters()) or any(True for _ in module.children()):
                continue
            self._replace(path)
            if self.is_done():
                resting.append(path)
            else:
                self._put_back(path)
        return resting

    def _take_back_needless(self, zeroed: list[str], replaced: list[str]) -> None:
        """The block holds as an identity: take back, in the block and in these lists, what is not needed for that."""
        for path in list(replaced):
            self._put_back(path)
            for name in self._values:
                if name.startswith(f"{path}."):
                    self._restore(name)
            if self._holds():
                replaced.remove(path)
            else:
                self._replace(path)
        for name in reversed(list(zeroed)):
            self._restore(name)
            if self._holds():
                zeroed.remove(name)
            else:
                self._zero(name)


def _few(value: Tensor) -> int:
    """Samples that show as much as the whole batch, which a block handles one by one as a rule: two for the statistics of a small one."""
    return 1 if value.dim() > 2 and value[0].numel() >= _LARGE else 2


def _uniform(like: Tensor, generator: torch.Generator, low: float, high: float) -> Tensor:
    drawn = torch.rand(like.shape, generator=generator, device=generator.device) * (high - low) + low
    return drawn.to(like.device, like.dtype)


def _other_arguments(call: ModuleCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block's call without the value that it maps."""
    assert call.slot is not None
    return with_value(call.args, call.kwargs, call.slot, None)


def _remembers(call: ModuleCall) -> bool:
    """Whether a block is called with an object that it may change, such as a cache."""
    return not is_plain(_other_arguments(call))


def _replaceable(flow: Flow, call: ModuleCall) -> list[str]:
    """Modules inside a block that map one tensor to one of the same shape, once; the smallest first."""
    prefix = f"{call.path}."
    inner = [c for c in flow.calls if c.path.startswith(prefix) and call.began < c.began and c.ended < call.ended]
    paths = [
        c.path
        for c in inner
        if c.slot is not None and c.output is not None and len(c.inputs) == 1 and len(flow.calls_of(c.path)) == 1
    ]
    depth = {path: sum(other.startswith(f"{path}.") for other in paths) for path in paths}
    return [path[len(call.path) + 1 :] for path in sorted(paths, key=lambda path: depth[path])]


class _Bound(nn.Module):
    """A block with its other arguments filled in."""

    def __init__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], slot: Slot) -> None:
        super().__init__()
        self.block = block
        self._arguments = (args, kwargs, slot)

    def forward(self, value: Tensor) -> Any:
        args, kwargs = with_value(*self._arguments, value)
        return self.block(*args, **kwargs)


def block_flops(call: ModuleCall) -> int:
    """FLOPs of one call of a block, per sample; 0 where they cannot be counted."""
    assert call.given is not None and call.slot is not None
    others, value = without_memory(_other_arguments(call)), call.given.tensor.detach()
    count = len(value) if value.dim() else 0
    for few in dict.fromkeys((min(1, count), count)):  # one sample, if the block takes one
        args, kwargs = first_samples(others, few, count)
        with suppress(SensliError):
            return int(count_flops(_Bound(call.module, args, kwargs, call.slot), (value[:few],)))
    return 0


# ---- For a block of a stack: its twin, and where the twin would go.


class TwinFinder:
    """Finds twins in the model of one run; what was learned on a block is tried first on its equals."""

    def __init__(self, flow: Flow, example: Any, init: str) -> None:
        self._flow, self._init = flow, init
        self._planner = ListPlanner(flow, example)
        self._plans: dict[object, Twin] = {}  # by what is alike
        self._sized: dict[object, Twin] = {}  # by what is equal
        self._refused: dict[object, str] = {}
        # Of a list: for each block the first and the last of its equals, and what must follow when the list takes a twin of them.
        self._equals: dict[str, list[tuple[int, int]]] = {}
        self._places: dict[tuple[str, tuple[int, int]], ListPlace | None] = {}
        self._numbers: dict[str, dict[str, list[tuple[str, str]]]] = {}  # of a container: what tells its blocks apart

    def find(self, call: ModuleCall, seen: SeenTensor, *, chained: bool) -> tuple[Twin, ListPlace | None]:
        """The layer and, where it goes into a list, what must follow. Raises `Refused` with the reason."""
        if isinstance(call.module, (ResidualLayer, ParametricLayer)):
            raise Refused("is an inserted layer, not an original block of the model")
        twin = self._twin(call, seen)
        return replace(twin, init=self._init), self.place(call, twin, chained=chained)

    def find_null(self, call: ModuleCall, *, chained: bool) -> tuple[Twin, ListPlace | None]:
        """The same for a loop that adds what its blocks give, so that the new one must give zero."""
        assert call.given is not None
        kind = (signature(call.module), manner(call.module))
        if kind in self._refused:
            raise Refused(self._refused[kind])
        try:
            twin = self._plans.get(kind)
            if twin is None:
                with random_state.kept():
                    twin = BlockSearch(call, call.given, null=True).search_null()
            place = self.place(call, twin, chained=chained)
            if place is None and not chained:
                raise Refused("is in a list that cannot take another block: a trial with one more changed the output")
        except Refused as refusal:
            self._refused[kind] = str(refusal)
            raise
        self._plans[kind] = twin
        return replace(twin, init=self._init), place

    def find_plain(self, call: ModuleCall, *, chained: bool) -> ListPlace | None:
        """Where a plain copy of a block goes that has no twin: what must follow in a list. Raises `Refused` with the reason."""
        plain = Twin(type(block_inside(call.module)).__name__, (), remembers=_remembers(call))  # nothing in it is zero
        return self.place(call, plain, chained=chained)

    def _twin(self, call: ModuleCall, seen: SeenTensor) -> Twin:
        """The plan, found on the first of all blocks that are alike; a trial in the model tells whether it holds for the others."""
        how = (manner(call.module), never_negative(seen))
        equal, alike = (signature(call.module), *how), (likeness(call.module), *how)
        if equal in self._sized:
            return self._sized[equal]
        if alike in self._refused:
            raise Refused(self._refused[alike])
        try:
            if alike in self._plans:
                twin = _twin_like(call, self._plans[alike])
            else:
                with random_state.kept():
                    twin = BlockSearch(call, seen).search(_replaceable(self._flow, call))
        except Refused as refusal:
            self._refused[alike] = str(refusal)
            raise
        self._plans[alike] = self._sized[equal] = twin
        return twin

    def place(self, call: ModuleCall, twin: Twin, *, chained: bool) -> ListPlace | None:
        """What must follow if the twin goes into a list, None if it goes beside its neighbour. Raises `Refused` if it may not."""
        place = None if chained else self._place_in_list(call, twin)
        if place is None:
            self._check_unnumbered(call, twin)
        return place

    def _check_unnumbered(self, call: ModuleCall, twin: Twin) -> None:
        """A twin beside its neighbour would have the neighbour's number, and with it the neighbour's entry in every cache."""
        parent, _, key = call.path.rpartition(".")
        while isinstance(self._flow.model.get_submodule(parent), Chain):
            parent, _, key = parent.rpartition(".")
        if parent not in self._numbers:
            siblings = {name: m for name, m in self._flow.model.get_submodule(parent)._modules.items() if m is not None}
            own = own_numbers(list(siblings.values()))
            self._numbers[parent] = dict(zip(siblings, own, strict=True))
        numbers = self._numbers[parent][key]
        if numbers:
            raise Refused(
                f"has its own number ({'.'.join(filter(None, numbers[0]))}), which a cache may use as a key, and no trial confirmed that "
                "its container can take another block and renumber all of them: the twin would share the entry of its neighbour"
            )
        if twin.remembers:
            raise Refused(
                "takes a stateful object, such as a key-value cache, and no trial confirmed that its list can take another block: "
                "the twin would share the entry of its neighbour"
            )

    def _place_in_list(self, call: ModuleCall, twin: Twin) -> ListPlace | None:
        container, _, key = call.path.rpartition(".")
        parent = self._flow.model.get_submodule(container)
        if not is_list(parent) or isinstance(self._flow.model.get_submodule(call.path), Chain):
            return None
        if container not in self._equals:
            self._equals[container] = equal_blocks(list(parent.children()))
        alike = self._equals[container][int(key) - first_number(parent)]
        if (container, alike) not in self._places:
            self._places[container, alike] = self._planner.plan(container, alike, twin)
        return self._places[container, alike]


def _twin_like(call: ModuleCall, known: Twin) -> Twin:
    """The plan of an alike block for this one, which may be of another size. It is tried in the model, not here."""
    if _remembers(call) != known.remembers:
        raise Refused("takes different arguments from the other blocks of the stack")
    parameters = sum(map(prod, known.outline(call.module).values()))
    return replace(known, parameters=parameters, flops=block_flops(call))


# ---- The twins of a search: a copy of a block between the blocks of a stack.


class TwinKind(Kind):
    """Copies of blocks."""

    move: ClassVar[type[Twin]] = Twin
    grows: ClassVar[str] = "layers"

    def propose(self, search: Search) -> None:
        if search.request.form not in ("auto", "twin"):
            return
        self._say_uncalled(search)
        # All twins before any other kind: between two blocks the one may have a twin where the other has none.
        for stack in sorted(search.stacks, key=lambda stack: -len(stack.blocks)):
            for block, side, seen in stack.boundaries():
                if stack.added or seen.node not in search.taken:
                    sites = self._null(search, block, seen) if stack.added else self._twin(search, block, side, seen)
                    among = (replace(site, _container=stack.container) for site in sites)
                    search.offer(block, side, seen, among, quiet=search.request.form == "auto")

    def _say_uncalled(self, search: Search) -> None:
        """Lists of blocks that are only holders of their parts: what a person takes for a stack has no block to copy."""
        for path, module in search.flow.model.named_modules():
            if not is_list(module) or len(module._modules) < 2:
                continue
            blocks = dict(module.named_children())
            holder = type(next(iter(blocks.values()))).__name__
            holders = all(isinstance(block, (nn.ModuleList, nn.ModuleDict)) for block in blocks.values())
            called = any(search.flow.calls_of(f"{path}.{name}") for name in blocks)
            kinds = {signature(block) for block in blocks.values()} if holders and not called else ()
            if len(kinds) == 1 and any(True for _ in module.parameters()):
                search.skipped[path] = (
                    f"holds {len(blocks)} blocks that are each a {holder}, of which only the parts are called, so "
                    "nothing can be copied. Give the blocks a class with a forward"
                )

    def _twin(self, search: Search, call: ModuleCall, side: str, seen: SeenTensor) -> Iterator[Site]:
        search.check(call, side, seen, block=True)
        chained = search.around.chained(call.path)
        twin, place = self._finder(search).find(call, seen, chained=chained)
        point = search.point(call, side, seen, block=True, chained=chained, place=place)
        yield from twin.ways(Site(point, twin))
        yield from search.instead(self, call, side, seen)

    def _null(self, search: Search, call: ModuleCall, seen: SeenTensor) -> Iterator[Site]:
        """For a loop that adds what its blocks give; no layer could do that."""
        search.check(call, "after", seen, block=True)
        in_sequential = isinstance(search.model.get_submodule(parent_of(call.path)), nn.Sequential)
        twin, place = self._finder(search).find_null(call, chained=in_sequential)
        yield from twin.ways(Site(search.point(call, "after", seen, block=True, chained=True, place=place), twin))

    def _finder(self, search: Search) -> TwinFinder:
        """What was learned on one block is tried first on its equals, also in the next search of the same run."""
        finder: TwinFinder = search.learned.setdefault(
            self, TwinFinder(search.flow, search.example, search.request.block_init)
        )
        return finder
