"""What a look proposes, measures and chooses: sites searched only after a change, that something trains and that there is room for."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import OptimizerError, SensliError
from sensli.growing.options import OF_STACKS, OF_STRATEGIES, Options
from sensli.growing.strategy import OptionalLoss, Strategy, read_generator, save_generator
from sensli.growing.triggers import TriggerContext
from sensli.growing.uniform import Uniform, add_up, make_uniform, parts_of_decision, parts_of_sites
from sensli.merits.catching import LossFunction
from sensli.merits.importance import measure_importance
from sensli.merits.measuring import measure
from sensli.merits.merits import LEAST, Merit, Merits, choose_sites, is_control
from sensli.modules.engines.distributed import Together
from sensli.modules.engines.fsdp import reshard
from sensli.modules.flops import count_flops
from sensli.modules.running import map_tensors, noting, tensors, untouched, without_autocast
from sensli.modules.wrappers import bare, is_sharded, own_parameters
from sensli.moves.finding import find_sites
from sensli.moves.sites import Site, Sites, Skipped, Where, filter_sites
from sensli.moves.stacking import after_blocks
from sensli.surgery.growth import check_joining
from sensli.surgery.optimizers import Group, Optimizers
from sensli.surgery.rates import count_layers
from sensli.surgery.record import factor_text, reason_of, rule_of
from sensli.text.commands import GROW, UNIFORM

# ---- The sites of a model: searched for again only after a change.

_PLAIN = (bool, int, float, complex, str, bytes, type(None), FunctionType, BuiltinFunctionType)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class RememberedSites:
    """The sites of a model, remembered for as long as the model is the same."""

    def __init__(self, *, where: Where, find: Callable[..., Sites] | None = None, **request: Any) -> None:
        self._find, self._request = find, request  # as `find_sites` takes it
        self._where = where
        self._seen: list[Any] | None = None
        self._found = Sites(())
        self._failures: list[str] = []  # of the model's code, in the last search

    def sites(self, model: nn.Module, example: Any) -> Sites:
        """All sites of the model. All ranks search, or none."""
        network = bare(model)
        now = fingerprint(network)
        known = now == self._seen
        if is_sharded(network):  # a search puts the parameters together, for which all ranks are needed
            with Together(model, "find sites") as together:
                known = all(together.agree(known))
        if not known:
            self._seen = None
            with noting() as failures:
                self._found = (self._find or find_sites)(model, example, **self._request)
            # What the model's code failed at may pass at the next look, unless it fails there again.
            if not failures or (self._found and failures == self._failures):
                self._seen = now
            self._failures = failures
        # Asked at every look: what a function says may depend on more than the model.
        sites, found = filter_sites(self._found, self._where), self._found
        return Sites(sites, found.skipped, notes=found.notes, model_name=type(network).__name__)


def fingerprint(model: nn.Module) -> list[Any]:
    """What a search depends on, as far as it is cheap to read: the modules and their order, mode, hooks and plain settings; shapes."""
    numbers: dict[int, int] = {}  # tied tensors have one number

    def form(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        number = numbers.setdefault(id(tensor), len(numbers))
        return number, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad

    return [
        (
            path,
            weakref.ref(module),  # not the number of an object, which another one may get after it
            type(module),
            [(name, value) for name, value in vars(module).items() if isinstance(value, _PLAIN)],
            [(name, form(tensor)) for name, tensor in (*module._parameters.items(), *module._buffers.items())],
            [tuple(getattr(module, name)) for name in _HOOKS],
        )
        for path, module in model.named_modules(remove_duplicate=False)
    ]


@without_autocast()
def propose_sites(strategy: Strategy, model: nn.Module, example: Any, optimizer: Optimizers, options: Options) -> Sites:
    """The sites that a strategy proposes and that something would train; an error with the reasons if there are none."""
    sites = trainable_sites(bare(model), strategy.propose(model, example), optimizer, options.rates.group)
    if not sites:
        asked = "" if options.where is None else f" for where={options.where!r}"
        other = {"units": "what='both', which adds layers too", "layers": "what='both', which adds units too"}
        remedy = f"\nGive {other[options.what]}." if options.strategy == "sensli" and options.what in other else ""
        raise SensliError(f"there is nowhere to grow{asked} in this {sites.explain()}{remedy}")
    return sites


def trainable_sites(network: nn.Module, sites: Sites, optimizer: Optimizers, group: int | Group | None) -> Sites:
    """The sites that the optimizer could follow to; the others are skipped with the reason."""
    kept, skipped = [], list(sites.skipped)
    for site in parts_of_sites(sites):
        try:
            check_joining(network, site, optimizer, group)
        except OptimizerError as error:
            skipped.append(Skipped(site.path, f"nothing would train a layer there: {error}"))
        else:
            kept.append(site)
    found = Sites(kept, skipped, notes=sites.notes, model_name=type(network).__name__)
    return make_uniform(network, found) if any(isinstance(site.move, Uniform) for site in sites) else found


# ---- Which of the sites there is room for: what the trigger's limits allow, and how much one growth may add
# (``max_factor``).


@dataclass(frozen=True)
class Room:
    """The sites that the trigger allows: those that fit, and those that would add more than ``max_factor`` allows."""

    fitting: list[Site]
    larger: list[Site]
    parameters: int  # of the model as it is
    max_factor: float | None

    @classmethod
    def of(cls, sites: Iterable[Site], options: Options, context: TriggerContext) -> Room:
        """Ask the trigger about each of the sites."""
        parameters, factor = context.sizes["parameters"], options.max_factor
        most = math.inf if factor is None else factor * parameters
        allowed = [site for site in sites if options.trigger.allows(site, context)]
        fitting = [site for site in allowed if parameters + site.parameters <= most]
        larger = [site for site in allowed if parameters + site.parameters > most]
        return cls(fitting, larger, parameters, factor)

    @property
    def left_out(self) -> str:
        """What a reason adds about the growths that are too large."""
        if not self.larger:
            return ""
        return f"; left out as larger than max_factor = {self.max_factor:g} allows: {len(self.larger)}"

    @property
    def why_none(self) -> str:
        """Why none of the sites fits."""
        if not self.larger:
            return "the trigger's limits leave no room to grow at any site"
        smallest, after = self._smallest
        return (
            f"every growth would bring the model to more than max_factor = {self.max_factor:g} times its parameters; the smallest, "
            f"{smallest}, {factor_text(self.parameters, after)}"
        )

    @property
    def advice(self) -> str:
        """How to allow the smallest of the growths that are too large."""
        factor = math.ceil(self._smallest[1] / self.parameters)
        return f"Give Grower(max_factor={factor}) to allow it, or None for no limit."

    @property
    def _smallest(self) -> tuple[Site, int]:
        smallest = min(self.larger, key=lambda site: site.parameters)
        return smallest, self.parameters + smallest.parameters


class Sizes(Mapping[str, int]):
    """Sizes by name, counted when first asked for: most triggers never do, and they are asked every epoch."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._model = model
        self._known: dict[str, int] = {}
        self._rules: dict[str, Callable[[], int]] = {
            "parameters": lambda: sum(p.numel() for p in own_parameters(model)),
            "flops": lambda: int(count_flops(model, example)),
            "depth": lambda: count_layers(model),
        }

    def __getitem__(self, name: str) -> int:
        if name not in self._known:
            self._known[name] = self._rules[name]()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def forget(self) -> None:
        """The model has grown: count again."""
        self._known.clear()

    def flops_for_log(self) -> int | None:
        """None where they cannot be counted, because no decision depends on them."""
        try:
            return self["flops"]
        except Exception:
            return None
        finally:
            if is_sharded(self._model):
                reshard(self._model)  # a forward pass without a backward one leaves the parameters whole


