"""`Grower(strategy="stack")`: every stack of equal blocks becomes several times as deep, by copies of its blocks.

Nothing is measured, so a check costs next to nothing. The copies act at once: the function is not kept, the loss jumps, and falls again
as training continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from sensli.growing.looking import RememberedSites
from sensli.growing.strategy import OptionalLoss, Strategy
from sensli.growing.triggers import TriggerContext
from sensli.merits.merits import Merit, Merits
from sensli.modules import checks
from sensli.modules.grown import count_growths
from sensli.modules.wrappers import bare
from sensli.moves.sites import Site, Sites, Where
from sensli.moves.stacking import StackCopy, check_copies, find_stack_copies
from sensli.text.commands import UNMEASURED

if TYPE_CHECKING:
    from sensli.growing.options import Options


class StackBlocks(Strategy):
    """Copies of the blocks of every stack, at each check.

    Args:
        factor: How many times as many blocks a stack has afterwards; spared ones are not multiplied (default: 2).
        order: ``"stack"`` puts the copies after the last block (ABC becomes ABCABC), ``"interleave"`` each after its own block (AABBCC)
            (default: "stack").
        spare: How many blocks at each end of a stack are not copied (default: 0).
        noise: The standard deviation of noise on the copies, as a share of that of each tensor (default: 0.0).
        where: Which stacks to copy, as in `find_sites`; a stack is named by the last block that is copied.
        seed: The random seed of the noise (default: 0).
    """

    takes: ClassVar[frozenset[str]] = frozenset({"factor", "order", "spare", "noise", "where"})
    grows: ClassVar[tuple[str, ...]] = ("layers",)
    shares: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = True

    def __init__(
        self,
        *,
        factor: int = 2,
        order: str = "stack",
        spare: int = 0,
        noise: float = 0.0,
        where: Where = None,
        seed: int = 0,
    ) -> None:
        self.factor, self.order, self.spare, self.noise = check_copies(factor, order, spare, noise)
        self.seed = checks.whole("seed", seed, 0, least=0, below=2**64)
        self._search = RememberedSites(where=where, find=find_stack_copies, order=self.order, spare=self.spare)

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(
            factor=options.factor, order=options.order, spare=options.spare, noise=options.noise, where=options.where,
            seed=options.seed,
        )  # fmt: skip

    @property
    def factors(self) -> Sequence[int]:
        """The factors to propose."""
        return (self.factor,)

    def propose(self, model: nn.Module, example: Any) -> Sites:
        found, network = self._search.sites(model, example), bare(model)
        seed = (self.seed + 1_000_003 * count_growths(network)) % 2**63  # another one at each growth
        sites = [
            replace(site, move=stack_of(site).times(factor - 1, noise=self.noise, seed=seed))
            for factor in self.factors
            for site in found
        ]
        return Sites(sites, found.skipped, model_name=type(network).__name__)

    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
        """The factor, which is no merit: nothing is measured."""
        return Merits([Merit(site, stack_of(site).copies + 1.0) for site in sites], norm=UNMEASURED, batches=0)

    def choose(self, merits: Merits, context: TriggerContext) -> list[Site]:
        return [merit.site for merit in merits]

    def reason(self, merits: Merits, taken: Sequence[Merit]) -> str:
        return f"{len(taken)} of {len(merits)} stacks copied"

    def keeps_function(self) -> bool:
        return False


def stack_of(site: Site) -> StackCopy:
    """The move of a site that copies a stack."""
    assert isinstance(site.move, StackCopy)
    return site.move
