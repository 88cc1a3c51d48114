"""`find_sites`: where a layer could go in a user's model, and which.

Points of the data flow are visited in this order, each at most once: the outputs of activation modules outside of
blocks, the boundaries of stacks of blocks, the inputs of layers that come from a functional activation; where a model
has none of these, the outputs of its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from sensli.errors import SensliError, one_of
from sensli.flow import Call, Flow, Seen, record
from sensli.graph import Channels, channels, nearest_parameters, operation, origin
from sensli.layers import FORMS, RELU, TANH, Activation, Layer, grouped_like, same_size_kernel
from sensli.lists import ListPlace
from sensli.sites import Ref, Site, Sites, Skipped
from sensli.stacks import Stack, find_stacks
from sensli.twinning import TwinFinder
from sensli.twins import INITS
from sensli.wrappers import bare
from sensli.zeroing import NoTwin

KINDS = ("conv", "linear", "block")

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS)

# Graph nodes of functional activations, and the module that is the same function.
_FUNCTIONAL = {
    "Relu": "ReLU", "Tanh": "Tanh", "Sigmoid": "Sigmoid", "Gelu": "GELU", "Silu": "SiLU", "Mish": "Mish", "Softplus": "Softplus",
    "LeakyRelu": "LeakyReLU", "Elu": "ELU", "Hardswish": "Hardswish", "Hardsigmoid": "Hardsigmoid", "Hardtanh": "Hardtanh",
    "LogSigmoid": "LogSigmoid",
}  # fmt: skip


def check_request(layer: str, where: str | Callable[[Site], bool] | None) -> None:
    """Raise if a layer or a kind of site is asked for that does not exist."""
    if layer != "auto" and layer not in FORMS:
        raise ValueError(one_of("layer", layer, ("auto", *FORMS)))
    if where is not None and not callable(where) and where not in KINDS:
        raise ValueError(one_of("kind of site in where=", where, KINDS))


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
    if init not in INITS:
        raise ValueError(one_of("init", init, INITS))
    if kernel_size is not None and (kernel_size < 1 or kernel_size % 2 == 0):
        raise ValueError(
            f"kernel_size={kernel_size}: a new convolution keeps the size of its map, so its kernel must be odd."
        )
    model = bare(model)
    finder = _Finder(model, record(model, example), layer, kernel_size, TwinFinder(model, example, init))
    sites, skipped = finder.find()
    if callable(where):
        chosen = where
        sites = [site for site in sites if chosen(site)]
    elif where is not None:
        sites = [site for site in sites if site.kind == where]
    return Sites(sites, skipped, model_name=type(model).__name__)


class _Refused(SensliError):
    """A place that cannot grow; the text becomes its reason in `Sites.skipped`."""


class _Finder:
    """One search: the run of the example, what was asked for, what was found so far."""

    def __init__(self, model: nn.Module, flow: Flow, layer: str, kernel_size: int | None, twins: TwinFinder) -> None:
        self.model = model
        self.twins = twins
        self.flow = flow
        self.layer = layer
        self.kernel_size = kernel_size
        self.found: list[tuple[int, Site]] = []  # with the moment in the run, to sort by the data flow
        self.taken: set[Any] = set()  # graph nodes of points that have a site
        self.skipped: dict[str, str] = {}
        # Forms that stand anywhere an activation does look into blocks too; the others respect them as units.
        self.stacks = find_stacks(flow) if layer in ("auto", "residual", "twin") else []
        self.blocks = [block.path for stack in self.stacks for block in stack.blocks]
        # What stands among blocks is a block too, if not an equal one: a stage begins with one that changes the size.
        for stack in self.stacks:
            if stack.residual and stack.container:
                container = flow.model.get_submodule(stack.container)
                if isinstance(container, (nn.Sequential, nn.ModuleList)):
                    blocks = [
                        f"{stack.container}.{n}"
                        for n, child in container.named_children()
                        if len(list(child.children())) > 1
                    ]
                    self.blocks += [path for path in blocks if not any(b.startswith(f"{path}.") for b in self.blocks)]

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

    # --- the points ---

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
            elif isinstance(module, _LAYERS) and calls > 1 and not self._in_block(path):
                self.skipped[path] = (
                    f"is used {calls} times in one forward pass, so a layer beside it would not be one place"
                )

    def _visit_stack(self, stack: Stack, *, twins: bool) -> None:
        first = stack.blocks[0]
        # In a plain chain of equal blocks the first one's input is a place only if it is an activation's output.
        assert first.given is not None
        opens = stack.residual or _functional(first.given) is not None
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
            if self._in_block(path):
                continue
            calls = self.flow.calls_of(path)
            if len(calls) != 1:
                times = f"is called {len(calls)} times in one forward pass" if calls else "is not called by the example"
                self.skipped[path] = f"{times}, so a layer there would not be one place"
                continue
            call = calls[0]
            if self._has_other_names(call):
                self.skipped[path] = "stands in the model under several names, so a layer there would not be one place"
            elif call.output is None:
                self.skipped[path] = f"returns {call.returned}, not a tensor"
            elif not self._weights_follow(call):
                self.skipped[path] = "is behind the last layer with weights: what comes out is the model's output"
            elif call.output.node is not None and not nearest_parameters(self.flow.parameter_names, call.output.node):
                self.skipped[path] = "stands before the first layer with weights: what comes out is the model's input"
            elif call.output.node not in self.taken:
                self._try(call, "after", call.output, known)

    def _visit_functional_activations(self) -> None:
        for call in self.flow.calls:
            if not isinstance(call.module, _LAYERS) or not call.inputs or self._in_block(call.path):
                continue
            source = origin(call.inputs[0].node)
            if source is None or source in self.taken or operation(source) not in _FUNCTIONAL:
                continue
            if len(self.flow.calls_of(call.path)) != 1 or self._has_other_names(call):
                self.skipped[call.path] = (
                    "is used several times in one forward pass, so a layer before it would not be one place"
                )
                continue
            self._try(call, "before", call.inputs[0], Activation(_FUNCTIONAL[operation(source)]))

    def _visit_layers(self) -> None:
        for call in self.flow.calls:
            plain = isinstance(call.module, _LAYERS) and not self._in_block(call.path)
            once = len(self.flow.calls_of(call.path)) == 1
            if plain and once and call.output is not None and self._weights_follow(call):
                self._try(call, "after", call.output)

    # --- one point ---

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
            site = self._site(call, side, seen, activation, block, twins)
        except _Refused as refusal:
            if twins and self.layer == "auto":
                return  # another form may do
            self.skipped[call.path] = str(refusal)
            self.taken.add(seen.node)  # one reason per point is enough
            return
        self.taken.add(seen.node)
        if side == "before":
            self.taken.add(origin(seen.node) if call.path not in self.blocks else seen.node)
        moment = call.ended if side == "after" else call.began
        self.found.append((moment, site))

    def _site(self, call: Call, side: str, seen: Seen, activation: Activation | None, block: bool, twins: bool) -> Site:
        if seen.node is None or not seen.reached:
            raise _Refused(
                "no gradient arrives there (the forward pass detaches it, or the output does not depend on it)"
            )
        if side == "before" and not block and not call.positional:
            raise _Refused(
                "takes its input by keyword or in a nest, and a layer before it needs it as the first argument"
            )
        if self._in_encoder_layer(call.path):
            raise _Refused(
                "stands inside torch's TransformerEncoderLayer, which in eval mode reads the weights without calling the modules"
            )
        source = origin(seen.node)
        # The graph does not say what a padding was filled with, so the values have a say too.
        from_relu = source is not None and operation(source) == "Relu" and not seen.negative
        neighbours = self._neighbours(call, seen)
        path, module = call.path, self.model.get_submodule(call.path)
        layer, place = None, None
        if twins:
            layer, place = self._twin(call, seen)
        else:
            form = self._form(from_relu, activation or _functional(seen))
            layer = self._plan(form, call, seen, neighbours, activation)
        return Site(
            anchor=Ref.to(path, module),
            side=side,
            layer=layer,
            shape=tuple(seen.tensor.shape[1:]),
            neighbours=tuple(Ref.to(name, self.model.get_submodule(name)) for name in neighbours),
            chained=self._chained(path),
            overwritten=seen.overwritten
            or self._overwritten_in_training(seen, call.ended if side == "after" else call.began),
            slot=call.slot if block and call.slot is not None else 0,
            first_part=side == "after" and call.output is None,
            place=place,
        )

    def _twin(self, call: Call, seen: Seen) -> tuple[Layer, ListPlace | None]:
        """A twin of the block, and its place in the list."""
        try:
            return self.twins.find(self.flow, call, seen, chained=self._chained(call.path))
        except NoTwin as refusal:
            raise _Refused(str(refusal)) from refusal

    def _form(self, from_relu: bool, activation: Activation | None) -> str:
        if self.layer == "auto":
            return "relu" if from_relu else "residual"
        if self.layer == "relu" and not from_relu:
            behind = activation.name if activation else "this"
            raise _Refused(
                f'is not idempotent: an identity layer + ReLU behind {behind} would change the function; use layer="residual"'
            )
        return self.layer

    def _plan(self, form: str, call: Call, seen: Seen, neighbours: list[str], activation: Activation | None) -> Layer:
        shape = tuple(seen.tensor.shape)
        if len(shape) < 2 or not seen.tensor.is_floating_point():
            raise _Refused(
                f"its values have shape {shape} and type {seen.tensor.dtype}: no batch of floating-point features"
            )
        # A matrix of samples and features leaves no choice, whatever its features were before they were flattened.
        lies = channels(seen.node, shape) if len(shape) > 2 else Channels(1, False)
        if lies is None and call.path in self.blocks and call.result is not None:
            lies = channels(call.result.node, shape)  # a block maps a space into itself
        if lies is None:
            raise _Refused(f"it cannot be told along which dimension of its shape {shape} the features lie")
        if lies.dim not in (1, len(shape) - 1):
            raise _Refused(f"its features lie along dimension {lies.dim} of {len(shape)}, neither second nor last")
        conv = lies.dim == 1 and (lies.first or len(shape) > 2) and 3 <= len(shape) <= 5
        s = RELU if form == "relu" else (activation or _functional(seen) or self._activation_in(call) or TANH)
        if not conv:
            if lies.dim != len(shape) - 1:
                raise _Refused(
                    f"its features lie along dimension {lies.dim} of shape {shape}, where no layer of ours acts"
                )
            # torch's slopes per channel lie along the second dimension, which are the features only in a matrix
            return Layer(form, "linear", shape[-1], activation=_fitted(s, shape[-1] if len(shape) == 2 else 1))
        kernel, groups = (3,) * (len(shape) - 2), 1
        for name in neighbours:
            module = self.model.get_submodule(name)
            if isinstance(module, _CONVOLUTIONS) and len(module.kernel_size) == len(shape) - 2:
                kernel, groups = same_size_kernel(module.kernel_size), grouped_like(shape[1], module.groups)
                break
        if self.kernel_size is not None:
            kernel = (self.kernel_size,) * len(kernel)
        return Layer(form, "conv", shape[1], kernel, groups, _fitted(s, shape[1]))

    # --- what stands around a point ---

    def _has_other_names(self, call: Call) -> bool:
        names = self.flow.model.named_modules(remove_duplicate=False)
        return any(module is call.module and path != call.path for path, module in names)

    def _in_encoder_layer(self, path: str) -> bool:
        while path:
            path = path.rpartition(".")[0]
            if isinstance(self.flow.model.get_submodule(path), nn.TransformerEncoderLayer):
                return True
        return False

    def _overwritten_in_training(self, seen: Seen, since: int) -> bool:
        """Whether a module that rests in eval mode (a dropout with ``inplace=True``) will work in place on these values."""
        memory = seen.tensor.untyped_storage().data_ptr()
        return any(
            call.began > since
            and getattr(call.module, "inplace", False) is True
            and any(given.tensor.untyped_storage().data_ptr() == memory for given in call.inputs)
            for call in self.flow.calls
        )

    def _in_block(self, path: str) -> bool:
        return any(path == block or path.startswith(block + ".") for block in self.blocks)

    def _weights_follow(self, call: Call) -> bool:
        return any(
            later.began > call.ended and any(True for _ in later.module.parameters(recurse=False))
            for later in self.flow.calls
        )

    def _neighbours(self, call: Call, seen: Seen) -> list[str]:
        """Paths of the modules that own the nearest parameters: those the values come from, else the anchor's own."""
        owners = [name.rpartition(".")[0] for name in nearest_parameters(self.flow.parameter_names, seen.node)]
        owners += [name.rpartition(".")[0] for name, _ in call.module.named_parameters(prefix=call.path)]
        return list(dict.fromkeys(owners))[:4]

    def _activation_in(self, call: Call) -> Activation | None:
        """The first activation inside a block, module or functional: what the block's author would use."""
        for module in call.module.modules():
            known = Activation.of(module)
            if known is not None:
                return known
        for inner in self.flow.calls:
            if (
                call.began < inner.began
                and inner.ended < call.ended
                and isinstance(inner.module, _LAYERS)
                and inner.inputs
            ):
                source = origin(inner.inputs[0].node)
                if source is not None and operation(source) in _FUNCTIONAL:
                    return Activation(_FUNCTIONAL[operation(source)])
        return None

    def _chained(self, path: str) -> bool:
        """Whether the anchor's container is an nn.Sequential that passes the data through its children itself."""
        parent = self.flow.model.get_submodule(path.rpartition(".")[0])
        own_forward = isinstance(parent, nn.Sequential) and type(parent).forward is nn.Sequential.forward
        return path != "" and own_forward and len(self.flow.calls_of(path.rpartition(".")[0])) == 1


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


def _functional(seen: Seen) -> Activation | None:
    """The activation that a tensor directly comes from, read off its graph node."""
    name = operation(seen.node) if seen.node is not None else ""
    return Activation(_FUNCTIONAL[name]) if name in _FUNCTIONAL else None


def _fitted(activation: Activation, width: int) -> Activation:
    """The same activation for another width: a PReLU with one slope per channel has to fit."""
    if activation.name == "PReLU" and dict(activation.arguments)["num_parameters"] > 1:
        return replace(activation, arguments=(("num_parameters", width),))
    return activation
