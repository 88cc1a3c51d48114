"""When to look, for users: ``from sensli.triggers import Every``. What is here lives in `sensli.growing`."""

from sensli.growing.saturating import Saturating
from sensli.growing.triggers import At, Diminishing, Every, Limit, Pays, Plateau, Spaced, Trigger, TriggerContext

__all__ = [
    "At",
    "Diminishing",
    "Every",
    "Limit",
    "Pays",
    "Plateau",
    "Saturating",
    "Spaced",
    "Trigger",
    "TriggerContext",
]
