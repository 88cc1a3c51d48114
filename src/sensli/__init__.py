"""Grow an ordinary PyTorch network while it trains.

`find_sites` finds the places where a layer could go, `measure` or `Probe` tell what it would be worth there, `insert` puts the best one
in without changing the function, and the optimizer follows. `Grower` does all of it once per epoch.
"""

from sensli import norms, triggers
from sensli._version import __version__
from sensli.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from sensli.errors import SensliError
from sensli.finding import find_sites
from sensli.flops import count_flops
from sensli.grower import Grower
from sensli.history import Growth, History
from sensli.measuring import measure
from sensli.merits import Merit, Merits
from sensli.probe import Probe
from sensli.replaying import replay
from sensli.sites import Site, Sites
from sensli.surgery import insert, undo

__all__ = [
    "Checkpoint", "Grower", "Growth", "History", "Merit", "Merits", "Probe", "SensliError", "Site", "Sites", "__version__",
    "count_flops", "find_sites", "insert", "load_checkpoint", "measure", "norms", "replay", "save_checkpoint", "triggers", "undo",
]  # fmt: skip
