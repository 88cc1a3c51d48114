"""The norms of a gradient, for users: ``from sensli.norms import squared_norm``. What is here lives in `sensli.merits`."""

from sensli.merits.norms import NORMS, squared_norm
from sensli.moves.roles import Geometry

__all__ = ["NORMS", "Geometry", "squared_norm"]
