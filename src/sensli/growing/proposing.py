"""The sites that a strategy proposes, without those that nothing would train."""

from __future__ import annotations

from typing import Any

from torch import nn

from sensli.errors import OptimizerError, SensliError
from sensli.growing.options import Options
from sensli.growing.strategies.strategy import Strategy
from sensli.modules.autocast import without_autocast
from sensli.modules.wrappers import bare
from sensli.moves.sites import Sites, Skipped
from sensli.surgery.insertion import check_joining
from sensli.surgery.state.optim import Optimizers


@without_autocast()
def proposed(strategy: Strategy, model: nn.Module, example: Any, optimizer: Optimizers, options: Options) -> Sites:
    """The sites that a strategy proposes and that something would train; an error with the reasons if there are none."""
    sites = trained(bare(model), strategy.propose(model, example), optimizer, options.group)
    if not sites:
        asked = "" if options.where is None else f" for where={options.where!r}"
        raise SensliError(f"there is nowhere to grow{asked} in this {type(model).__name__}. {sites.explain()}")
    return sites


def trained(network: nn.Module, sites: Sites, optimizer: Optimizers, group: int | dict[str, Any] | None) -> Sites:
    """The sites that the optimizer could follow to; the others are skipped with the reason."""
    kept, skipped = [], list(sites.skipped)
    for site in sites:
        try:
            check_joining(network, site, optimizer, group)
        except OptimizerError as error:
            skipped.append(Skipped(site.path, f"nothing would train a layer there: {error}"))
        else:
            kept.append(site)
    return Sites(kept, skipped, notes=sites.notes, model_name=type(network).__name__)
