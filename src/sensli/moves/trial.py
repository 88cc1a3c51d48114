"""What could be done is tried on a copy of the model, all of it at once: only what holds there is offered.

A new layer must run exactly once, give what it is given, in eval and in training mode, and get the gradient that a measurement would
catch at its site; and everything that the model returns must stay.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sensli.modules import random_state
from sensli.modules.running import (
    brief_error,
    count_samples,
    device_of,
    equal_tensors,
    first_samples,
    first_tensor,
    let_memory_through,
    note,
    relative_change,
    rounding,
    run,
    tensors,
    to_device,
    undraw_hooks,
    untouched,
    value_at,
    with_another,
    with_first,
)
from sensli.modules.wrappers import run_eagerly
from sensli.moves.inserting import Cut, Inserts, apply_cut, plan_cut, take_out
from sensli.moves.point import handed_on, tap
from sensli.moves.sites import Site
from sensli.moves.trace.flow import Flow, SeenTensor, copy_example
from sensli.moves.trace.stacks import manner

if TYPE_CHECKING:
    from sensli.moves.layers import Layer

# ---- One trial for all that could be done: many candidates at once and, where they fail, fewer of them.


_ATTEMPTS = 24  # trials of one search: more would cost more than they find

T = TypeVar("T")


@dataclass
class Verdict:
    """What a trial of several candidates told: what is wrong with single ones, or with all of them together."""

    wrong: dict[int, str] = field(default_factory=dict)
    together: str = ""

    @property
    def good(self) -> bool:
        return not self.wrong and not self.together


def bisect(
    candidates: Sequence[T],
    attempt: Callable[[list[T]], Verdict],
    *,
    family: Callable[[T], object] = lambda each: None,
    fall_together: Callable[[list[T], str], bool] = lambda group, reason: False,
    take_other: Callable[[T], bool] = lambda each: False,
    limit: int = _ATTEMPTS,
    at_limit: str = "{}",
) -> tuple[list[T], list[tuple[T, str]]]:
    """Those that hold, and the others with the reason. All are tried at once, then family by family, then in halves.

    ``fall_together``: whether what is wrong with a family is wrong with each of it. ``take_other``: whether a candidate that fails has
    become another one, to be tried instead. After ``limit`` attempts what is left is refused, and ``at_limit`` is the text for it.
    """
    good: list[T] = []
    refused: list[tuple[T, str]] = []
    waiting, attempts = [list(candidates)], 0
    while waiting:
        group = waiting.pop()
        if not group:
            continue
        attempts += 1
        verdict = attempt(group)
        families: dict[object, list[T]] = {}
        for each in group:
            families.setdefault(family(each), []).append(each)
        half = 0 if verdict.wrong else len(group) // 2
        if verdict.good:
            good += group
        elif attempts >= limit:
            reason = verdict.together or "a neighbouring place failed the trial"
            refused += [(each, at_limit.format(verdict.wrong.get(i, reason))) for i, each in enumerate(group)]
        elif half and len(families) > 1:
            waiting += families.values()
        elif half and not fall_together(group, verdict.together):
            waiting += [group[:half], group[half:]]
        else:
            failed = verdict.wrong or dict.fromkeys(range(len(group)), verdict.together)
            lost = [i for i in sorted(failed) if not take_other(group[i])]
            refused += [(group[i], failed[i]) for i in lost]
            waiting.append([each for i, each in enumerate(group) if i not in lost])
    return good, refused


class Rehearsal:
    """The copy of the model that the example ran through, to be changed, run and put back again and again."""

    def __init__(self, flow: Flow, example: Any) -> None:
        self.model, self._flow = flow.model, flow
        self.example = to_device(example, device_of(self.model))
        self._examples = {False: self.example, True: self.example}  # by the mode: evaluation, training
        self._more: Any = with_another(self.example)  # for a model that needs all of them, or one more than there is
        self._base: dict[bool, Any] = {}  # what the copy returns as it is

    def _run(self, training: bool) -> Any:
        """What the copy returns as it is now."""
        raise NotImplementedError

    @contextmanager
    def _running(self, training: bool, *, graph: bool) -> Iterator[Any]:
        """The copy in one of its modes, and what it is called with; what a run would change is put back."""
        # Never chained: somebody's train() returns None.
        self.model.train(training)
        try:
            with untouched(self.model), torch.set_grad_enabled(graph), run_eagerly():
                yield self._examples[training]
        finally:
            self.model.eval()

    def _baseline(self, training: bool) -> Any:
        """What the copy returns as it is; None where it does not run in this mode."""
        if training not in self._base:
            try:
                self._base[training] = self._run(training)
            except Exception as error:
                let_memory_through(error)
                if training and self._take_more():
                    return self._baseline(True)
                note(error)
                self._base[training] = None
                if training:
                    self._flow.note_untrained(error)
        return self._base[training]

    def _take_more(self) -> bool:
        """Train with more samples from now on, where so few may be too small a batch for a norm; False if there is nothing to gain."""
        fewer = self._examples[True] is not self._more
        self._examples[True] = self._more
        return fewer


# ---- What takes the place of a new layer in a trial: it does what the layer does as long as it is an identity, at hardly
# any cost.


class IdentityStandIn(nn.Module):
    """What a new layer does as long as it is an identity, at hardly any cost; on a small piece of the values the layer itself shows it."""

    def __init__(self, plan: Layer, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._plan = plan
        self._piece = tuple(slice(0, k + 1) for k in plan.kernel)

    def forward(self, x: Tensor) -> Tensor:
        conv = self._plan.kind == "conv"
        where = (slice(0, 2), slice(None), *self._piece) if conv else (slice(0, 2),) * (x.dim() - 1)
        piece = x[where]
        with torch.no_grad():
            shown = self.layer(piece.detach())
        result = x.relu() if self._plan.form == "relu" else x.clone()
        return result if equal_tensors(shown, self._plan.gives(piece).detach()) else torch.full_like(result, torch.nan)


# ---- The layers of a trial: put into the copy of a model at every site, and watched while it runs.


@dataclass
class NewLayer:
    """A layer in the copy, and what was seen of it in one run."""

    site: Site
    layer: nn.Module
    cut: Cut
    calls: int = 0
    same: bool = True
    output: Tensor | None = None
    given: GradientEdge | None = None  # where its input comes from in the graph

    def watch(self) -> list[Any]:
        """Hooks that see whether the layer runs once and gives what it is given."""
        self.calls, self.same, self.output, self.given = 0, True, None, None
        inputs: list[Tensor] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            value = value_at(args, kwargs, self.site.point.slot if move_of(self.site).takes_call else 0)
            inputs.append(value.detach().clone())
            # The place in the graph, not the tensor, which somebody may work on in place.
            self.given = get_gradient_edge(value) if value.requires_grad and torch.is_grad_enabled() else None
            self.calls += 1

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            value, result = inputs.pop(), first_tensor(output)
            self.output = result
            self.same = (
                self.same and result is not None and equal_tensors(result.detach(), move_of(self.site).gives(value))
            )

        return [
            *undraw_hooks(self.layer),
            self.layer.register_forward_pre_hook(before, with_kwargs=True),
            self.layer.register_forward_hook(after, with_kwargs=True),
        ]

    def problem(self, mode: str) -> str:
        """What the run told to be wrong with the layer; empty if nothing is."""
        if self.calls == 0:
            return (
                "a layer there did not run when it was tried: the forward pass uses the module under another name, without calling it, or "
                "only for some inputs"
            )
        if self.calls > 1:
            return f"a layer there would run {self.calls} times in one forward pass"
        return "" if self.same else f"a layer there would change the values in {mode} mode"


def move_of(site: Site) -> Inserts:
    """A trial puts modules in: it is for the moves that do so."""
    assert isinstance(site.move, Inserts)
    return site.move


def _first_of_equals(model: nn.Module, sites: Sequence[Site]) -> set[int]:
    """Of the equal copies of blocks in one container the first: it is really inserted, and represents the others."""
    first: dict[object, int] = {}
    for index, site in enumerate(sites):
        if move_of(site).takes_call:
            key = (site.path.rpartition(".")[0], site.move, manner(model.get_submodule(site.path)))
            first.setdefault(key, index)
    return set(first.values())


# ---- How what a model returns, or a gradient, differs with new layers from what it was without them.


def difference(before: Any, after: Any, in_list: bool) -> str:
    """How two outputs differ; empty if they do not."""
    old, new = list(_parts(before, in_list)), list(_parts(after, in_list))
    if len(old) != len(new):
        return f"the model returns {len(new)} values instead of {len(old)}"
    for one, other in zip(old, new, strict=True):
        if isinstance(one, Tensor) != isinstance(other, Tensor):
            return "the model returns values of other types"
        if not isinstance(one, Tensor):
            if one != other and one == one:
                return f"the model returns {other!r} instead of {one!r}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            return f"the model's output changes from shape {tuple(one.shape)} to {tuple(other.shape)}"
        else:
            distance = relative_change(one.detach(), other.detach())
            if distance:
                return f"the model's output changes by {distance:.1e}"
    return ""


def _parts(value: Any, in_list: bool) -> Iterator[Any]:
    """All tensors and plain values. Where a list of blocks has grown, not the lists with one entry per block in a record."""
    if isinstance(value, Mapping) or (is_dataclass(value) and not isinstance(value, type)):
        named = value.values() if isinstance(value, Mapping) else [getattr(value, f.name, None) for f in fields(value)]
        for part in named:
            if not (in_list and isinstance(part, (tuple, list))):
                yield from _parts(part, in_list)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _parts(part, in_list)
    elif isinstance(value, (Tensor, int, float, complex, str)):
        yield value


def are_alike(one: Tensor | None, other: Tensor | None, on: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    difference = one - other if on is None else (one - other) * on
    half = one.dtype.itemsize < 4
    distance, size = (torch.linalg.vector_norm(t.float() if half else t).item() for t in (difference, one))
    return bool(distance <= (0.1 if half else 100 * rounding(one.dtype)) * size)


class LayerRehearsal(Rehearsal):
    """New layers on trial."""

    def __init__(self, flow: Flow, example: Any) -> None:
        super().__init__(flow, example)
        # In training both runs are ours, so that a few samples tell the same; more than one, for statistics of a batch.
        self._examples[True] = first_samples(self.example, 2, count_samples(self.example))
        self._seen: dict[tuple[str, str], SeenTensor | None] = {}
        for call in flow.calls:
            self._seen[call.path, "after"] = call.result or call.output
            self._seen[call.path, "before"] = call.given or next(iter(call.inputs), None)
        self._cotangents: dict[int, Tensor | None] = {}  # of the run that was recorded, by the tensor's id
        self._numbers = {id(module): number for number, module in enumerate(self.model.modules())}
        self._random: dict[bool, bool] = {}  # whether outputs differ when nothing does
        self._ungraded: str | None = None  # why gradients could not be asked for
        self._built: dict[tuple[Site, bool, int], nn.Module] = {}  # layers, built once and used in every run
        self._shells = {c.path: c.shell for c in flow.calls if c.output is not None or c.shell is not None}

    def attempt(self, sites: Sequence[Site]) -> Verdict:
        """Put a layer at every site, run the example in both modes, and take them out again."""
        self._ungraded = None
        verdict = self._in_mode(False, sites)
        if verdict.good and self._baseline(True) is not None:  # otherwise it cannot train on the example
            verdict = self._in_mode(True, sites)
        if verdict.good and (self._flow.frozen or self._ungraded):
            verdict = self._backward(sites)
        return verdict

    def _in_mode(self, training: bool, sites: Sequence[Site]) -> Verdict:
        with self._inserted(sites) as new:
            try:
                output = self._run(training, new, graph=not training)
            except Exception as error:
                note(error)
                return Verdict(together=f"the forward pass fails with a layer there ({brief_error(error)})")
            problems = [each.problem("training" if training else "eval") for each in new]
            if any(problems):
                return Verdict({index: problem for index, problem in enumerate(problems) if problem})
            outputs = [each.output for each in new]
            wanted = [*outputs, *(each.given for each in new)]
            gradients = None if training else self._gradients(output, wanted)
        verdict = self._compare(training, output, new)
        if verdict.good and gradients is not None:
            # Units that a ReLU turned off are left out: another new layer after them, with its own ReLU, gives them nothing back.
            on = [None if o is None else o.detach() != 0 for o in outputs]
            verdict.wrong = self._other_gradients(sites, gradients[: len(new)], gradients[len(new) :], on)
        return verdict

    def _backward(self, sites: Sequence[Site]) -> Verdict:
        """One backward pass as the model trains, with what is frozen and the layers themselves.

        What an operation in place overwrites nobody may have needed before: a part without gradients saves nothing.
        """
        error = self._failure(sites)
        # Behind the first one everything gets gradients; alone, because another layer may stand between a value and who overwrites it.
        first = self._failure(sites[:1]) if error is None and len(sites) > 1 else None
        own = self._own_failure if error or first or self._ungraded else None
        if own is None and error is not None:
            return Verdict(together=_BACKWARD.format(error))
        if own is None and first is not None:
            return Verdict({0: _BACKWARD.format(first)})
        unknown = own or self._ungraded
        if unknown is not None:
            where = "the model itself" if own is not None else "a copy in which nothing is frozen"
            self._flow.note(
                f"whether layers get the gradients that are measured was not tried: autograd fails on {where} ({unknown})"
            )
        return Verdict()

    @cached_property
    def _own_failure(self) -> str | None:
        return self._failure(())

    def _failure(self, sites: Sequence[Site]) -> str | None:
        """What a backward pass of the copy with these layers raises."""
        training = self._baseline(True) is not None
        named = self.model.named_parameters(remove_duplicate=False)
        frozen = [p for name, p in named if name in self._flow.frozen and p.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            with self._inserted(sites, themselves=True) as new:
                asked = [p for p in self.model.parameters() if p.requires_grad]
                self._run(training, new, graph=True, nodes=False, then=lambda output: _gradients(output, asked))
        except Exception as error:
            note(error)
            return brief_error(error)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
        return None

    def _compare(self, training: bool, output: Any, new: list[NewLayer]) -> Verdict:
        """The output with the layers against the one without; they have been taken out again."""
        in_list = any(each.cut.way == "list" for each in new)
        # In eval mode it mostly is as it came out when the run was recorded.
        if not training and not difference(self._flow.output, output, in_list):
            return Verdict()
        base = self._baseline(training)
        problem = difference(base, output, in_list) if base is not None else ""
        if problem and self._is_random(training):
            return Verdict()  # it differs from run to run: that its layers are identities is all that can be known
        mode = "training" if training else "eval"
        return Verdict(together=f"{problem} in {mode} mode with a layer there: {_WHY}" if problem else "")

    def _is_random(self, training: bool) -> bool:
        if training not in self._random:
            self._random[training] = bool(difference(self._base[training], self._run(training), False))
        return self._random[training]

    def _run(
        self,
        training: bool,
        new: Sequence[NewLayer] = (),
        *,
        graph: bool = False,
        nodes: bool = True,
        then: Callable[[Any], object] | None = None,
    ) -> Any:
        """What the copy returns; ``then`` is given it before buffers are put back, which a graph may have saved."""
        with self._running(training, graph=graph) as example:
            handles = [handle for each in new for handle in each.watch()]
            for module in self.model.modules():
                if id(module) in self._numbers and not isinstance(module, torch.jit.ScriptModule):
                    handles.append(module.register_forward_pre_hook(self._seeding(), prepend=True))
            try:
                _seed(0)
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.seed(0)
                output = run(self.model, copy_example(example, nodes=graph and nodes and self._flow.takes_gradients))
                if then is not None:
                    then(output)
                return output
            finally:
                for handle in handles:
                    handle.remove()

    def _seeding(self) -> Callable[..., None]:
        """Random numbers that depend on the module and on how often it was called, not on what else has drawn some."""
        calls = [0]

        def hook(module: nn.Module, *_: Any) -> None:
            calls[0] += 1
            _seed(self._numbers[id(module)] * 1000 + calls[0])

        return hook

    @contextmanager
    def _inserted(self, sites: Sequence[Site], *, themselves: bool = False) -> Iterator[list[NewLayer]]:
        """The copy with a layer at every site, in their order: with what stands in for it, or with the layers ``themselves``."""
        bound = [replace(site, point=site.point.in_model(self.model)) for site in sites]
        real = _first_of_equals(self.model, sites)
        standing: Counter[Site] = Counter()
        layers: list[nn.Module] = []
        for index, site in enumerate(bound):  # before the first goes in: a block is copied as it is
            layer = self._layer(site, site.find(self.model)[1], index in real, standing[site])
            layers.append(layer.layer if themselves and isinstance(layer, IdentityStandIn) else layer)
            standing[site] += 1
        new: list[NewLayer] = []
        try:
            for site, layer in zip(reversed(bound), reversed(layers), strict=True):  # what comes before keeps its name
                path, _ = site.find(self.model)
                cut = plan_cut(self.model, site.point, path, takes_call=move_of(site).takes_call)
                apply_cut(self.model, cut, layer)
                new.append(NewLayer(site, layer, cut))
            yield new[::-1]
        finally:
            for each in reversed(new):
                take_out(self.model, each.cut.path, each.cut.place)

    def _layer(self, site: Site, anchor: nn.Module, real: bool, number: int) -> nn.Module:
        """The layer for a site, the first time built, then used again; ``number``: how many of them are there already."""
        # Of equal twins in one container some will do: that the others are identities too follows, here it is about their places.
        real = real or site.path not in self._shells
        if (site, real, number) not in self._built:
            layer = move_of(site).stand_in(self.model, site, anchor, real=real)
            if not real and (shell := self._shells[site.path]) is not None and move_of(site).takes_call:
                layer.register_forward_hook(lambda _, __, output: with_first(shell, output))
            for parameter in layer.parameters():
                parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
            self._built[site, real, number] = layer
        return self._built[site, real, number]

    # --- the gradient that comes back to a site ---

    def _other_gradients(
        self,
        sites: Sequence[Site],
        gradients: list[Tensor | None],
        before: list[Tensor | None],
        on: list[Tensor | None],
    ) -> dict[int, str]:
        """Sites where a measurement would catch another gradient than the layer gets. ``before``: what the layers hand back."""
        wrong = {i: _NO_GRADIENT for i, g in enumerate(gradients) if g is None}
        wrong |= {i: _OVERFLOW for i, g in enumerate(gradients) if g is not None and not bool(g.isfinite().all())}
        tried = [i for i, site in enumerate(sites) if move_of(site).caught_at_site and i not in wrong]
        # An identity hands back what it gets. Where more comes back to its input, that is used elsewhere, and a measurement must tell.
        open_ones = [i for i in tried if not are_alike(gradients[i], before[i], on[i])]
        # A loop of the model's own may treat gradients by a block's position, which the new ones have moved: those without them must be the
        # same.
        in_list = [i for i in tried if self._in_own_loop(sites[i]) and i not in open_ones]
        recorded = self._recorded_gradients([sites[i] for i in in_list])
        open_ones += [i for i, g in zip(in_list, recorded, strict=True) if not are_alike(gradients[i], g, on[i])]
        caught = self._caught_gradients([sites[i] for i in open_ones]) if open_ones else None
        if caught is not None:
            differ = (i for i, g in zip(open_ones, caught, strict=True) if not are_alike(gradients[i], g, on[i]))
            wrong.update(dict.fromkeys(differ, _OTHER_GRADIENT))
        return wrong

    def _in_own_loop(self, site: Site) -> bool:
        """Whether the model itself goes through the container that the layer is in."""
        container = self.model.get_submodule(site.path.rpartition(".")[0])
        return site.point.place is not None or (not site.point.chained and isinstance(container, nn.Sequential))

    def _recorded_gradients(self, sites: Sequence[Site]) -> list[Tensor | None]:
        """The gradients of the run that found the sites: of all uses of a value, which nearly always are the uses after the site."""
        seen = [self._seen.get((site.path, site.side)) for site in sites]
        values = [None if s is None or s.overwritten else s.tensor for s in seen]
        unknown = {id(v): v for v in values if v is not None and id(v) not in self._cotangents}
        if unknown:
            found = self._gradients(self._flow.output, list(unknown.values()), again=True)
            self._cotangents.update(zip(unknown, found or [None] * len(unknown), strict=True))
        return [None if v is None else self._cotangents[id(v)] for v in values]

    def _caught_gradients(self, sites: Sequence[Site]) -> list[Tensor | None] | None:
        """What a measurement would catch, in a separate run."""
        caught: list[Tensor | None] = [None] * len(sites)

        def watcher(index: int) -> Callable[..., Tensor]:
            def watch(value: Tensor, args: Any, kwargs: Any) -> Tensor:
                caught[index] = watched = handed_on(value, sites[index].point)[1]
                return watched

            return watch

        handles = [tap(s.point, self.model.get_submodule(s.path), watcher(i)) for i, s in enumerate(sites)]
        try:
            output = self._run(False, graph=True)
        except Exception as error:
            note(error)
            self._ungraded = brief_error(error)
            return None
        finally:
            for handle in handles:
                handle.remove()
        return self._gradients(output, caught)

    def _gradients(
        self, output: Any, wanted: Sequence[Tensor | GradientEdge | None], *, again: bool = False
    ) -> list[Tensor | None] | None:
        """None where there are none or autograd fails, which a real backward pass then has to tell more of."""
        try:
            return _gradients(output, wanted, again=again)
        except Exception as error:
            note(error)
            self._ungraded = brief_error(error)
            return None


_WHY = "the forward pass counts, indexes or slices its modules, or checks their class"
_BACKWARD = "the backward pass fails with a layer there ({})"
_NO_GRADIENT = "a layer there would get no gradient"
_OVERFLOW = "the gradient that arrives there is infinite or not a number on the example, so nothing can be measured"
_OTHER_GRADIENT = (
    "its values are read elsewhere too: the gradient that could be measured is not the one that a layer there would get"
)


def _gradients(
    output: Any, wanted: Sequence[Tensor | GradientEdge | None], *, again: bool = False
) -> list[Tensor | None] | None:
    """Those of a fixed sum of all outputs; None where the model allows none to be asked for."""
    results = [
        t for t in tensors(output) if t.requires_grad and t.is_floating_point() and bool(torch.isfinite(t).all())
    ]
    asked: list[Any] = [w for w in wanted if isinstance(w, GradientEdge) or (w is not None and w.requires_grad)]
    if not results or not asked:
        return None
    generator = torch.Generator().manual_seed(1)
    weights = [(torch.rand(t.shape, generator=generator, device="cpu") + 0.5).to(t.device, t.dtype) for t in results]
    # Asked for one by one they are the same; what a checkpoint computes again is not seen by the hooks.
    found = torch.autograd.grad(results, asked, weights, allow_unused=True, retain_graph=again)
    by_id = {id(w): g for w, g in zip(asked, found, strict=True)}
    return [None if w is None else by_id.get(id(w)) for w in wanted]


def _seed(number: int) -> None:
    random_state.seed_torch(number)
    random.seed(number)
