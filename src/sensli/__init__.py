"""Grow an ordinary PyTorch network while it trains.

`find_sites` finds the places where a layer could go, `measure` or `Probe` tell what it would be worth there, `grow` (for
layers also `insert`) takes the best one without changing the function, and the optimizer follows. `Grower` does all of it once per epoch.
"""

from sensli.errors import SensliError
from sensli.growing import triggers
from sensli.growing.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from sensli.growing.grower import Grower
from sensli.growing.trials.trial import Trial
from sensli.merits import norms
from sensli.merits.measuring import measure
from sensli.merits.merits import Merit, Merits
from sensli.merits.probe import Probe
from sensli.modules.flops import count_flops
from sensli.moves.finding import find_sites
from sensli.moves.sites import Site, Sites
from sensli.surgery.dead import recycle, remove_dead
from sensli.surgery.history.history import Growth, History
from sensli.surgery.insertion import grow, insert, undo
from sensli.surgery.replaying import replay

__version__ = "0.1.0"

__all__ = [
    "Checkpoint", "Grower", "Growth", "History", "Merit", "Merits", "Probe", "SensliError", "Site", "Sites", "Trial",
    "__version__",
    "count_flops", "find_sites", "grow", "insert", "load_checkpoint", "measure", "norms", "recycle", "remove_dead",
    "replay", "save_checkpoint", "triggers", "undo",
]  # fmt: skip
