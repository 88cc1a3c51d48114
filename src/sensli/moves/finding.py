"""`find_sites`: where a layer could go in a user's model, and which.

Points of the data flow are visited in this order, each at most once: the outputs of activation modules outside of
blocks, the boundaries of stacks of blocks, the inputs of layers that come from a functional activation; where a model
has none of these, the outputs of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sensli.modules import checks
from sensli.modules.wrappers import bare
from sensli.moves.layers import FORMS
from sensli.moves.placing import Placing, Refused
from sensli.moves.sites import Site, Sites, Skipped
from sensli.moves.trace.activations import Activation, functional
from sensli.moves.trace.flow import Call, Flow, Seen, record
from sensli.moves.trace.graph import nearest_parameters, origin
from sensli.moves.trace.stacks import Stack, find_stacks, parent_of
from sensli.moves.trace.surroundings import LAYERS, Surroundings
from sensli.moves.trial import Trial, Verdict
from sensli.moves.twin.twinning import TwinFinder
from sensli.moves.twin.twins import INITS

KINDS = ("conv", "linear", "block")


def check_request(layer: str, where: str | Callable[[Site], bool] | None) -> None:
    """Raise if a layer or a kind of site is asked for that does not exist."""
    checks.one_of("layer", layer, ("auto", *FORMS))
    if where is not None and not callable(where):
        checks.one_of("where", where, KINDS, other="a function of a Site that returns True or False")


def find_sites(
    model: nn.Module,
    example: Any,
    *,
    layer: str = "auto",
    where: str | Callable[[Site], bool] | None = None,
    kernel_size: int | None = None,
    init: str = "copy",
) -> Sites:
    """Find the places where an identity layer can be inserted without changing the function.

    The example runs a few times through a copy of the model, with and without new layers; the model itself is only read.

    Args:
        model: The network.
        example: What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        layer: The form of the new layers: ``"relu"``, ``"residual"``, ``"parametric"``, ``"twin"``, or ``"auto"`` to choose
            what fits each place (default: "auto").
        where: Which sites to keep: a kind (``"conv"``, ``"linear"``, ``"block"``) or a function of a `Site` that returns a bool.
            None keeps all of them.
        kernel_size: The kernel size of new convolutions, an odd number. None takes the neighbour's if it is odd, otherwise 3.
        init: How a twin gets the weights that need not be zero: ``"copy"`` takes those of its neighbour, ``"fresh"`` draws new
            ones with the same spread (default: "copy").

    Returns:
        The sites in the order of the data flow, with the places that were skipped and why.

    Raises:
        BadExample: If the example does not run through the model.
        UnsupportedModel: If the model as a whole cannot be read.
    """
    check_request(layer, where)
    checks.one_of("init", init, INITS)
    if kernel_size is not None:
        kernel_size = checks.odd(
            "kernel_size", kernel_size, 3, "a new convolution must keep the size of its feature map"
        )
    model = bare(model)
    checks.example("example", example)
    with torch.inference_mode(False):
        sites, skipped = _search(model, example, layer, kernel_size, init)
    if callable(where):
        chosen = where
        sites = [site for site in sites if chosen(site)]
    elif where is not None:
        sites = [site for site in sites if site.kind == where]
    return Sites(sites, skipped, model_name=type(model).__name__)


def _search(
    model: nn.Module, example: Any, layer: str, kernel_size: int | None, init: str
) -> tuple[list[Site], list[Skipped]]:
    flow = record(model, example)
    trial, twins = Trial(flow, example), TwinFinder(model, example, init)
    finder = _Finder(model, flow, layer, kernel_size, twins, added=True)
    sites, skipped = finder.find(trial)
    lists = [stack for stack in finder.stacks if stack.added]
    if lists and not any(site.layer.twin is not None and site.layer.twin.null for site in sites):
        # Nothing can go between the blocks of those lists, so they are looked into.
        sites, others = _Finder(model, flow, layer, kernel_size, twins, added=False).find(trial)
        skipped = [*skipped, *(each for each in others if each not in skipped)]
    return sites, skipped


@dataclass
class _Candidate:
    """A point of the data flow: what may be put there if the trial refuses what is there now."""

    call: Call
    moment: int  # in the run, to sort by the data flow
    site: Site
    others: Iterator[Site]


class _Finder:
    """One search: the run of the example, what was asked for, what was found so far."""

    def __init__(
        self, model: nn.Module, flow: Flow, layer: str, kernel_size: int | None, twins: TwinFinder, *, added: bool
    ) -> None:
        self.flow = flow
        self.layer = layer
        self.found: list[_Candidate] = []
        self.taken: set[Any] = set()  # graph nodes of points that have a site
        self.skipped: dict[str, str] = {}
        # Forms that stand anywhere an activation does look into blocks too; the others respect them as units.
        self.stacks = (
            find_stacks(flow, added=added and layer != "residual") if layer in ("auto", "residual", "twin") else []
        )
        self.around = Surroundings(flow, self.stacks)
        self.placing = Placing(model, self.around, layer, kernel_size, twins)
        self._makers: dict[Any, Call] = {}  # which module gave the values of a graph node, the innermost
        for call in flow.calls:
            if call.output is not None and call.output.node is not None:
                self._makers[call.output.node] = call

    def find(self, trial: Trial) -> tuple[list[Site], list[Skipped]]:
        self._visit_refused()
        if self.layer in ("auto", "twin"):
            # All twins before any other form: between two blocks the one may have a twin where the other has none.
            for stack in sorted(self.stacks, key=lambda stack: -len(stack.blocks)):
                self._visit_stack(stack, twins=True)
        if self.layer != "twin":
            self._visit_activations()
            for stack in self.stacks:
                self._visit_stack(stack, twins=False)
            self._visit_functional_activations()
        self._confirm(trial)
        if not self.found and self.layer not in ("relu", "twin"):
            self._visit_layers()
            self._confirm(trial)
        if not self.found and not self.skipped:
            what = "no stack of blocks" if self.layer == "twin" else "no activation and no layer with weights"
            self.skipped[""] = f"{what} was reached by the example, so there is nowhere to grow"
        self.found.sort(key=lambda candidate: candidate.moment)
        return [each.site for each in self.found], [Skipped(path, reason) for path, reason in self.skipped.items()]

    def _confirm(self, trial: Trial) -> None:
        """Keep what holds in the model; what does not is replaced by the next best, or skipped with the reason."""
        self.found.sort(key=lambda candidate: candidate.moment)
        confirmed: list[_Candidate] = []
        waiting, attempts = [self.found], 0
        while waiting:
            group = waiting.pop()
            if not group:
                continue
            attempts += 1
            verdict = _attempt(trial, group)
            if verdict.good:
                confirmed += group
            elif attempts >= _ATTEMPTS:
                for each in group:
                    reason = verdict.together or verdict.wrong.get(
                        group.index(each), "a neighbouring place failed the trial"
                    )
                    self.skipped[each.call.path] = f"{reason}, when tried together with other places"
            elif verdict.wrong:
                waiting.append(
                    [e for i, e in enumerate(group) if i not in verdict.wrong or self._next(e, verdict.wrong[i])]
                )
            else:
                waiting += self._apart(group, verdict.together or "")
        self.found = confirmed

    def _apart(self, group: list[_Candidate], reason: str) -> list[list[_Candidate]]:
        """A group that does not hold together: by containers, then in another way, then in halves, to find those that do not hold."""
        families: dict[object, list[_Candidate]] = {}
        for each in group:
            families.setdefault(_family(each.site), []).append(each)
        if len(families) > 1:
            return list(families.values())
        in_container = group[0].site.chained or group[0].site.place is not None
        if len(group) == 1 or (in_container and not _is_fixed(group[0].site)):
            return [[each for each in group if self._next(each, reason)]]
        half = len(group) // 2
        return [group[:half], group[half:]]

    def _next(self, candidate: _Candidate, reason: str) -> bool:
        """Take the next best for a point; where there is none, say why."""
        try:
            candidate.site = next(candidate.others)
            return True
        except (StopIteration, Refused):
            self.skipped[candidate.call.path] = reason
            return False

    def _visit_refused(self) -> None:
        """Modules that could not be grown beside or into, said at once."""
        for path in self.flow.opaque:
            self.skipped[path] = "is a scripted module, which can be neither read nor changed"
        for path, module in self.flow.model.named_modules():
            calls = len(self.flow.calls_of(path))
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                self.skipped[path] = (
                    "is recurrent: its steps and layers run inside one call, so there is no place between them"
                )
            elif "quantized" in type(module).__module__:
                self.skipped[path] = "is quantised: its weights are whole numbers, and no gradient passes"
            elif isinstance(module, LAYERS) and calls > 1 and not self.around.in_block(path):
                self.skipped[path] = (
                    f"is used {calls} times in one forward pass, so a layer next to it would not be in a single place"
                )

    def _visit_stack(self, stack: Stack, *, twins: bool) -> None:
        if stack.added:
            if twins:
                for block in stack.blocks:
                    assert block.result is not None
                    self._try(block, "after", block.result, block=True, twins=True, added=True)
            return
        first = stack.blocks[0]
        # In a plain chain of equal blocks the first one's input is a place only if it is an activation's output.
        assert first.given is not None
        opens = stack.residual or functional(first.given.node) is not None
        if opens and first.given.node not in self.taken:
            self._try(first, "before", first.given, block=True, twins=twins)
        for block in stack.blocks:
            assert block.result is not None
            if block.result.node not in self.taken:
                self._try(block, "after", block.result, block=True, twins=twins)

    def _visit_activations(self) -> None:
        for path, module in self.flow.model.named_modules():
            known = Activation.of(module)
            if known is None and not _could_be_activation(module, self.flow.calls_of(path)):
                continue
            if self.around.in_block(path):
                continue
            calls = self.flow.calls_of(path)
            if len(calls) != 1:
                times = f"is called {len(calls)} times in one forward pass" if calls else "is not called by the example"
                self.skipped[path] = f"{times}, so a layer there would not be in a single place"
                continue
            call = calls[0]
            if self.around.has_other_names(call):
                self.skipped[path] = "has several names in the model, so a layer there would not be in a single place"
            elif call.output is None:
                self.skipped[path] = f"returns {call.returned}, not a tensor"
            elif not self.around.weights_follow(call):
                self.skipped[path] = "comes after the last layer with weights: its output is the model's output"
            elif call.output.node is not None and not self._has_parameters(call.output.node):
                self.skipped[path] = "comes before the first layer with weights: its output is the model's input"
            elif call.output.node not in self.taken:
                self._try(call, "after", call.output, known)

    def _has_parameters(self, node: Any) -> bool:
        return any(True for _ in nearest_parameters(self.flow.parameter_names, node))

    def _visit_functional_activations(self) -> None:
        for call in self.flow.calls:
            if not isinstance(call.module, LAYERS) or not call.inputs or self.around.in_block(call.path):
                continue
            source = origin(call.inputs[0].node)
            activation = functional(source)
            if activation is None or source in self.taken:
                continue
            if len(self.flow.calls_of(call.path)) != 1 or self.around.has_other_names(call):
                self.skipped[call.path] = (
                    "is used several times in one forward pass, so a layer before it would not be in a single place"
                )
                continue
            maker = self._maker_before(source, call)
            self._try(call, "before", call.inputs[0], activation, before=(maker, source) if maker is not None else None)

    def _maker_before(self, source: Any, call: Call) -> Call | None:
        """The module whose map goes into a functional activation and is then flattened: the layer belongs to the map, not to its pixels."""
        map_dims, dims = len(source._input_metadata[0].shape), call.inputs[0].tensor.dim()
        maker = self._makers.get(source.next_functions[0][0]) if map_dims > 2 and dims < map_dims else None
        if maker is None or len(self.flow.calls_of(maker.path)) != 1 or self.around.has_other_names(maker):
            return None
        return None if self.around.in_block(maker.path) else maker

    def _visit_layers(self) -> None:
        for call in self.flow.calls:
            plain = isinstance(call.module, LAYERS) and not self.around.in_block(call.path)
            once = len(self.flow.calls_of(call.path)) == 1
            if plain and once and call.output is not None and self.around.weights_follow(call):
                self._try(call, "after", call.output)

    def _try(
        self,
        call: Call,
        side: str,
        seen: Seen,
        activation: Activation | None = None,
        *,
        block: bool = False,
        twins: bool = False,
        added: bool = False,
        before: tuple[Call, Any] | None = None,
    ) -> None:
        """A candidate at a point, or the reason why there is none. ``before``: the module before a functional activation, and its node."""
        sites = self.placing.sites(call, side, seen, activation, block, twins, added)
        if before is not None and activation is not None:
            sites = _first_that_goes(self.placing.before_activation(before[0], activation, before[1]), sites)
        try:
            site = next(sites)
        except Refused as refusal:
            if twins and self.layer == "auto":
                return  # another form may do
            self.skipped[call.path] = str(refusal)
            self.taken.add(seen.node)  # one reason per point is enough
            return
        self.taken.add(seen.node)
        if side == "before":
            self.taken.add(origin(seen.node) if call.path not in self.around.blocks else seen.node)
        moment = call.ended if side == "after" else call.began
        self.found.append(_Candidate(call, moment, site, sites))


_ATTEMPTS = 24  # trials of one search: more would cost more than they find


def _first_that_goes(one: Iterator[Site], other: Iterator[Site]) -> Iterator[Site]:
    with suppress(Refused):
        yield from one
    yield from other


def _attempt(trial: Trial, group: list[_Candidate]) -> Verdict:
    """Try all places of a group at once, and of every family of them one twice: a second growth must work too."""
    sites = [each.site for each in group]
    again = list({(_family(s), s.layer.form, s.side): i for i, s in reversed(list(enumerate(sites)))}.values())
    verdict = trial.attempt([*sites, *(sites[i] for i in again)])
    for index in list(verdict.wrong):
        if index >= len(sites):
            verdict.wrong.setdefault(again[index - len(sites)], verdict.wrong.pop(index))
    return verdict


def _family(site: Site) -> object:
    """Sites that go into the same container in the same way hold or fall together."""
    return (
        parent_of(site.path),
        site.chained,
        site.place is not None,
        site.layer.twin is not None and site.layer.twin.null,
    )


def _is_fixed(site: Site) -> bool:
    """Whether there is no other way to put this layer there."""
    return site.layer.twin is not None and (site.layer.twin.null or bool(site.place and site.place.indices))


def _could_be_activation(module: nn.Module, calls: list[Call]) -> bool:
    """A parameterless leaf of the user's own that changes values and keeps the shape: treated as an activation."""
    if (
        any(True for _ in module.children())
        or any(True for _ in module.parameters())
        or type(module).__module__.startswith("torch.")
    ):
        return False
    if len(calls) != 1 or calls[0].output is None or len(calls[0].inputs) != 1:
        return False
    given, output = calls[0].inputs[0], calls[0].output
    return (
        output.tensor.is_floating_point()
        and output.tensor.shape == given.tensor.shape
        and output.node is not given.node
    )
