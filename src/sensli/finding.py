"""`find_sites`: where a layer could go in a user's model, and which.

Points of the data flow are visited in this order, each at most once: the outputs of activation modules outside of
blocks, the boundaries of stacks of blocks, the inputs of layers that come from a functional activation; where a model
has none of these, the outputs of its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sensli import checks
from sensli.flow import Call, Flow, Seen, record
from sensli.graph import nearest_parameters, origin
from sensli.layers import FORMS, Activation
from sensli.placing import Placing, Refused
from sensli.sites import Site, Sites, Skipped
from sensli.stacks import Stack, find_stacks
from sensli.surroundings import LAYERS, Surroundings, functional
from sensli.twinning import TwinFinder
from sensli.twins import INITS
from sensli.wrappers import bare

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

    ``example`` is a tensor, a tuple of arguments or a dict of keyword arguments; it runs once through a copy of the model, which
    is only read. ``layer`` is ``"relu"``, ``"residual"``, ``"parametric"``, ``"twin"`` or ``"auto"``; ``where`` a kind (``"conv"``,
    ``"linear"``, ``"block"``) or a callable on `Site`; ``kernel_size`` that of new convolutions (default: the neighbour's if odd, else 3).
    ``init``: whether the maps of a twin that need not be zero are its neighbour's (``"copy"``) or drawn anew, equally spread (``"fresh"``).
    """
    check_request(layer, where)
    checks.one_of("init", init, INITS)
    if kernel_size is not None:
        kernel_size = checks.odd("kernel_size", kernel_size, 3, "a new convolution keeps the size of its map")
    model = bare(model)
    checks.example("example", example)
    finder = _Finder(model, record(model, example), layer, kernel_size, TwinFinder(model, example, init))
    sites, skipped = finder.find()
    if callable(where):
        chosen = where
        sites = [site for site in sites if chosen(site)]
    elif where is not None:
        sites = [site for site in sites if site.kind == where]
    return Sites(sites, skipped, model_name=type(model).__name__)


class _Finder:
    """One search: the run of the example, what was asked for, what was found so far."""

    def __init__(self, model: nn.Module, flow: Flow, layer: str, kernel_size: int | None, twins: TwinFinder) -> None:
        self.flow = flow
        self.layer = layer
        self.found: list[tuple[int, Site]] = []  # with the moment in the run, to sort by the data flow
        self.taken: set[Any] = set()  # graph nodes of points that have a site
        self.skipped: dict[str, str] = {}
        # Forms that stand anywhere an activation does look into blocks too; the others respect them as units.
        self.stacks = find_stacks(flow) if layer in ("auto", "residual", "twin") else []
        self.around = Surroundings(flow, self.stacks)
        self.placing = Placing(model, self.around, layer, kernel_size, twins)

    def find(self) -> tuple[list[Site], list[Skipped]]:
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
            if not self.found and self.layer != "relu":
                self._visit_layers()
        if not self.found and not self.skipped:
            what = "no stack of blocks" if self.layer == "twin" else "no activation and no layer with weights"
            self.skipped[""] = f"{what} was met by the example, so there is no place to choose"
        self.found.sort(key=lambda entry: entry[0])
        return [site for _, site in self.found], [Skipped(path, reason) for path, reason in self.skipped.items()]

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
                    f"is used {calls} times in one forward pass, so a layer beside it would not be one place"
                )

    def _visit_stack(self, stack: Stack, *, twins: bool) -> None:
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
                self.skipped[path] = f"{times}, so a layer there would not be one place"
                continue
            call = calls[0]
            if self.around.has_other_names(call):
                self.skipped[path] = "stands in the model under several names, so a layer there would not be one place"
            elif call.output is None:
                self.skipped[path] = f"returns {call.returned}, not a tensor"
            elif not self.around.weights_follow(call):
                self.skipped[path] = "is behind the last layer with weights: what comes out is the model's output"
            elif call.output.node is not None and not nearest_parameters(self.flow.parameter_names, call.output.node):
                self.skipped[path] = "stands before the first layer with weights: what comes out is the model's input"
            elif call.output.node not in self.taken:
                self._try(call, "after", call.output, known)

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
                    "is used several times in one forward pass, so a layer before it would not be one place"
                )
                continue
            self._try(call, "before", call.inputs[0], activation)

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
    ) -> None:
        """A site at a point, or the reason why there is none."""
        try:
            site = self.placing.site(call, side, seen, activation, block, twins)
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
        self.found.append((moment, site))


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