# ---- Whether a merit is worth a layer: compared with the existing weights (``tau``), and with a loss that is gone already
# (``floor``).

SOLVED = 1e-3  # the share of the largest loss below which the floor holds
_CLASSES = 10.0  # times the floor: a few rounding errors of single precision, by which cross-entropy goes in steps


class Threshold:
    """Lets the merits through that reach it. Remembers the largest loss that is known of: the scale of the floor."""

    def __init__(self, tau: float, floor: float) -> None:
        self.tau, self.floor = tau, floor
        self.largest_loss = 0.0
        self.classes = False  # whether the targets of the last look were classes

    def worth(self, merits: Merits) -> list[Merit]:
        """The merits that reach it, the largest first."""
        least = self.least_gain(merits)
        if self.is_learnt(merits):
            return []
        return [
            merit
            for merit in merits.ranked
            if (merit.ratio is None or merit.ratio >= self.tau) and math.sqrt(merit.value) >= least
        ]

    def least_gain(self, merits: Merits) -> float:
        """The least first-order decrease of the loss, per unit change of the new weights, that a layer must promise now.

        Only where most of the loss is gone: a network whose outputs are far too small for its targets has small gradients too.
        """
        if merits.loss is None:  # of steps that were watched without it
            return 0.0
        loss = abs(merits.loss)
        self.largest_loss = max(self.largest_loss, loss)
        # A loss of exactly zero leaves nothing to gain, whatever its scale was.
        scale = max(self.largest_loss, 1.0) if loss == 0 else self.largest_loss
        return self.floor * scale if loss <= SOLVED * scale else 0.0

    def is_learnt(self, merits: Merits) -> bool:
        """Whether the loss itself says that classes are learnt: it is the share that is wrong, and no layer lowers it by more.

        The merit does not tell: activations of a network that is sure are large, and so are its gradients beside the loss. A
        squared error is the square of what is wrong, so a regression may go on.
        """
        return self.classes and merits.loss is not None and 0 <= merits.loss <= self.least_loss

    @property
    def least_loss(self) -> float:
        """Where targets are classes, the loss at which nothing is left to gain."""
        return min(_CLASSES * self.floor, SOLVED) * self.largest_loss

    def learn_scale(self, model: nn.Module, blind: Blind | None, merits: Merits) -> None:
        """Take the loss of a blind output into account: the first look may come when the problem is solved. All ranks call it."""
        with Together(model, "compare the loss with that of a constant output") as together:
            found = None if blind is None else blind.loss(bare(model), above=merits.loss or 0.0)
            told = together.agree((found, blind is not None and blind.classes))
        self.classes = all(classes for _, classes in told)
        known = [loss for loss, _ in told if loss is not None]
        if known:
            self.largest_loss = max(self.largest_loss, abs(sum(known) / len(known)))


