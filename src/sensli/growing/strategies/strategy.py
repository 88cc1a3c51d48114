"""`Strategy`: the three questions that `Grower` asks at a look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from sensli.errors import WrongType
from sensli.growing.trigger import Moment
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.modules import checks
from sensli.moves.sites import Site, Sites
from sensli.surgery.history.history import History
from sensli.text.names import GROW

if TYPE_CHECKING:  # the options know the names of strategies
    from sensli.growing.options import Options


@runtime_checkable
class Strategy(Protocol):
    """Where a model could grow, what each site is worth, and which of them to take. Reads the model and never changes it.

    With several processes each of them asks its own strategy, and all must get the same answers. One that remembers nothing
    inherits what follows the three questions.

    Attributes:
        takes: The options of `Grower` that `made` hands on, by name; others are refused when a Grower is made. ``seed`` may always be given
            (default: none).
        grows: What it can grow, as ``Grower(grow=...)`` names it; the first is meant where nothing is said. Whoever grows one thing alone
            refuses the others (default: all three).
        shares: Whether its merits have a `share`, which `triggers.Pays` needs (default: True).
        needs_metric: Whether `choose` reads ``moment.metric`` (default: False). Where FLOPs are compared, the metric is paid for then.
        all_at_once: Whether what `choose` returns is one decision, of which `Grower` takes everything that fits, however small ``count``
            is (default: False).
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

    def choose(self, merits: Merits, moment: Moment) -> Sequence[Site]:
        """The sites to take, in that order. `Grower` takes the first ones that fit, at most ``count``; all of them if `all_at_once`."""
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
