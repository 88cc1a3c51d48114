"""One look of a Grower, from what was measured to what came of it, and how it gets into the record and the log."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from torch import nn

from sensli.growing.logs import tell
from sensli.growing.options import Options
from sensli.growing.room import Room
from sensli.growing.sizes import Sizes
from sensli.merits.merits import Merit, Merits
from sensli.surgery.history.growth import Growth
from sensli.surgery.history.outline import outline
from sensli.surgery.history.record import Look, Record
from sensli.surgery.history.tried import Tried


@dataclass
class Looked:
    """What a look found, why it ended as it did, and what was inserted for which merit."""

    room: Room
    merits: Merits | None = None  # None where there was nothing to choose from
    reason: str = ""
    grown: list[tuple[Merit, Growth]] = field(default_factory=list)
    recycled: int = 0  # units
    tried: Tried | None = None
    kept: bool = True  # the function
    rule: str = ""  # by which the place was taken, where the merit did not decide it

    @property
    def taken(self) -> list[Merit]:
        """The merits that were taken."""
        return [merit for merit, _ in self.grown]

    def noted(self, call: int, options: Options, sizes: Sizes) -> Look:
        """What the page and the log show. FLOPs are counted after a growth only."""
        flops = sizes.flops_for_log() if self.grown else None
        return Look.of(
            self.merits,
            self.taken,
            call=call,
            tau=options.tau,
            select=options.selection,
            reason=self.reason + (f"; dead units recycled: {self.recycled}" if self.recycled else ""),
            inserted=tuple(growth.number for _, growth in self.grown),
            parameters=self.room.parameters,
            flops=None if flops is None else flops - sum(growth.site.flops for _, growth in self.grown),
            added=tuple(growth.site.parameters for _, growth in self.grown),
            per=options.per,
            unit=options.unit,
            tried=self.tried,
            kept=self.kept,
            rule=self.rule,
        )


def keep(
    record: Record, options: Options, network: nn.Module, call: int, metric: float | None, look: Look | None
) -> None:
    """Record a call, and the look if there was one, which the log is told."""
    record.unit = options.unit
    record.count(call, metric)
    if look is not None:
        record.looks.append(look)
        if look.inserted or look.parameters != record.drawn_parameters:  # or whoever undid a growth meanwhile
            draw(record, call, network)
        tell(options.log, look)


def draw(record: Record, call: int, network: nn.Module) -> None:
    """Keep a drawing of the model for the page. One that fails warns: nothing depends on it but the page."""
    try:
        record.draw(call, outline(network))
    except Exception as error:
        warnings.warn(
            f"the model could not be drawn for the page of the training: {type(error).__name__}: {error}", stacklevel=5
        )