class Blind:
    """A loss function that remembers one batch, to tell the loss of an output that does not depend on the input."""

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self._seen: tuple[Any, Any] | None = None  # the mean output in the form of the output, and the target

    def __call__(self, output: Any, target: Any) -> Tensor:
        if self._seen is None:
            self._seen = map_tensors(output, _mean), target
        return self._loss_fn(output, target)

    def loss(self, network: nn.Module, above: float) -> float | None:
        """The loss of the mean output of a batch for all its samples, or of zeros, whichever is smaller.

        None if neither is a number above the loss of the network: then it says nothing about what can be learnt.
        """
        means, target = self._seen or (None, None)
        found = []
        for factor in (1.0, 0.0) if self._seen is not None else ():
            # Only a limit depends on it, so a loss function may fail on such an output.
            with suppress(Exception), torch.no_grad(), untouched(network):
                value = float(self._loss_fn(map_tensors(means, partial(_times, factor=factor)), target))
                found += [value] if above < value < math.inf else []
        return min(found, default=None)

    @property
    def classes(self) -> bool:
        """Whether the target of the batch is classes: whole numbers by their type, or nothing but zeros and ones, and both of them."""
        found = list(tensors(None if self._seen is None else self._seen[1]))
        with suppress(Exception):  # a tensor may be of a class that cannot be compared
            return bool(found) and all(map(_are_classes, found))
        return False


def _are_classes(target: Tensor) -> bool:
    if not target.is_floating_point():
        return not target.is_complex()
    ones = target == 1
    return bool(((target == 0) | ones).all() and ones.any() and not ones.all())


