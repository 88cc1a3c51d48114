"""`Strategy`: the three questions that `Grower` asks at a look; and the registry of those that have a name."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.errors import WrongType
from sensli.growing.triggers import TriggerContext
from sensli.merits.catching import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.modules import checks
from sensli.moves.sites import Site, Sites
from sensli.surgery.history import History
from sensli.text.commands import GROW

if TYPE_CHECKING:
    from sensli.growing.options import Options

OptionalLoss = LossFunction | None  # None: the model returns its loss


@runtime_checkable
class Strategy(Protocol):
    """Where a model could grow, what each site is worth, and which of them to take. Reads the model and never changes it.

    With several processes each of them asks its own strategy, and all must get the same answers. One that remembers nothing
    inherits what follows the three questions.

    Attributes:
        takes: The options of `Grower` that `made` hands on, by name; others are refused when a Grower is made. ``seed`` may always be given
            (default: none).
        grows: What it can grow, as ``Grower(what=...)`` names it; the first is meant where nothing is said. Whoever grows one thing alone
            refuses the others (default: all three).
        shares: Whether its merits have a `share`, which `triggers.Pays` needs (default: True).
        needs_metric: Whether `choose` reads ``context.metric`` (default: False). Where FLOPs are compared, the metric is paid for then.
        all_at_once: Whether what `choose` returns is one decision, of which `Grower` takes everything that fits, however small
            ``max_growths`` is (default: False).
    """

    takes: ClassVar[frozenset[str]] = frozenset()
    grows: ClassVar[tuple[str, ...]] = GROW
    shares: ClassVar[bool] = True
    needs_metric: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = False

    @classmethod
    def made(cls, options: Options) -> Strategy:
        """The strategy as ``Grower(strategy="its name")`` makes it, with what it takes from the other options."""
        return cls()

    def propose(self, model: nn.Module, example: Any) -> Sites:
        """The sites in question. Those that nothing would train, or that exceed a limit, are left out by `Grower`."""
        ...

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        """What each of the sites is worth; with ``norm="none"`` the values are no merits, and none is logged. Raises `ZeroMerits` if none
        is worth anything."""
        ...

    def choose(self, merits: Merits, context: TriggerContext) -> Sequence[Site]:
        """The sites to take, in that order. `Grower` takes the first that fit, at most ``max_growths``, or all if `all_at_once`."""
        ...

    def reason(self, merits: Merits, taken: Sequence[Merit]) -> str:
        """Why the look ended as it did, for the log; asked after `choose`."""
        return f"{type(self).__name__} chose {len(taken)} of {len(merits)} sites"

    def rule(self, merits: Merits, taken: Sequence[Merit]) -> str:
        """By which rule the place was taken, in a few words for the log, where the merit did not decide it; empty otherwise."""
        return ""

    def keeps_function(self) -> bool:
        """Whether the function stays as it was at a growth. Where it does not, the log says so."""
        return True

    def attend(self, model: nn.Module, optimizers: Sequence[Optimizer], history: History) -> None:
        """Told what trains the model and what it has grown, both alive, when a Grower is made or has read its state.

        For a method that takes part in every step, such as one with separate learning rates: it registers hooks on the optimizers.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to resume, and restored when a step fails: plain data."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; ``state`` may hold more than that. Raises if it is damaged, and has changed nothing then."""


def check_strategy(strategy: str | Strategy, known: Iterable[str]) -> None:
    """Refuse what is neither registered nor a strategy; whether ``"package.module:Class"`` is one shows when it is imported."""
    if isinstance(strategy, type) and isinstance(strategy, Strategy):
        hint = f"Call it: strategy={strategy.__name__}(...)."
        checks.refuse("strategy", "a Strategy object, or the name of one", strategy, WrongType, hint)
    if not isinstance(strategy, Strategy) and not (isinstance(strategy, str) and ":" in strategy):
        checks.one_of("strategy", strategy, known, other="a Strategy object")


