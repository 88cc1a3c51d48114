"""AutoGrow (Wen, Yan, Chen, Li 2020): one block after the other at the end of each stage in turn, until a stage no longer pays.

A stage that was grown is closed for good if the metric has not improved since by more than ``least``; growth ends when all are closed.
Their code decides by the accuracy on the test set; here it is the metric that `Grower.step` is given, so give that of a validation set. New
blocks begin as in their variant ZeroInit, which keeps the function; they found normally distributed last norms (GauInit)
better, which do not keep it and are not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from sensli.growing.searching import Search
from sensli.growing.strategies.strategy import Strategy
from sensli.growing.triggers import Moment
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.moves.sites import Site, Sites

if TYPE_CHECKING:
    from sensli.growing.options import Options

LEAST = 5e-4  # their 0.05 points of accuracy


class AutoGrow(Strategy):
    """Twins at the ends of stages, in turn.

    Args:
        least: By how much the metric, of which smaller is better, must fall between two looks for a stage to stay open.
        where: Which sites to consider, as in `find_sites`.
    """

    needs_metric = True

    def __init__(self, *, least: float = LEAST, where: Any = None) -> None:
        self.least = least
        self._search = Search(layer="twin", where=where)
        self.closed: list[str] = []
        self.last: str | None = None  # the stage that was grown last
        self.metric: float | None = None  # as it was then

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(where=options.where)

    def propose(self, model: nn.Module, example: Any) -> Sites:
        found = self._search.sites(model, example)
        ends = {stage(site): site for site in found}  # the last of each stage stays
        return Sites(list(ends.values()), found.skipped, model_name=type(model).__name__)

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        return Merits([Merit(site, 1.0) for site in sites], norm="none", batches=0)

    def choose(self, merits: Merits, moment: Moment) -> list[Site]:
        if self.last is not None and self.last not in self.closed and self._stalled(moment.metric):
            self.closed.append(self.last)
        stages = [stage(merit.site) for merit in merits]
        after = stages.index(self.last) + 1 if self.last in stages else 0
        turns = [*range(after, len(stages)), *range(after)]
        chosen = next((index for index in turns if stages[index] not in self.closed), None)
        if chosen is None:
            return []
        self.last, self.metric = stages[chosen], moment.metric
        return [merits[chosen].site]

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


def stage(site: Site) -> str:
    """The container that the blocks around a site are in."""
    return site.path.rpartition(".")[0]
