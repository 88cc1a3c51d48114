"""What methods of other papers share: how they begin, how one process decides for all, and what a copy that grew tells."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.errors import UnsupportedModel, ZeroMerits
from sensli.growing.looking import RememberedSites
from sensli.growing.strategy import OptionalLoss, Strategy, read_generator, save_generator
from sensli.growing.triggers import TriggerContext
from sensli.merits.catching import scalar_loss, split_batch
from sensli.merits.merits import Merit, Merits
from sensli.modules import checks
from sensli.modules.engines.distributed import Together
from sensli.modules.running import count_samples, device_of, run, to_device, untouched
from sensli.modules.wrappers import bare, is_sharded
from sensli.moves.finding import check_units
from sensli.moves.sites import Edit, Site, Sites
from sensli.text.commands import UNMEASURED

if TYPE_CHECKING:
    from sensli.growing.options import Options


class PaperMethod(Strategy):
    """The sites that its search finds, each worth the same."""

    takes: ClassVar[frozenset[str]] = frozenset({"where"})
    grows: ClassVar[tuple[str, ...]] = ("layers",)
    shares: ClassVar[bool] = False
    _search: RememberedSites

    def propose(self, model: nn.Module, example: Any) -> Sites:
        return self._search.sites(model, example)

    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
        return equal_merits(sites)


class UnitMethod(PaperMethod):
    """A method that adds units.

    Args:
        units: How many units a layer gets at once, as in `find_sites`.
        where: Which sites to consider, as in `find_sites`.
        seed: The random seed.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"units", "where"})
    grows: ClassVar[tuple[str, ...]] = ("units",)
    start_of_sites: ClassVar[str] = "random"
    by_ones: ClassVar[bool] = False  # sites are of one unit each: how many come is decided for all layers together
    keeps: ClassVar[bool] = True  # the function
    in_turn: ClassVar[bool] = False  # takes one width after the other, whatever they are worth

    def __init__(self, *, units: int | float = 0.25, where: Any = None, seed: int = 0) -> None:
        self.units = check_units(units)
        self._search = RememberedSites(
            form="auto", where=where, what="units", units=1 if self.by_ones else self.units, init=self.start_of_sites
        )
        self.generator = torch.Generator().manual_seed(check_seed(seed))
        self.turn = 0

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(units=options.units, where=options.where, seed=options.seed)

    def keeps_function(self) -> bool:
        return self.keeps

    def choose(self, merits: Merits, context: TriggerContext) -> list[Site]:
        worth = [merit for merit in merits if merit.value > 0]
        if not self.in_turn:
            return by_value(worth)
        first = self.turn % len(worth)
        self.turn += 1
        return [merit.site for merit in (*worth[first:], *worth[:first])]

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self.turn, "rival_generator": save_generator(self.generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        turn = state["turn"]
        if type(turn) is not int or turn < 0:
            raise ValueError(f"turn is {turn!r}")
        self.generator.set_state(read_generator(state["rival_generator"]))
        self.turn = turn


def equal_merits(sites: Iterable[Site], batches: int = 0) -> Merits:
    """Sites of which none is worth more than another."""
    return Merits([Merit(site, 1.0) for site in sites], norm=UNMEASURED, batches=batches)


def by_value(merits: Iterable[Merit]) -> list[Site]:
    """The sites, that of the largest value first; of equal ones the first."""
    return [merit.site for merit in sorted(merits, key=lambda merit: -merit.value)]


def by_turn(last: str | None, names: Sequence[str]) -> list[int]:
    """Indices in the order of their turns: the name after the last one first, and so around."""
    after = names.index(last) + 1 if last in names else 0
    return [*range(after, len(names)), *range(after)]


def check_seed(seed: int) -> int:
    """A random seed, as `Grower` takes it."""
    return checks.whole("seed", seed, 0, least=0, below=2**64)


# ---- Decisions of several processes by a method that searches: one of them gets the batches of all, and the others what
# it has found.
#
# Sums over processes would do for a gradient, not for a search along a line, a short training or a model that is
# tried. So the first process scores as if it were alone with the data of all, each batch of a look in turn from every
# process, and sends sites, scores and what the strategy remembers.

Scoring = TypeVar("Scoring", bound=Strategy)
Score = Callable[[Scoring, nn.Module, Sequence[Site], Iterable[Any], OptionalLoss], Merits]


def by_one(score: Score[Scoring]) -> Score[Scoring]:
    """Make a way of scoring run in one process with the batches of all, and say the same on every process."""

    @wraps(score)
    def scored(
        strategy: Scoring, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss
    ) -> Merits:
        network = bare(model)
        with Together(model, f"score sites by {type(strategy).__name__}") as together:
            refuse_sharded(network, strategy)
            if together.group is None:
                return score(strategy, model, sites, batches, loss_fn)
            mine = [to_device(batch, torch.device("cpu")) for batch in batches]
            together.agree(last=False)
            joined = _gathered(mine, together)
            answer: Any = None
            if together.rank == 0:
                try:
                    found = score(strategy, model, sites, joined, loss_fn)
                    by_path = [merit.site.by_path() for merit in found]  # which other processes can read
                    answer = found.with_sites(by_path), strategy.state_dict()
                except ZeroMerits as nothing:
                    answer = str(nothing), strategy.state_dict()
            told, state = together.agree(answer)[0]
            if together.rank != 0:
                strategy.load_state_dict(state)
            if isinstance(told, str):
                raise ZeroMerits(told)
            if together.rank != 0:
                assert isinstance(told, Merits)
                found = told.with_sites([merit.site.in_model(network) for merit in told])
            return found

    return scored


def refuse_sharded(network: nn.Module, strategy: Strategy) -> None:
    """Raise if no process has whole parameters."""
    if is_sharded(network):
        raise UnsupportedModel(
            f"{type(strategy).__name__} needs whole parameters, but the model is sharded (fully_shard). Use strategy='sensli', or "
            "DistributedDataParallel."
        )


def _gathered(mine: list[Any], together: Together) -> list[Any]:
    """The batches of all processes: the first of each, then the second of each. On the first process; the others get none."""
    group: Any = together.group
    every: list[Any] | None = [None] * dist.get_world_size(group) if together.rank == 0 else None
    dist.gather_object(mine, every, dst=dist.get_global_rank(group, 0), group=group)
    missing = object()
    rounds = zip_longest(*(every or ()), fillvalue=missing)
    return [batch for each in rounds for batch in each if batch is not missing]


# ---- Batches that a method runs itself, and copies of a model that grew at a site.


def run_batch(model: nn.Module, batch: Any, index: int, loss_fn: OptionalLoss) -> tuple[Any, Any]:
    """What the model makes of a batch, and the target, both on its device."""
    given, target = split_batch(batch, index, model if loss_fn is not None else None)
    device = device_of(model)
    return run(model, to_device(given, device)), to_device(target, device)


def batch_loss(model: nn.Module, batch: Any, index: int, loss_fn: OptionalLoss) -> Tensor:
    """The loss of a batch."""
    return scalar_loss(*run_batch(model, batch, index, loss_fn), loss_fn, index)


def mean_loss(
    model: nn.Module, batches: Sequence[Any], loss_fn: OptionalLoss, optimizer: Optimizer | None = None
) -> float:
    """The mean loss of one pass, with a step after each batch if there is an optimizer."""
    total, samples = 0.0, 0
    for index, batch in enumerate(batches):
        loss = batch_loss(model, batch, index, loss_fn)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        size = count_samples(batch)
        total, samples = total + float(loss.detach()) * size, samples + size
    return total / samples


def apply_growth(model: nn.Module, site: Site) -> Edit:
    """Grow a model at a site, and nothing that follows it: for a copy."""
    here = site.in_model(model)
    edit = here.move.plan(model, here)
    edit.build()
    edit.apply()
    return edit


def grown_copy(model: nn.Module, site: Site) -> nn.Module:
    """A copy of a model that grew at a site."""
    grown = copy.deepcopy(model)
    apply_growth(grown, site)
    return grown


def loss_after(model: nn.Module, site: Site, batches: Sequence[Any], loss_fn: OptionalLoss) -> float:
    """The mean loss over the batches after a growth that is made in a copy alone: for a step that is found by a search along a line."""
    grown = grown_copy(model, site)
    with torch.no_grad(), untouched(grown):
        return mean_loss(grown, batches, loss_fn)