# ---- What `Grower` could do at a look, one file each: what is proposed, how it is scored, what is taken. None of them
# changes the model.
#
# The registry has names only, and the file of a strategy is imported when it is asked for: strategies read the
# options of `Grower`, which know the names.

# The name for Grower(strategy=...), and where its class is.
STRATEGIES: dict[str, str] = {
    "sensli": "sensli.growing.looking:Sensli",
    "stack": "sensli.growing.stacking:StackBlocks",
    "random-place": "sensli_lab.methods.controls:RandomPlace",
    "random-start": "sensli_lab.methods.controls:RandomStart",
    "random-units": "sensli_lab.methods.controls:RandomUnits",
    "net2net": "sensli_lab.methods.net2net:Net2Net",
    "net2net-deeper": "sensli_lab.methods.net2net:Net2NetDeeper",
    "netmorph": "sensli_lab.methods.net2net:NetMorph",
    "netmorph-deeper": "sensli_lab.methods.net2net:NetMorphDeeper",
    "gradmax": "sensli_lab.methods.units:GradMax",
    "tiny": "sensli_lab.methods.units:Tiny",
    "nest": "sensli_lab.methods.units:Nest",
    "senn": "sensli_lab.methods.units:Senn",
    "north": "sensli_lab.methods.units:North",
    "firefly": "sensli_lab.methods.splitting:Firefly",
    "convsenn": "sensli_lab.methods.convsenn:ConvSenn",
    "morphnet": "sensli_lab.methods.morphnet:MorphNet",
    "splitting": "sensli_lab.methods.splitting:Splitting",
    "variance-transfer": "sensli_lab.methods.variance_transfer:VarianceTransfer",
    "autogrow": "sensli_lab.methods.blocks:AutoGrow",
    "autogrow-gauss": "sensli_lab.methods.blocks:AutoGrowGauss",
    "autogrow-adam": "sensli_lab.methods.blocks:AutoGrowAdam",
    "llama-pro": "sensli_lab.methods.blocks:LlamaPro",
    "g-stack": "sensli_lab.methods.blocks:GStack",
}


def strategy_class(name: str) -> type[Strategy]:
    """The class of a registered name, or of ``"package.module:Class"``."""
    module, _, kind = STRATEGIES.get(name, name).partition(":")
    try:
        found = getattr(import_module(module), kind)
    except Exception as error:  # of whatever the module does
        raise ValueError(
            f"strategy {name!r} cannot be imported: {type(error).__name__}: {error}. "
            "Give 'package.module:Class' as Python finds it from here."
        ) from error
    if not isinstance(found, type) or not all(
        hasattr(found, question) for question in ("propose", "score", "choose", "made")
    ):
        raise ValueError(f"strategy {name!r} must be a class that inherits from sensli.growing.strategy.Strategy.")
    return found


def strategy_of(options: Options) -> Strategy:
    """The strategy that the options name, or the object that they hold."""
    return strategy_class(options.strategy).made(options) if isinstance(options.strategy, str) else options.strategy


# ---- The state of a random generator in a strategy's `state_dict`: one text, which is a third of the size of a list of
# numbers as JSON.


def save_generator(generator: torch.Generator) -> str:
    """Its state as plain data."""
    return base64.b64encode(bytes(generator.get_state().tolist())).decode()


def read_generator(state: Any) -> Tensor:
    """What `saved` returned, for `set_state`; a list of numbers, too, as states of before had it. Raises ValueError if it is neither."""
    try:
        numbers = base64.b64decode(state, validate=True) if isinstance(state, str) else bytes(_numbers(state))
        found = torch.tensor(list(numbers), dtype=torch.uint8, device="cpu")
        torch.Generator().set_state(found)  # raises if it is none
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"the state of a random generator is damaged: {error}") from error
    return found


def _numbers(state: Any) -> list[int]:
    if not isinstance(state, list) or any(type(number) is not int for number in state):
        raise TypeError("it is neither a text nor a list of bytes")
    return state
