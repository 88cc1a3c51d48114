"""Blocks of other papers: LLaMA-Pro's identity copies, G_stack's whole stacks, and AutoGrow's new blocks at the end of stages."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.growing.looking import RememberedSites
from sensli.growing.stacking import StackBlocks, stack_of
from sensli.growing.strategy import OptionalLoss, Strategy
from sensli.growing.triggers import TriggerContext
from sensli.merits.measuring import EMPTY
from sensli.merits.merits import Merit, Merits
from sensli.modules import checks, random_state
from sensli.modules.grown import attached_record, count_growths, grown_modules
from sensli.modules.wrappers import bare
from sensli.moves.sites import Site, Sites
from sensli.moves.stacking import StackCopy
from sensli.moves.twin.twins import LASTS, Twin
from sensli.text.commands import UNMEASURED
from sensli_lab.methods.searching import PaperMethod, apply_growth, by_one, by_turn, check_seed, equal_merits, mean_loss

if TYPE_CHECKING:
    from sensli.growing.options import Options

# ---- LLaMA-Pro (Wu et al. 2024): copies of blocks whose outputs begin at zero, evenly spaced among the others. Which
# places, nothing measures.
#
# Of L blocks, each (L / new)-th gets a copy of itself right after it: 32 blocks become 40 by a copy after each
# fourth, the last one included, as in the released code. There the zeros are those of ``o_proj`` and ``down_proj``;
# here they are found by trial, which gives the same two in such a block. `Grower(strategy="llama-pro", count=8,
# freeze_rest=True)` is the published recipe for eight new blocks: the old weights do not train. The function is kept.


class LlamaPro(PaperMethod):
    """Twins at fixed places: a control for the question where.

    Args:
        count: How many blocks come at one look.
        where: Which sites to consider, as in `find_sites`.
    """

    def __init__(self, *, count: int = 1, where: Any = None) -> None:
        self.count = checks.whole("count", count, 1)
        self._search = RememberedSites(form="twin", where=where)

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(count=options.max_growths, where=options.where)

    def choose(self, merits: Merits, context: TriggerContext) -> list[Site]:
        ends = [merit.site for merit in merits if merit.site.side == "after"] or [merit.site for merit in merits]
        apart = max(1, len(ends) // self.count)
        return ends[apart - 1 :: apart][: self.count]


# ---- G_stack (Du, Luo, Qiu, Huang et al. 2024): the whole stack of blocks several times over, once, early in training.
# Nothing is measured.
#
# Blocks 0, ..., n - 1 become (0, ..., n - 1) g times, with the growth factor g = 4; what is around them (embeddings,
# last norm, head) stays. The copies are plain ones, so the function is not kept. Followed: g, the order and the plain
# copies, as in the released code. Where the limits of the trigger or ``max_factor`` do not leave room for g, the
# largest smaller factor that fits is taken (so give ``max_factor=None``, or 4). When to stack is left to the trigger:
# the paper fits, on large language models, log10 d = 0.88 log10 N + 163.27 / log10 C - 5.74 tokens for N parameters
# of the grown network and C FLOPs.
#
# Not followed: its code takes the model alone from the checkpoint, so that AdamW begins with empty moments
# everywhere, with a new warm-up and a new cosine. Here the copies' moments are new, the others are kept, and the
# learning rate goes its way, as for every method; ``optimizer.state.clear()`` after the growth does what the code
# does. With several stacks (an encoder and a decoder), the one with most parameters is stacked first; ``count`` says
# how many of them.

FACTOR = 4  # of the paper


class GStack(StackBlocks):
    """Plain copies of each stack after it, once.

    Args:
        factor: How many times as many blocks the stack has afterwards, at most (default: 4).
        where: Which stacks to copy, as in `find_sites`; a stack is named by its last block.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"where"})
    all_at_once: ClassVar[bool] = False

    def __init__(self, *, factor: int = FACTOR, where: Any = None) -> None:
        super().__init__(factor=checks.whole("factor", factor, FACTOR, least=2), where=where)

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(where=options.where)

    @property
    def factors(self) -> Sequence[int]:
        return range(self.factor, 1, -1)

    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
        """The factor: of what fits, the largest is taken."""
        copied = _copied(bare(model))  # as the model itself tells
        merits = [Merit(site, 0.0 if site.path in copied else stack_of(site).copies + 1.0) for site in sites]
        return Merits(merits, norm=UNMEASURED, batches=0)

    def choose(self, merits: Merits, context: TriggerContext) -> list[Site]:
        ranked = sorted((merit for merit in merits if merit.value > 0), key=lambda merit: -merit.site.parameters)
        largest: dict[str, Site] = {}  # of each stack, which its last block names
        for merit in ranked:
            largest.setdefault(merit.site.path, merit.site)
        return list(largest.values())

    def reason(self, merits: Merits, taken: Sequence[Merit]) -> str:
        if taken:
            return f"GStack made {', '.join(f'{merit.value:g} times as many blocks' for merit in taken)}"
        return "GStack stacks once, and has done so"


