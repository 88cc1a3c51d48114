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

# The name for Grower(strategy=...) -> the file here, and the class in it.
STRATEGIES: dict[str, tuple[str, str]] = {
    "sensli": ("sensli", "Sensli"),
    "random-place": ("random_place", "RandomPlace"),
    "random-start": ("random_start", "RandomStart"),
    "random-units": ("random_units", "RandomUnits"),
    "net2net": ("net2net", "Net2Net"),
    "net2net-deeper": ("net2net_deeper", "Net2NetDeeper"),
    "netmorph": ("netmorph", "NetMorph"),
    "netmorph-deeper": ("netmorph_deeper", "NetMorphDeeper"),
    "gradmax": ("gradmax", "GradMax"),
    "tiny": ("tiny", "Tiny"),
    "nest": ("nest", "Nest"),
    "senn": ("senn", "Senn"),
    "north": ("north", "North"),
    "firefly": ("firefly", "Firefly"),
    "convsenn": ("convsenn", "ConvSenn"),
    "morphnet": ("morphnet", "MorphNet"),
    "splitting": ("splitting", "Splitting"),
    "variance-transfer": ("variance_transfer", "VarianceTransfer"),
    "autogrow": ("autogrow", "AutoGrow"),
    "autogrow-gauss": ("autogrow", "AutoGrowGauss"),
    "autogrow-adam": ("autogrow", "AutoGrowAdam"),
    "llama-pro": ("llama_pro", "LlamaPro"),
    "g-stack": ("g_stack", "GStack"),
}


def class_of(name: str) -> type[Strategy]:
    """The class that is registered under a name."""
    file, kind = STRATEGIES[name]
    found: type[Strategy] = getattr(import_module(f"{__name__}.{file}"), kind)
    return found


def strategy_of(options: Options) -> Strategy:
    """The strategy that the options name, or the object that they hold."""
    return class_of(options.strategy).made(options) if isinstance(options.strategy, str) else options.strategy
