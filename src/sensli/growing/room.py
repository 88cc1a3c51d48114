"""Which of the sites there is room for: what the trigger's limits allow, and how much one growth may add (``max_factor``)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sensli.growing.options import Options
from sensli.growing.trigger import Moment
from sensli.moves.sites import Site
from sensli.surgery.history.record import factor_text


@dataclass(frozen=True)
class Room:
    """The sites that the trigger allows: those that fit, and those that would add more than ``max_factor`` allows."""

    fitting: list[Site]
    larger: list[Site]
    parameters: int  # of the model as it is
    max_factor: float | None

    @classmethod
    def of(cls, sites: Iterable[Site], options: Options, moment: Moment) -> Room:
        """Ask the trigger about each of the sites."""
        parameters, factor = moment.sizes["parameters"], options.max_factor
        most = math.inf if factor is None else factor * parameters
        allowed = [site for site in sites if options.trigger.allows(site, moment)]
        fitting = [site for site in allowed if parameters + site.parameters <= most]
        larger = [site for site in allowed if parameters + site.parameters > most]
        return cls(fitting, larger, parameters, factor)

    @property
    def left_out(self) -> str:
        """What a reason adds about the growths that are too large."""
        if not self.larger:
            return ""
        return f"; left out as larger than max_factor = {self.max_factor:g} allows: {len(self.larger)}"

    @property
    def why_none(self) -> str:
        """Why none of the sites fits."""
        if not self.larger:
            return "the trigger's limits leave no room to grow at any site"
        smallest, after = self._smallest
        return (
            f"every growth would bring the model to more than max_factor = {self.max_factor:g} times its parameters; the smallest, "
            f"{smallest}, {factor_text(self.parameters, after)}"
        )

    @property
    def advice(self) -> str:
        """How to allow the smallest of the growths that are too large."""
        factor = math.ceil(self._smallest[1] / self.parameters)
        return f"Give Grower(max_factor={factor}) to allow it, or None for no limit."

    @property
    def _smallest(self) -> tuple[Site, int]:
        smallest = min(self.larger, key=lambda site: site.parameters)
        return smallest, self.parameters + smallest.parameters