def _copied(network: nn.Module) -> set[str]:
    """The paths of the blocks that a stacking made; a stack that ends with one of them has had its turn."""
    born = list(grown_modules(network))
    records = ((number, attached_record(module, number)) for number, _, module in born)
    stacked = {number for number, record in records if record is not None and isinstance(record.site.move, StackCopy)}
    return {path for number, path, _ in born if number in stacked}


# ---- AutoGrow (Wen, Yan, Chen, Li 2020): one block after the other at the end of each stage in turn, until a stage no
# longer pays.
#
# A stage that was grown is closed for good if the metric has not improved since by more than ``least``; growth ends
# when all are closed. Their code decides by the accuracy on the test set; here it is the metric that `Grower.step` is
# given, so give that of a validation set. They append a block every few epochs and close a stage by the running
# maximum of the last hundred or more; here each look is one of their intervals.
#
# A new block is as its modules initialise themselves, but for the weight and the bias of its last norm, which in their
# code are
# - zero (ZeroInit, ``"autogrow"``): the function is kept,
# - uniform in [0, 1) (UniInit, ``AutoGrow(start="uniform")``), or
# - standard normal (GauInit, ``"autogrow-gauss"``), which they found best: the function is not kept, nor with UniInit, or
# - trained alone, until the accuracy is back (AdamInit, ``"autogrow-adam"``, see `adam_init`).
#
# We follow the code for these (a review of it has uniform numbers of deviation 1 for GauInit). A block whose last part
# is a convolution or a linear map and no norm keeps its default start with all but ZeroInit, as their plain networks
# do. Parameters of modules that have no ``reset_parameters`` are copies of the neighbour's.

LEAST = 5e-4  # their 0.05 points of accuracy


