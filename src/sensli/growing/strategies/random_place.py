"""A control: SensLI's own sites and starts, at a random one of them. What is measured decides whether to grow, not where.

It is `Grower(select="random")` under a name. The function is kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from sensli.growing.options import Options
from sensli.growing.strategies.sensli import Sensli


class RandomPlace(Sensli):
    """Chooses among the sites by lot."""

    takes: ClassVar[frozenset[str]] = Sensli.takes - {"select"}

    @classmethod
    def made(cls, options: Options) -> Sensli:
        return cls(replace(options, strategy="sensli", select="random"))
