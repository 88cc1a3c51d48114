"""From the record of a training to what the page shows: plain data, in which every number is the record's own."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from sensli import __version__
from sensli.errors import HistoryError
from sensli.modules import checks
from sensli.surgery.history import Growth, History
from sensli.surgery.outline import Unit
from sensli.surgery.record import Decision
from sensli.text.commands import PER, UNMEASURED
from sensli.text.tables import html_table, short_number

# ---- What a history says about the boxes of its record: units before and after, and growths that share a box.


def _units(growth: Growth) -> list[int] | None:
    weight = next((each for each in growth.resized if each.name == f"{growth.name}.weight"), None)
    shapes = zip(weight.old_shape, weight.new_shape, strict=True) if weight is not None else ()
    return next(([old, new] for old, new in shapes if old != new), None)


def separate_boxes(units: Sequence[Unit], call: int, history: History) -> list[Unit]:
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


# ---- The training in words: what the film shows, for readers who cannot see it, or without JavaScript.


def words(data: dict[str, Any]) -> tuple[str, str]:
    """The heading and the text of the page, as HTML."""
    heading = f"<h1>{escape(data['title'])}</h1>"
    if data["intro"]:
        heading += f"<p>{escape(data['intro'])}</p>"
    parts = [_summary(data)]
    if data["results"]:
        header = list(data["results"][0])
        rows = [[str(row[name]) for name in header] for row in data["results"]]
        parts.append(f'<h3>Result</h3><div class="wide">{html_table(header, rows)}</div>')
    for look in data["looks"]:
        parts.append(_look_in_words(look, data["unit"]))
    return heading, "\n".join(parts)


def _summary(data: dict[str, Any]) -> str:
    looks = data["looks"]
    text = (
        f"{_count(data['calls'], data['unit'])}, {_count(len(looks), 'look')} at all sites, {_describe_growths(looks)}."
    )
    for curve in data["curves"]:
        known = [
            (call, value) for call, value in zip(curve["calls"], curve["values"], strict=True) if value is not None
        ]
        if known:
            (first, start), (last, end) = known[0], known[-1]
            name = data["measure"] if curve["name"] == data["measure"] else f"{data['measure']} of {curve['name']}"
            unit = data["unit"]
            text += f" {caption(name)}: {start:.4g} at {unit} {first:,}, {end:.4g} at {unit} {last:,}."
    return f"<p>{escape(text)}</p>"


def caption(name: str) -> str:
    """A name at the beginning of a line: words get a capital letter, a name as code has it ("eval_loss") stays what it is."""
    return name.capitalize() if name.replace(" ", "").isalpha() and name.islower() else name


def _look_in_words(look: dict[str, Any], unit: str) -> str:
    title = f"{unit.capitalize()} {look['call']:,}: " + (
        _describe_growths([look]) if look["inserted"] else "nothing inserted"
    )
    lines = "".join(f"<p class='line'>{escape(line)}</p>" for line in look["line"].splitlines())
    undone = "<p>Undone later.</p>" if look["undone"] else ""
    reason = f"<p>Why: {escape(look['reason'])}.</p>" if look["inserted"] else ""
    per, measured = look["per"], look["norm"] != UNMEASURED
    rows = [
        [
            merit["site"],
            f"{merit['value']:.3e}" if measured else "",
            "" if merit["ratio"] is None else f"{merit['ratio']:.2f}",
            short_number(merit["parameters"]),
            short_number(merit["flops"]),
            *([f"{merit['value'] / max(merit[per], 1):.3e}"] if per else []),
            "yes" if index in look["chosen"] else "",
        ]
        for index, merit in enumerate(look["merits"])
    ]
    table = (
        html_table(["site", "merit", "ratio", "+parameters", "+FLOPs", *([PER[per]] if per else []), "chosen"], rows)
        if rows
        else ""
    )
    return f'<h3>{escape(title)}</h3>{lines}{reason}{undone}<div class="wide">{table}</div>'


def _describe_growths(looks: list[dict[str, Any]]) -> str:
    """How often layers were inserted, and existing ones widened."""
    kinds = [look["merits"][index]["kind"] for look in looks for index in look["chosen"]]
    wider = kinds.count("units")
    inserted = f"{_count(len(kinds) - wider, 'layer')} inserted"
    widened = f"{_count(wider, 'layer')} widened"
    return ", ".join([inserted] * (len(kinds) > wider or not wider) + [widened] * (wider > 0))


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


# ---- Pictures of a small network while it learns on the plane: where it decides, and what its weights are.


SIDE = 52  # pixels of a picture in each direction; the page smooths it
EXTENT = 1.75  # of the plane shown, from -EXTENT to EXTENT


class Film:
    """Takes one picture per call of `take`; a byte per pixel and a few digits per weight, so that many fit into a page."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[int] = []
        self._pictures: list[str] = []
        self._weights: list[list[dict[str, Any]]] = []
        ticks = torch.linspace(-EXTENT, EXTENT, SIDE, device="cpu")
        rows, columns = torch.meshgrid(ticks.flip(0), ticks, indexing="ij")  # the first row of a picture is its top
        self._grid = torch.stack([columns, rows], dim=-1).view(-1, 2)

    @torch.no_grad()
    def take(self, call: int, model: nn.Module) -> None:
        """Keep the probability of class 1 over the plane, and the weights of all linear layers."""
        share = model(self._grid).softmax(dim=1)[:, 1]
        pixels = (share.clamp(0, 1) * 255).round().to(torch.uint8)
        self.calls.append(call)
        self._pictures.append(base64.b64encode(bytes(pixels.tolist())).decode())
        layers = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
        self._weights.append([{"path": path, "weight": _digits(layer.weight)} for path, layer in layers])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "side": SIDE,
            "extent": EXTENT,
            "calls": self.calls,
            "pictures": self._pictures,
            "weights": self._weights,
        }


