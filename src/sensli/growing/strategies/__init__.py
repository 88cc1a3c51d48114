"""What `Grower` could do at a look, one file each: what is proposed, how it is scored, what is taken. None of them changes the model.

The registry has names only, and the file of a strategy is imported when it is asked for: strategies read the options of `Grower`, which
know the names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sensli.growing.options import Options
    from sensli.growing.strategies.strategy import Strategy

# The name for Grower(strategy=...), and where its class is.
STRATEGIES: dict[str, str] = {
    "sensli": "sensli.growing.strategies.sensli:Sensli",
    "random-place": "sensli.growing.strategies.random_place:RandomPlace",
    "random-start": "sensli.growing.strategies.random_start:RandomStart",
    "random-units": "sensli.growing.strategies.random_units:RandomUnits",
    "net2net": "sensli.growing.strategies.net2net:Net2Net",
    "net2net-deeper": "sensli.growing.strategies.net2net_deeper:Net2NetDeeper",
    "netmorph": "sensli.growing.strategies.netmorph:NetMorph",
    "netmorph-deeper": "sensli.growing.strategies.netmorph_deeper:NetMorphDeeper",
    "gradmax": "sensli.growing.strategies.gradmax:GradMax",
    "tiny": "sensli.growing.strategies.tiny:Tiny",
    "nest": "sensli.growing.strategies.nest:Nest",
    "senn": "sensli.growing.strategies.senn:Senn",
    "north": "sensli.growing.strategies.north:North",
    "firefly": "sensli.growing.strategies.firefly:Firefly",
    "convsenn": "sensli.growing.strategies.convsenn:ConvSenn",
    "morphnet": "sensli.growing.strategies.morphnet:MorphNet",
    "splitting": "sensli.growing.strategies.splitting:Splitting",
    "variance-transfer": "sensli.growing.strategies.variance_transfer:VarianceTransfer",
    "autogrow": "sensli.growing.strategies.autogrow:AutoGrow",
    "autogrow-gauss": "sensli.growing.strategies.autogrow:AutoGrowGauss",
    "autogrow-adam": "sensli.growing.strategies.autogrow:AutoGrowAdam",
    "llama-pro": "sensli.growing.strategies.llama_pro:LlamaPro",
    "g-stack": "sensli.growing.strategies.g_stack:GStack",
}


def class_of(name: str) -> type[Strategy]:
    """The class of a registered name, or of ``"package.module:Class"``."""
    module, _, kind = STRATEGIES.get(name, name).partition(":")
    try:
        found = getattr(import_module(module), kind)
    except Exception as error:  # of whatever the module does
        raise ValueError(f"strategy {name!r} cannot be imported: {type(error).__name__}: {error}.") from error
    if not isinstance(found, type) or not all(
        hasattr(found, question) for question in ("propose", "score", "choose", "made")
    ):
        raise ValueError(
            f"strategy {name!r} must be a class that inherits from sensli.growing.strategies.strategy.Strategy."
        )
    return found


def strategy_of(options: Options) -> Strategy:
    """The strategy that the options name, or the object that they hold."""
    return class_of(options.strategy).made(options) if isinstance(options.strategy, str) else options.strategy