class AutoGrow(PaperMethod):
    """Twins at the ends of stages, in turn.

    Args:
        start: How the last norm of a new block begins: ``"zero"``, ``"uniform"``, ``"normal"`` or ``"trained"`` (default: "zero").
        least: By how much the metric, of which smaller is better, must fall between two looks for a stage to stay open (default: 5e-4).
        where: Which sites to consider, as in `find_sites`.
        seed: The random seed of new blocks (default: 0).
    """

    needs_metric: ClassVar[bool] = True

    def __init__(self, *, start: str = "zero", least: float = LEAST, where: Any = None, seed: int = 0) -> None:
        self.start = checks.one_of("start", start, LASTS)
        self.least = checks.at_least("least", least, 0, LEAST)
        self.seed = check_seed(seed)
        self._search = RememberedSites(form="twin", where=where)
        self.closed: list[str] = []
        self.last: str | None = None  # the stage that was grown last
        self.metric: float | None = None  # as it was then

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(where=options.where, seed=options.seed)

    def propose(self, model: nn.Module, example: Any) -> Sites:
        found, network = super().propose(model, example), bare(model)
        seed = (self.seed + 1_000_003 * count_growths(network)) % 2**63  # another one for each block
        ends = {stage(site): site for site in found if isinstance(site.move, Twin)}  # the last of each stage stays
        sites = [
            replace(site, move=site.move.new_block(site.find(network)[1], self.start, seed))
            for site in ends.values()
            if isinstance(site.move, Twin)
        ]
        return Sites(sites, found.skipped, model_name=type(network).__name__)

    def keeps_function(self) -> bool:
        return self.start == "zero"

    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
        if self.start == "trained":
            return self._score_trained(model, sites, batches, loss_fn)
        return equal_merits(sites)

    @by_one
    def _score_trained(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss
    ) -> Merits:
        """With the norm of the block that is next; the others will not be taken now."""
        every, due = list(batches), self._next([stage(site) for site in sites])
        found = [
            adam_init(bare(model), site, every, loss_fn) if index == due else site for index, site in enumerate(sites)
        ]
        return equal_merits(found, len(every))

    def choose(self, merits: Merits, context: TriggerContext) -> list[Site]:
        if self.last is not None and self.last not in self.closed and self._stalled(context.metric):
            self.closed.append(self.last)
        stages = [stage(merit.site) for merit in merits]
        chosen = self._next(stages)
        if chosen is None:
            return []
        self.last, self.metric = stages[chosen], context.metric
        return [merits[chosen].site]

    def _next(self, stages: Sequence[str]) -> int | None:
        """Whose turn it is among those that are open. The stage that grew last comes last, so closing it changes no other turn."""
        return next((index for index in by_turn(self.last, stages) if stages[index] not in self.closed), None)

    def _stalled(self, metric: float | None) -> bool:
        return metric is not None and self.metric is not None and metric > self.metric - self.least

    def state_dict(self) -> dict[str, Any]:
        return {"closed": list(self.closed), "last": self.last, "metric": self.metric}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        closed, last, metric = state["closed"], state["last"], state["metric"]
        if not isinstance(closed, list) or not all(isinstance(name, str) for name in [*closed, last or ""]):
            raise ValueError(f"the stages are {closed!r} and {last!r}")
        if metric is not None and type(metric) is not float:
            raise ValueError(f"the metric is {metric!r}")
        self.closed, self.last, self.metric = list(closed), last, metric


class AutoGrowGauss(AutoGrow):
    """AutoGrow with normally distributed last norms."""

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(start="normal", where=options.where, seed=options.seed)


class AutoGrowAdam(AutoGrow):
    """AutoGrow with last norms that are trained before the block comes."""

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(start="trained", where=options.where, seed=options.seed)


def stage(site: Site) -> str:
    """The container that the blocks around a site are in."""
    return site.path.rpartition(".")[0]


# ---- AutoGrow's AdamInit: the last norm of a new block is trained alone, in a copy of the model, before the block comes.
#
# From their code: the norm begins as it initialises itself; Adam with a rate of 1e-3 and a weight decay of 5e-4
# trains its weight and bias and nothing else, in training mode, for at most ten passes over the training data; it
# ends after a pass whose accuracy is above that of the model without the block less 0.5 points. A strategy sees
# losses and not accuracies, so here the mean loss of a pass must fall below that of the model without the block, plus
# one part in two hundred; a pass is one over the batches of the look. What the passes do to running statistics stays
# in the copy.

RATE, DECAY, PASSES = 1e-3, 5e-4, 10
NEAR = 0.005  # their 0.5 points, as a share of the loss


def adam_init(model: nn.Module, site: Site, batches: Sequence[Any], loss_fn: OptionalLoss) -> Site:
    """The site of a new block with what its last norm has learnt; as it is if the block does not end with a norm."""
    assert isinstance(site.move, Twin)
    if not batches:
        raise MeasurementError(EMPTY)
    grown = copy.deepcopy(model)
    block = grown.get_submodule(apply_growth(grown, site).name)
    names = site.move.last_norm(block)
    if not names:
        return site
    known = dict(block.named_parameters())
    grown.requires_grad_(False)
    trained = {name: known[name].requires_grad_() for name in names}
    optimizer = torch.optim.Adam(trained.values(), lr=RATE, weight_decay=DECAY)
    with random_state.kept(), torch.inference_mode(False), torch.enable_grad():
        with torch.no_grad():
            before = mean_loss(copy.deepcopy(model).train(), batches, loss_fn)
        grown.train()
        for _ in range(PASSES):
            if mean_loss(grown, batches, loss_fn, optimizer) < before + NEAR * abs(before):
                break
    values: dict[str, Tensor] = {name: value.detach().cpu().clone() for name, value in trained.items()}
    return replace(site, move=site.move.trained(values))