def _mean(output: Tensor) -> Tensor:
    """The mean over the samples, for each of them; it takes no more memory than one of them."""
    if not output.is_floating_point() or output.dim() == 0 or len(output) == 0:
        return output.detach()
    return output.detach().float().mean(0, keepdim=True).to(output.dtype).expand_as(output)


def _times(output: Tensor, factor: float) -> Tensor:
    return (output * factor).contiguous() if output.is_floating_point() else output


class Sensli(Strategy):
    """Proposes what `find_sites` finds, scores by `measure`, and takes what passes the threshold by the order of ``select``."""

    takes: ClassVar[frozenset[str]] = OF_STRATEGIES - OF_STACKS
    grows: ClassVar[tuple[str, ...]] = (*GROW, UNIFORM)

    def __init__(self, options: Options) -> None:
        self.options = options
        self.threshold = Threshold(options.tau, options.floor)
        self._search = RememberedSites(
            what="units" if options.what == UNIFORM else options.what, where=options.where, form=options.form,
            kernel_size=options.kernel_size, units=options.units, init=options.init,
        )  # fmt: skip
        # Not the global random state, which growing leaves alone.
        self._generator = torch.Generator().manual_seed(options.seed)
        self._importance: list[float] = []  # of the blocks of the last look, where it decides

    @classmethod
    def made(cls, options: Options) -> Sensli:
        return cls(options)

    def propose(self, model: nn.Module, example: Any) -> Sites:
        found = self._search.sites(model, example)
        if self.options.select == LEAST:
            return after_blocks(found, type(bare(model)).__name__)
        return make_uniform(bare(model), found) if self.options.what == UNIFORM else found

    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
        options = self.options
        blind = Blind(loss_fn) if loss_fn is not None and options.floor else None
        merits = measure(
            model, parts_of_sites(sites), batches, blind or loss_fn, norm=options.norm, ratio=True,
            confidence=options.confidence, tolerance=options.tolerance,
        )  # fmt: skip
        if options.floor:
            self.threshold.learn_scale(model, blind, merits)
        if options.select == LEAST:
            blocks = [site.find(bare(model))[1] for site in sites]
            self._importance = measure_importance(model, blocks, batches, loss_fn)
        return add_up(bare(model), merits) if options.what == UNIFORM else merits

    def choose(self, merits: Merits, context: TriggerContext) -> list[Site]:
        worth = self.threshold.worth(merits)
        if self.options.select == LEAST:  # whether to grow, the largest merit decides
            ranked = sorted(range(len(merits)), key=lambda index: self._importance[index])
            return [merits[index].site for index in ranked[: len(worth)]]
        options = self.options
        found = choose_sites(options.select, merits, worth, options.max_growths, self._generator, per=options.per)
        return [merit.site for merit in found]

    def reason(self, merits: Merits, taken: Sequence[Merit]) -> str:
        if not taken and self.threshold.is_learnt(merits):
            return (
                f"the problem is solved: the classes are learnt, with a loss of {merits.loss:.1e}, not above the "
                f"{self.threshold.least_loss:.1e} that the floor allows"
            )
        if taken and self.options.what == UNIFORM:
            return f"all {len(parts_of_decision(taken[0]))} widths grow by {self.options.units:g}, as one decision"
        return reason_of(
            merits, taken, select=self.options.selection, tau=self.threshold.tau, floor=self.threshold.least_gain(merits),
            control=is_control(self.options.select), per=self.options.per,
        )  # fmt: skip

    def rule(self, merits: Merits, taken: Sequence[Merit]) -> str:
        if taken and self.options.select == LEAST:
            return f"copies the least important of {len(merits)} blocks"
        return rule_of(merits, taken, self.options.selection)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": save_generator(self._generator), "largest_loss": self.threshold.largest_loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loss = state.get("largest_loss", 0.0)
        if type(loss) not in (int, float) or not 0 <= loss < math.inf:
            raise ValueError(f"largest_loss is {loss!r}")
        self._generator.set_state(read_generator(state["generator"]))
        self.threshold.largest_loss = float(loss)
