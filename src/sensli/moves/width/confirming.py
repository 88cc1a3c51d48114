"""Whether widths hold, found by widening a copy of the model.

What it returns must stay, and must not depend on the new rows at all, however large they are. What readers get of a new unit must be what
a measurement, which runs candidates alone, would say of its rows: a unit may depend neither on its number nor on the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.modules import random_state
from sensli.modules.configs import build_again, differences, held_objects, shapes
from sensli.modules.copies import NoDropout, without_saving
from sensli.modules.flops import count_flops
from sensli.modules.running import brief_error, first_tensor, forgiven, note, relative_change, run, tensors
from sensli.moves.point import Ref
from sensli.moves.roles import role_of
from sensli.moves.search import Search
from sensli.moves.sites import Site
from sensli.moves.stretching import Stretch
from sensli.moves.trial import Rehearsal, Verdict, bisect
from sensli.moves.width.marking import common_path
from sensli.moves.width.replica import Replica, by_label
from sensli.moves.width.starts import STARTS, drawn_rows
from sensli.moves.width.widening import Passing, Widening, covers_all_blocks, resizes
from sensli.moves.width.width import TOLERANCE, Axis, Entries, Size, Width, family

_LARGE = (1000.0, 10.0, 1.0)  # times the usual rows: what competes wins then; less where the model cannot take so much
_TURNS = 3  # so often all candidates run beside each other, as a measurement has three for each unit that would come
_ROOM = 2**22  # entries of the candidates that are held at once
_LEAST = 8  # candidates: as many places in the row of units are tried
_CANCELLED = 32  # rounding errors of what makes units: so much of it is left in a sum that cancels
_ALIKE = 1000  # rounding errors of what makes units: a norm on the way may enlarge them
_MODES = (False, True)  # evaluation, training
_SIZES = {
    False: 1.0,
    True: -1.0,
}  # of rows: the other way round in training, so that behind a ReLU every unit is above zero once
_APART = (
    "what is read of a unit depends on its number or on the other units, as with topk, sort or cumsum, so new ones could not be "
    "measured. Compute each unit alone and all of them alike, or leave this width as it is"
)


def confirm(trial: WidthRehearsal, sites: Sequence[Site]) -> tuple[list[Site], list[tuple[Site, str]]]:
    """Those that hold, and the others with the reason."""
    for training in _MODES:
        trial.hear(sites, training)  # all in one pass; what fails here is found below
    good, refused = bisect(
        sites,
        lambda group: Verdict(together=trial.moves(group)),
        family=lambda site: family(site.path),  # layers of equal blocks
        fall_together=lambda group, problem: trial.moves(group[:1]) == problem,  # its equals do wrong what one does
    )
    for reasons_of in (trial.apart, trial.start_refusals):
        reasons = reasons_of(good)
        refused += [(site, reasons[id(site)]) for site in good if id(site) in reasons]
        good = [site for site in good if id(site) not in reasons]
    return good, refused


class WidthRehearsal(Rehearsal):
    """More units on trial."""

    def __init__(self, search: Search) -> None:
        super().__init__(search.flow, search.example)
        self._tried: dict[int, _Tried] = {}  # by the id of the site
        # torch's encoder takes another way without gradients, and leaves padded positions zero there
        self._fast = any(isinstance(module, nn.TransformerEncoderLayer) for module in self.model.modules())

    def of(self, sites: Sequence[Site], modes: Sequence[bool] = _MODES) -> str:
        """What is wrong with the sites together, in evaluation and in training; empty if nothing is."""
        return self.moves(sites, modes) or next(iter(self.apart(sites, modes).values()), "")

    def moves(self, sites: Sequence[Site], modes: Sequence[bool] = _MODES) -> str:
        """Why more units at these sites together are not without effect; empty if they are."""
        for training in modes:
            base = self._baseline(training)
            if base is None and not training:
                return "the model does not run with other random numbers"
            if base is None:
                continue  # a batch too small for its norms: it cannot train on the example
            try:
                first, given = self._outputs(sites, training, _SIZES[training])
                second = self._outputs_of_large(sites, training, first)
            except Exception as error:
                note(error)
                return f"the model fails with more of them ({brief_error(error)})"
            if [t.shape for t in first] != [t.shape for t in base]:
                return "what the model returns changes its shape with more of them"
            if _differ(base, first, given.largest):
                return "what the model returns changes with more of them"
            if not all(torch.equal(one, other) for one, other in zip(first, second, strict=True)):
                return "what the model returns depends on units whose columns are zero"
            for site in sites:
                self._on_copy(site).given[training] = given
        return ""

    def apart(self, sites: Sequence[Site], modes: Sequence[bool] = _MODES) -> dict[int, str]:
        """Of sites that move nothing, by their ids, those whose new units cannot be measured as candidates alone, and why."""
        found: dict[int, str] = {}
        for training in (mode for mode in modes if self._baseline(mode) is not None):
            heard, unheard = bisect(sites, partial(self.hear, training=training), limit=2 * len(sites))
            found.update({id(site): problem for site, problem in unheard})
            found.update({id(site): _APART for site in heard if not self._on_copy(site).is_alike(training)})
        return found

    def start_refusals(self, sites: Sequence[Site]) -> dict[int, str]:
        """Of sites that hold, by their ids, those whose units cannot start as they should, and why."""
        found: dict[int, str] = {}
        for site in sites:
            start = width_of(site).start
            try:
                reason = STARTS[start].refusal(site, self)
            except Exception as error:
                note(error)
                reason = f'start="{start}" fails there ({brief_error(error)})'
            if reason:
                found[id(site)] = reason
        return found

    def _outputs_of_large(self, sites: Sequence[Site], training: bool, usual: Sequence[Tensor]) -> list[Tensor]:
        """What the copy returns with rows the other way round, so large that they win where units compete."""
        found: list[Tensor] = []
        for times in _LARGE:
            found, _ = self._outputs(sites, training, -times * _SIZES[training])
            if all(torch.equal(one.isfinite(), other.isfinite()) for one, other in zip(found, usual, strict=True)):
                break  # otherwise the model cannot take them: zero times infinity is not a number
        return found

    def hear(self, sites: Sequence[Site], training: bool) -> Verdict:
        """Learn what a measurement would say that new units give to their readers; or say why it cannot."""
        asking = [tried for tried in map(self._on_copy, sites) if training not in tried.heard]
        if not asking:
            return Verdict()

        def once() -> tuple[list[Tensor], dict[tuple[int, str], list[Tensor]]]:
            replica = Replica(self.model)
            for tried in asking:
                replica.ask(tried, tried.width, tried.rows(_SIZES[training]).taken(tried.width, tried.candidates))
            with replica.beside():
                output = self._run(training, gradients=True)
                return output, {key: [value.detach() for value in values] for key, values in replica.read.items()}

        try:
            output, said = without_saving(once)
        except Exception as error:
            if training and self._take_more():
                return self.hear(sites, training)
            note(error)
            cause = error.__cause__ or error  # a measurement would say more, of another moment
            why = str(cause).split("\n")[0] if isinstance(cause, MeasurementError) else brief_error(cause)
            problem = f"new units cannot be measured, because the model's code does not run on them alone ({why})"
            return Verdict(together=problem)
        for tried in asking:
            tried.heard[training] = {path: values for (asker, path), values in said.items() if asker == id(tried)}
        if training or not self._fast:
            self._base.setdefault(training, output)  # which is what the model returns as it is
        return Verdict()

    def flops(self, site: Site) -> int:
        """What a site that holds adds to a forward pass, per sample."""
        before = count_flops(self.model, self.example)
        with self.widened([site]):
            return count_flops(self.model, self.example) - before

    def changes(self, site: Site) -> bool:
        """Whether the output moves with new units as they start without a measurement."""
        base = self._baseline(False)
        now, given = self._outputs([site], False, None)
        return base is None or _differ(base, now, given.largest)

    def largest(self, site: Site) -> float:
        """The largest value that a reader gets of new units as they start without a measurement."""
        _, given = self._outputs([site], False, None)
        return max((float(x.abs().max()) for values in given.values.values() for x in values if x.numel()), default=0.0)

    def _outputs(self, sites: Sequence[Site], training: bool, size: float | None) -> tuple[list[Tensor], _Given]:
        """What the widened copy returns, and what its readers get of the new units."""
        with self.widened(sites, size), self._watching(sites) as given:
            return self._run(training), given

    @contextmanager
    def widened(self, sites: Sequence[Site], size: float | None = 1.0) -> Iterator[None]:
        """The copy is wider as long as the context lasts: by drawn rows of this size, or as units start without a measurement."""
        wider = [replace(site, move=self._on_copy(site).move(size)) for site in in_order(sites)]
        passing = Passing(self._called_layers)
        with ExitStack() as stack:
            for site in wider:
                point = replace(site.point, anchor=site.point.by_path().anchor, neighbours=())
                edit = Widening(self.model, replace(site, point=point), strict=False)
                # Rows of a given size depend on nothing that was widened before; a start may read what is there.
                edit.passing = None if size is None else passing
                edit.build()
                edit.apply()
                stack.callback(edit.revert)
            with passing.running():
                yield

    def _called_layers(self, parameter: Tensor) -> list[nn.Module]:
        """The layers that have a parameter, if all of them were called in the run, so that nobody else reads it."""
        found = [] if self._fast else self._holders.get(id(parameter), [])
        known = all(role_of(module) is not None and self._flow.calls_of(path) for path, module in found)
        return [module for _, module in found] if known else []

    @cached_property
    def _holders(self) -> dict[int, list[tuple[str, nn.Module]]]:
        found: dict[int, list[tuple[str, nn.Module]]] = {}
        for path, module in self.model.named_modules():
            for parameter in module._parameters.values():
                found.setdefault(id(parameter), []).append((path, module))
        return found

    @contextmanager
    def _watching(self, sites: Sequence[Site]) -> Iterator[_Given]:
        """What the readers of the widened copy get of new units as long as the context lasts."""
        given = _Given()
        labels: dict[str, Tensor] = {}  # along the axis of a reader: whose new units lie where, -1 for all others
        makers: set[str] = set()
        for site in in_order(sites):
            width = self._on_copy(site).width
            for axis in width.axes:
                path = axis.module.path
                if axis.fill == "column":
                    stretch = Stretch(0, width.units, width.more, axis.start, axis.outer, axis.inner)
                    before = labels.get(path, torch.full((axis.length,), -1, device="cpu"))
                    labels[path] = stretch.applied(before, id(site))
                elif axis.fill == "row":
                    makers.add(path)
        handles = [self.model.get_submodule(path).register_forward_hook(given.made) for path in makers]
        for path, places in labels.items():
            hook = given.reading(path, places)
            handles.append(self.model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield given
        finally:
            for handle in handles:
                handle.remove()

    def _on_copy(self, site: Site) -> _Tried:
        """The site on trial, bound to the copy once."""
        if id(site) not in self._tried:
            self._tried[id(site)] = _Tried(site, width_of(site).by_path().in_model(self.model))
        return self._tried[id(site)]

    def _run(self, training: bool, *, gradients: bool = False) -> list[Tensor]:
        with self._running(training, graph=gradients) as example, NoDropout():
            random_state.seed_torch(0)
            return [t.detach().clone() for t in tensors(run(self.model, example))]


def _differ(base: Sequence[Tensor], now: Sequence[Tensor], largest: float) -> bool:
    """Whether outputs have moved by more than rounding does, of them or of terms as large as ``largest`` that nearly cancel in them."""
    moved = [(old, new) for old, new in zip(base, now, strict=True) if relative_change(old, new) > _tolerance(old)]
    return not all(
        old.is_floating_point() and bool((new - old).abs().max() <= _CANCELLED * torch.finfo(old.dtype).eps * largest)
        for old, new in moved
    )


def _tolerance(output: Tensor) -> float:
    """By how much an output may move: what rounding does to it, and not more."""
    return 1e-9 if output.dtype == torch.float64 else TOLERANCE


def width_of(site: Site) -> Width:
    """The width of a site for more units."""
    assert isinstance(site.move, Width)
    return site.move


def in_order(sites: Sequence[Site]) -> list[Site]:
    """An order in which a site keeps its positions although others were widened before: from the end of shared axes."""
    return sorted(sites, key=lambda site: max(axis.start for axis in width_of(site).axes), reverse=True)


@dataclass
class _Given:
    """What the readers of new units got of them in a run of the widened copy."""

    # by the id of the site and the path of the reader, call by call
    values: dict[tuple[int, str], list[Tensor]] = field(default_factory=dict)
    largest: float = 0.0  # of all that the layers that make units gave

    def made(self, module: Any, args: Any, output: Any) -> None:
        value = first_tensor(output)
        if value is not None and value.numel():
            self.largest = max(self.largest, float(value.detach().abs().max()))

    def reading(self, path: str, labels: Tensor) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            x, role = first_tensor(args or tuple(kwargs.values())), role_of(module)
            if x is None or role is None:
                return
            for site, held in by_label(x.detach(), role.channel, labels):
                self.values.setdefault((site, path), []).append(held)

        return hook


@dataclass
class _Tried:
    """A site on trial, with what was learned of it in each mode. It is held, so that no other gets its id."""

    site: Site
    width: Width  # bound to the copy
    # what candidates alone give to each reader, call by call
    heard: dict[bool, dict[str, list[Tensor]]] = field(default_factory=dict)
    given: dict[bool, _Given] = field(default_factory=dict)  # likewise what the widened copy gave them

    def move(self, size: float | None) -> Width:
        """The width with rows of this size; without one as its units start without a measurement."""
        # However units start, they must do nothing as long as nothing reads them.
        return self.width if size is None else replace(self.width, start="random", _entries=self.rows(size))

    def rows(self, size: float) -> Entries:
        """Rows for new units that all point one way, so that all are on where one is."""
        return Entries(tuple(self._unit), sizes=size * torch.linspace(0.5, 1.5, self.width.more, device="cpu"))

    @cached_property
    def _unit(self) -> list[Tensor | None]:
        """The rows of one unit, drawn for the layers as they are. The bias is not zero: an example may be."""
        generator = torch.Generator().manual_seed(crc32(self.site.path.encode()))
        one = drawn_rows(replace(self.width, more=1), generator).values
        spread = max((float(v.std(correction=0)) for v in one if v is not None and v.dim() > 1), default=1.0)
        return [
            torch.randn(v.shape, generator=generator, device="cpu").to(v) * spread
            if v is not None and v.dim() < 2
            else v
            for v in one
        ]

    @property
    def candidates(self) -> list[int]:
        """The new units as candidates: each turn begins with another one, so that neither its number nor its being even may matter."""
        more = self.width.more
        turns = max(_TURNS, -(-_LEAST // more))
        if self.width.blocks and turns * more * self._row_entries > _ROOM:
            turns = -(-_LEAST // more)  # each block was tried alone before
        return [(1 + turn + unit) % more for turn in range(turns) for unit in range(more)]

    @cached_property
    def _row_entries(self) -> int:
        """Of the rows of one unit."""
        rows = [axis for axis in self.width.axes if axis.fill == "row"]
        return sum(axis.tensor.numel() // axis.tensor.shape[axis.dim] * axis.outer * axis.inner for axis in rows)

    def is_alike(self, training: bool) -> bool:
        """Whether the readers got of the new units what candidates alone give them."""
        said, given = self.heard[training], self.given[training]
        for axis in self.width.axes:
            # None where torch's own layers read the weights without calling the module.
            there = given.values.get((id(self.site), axis.module.path), []) if axis.fill == "column" else []
            if there and not self._is_read_alike(axis, said.get(axis.module.path, []), there, given.largest):
                return False
        return True

    def _is_read_alike(self, axis: Axis, alone: Sequence[Tensor], there: Sequence[Tensor], largest: float) -> bool:
        """Whether a reader gets the same, call by call, of candidates alone and of the units that they would be."""
        role = role_of(axis.module.find_module())
        if role is None or len(alone) != len(there):
            return False
        for one, new in zip(alone, there, strict=True):
            candidates = one.movedim(role.channel, 0).unflatten(0, (axis.outer, -1, axis.inner))
            units = new.movedim(role.channel, 0).unflatten(0, (axis.outer, self.width.more, axis.inner))
            expected = units.index_select(1, torch.tensor(self.candidates, device=units.device))
            if candidates.shape != expected.shape:
                return False
            if relative_change(expected, candidates):
                rounded = _ALIKE * torch.finfo(expected.dtype).eps * largest
                allowed = _tolerance(expected) * expected.abs().max() + rounded
                if not bool((candidates - expected).abs().max() <= allowed):
                    return False
        return True


# ---- Widths that a configuration states once for all blocks (``intermediate_size``): one site widens all of them and the
# configuration.
#
# A model that was built from a configuration can be saved and loaded by its library only as long as the configuration
# describes it. So where all blocks have the same width and the class builds wider blocks from a changed
# configuration, that is the site: the model built again must have exactly the shapes, and inside its modules the
# numbers, of the one that is really wider.


_AT_ONCE = 3  # numbers of a configuration that change together: heads, those of the keys and values, a total
_UNSAID = ("inner", "intermediate", "ffn", "mlp")  # in names of widths that a configuration may leave to a default


def as_configured(trial: WidthRehearsal, model: nn.Module, sites: Sequence[Site]) -> list[Site]:
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
        move = width_of(site)
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


def _together(trial: WidthRehearsal, model: nn.Module, group: list[Site], built: _Built) -> Site | None:
    if len(group) > 1 and not STARTS[width_of(group[0]).start].together:
        return None
    described = built.around([axis.module.path for site in group for axis in width_of(site).axes])
    return None if described is None else _Together(trial, model, group, *described).site()


class _Together:
    """Sites of equal blocks, and the configuration that may state their width."""

    def __init__(self, trial: WidthRehearsal, model: nn.Module, group: list[Site], owner: str, name: str) -> None:
        self.trial, self.model, self.owner, self.name = trial, model, owner, name
        self.module = trial.model.get_submodule(owner)
        moves = [width_of(site) for site in group]
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
            if built is None or shapes(built) != wanted or not is_valid(changed):
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
        for through, holder in [
            ((self.name,), held),
            *(((self.name, name), part) for name, part in held_objects(held)),
        ]:
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
            holder = replace(size, through=size.through[1:]).holder(configuration)
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


def is_valid(configuration: Any) -> bool:
    """Whether the library reads the configuration back: it may refuse numbers that the model itself would take."""
    if not hasattr(configuration, "to_dict") or not hasattr(type(configuration), "from_dict"):
        return True
    with forgiven():
        type(configuration).from_dict(configuration.to_dict())
        return True
    return False
