"""Whether widths hold, found by widening a copy of the model.

What it returns must stay, and must not depend on the new rows at all, however large they are. What readers get of a new unit must be what
a measurement, which runs candidates alone, would say of its rows: a unit may depend neither on its number nor on the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.modules import random_state
from sensli.modules.copies import NoDropout
from sensli.modules.flops import count_flops
from sensli.modules.running import (
    brief_error,
    device_of,
    first_tensor,
    let_memory_through,
    moved,
    note,
    run,
    tensors,
    to_device,
    untouched,
    with_another,
)
from sensli.modules.wrappers import eager
from sensli.moves.point import Ref
from sensli.moves.roles import role_of
from sensli.moves.search import Search
from sensli.moves.sites import Site
from sensli.moves.stretching import Stretch
from sensli.moves.twin.counting import build_again, differences, shapes
from sensli.moves.width.marking import common_path, held_objects
from sensli.moves.width.replica import Replica
from sensli.moves.width.starts import STARTS, drawn_rows
from sensli.moves.width.widening import Widening, covers_all_blocks, resizes
from sensli.moves.width.width import TOLERANCE, Axis, Entries, Size, Width, family

_ATTEMPTS = 24  # more would cost more than they find
_LARGE = (1000.0, 10.0, 1.0)  # times the usual rows: what competes wins then; less where the model cannot take so much
_TURNS = 3  # so often all candidates run beside each other, as a measurement has three for each unit that would come
_LEAST = 8  # candidates: as many places in the row of units are tried
_ALIKE = 1000  # rounding errors of what makes units: a norm on the way may enlarge them
_MODES = (False, True)  # evaluation, training
_APART = (
    "what is read of a unit depends on its number or on the other units, as with topk, sort or cumsum, so new ones could not be "
    "measured. Compute each unit alone and all of them alike, or leave this width as it is"
)


def confirm(trial: WidthRehearsal, sites: Sequence[Site]) -> tuple[list[Site], list[tuple[Site, str]]]:
    """Those that hold, and the others with the reason. All are tried at once, then layer by layer of equal blocks, then in halves."""
    good: list[Site] = []
    wrong: list[tuple[Site, str]] = []
    for training in _MODES:
        trial.hear(sites, training)  # all in one pass; what fails here is found below
    waiting, attempts = [list(sites)], 0
    while waiting:
        group = waiting.pop()
        if not group:
            continue
        attempts += 1
        problem = trial.moves(group)
        families: dict[str, list[Site]] = {}
        for site in group:
            families.setdefault(family(site.path), []).append(site)
        if not problem:
            good += group
        elif len(group) == 1 or attempts >= _ATTEMPTS:
            wrong += [(site, problem) for site in group]
        elif len(families) > 1:
            waiting += families.values()
        elif trial.moves(group[:1]) == problem:  # what one of them does wrong its equals do too
            wrong += [(site, problem) for site in group]
        else:
            waiting += [group[: len(group) // 2], group[len(group) // 2 :]]
    apart = trial.apart(good)
    wrong += [(site, apart[id(site)]) for site in good if id(site) in apart]
    return _able(trial, [site for site in good if id(site) not in apart], wrong)


def _able(
    trial: WidthRehearsal, sites: Sequence[Site], wrong: list[tuple[Site, str]]
) -> tuple[list[Site], list[tuple[Site, str]]]:
    """Those whose units can start as they should, and the others with the reason."""
    good = []
    for site in sites:
        assert isinstance(site.move, Width)
        try:
            reason = STARTS[site.move.start].refusal(site, trial)
        except Exception as error:
            note(error)
            reason = f'start="{site.move.start}" fails there ({brief_error(error)})'
        if reason:
            wrong.append((site, reason))
        else:
            good.append(site)
    return good, wrong


class WidthRehearsal:
    """The copy that the example ran through."""

    def __init__(self, search: Search) -> None:
        self.model = search.flow.model
        self.example = to_device(search.example, device_of(self.model))
        self._flow, self._training = search.flow, self.example
        self._base: dict[bool, list[Tensor] | None] = {}
        # by mode and site, which is held so that no other gets its number: what candidates alone give to each reader
        self._heard: dict[tuple[bool, int], tuple[Site, dict[str, list[Tensor]]]] = {}
        self._given: dict[tuple[bool, int], _Given] = {}  # likewise what the widened copy gave them
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
                first, given = self._outputs(sites, training)
                second = self._of_large(sites, training, first)
            except Exception as error:
                note(error)
                return f"the model fails with more of them ({brief_error(error)})"
            if [t.shape for t in first] != [t.shape for t in base]:
                return "what the model returns changes its shape with more of them"
            if any(moved(old, new) > _tolerance(old) for old, new in zip(base, first, strict=True)):
                return "what the model returns changes with more of them"
            if not all(torch.equal(one, other) for one, other in zip(first, second, strict=True)):
                return "what the model returns depends on units whose columns are zero"
            self._given.update({(training, id(site)): given for site in sites})
        return ""

    def apart(self, sites: Sequence[Site], modes: Sequence[bool] = _MODES) -> dict[int, str]:
        """Of sites that move nothing, by their ids, those whose new units cannot be measured as candidates alone, and why."""
        found: dict[int, str] = {}
        for training in (mode for mode in modes if self._baseline(mode) is not None):
            problem, half = self.hear(sites, training), len(sites) // 2
            if problem and half:
                found.update({**self.apart(sites[:half], [training]), **self.apart(sites[half:], [training])})
            elif problem:
                found[id(sites[0])] = problem
            else:
                found.update({id(site): _APART for site in sites if not self._is_alike(site, training)})
        return found

    def _of_large(self, sites: Sequence[Site], training: bool, usual: Sequence[Tensor]) -> list[Tensor]:
        """What the copy returns with rows the other way round, so large that they win where units compete."""
        found: list[Tensor] = []
        for times in _LARGE:
            found, _ = self._outputs(sites, training, -times)
            if all(torch.equal(one.isfinite(), other.isfinite()) for one, other in zip(found, usual, strict=True)):
                break  # otherwise the model cannot take them: zero times infinity is not a number
        return found

    def hear(self, sites: Sequence[Site], training: bool) -> str:
        """Learn what a measurement would say that new units give to their readers; or say why it cannot."""
        sites = [site for site in sites if (training, id(site)) not in self._heard]
        if not sites:
            return ""
        replica = Replica(self.model)
        for site in sites:
            width = self._width(site)
            replica.ask(site, width, self._rows(site, training).taken(width, _several(width)))
        try:
            with replica.beside():
                output = self._run(training, gradients=True)
                said: dict[int, dict[str, list[Tensor]]] = {id(site): {} for site in sites}
                for (asker, path), values in replica.last.read.items():
                    said[asker][path] = [value.detach() for value in values]
        except Exception as error:
            if training and self._take_another():
                return self.hear(sites, training)
            note(error)
            cause = error.__cause__ or error  # a measurement would say more, of another moment
            why = str(cause).split("\n")[0] if isinstance(cause, MeasurementError) else brief_error(cause)
            return f"new units cannot be measured, because the model's code does not run on them alone ({why})"
        self._heard.update({(training, id(site)): (site, said[id(site)]) for site in sites})
        if training or not self._fast:
            self._base.setdefault(training, output)  # which is what the model returns as it is
        return ""

    def _is_alike(self, site: Site, training: bool) -> bool:
        """Whether the readers of a site got of the new units what candidates alone give them."""
        width, (_, said), given = self._width(site), self._heard[training, id(site)], self._given[training, id(site)]
        for axis in width.axes:
            # None where torch's own layers read the weights without calling the module.
            there = given.values.get((id(site), axis.module.path), []) if axis.fill == "column" else []
            if there and not _read_alike(axis, width, said.get(axis.module.path, []), there, given.largest):
                return False
        return True

    def _rows(self, site: Site, training: bool, times: float = 1.0) -> Entries:
        """Rows for new units; the other way round in training, so that behind a ReLU every unit is above zero once."""
        return _drawn(self._width(site), crc32(site.path.encode()), -times if training else times)

    def _take_another(self) -> bool:
        """Train with one more sample from now on, where one alone is too small for a norm; False if there is nothing to gain."""
        before = self._training
        self._training = with_another(self.example) if before is self.example else before
        return self._training is not before

    def _baseline(self, training: bool) -> list[Tensor] | None:
        if training not in self._base:
            try:
                self._base[training] = self._run(training)
            except Exception as error:
                let_memory_through(error)
                if training and self._take_another():
                    return self._baseline(True)
                note(error)
                if training:
                    self._flow.note_untrained(error)
                self._base[training] = None
        return self._base[training]

    def flops(self, site: Site) -> int:
        """What a site that holds adds to a forward pass, per sample."""
        before = count_flops(self.model, self.example)
        with self.widened([site]):
            return count_flops(self.model, self.example) - before

    def _outputs(self, sites: Sequence[Site], training: bool, times: float = 1.0) -> tuple[list[Tensor], _Given]:
        """What the copy returns with new rows, and what its readers get of the new units."""
        with self.widened(sites, training, times), self._watched(sites) as given:
            return self._run(training), given

    @contextmanager
    def widened(self, sites: Sequence[Site], training: bool = False, times: float = 1.0) -> Iterator[None]:
        """The copy is wider as long as the context lasts."""
        with ExitStack() as stack:
            # However units start, they must do nothing as long as nothing reads them. Drawn for the layers as they are.
            rows = [self._rows(site, training, times) for site in in_order(sites)]
            for site, entries in zip(in_order(sites), rows, strict=True):
                move = replace(self._width(site), start="random", _entries=entries)
                self._widen(replace(site, move=move), stack)
            yield

    @contextmanager
    def _watched(self, sites: Sequence[Site]) -> Iterator[_Given]:
        """What the readers of the widened copy get of new units as long as the context lasts."""
        given = _Given()
        labels: dict[str, Tensor] = {}  # along the axis of a reader: whose new units lie where, -1 for all others
        makers: set[str] = set()
        for site in in_order(sites):
            width = self._width(site)
            for axis in width.axes:
                path = axis.module.path
                if axis.fill == "column":
                    stretch = Stretch(0, width.units, width.more, axis.start, axis.outer, axis.inner)
                    labels[path] = stretch.applied(
                        labels.get(path, torch.full((axis.length,), -1, device="cpu")), id(site)
                    )
                elif axis.fill == "row":
                    makers.add(path)
        modules = {path: self.model.get_submodule(path) for path in {*labels, *makers}}
        handles = [modules[path].register_forward_hook(given.made) for path in makers]
        for path, places in labels.items():
            hook = given.reading(path, places)
            handles.append(modules[path].register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield given
        finally:
            for handle in handles:
                handle.remove()

    def _width(self, site: Site) -> Width:
        """The width of a site, bound to the copy."""
        assert isinstance(site.move, Width)
        return site.move.by_path().on(self.model)

    def changes(self, site: Site) -> bool:
        """Whether the output moves with new units as they start without a measurement."""
        base = self._baseline(False)
        now, _ = self._started(site)
        return base is None or any(moved(old, new) > _tolerance(old) for old, new in zip(base, now, strict=True))

    def largest(self, site: Site) -> float:
        """The largest value that a reader gets of new units as they start without a measurement."""
        _, given = self._started(site)
        return max((float(x.abs().max()) for values in given.values.values() for x in values if x.numel()), default=0.0)

    def _started(self, site: Site) -> tuple[list[Tensor], _Given]:
        with ExitStack() as stack:
            self._widen(replace(site, move=site.move.by_path()), stack)
            given = stack.enter_context(self._watched([site]))
            return self._run(False), given

    def _widen(self, site: Site, stack: ExitStack) -> None:
        """Widen the copy until the stack is closed."""
        point = replace(site.point, anchor=site.point.by_path().anchor, neighbours=())
        edit = Widening(self.model, replace(site, point=point), strict=False)
        edit.build()
        edit.apply()
        stack.callback(edit.revert)

    def _run(self, training: bool, *, gradients: bool = False) -> list[Tensor]:
        # Never chained: somebody's train() returns None.
        self.model.train(training)
        with untouched(self.model), torch.set_grad_enabled(gradients), eager(), NoDropout():
            random_state.seed_torch(0)
            output: Any = run(self.model, self._training if training else self.example)
        self.model.eval()
        return [t.detach().clone() for t in tensors(output)]


def _tolerance(output: Tensor) -> float:
    """By how much an output may move: what rounding does to it, and not more."""
    return 1e-9 if output.dtype == torch.float64 else TOLERANCE


def in_order(sites: Sequence[Site]) -> list[Site]:
    """An order in which a site keeps its positions although others were widened before: from the end of shared axes."""

    def last(site: Site) -> int:
        assert isinstance(site.move, Width)
        return max(axis.start for axis in site.move.axes)

    return sorted(sites, key=last, reverse=True)


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
            for site in labels.unique().tolist():
                if site >= 0:
                    places = (labels == site).nonzero().flatten().to(x.device)
                    held = x.detach().index_select(role.channel % x.dim(), places)
                    self.values.setdefault((site, path), []).append(held)

        return hook


def _several(width: Width) -> list[int]:
    """The new units as candidates: each turn begins with another one, so that neither its number nor its being even may matter."""
    turns = max(_TURNS, -(-_LEAST // width.more))
    return [(turn + unit) % width.more for turn in range(turns) for unit in range(width.more)]


def _read_alike(axis: Axis, width: Width, alone: Sequence[Tensor], there: Sequence[Tensor], largest: float) -> bool:
    """Whether a reader gets the same, call by call, of candidates alone and of the units that they would be."""
    role = role_of(axis.module.find_module())
    if role is None or len(alone) != len(there):
        return False
    for one, new in zip(alone, there, strict=True):
        candidates = one.movedim(role.channel, 0).unflatten(0, (axis.outer, -1, axis.inner))
        units = new.movedim(role.channel, 0).unflatten(0, (axis.outer, width.more, axis.inner))
        expected = units.index_select(1, torch.tensor(_several(width), device=units.device))
        if candidates.shape != expected.shape:
            return False
        if moved(expected, candidates):
            allowed = _tolerance(expected) * expected.abs().max() + _ALIKE * torch.finfo(expected.dtype).eps * largest
            if not bool((candidates - expected).abs().max() <= allowed):
                return False
    return True


def _drawn(width: Width, seed: int, times: float) -> Entries:
    """Rows for a trial: all units point one way, so that all are on where one is. The bias is not zero: an example may be."""
    generator = torch.Generator().manual_seed(seed)
    one = drawn_rows(replace(width, more=1), generator)
    spread = max((float(v.std(correction=0)) for v in one.values if v is not None and v.dim() > 1), default=1.0)
    sizes = times * torch.linspace(0.5, 1.5, width.more, device="cpu")
    values: list[Tensor | None] = []
    for axis, value in zip(width.axes, one.values, strict=True):
        if value is not None:
            if value.dim() < 2:
                value = torch.randn(value.shape, generator=generator, device="cpu").to(value) * spread
            units = value.unflatten(axis.dim, (axis.outer, 1, axis.inner))
            shape = [-1 if dim == axis.dim + 1 else 1 for dim in range(units.dim())]
            value = (units * sizes.to(units).view(shape)).flatten(axis.dim, axis.dim + 2)
        values.append(value)
    return Entries(tuple(values))


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


def _together(trial: WidthRehearsal, model: nn.Module, group: list[Site], built: _Built) -> Site | None:
    if len(group) > 1 and not STARTS[_width(group[0]).start].together:
        return None
    described = built.around([axis.module.path for site in group for axis in _width(site).axes])
    return None if described is None else _Together(trial, model, group, *described).site()


class _Together:
    """Sites of equal blocks, and the configuration that may state their width."""

    def __init__(self, trial: WidthRehearsal, model: nn.Module, group: list[Site], owner: str, name: str) -> None:
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
