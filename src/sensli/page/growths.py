"""What a history says about the boxes of its record: units before and after, and growths that share a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sensli.surgery.history.growth import Growth
from sensli.surgery.history.history import History
from sensli.surgery.history.outline import Unit


def growths_of(history: History) -> list[dict[str, Any]]:
    """What a Grower made: number, call and site as text of each growth and, where a layer got more units, how many it had and has."""
    return [
        {"number": growth.number, "call": growth.call, "site": str(growth.site), "units": _units(growth)}
        for growth in history
        if growth.call is not None
    ]


def _units(growth: Growth) -> list[int] | None:
    weight = next((each for each in growth.resized if each.name == f"{growth.name}.weight"), None)
    shapes = zip(weight.old_shape, weight.new_shape, strict=True) if weight is not None else ()
    return next(([old, new] for old, new in shapes if old != new), None)


def apart(units: Sequence[Unit], call: int, history: History) -> list[Unit]:
    """The boxes, with a separate one for every new layer: older records draw a layer that went into a new one as part of its box."""
    boxes = list(units)
    for growth in history:
        known = {box.growth for box in boxes}
        if growth.number in known or not growth.parameters or growth.call is None or growth.call > call:
            continue
        around = next(
            (each for each in history if growth.name.startswith(f"{each.name}.") and each.number in known), None
        )
        place = next((i for i, box in enumerate(boxes) if around is not None and box.growth == around.number), None)
        if place is None:
            continue
        parameters = growth.site.parameters
        boxes[place] = replace(boxes[place], parameters=max(0, boxes[place].parameters - parameters))
        new = Unit(growth.name, str(growth.site.move), parameters, growth.number)
        boxes.insert(place + (growth.site.side == "after"), new)
    return boxes
