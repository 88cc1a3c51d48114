"""Blocks of other papers: LLaMA-Pro's identity copies, and G_stack's whole stacks, which change the function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from sensli.growing.looking import RememberedSites
from sensli.growing.strategy import Strategy
from sensli.growing.triggers import Moment
from sensli.merits.catching import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.modules import checks
from sensli.modules.grown import grown, told
from sensli.modules.wrappers import bare
from sensli.moves.sites import Site, Sites
from sensli.moves.stacking import StackCopy, find_stacks
from sensli.text.commands import UNMEASURED
from sensli_lab.methods.searching import PaperMethod

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
        self._search = RememberedSites(layer="twin", where=where)

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(count=options.count, where=options.where)

    def choose(self, merits: Merits, moment: Moment) -> list[Site]:
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


class GStack(PaperMethod):
    """Plain copies of each stack after it, once.

    Args:
        factor: How many times as many blocks the stack has afterwards, at most (default: 4).
        where: Which stacks to copy, as in `find_sites`; a stack is named by its last block.
    """

    def __init__(self, *, factor: int = FACTOR, where: Any = None) -> None:
        self.factor = checks.whole("factor", factor, FACTOR, least=2)
        self._search = RememberedSites(where=where, find=find_stacks)

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(where=options.where)

    def propose(self, model: nn.Module, example: Any) -> Sites:
        found = super().propose(model, example)
        sites = [
            replace(site, move=_stack(site).times(factor - 1)) for factor in range(self.factor, 1, -1) for site in found
        ]
        return Sites(sites, found.skipped, model_name=type(bare(model)).__name__)

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        """The factor: of what fits, the largest is taken."""
        copied = _copied(bare(model))  # as the model itself tells
        merits = [Merit(site, 0.0 if site.path in copied else _stack(site).copies + 1.0) for site in sites]
        return Merits(merits, norm=UNMEASURED, batches=0)

    def choose(self, merits: Merits, moment: Moment) -> list[Site]:
        ranked = sorted((merit for merit in merits if merit.value > 0), key=lambda merit: -merit.site.parameters)
        largest: dict[str, Site] = {}  # of each stack, which its last block names
        for merit in ranked:
            largest.setdefault(merit.site.path, merit.site)
        return list(largest.values())

    def reason(self, merits: Merits, taken: Sequence[Merit]) -> str:
        if taken:
            return f"GStack made {', '.join(f'{merit.value:g} times as many blocks' for merit in taken)}"
        return "GStack stacks once, and has done so"

    def keeps_function(self) -> bool:
        return False


def _stack(site: Site) -> StackCopy:
    assert isinstance(site.move, StackCopy)
    return site.move


def _copied(network: nn.Module) -> set[str]:
    """The paths of the blocks that a stacking made; a stack that ends with one of them has had its turn."""
    born = list(grown(network))
    records = ((number, told(module, number)) for number, _, module in born)
    stacked = {number for number, record in records if record is not None and isinstance(record.site.move, StackCopy)}
    return {path for number, path, _ in born if number in stacked}
