"""The ways in which new units may start, by name."""

from __future__ import annotations

from sensli.moves.width.starts.gradmax import GradMax
from sensli.moves.width.starts.net2net import Net2Net
from sensli.moves.width.starts.random import Random
from sensli.moves.width.starts.sensitive import Sensitive
from sensli.moves.width.starts.start import Start

STARTS: dict[str, Start] = {
    "sensitive": Sensitive(),
    "random": Random(),
    "gradmax": GradMax(),
    "net2net": Net2Net(),
}
