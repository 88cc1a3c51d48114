"""Grow an ordinary PyTorch network while it trains.

`find_sites` finds the places where a layer could go, `measure` or `Probe` tell what it would be worth there, `grow` (for
layers also `insert`) takes the best one without changing the function, and the optimizer follows. `Grower` does all of it once per epoch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; typing itself would be most of the time that `import sensli` takes
if TYPE_CHECKING:
    from typing import Any

    from sensli import norms, triggers
    from sensli.checkpoint.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
    from sensli.errors import SensliError, WrongType
    from sensli.expanding.expanding import expand, undo_expansion
    from sensli.expanding.record import expansion
    from sensli.growing.grower import Grower
    from sensli.growing.options import Rates, Trial
    from sensli.merits.measuring import measure
    from sensli.merits.merits import Merit, Merits
    from sensli.merits.probe import Probe
    from sensli.modules.flops import count_flops
    from sensli.moves.finding import find_sites
    from sensli.moves.sites import Site, Sites
    from sensli.surgery.dead import recycle, remove_dead
    from sensli.surgery.growth import grow, insert, replay, undo
    from sensli.surgery.history import Growth, History

__version__ = "0.1.0"

__all__ = [
    "Checkpoint", "Grower", "Growth", "History", "Merit", "Merits", "Probe", "Rates", "SensliError", "Site", "Sites", "Trial",
    "WrongType", "__version__",
    "count_flops", "expand", "expansion", "find_sites", "grow", "insert", "load_checkpoint", "measure", "norms", "recycle", "remove_dead",
    "replay", "save_checkpoint", "triggers", "undo", "undo_expansion",
]  # fmt: skip

# Where each name lives. They are imported when they are first asked for: torch takes seconds, which a help text need not wait for.
_HOMES = {
    "errors": ("SensliError", "WrongType"),
    "checkpoint.checkpoint": ("Checkpoint", "load_checkpoint", "save_checkpoint"),
    "expanding.expanding": ("expand", "undo_expansion"),
    "expanding.record": ("expansion",),
    "growing.grower": ("Grower",),
    "growing.options": ("Rates", "Trial"),
    "merits.measuring": ("measure",),
    "merits.merits": ("Merit", "Merits"),
    "merits.probe": ("Probe",),
    "modules.flops": ("count_flops",),
    "moves.finding": ("find_sites",),
    "moves.sites": ("Site", "Sites"),
    "surgery.dead": ("recycle", "remove_dead"),
    "surgery.history": ("Growth", "History"),
    "surgery.growth": ("grow", "insert", "replay", "undo"),
}
_MODULES = (
    "errors", "expanding", "growing", "integrations", "merits", "modules", "moves", "norms", "page", "paper", "surgery", "text", "triggers",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    from importlib import import_module

    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is not None:
        found = getattr(import_module(f"sensli.{home}"), name)
    elif name in _MODULES:
        found = import_module(f"sensli.{name}")
    else:
        raise AttributeError(f"module 'sensli' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