def _digits(weight: Tensor) -> list[list[float]]:
    return [[round(value, 2) for value in row] for row in weight.tolist()]


FRAMES = 150  # positions of the slider, besides the decisions


@dataclass(frozen=True)
class Curve:
    """One line of the chart: a network's loss or metric, call by call."""

    name: str
    calls: Sequence[int]
    values: Sequence[float | None]
    role: str = "grown"  # "grown", "baseline" or "extended": the colour


def page_data(
    history: History,
    *,
    title: str = "A network grows",
    intro: str = "",
    measure: str | None = None,
    curves: Sequence[Curve] = (),
    films: Sequence[Film] = (),
    results: Sequence[dict[str, Any]] = (),
    points: Sequence[tuple[float, float, int]] = (),
) -> dict[str, Any]:
    """Collect what the page shows of a history.

    Args:
        history: The history of a `Grower`.
        title: The title of the page (default: "A network grows").
        intro: A paragraph below the title (default: "").
        measure: What the metric is called. None takes the name in the record, which the callbacks write there, or "metric".
        curves: The lines of the chart. Without any, the metric of the record.
        films: The decision boundary and the weights of small networks on the plane, call by call.
        results: The rows of a table at the end, with the same keys in each.
        points: The data on the plane, as (x, y, class).

    Returns:
        Plain data for `write_page`.

    Raises:
        HistoryError: If the history has no record of the training.
    """
    record = checks.instance("history", history, History, "a History (for example grower.history)").record
    if not record:
        raise HistoryError(
            "the history contains growths but no record of the training, so there is nothing to show. A Grower writes the record "
            "itself; a History made by hand or by an earlier version does not have one."
        )
    measure = measure or record.metric or "metric"
    if not curves and record.metrics:
        calls, values = zip(*record.metrics, strict=True)
        curves = [Curve(measure, calls, values)]
    numbers = {growth.number for growth in history}
    return {
        "version": __version__,
        "title": title,
        "intro": intro,
        "measure": measure,
        "caption": caption(measure),
        "unit": record.step_name,
        "calls": record.calls,
        "frames": list(films[0].calls) if films else _frames(history),
        "curves": [asdict(curve) for curve in curves],
        "looks": [_look(look, numbers) for look in record.decisions],
        # What a Grower made and, where a layer got more units, how many it had and has.
        "growths": [
            {"number": growth.number, "call": growth.call, "site": str(growth.site), "units": _units(growth)}
            for growth in history
            if growth.call is not None
        ],
        "outlines": [
            {"call": call, "units": [unit.to_dict() for unit in separate_boxes(units, call, history)]}
            for call, units in record.outlines
        ],
        "films": [film.to_dict() for film in films],
        "points": [list(point) for point in points],
        "results": list(results),
    }


def _frames(history: History) -> list[int]:
    """Where the slider stops: evenly spread, and at each look just before it and at it."""
    record = history.record
    step = max(1, record.calls // FRAMES)
    stops = {0, record.calls, *range(0, record.calls, step)}
    for look in record.decisions:
        stops |= {look.call - 1, look.call}
    return sorted(stops)


def _look(look: Decision, numbers: set[int]) -> dict[str, Any]:
    """A look with its line, and the mean over the existing weights, of which the threshold is a multiple."""
    mean = next((m.value / m.ratio for m in look.merits if m.ratio and not math.isnan(m.ratio)), None)
    return {
        **look.to_dict(),
        "line": str(look),
        "mean": mean,
        "undone": [number for number in look.growths if number not in numbers],
    }
