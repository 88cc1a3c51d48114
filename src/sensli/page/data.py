"""From the record of a training to what the page shows: plain data, in which every number is the record's own."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

import torch
from torch import nn

from sensli import __version__
from sensli.errors import HistoryError
from sensli.merits.merits import BY_MERIT, spread
from sensli.modules import checks
from sensli.surgery.history import Growth, History
from sensli.surgery.outline import Unit
from sensli.surgery.record import Decision, Record
from sensli.text.commands import PER, UNMEASURED
from sensli.text.tables import html_table, short_number

# ---- What a history says about the boxes of its record: units before and after, and growths that share a box.


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


def resized_in(units: Sequence[Unit], call: int, history: History) -> list[list[int]]:
    """For each box the numbers of the growths that gave a tensor in it another shape, without those that it says itself."""
    names: dict[str, list[int]] = {}  # of tensors, as they are called at this call, to growths
    for growth in history:
        if growth.call is None or growth.call > call:
            continue
        names = {growth.renames.get(name, name): numbers for name, numbers in names.items()}
        for tensor in growth.resized:
            names.setdefault(growth.renames.get(tensor.name, tensor.name), []).append(growth.number)
    paths = [".".join(part for part in unit.path.split(".") if part != "anchor") for unit in units]
    found: list[set[int]] = [set() for _ in units]
    for name, numbers in names.items():
        around = [i for i, path in enumerate(paths) if not path or name == path or name.startswith(f"{path}.")]
        if around:
            found[max(around, key=lambda i: len(paths[i]))].update(numbers)
    return [sorted(numbers - set(unit.changes)) for unit, numbers in zip(units, found, strict=True)]


def separate_boxes(units: Sequence[Unit], call: int, history: History) -> list[Unit]:
    """The boxes, with a separate one for every new layer: older records draw a layer that went into a new one as part of its box."""
    boxes = list(units)
    for growth in history:
        known = {box.growth for box in boxes}
        if growth.number in known or not growth.parameters or growth.call is None or growth.call > call:
            continue
        outer = (each for each in history if growth.name.startswith(f"{each.name}.") and each.number in known)
        around = next(outer, None)
        place = next((i for i, box in enumerate(boxes) if around is not None and box.growth == around.number), None)
        if place is None:
            continue
        parameters = growth.site.parameters
        boxes[place] = replace(boxes[place], parameters=max(0, boxes[place].parameters - parameters))
        new = Unit(growth.name, str(growth.site.move), parameters, growth.number)
        boxes.insert(place + (growth.site.side == "after"), new)
    return boxes


def with_rivals(look: Decision, units: Sequence[Unit]) -> list[dict[str, Any]]:
    """The merits of a check as plain data, each with what was compared (``worth``) and why it did not compete (``aside``).

    ``units`` are the boxes before the check: they give the order of the sites between blocks, which a record does not say.
    """
    rows = [merit.to_dict() for merit in look.merits]
    for row in rows:
        row["worth"] = row["value"] / max(row[look.per], 1) if look.per else row["value"]
        row["aside"] = ""
    if not look.measured:
        return rows
    if look.tried is not None:
        tried = {arm.name for arm in look.tried.arms}
        _set_aside([row for row in rows if row["site"] not in tried], "not in the trial, which decided")
        return rows
    if look.select == "smallest":  # by merit, the other way round
        return rows
    if look.select not in BY_MERIT:
        _set_aside(rows, f"the merit did not decide: select={look.select} did")
        return rows
    stacks = _stacks(rows, units) if look.select == "auto" else []
    for own in stacks:
        others = [row for row in own if row is not own[spread(1, len(own))[0]]]
        _set_aside(others, "between blocks only the middle site competes")
    single = [row for row in rows if not any(row is each for own in stacks for each in own)]
    below = [row for row in single if row["ratio"] is not None and row["ratio"] < look.tau]
    _set_aside(below, f"below tau = {look.tau:g}")
    if look.chosen:
        first = rows[look.chosen[0]]["worth"]
        _set_aside([row for row in single if row["worth"] > first], "left out by the limits")
    return rows


def _set_aside(rows: Iterable[dict[str, Any]], why: str) -> None:
    for row in rows:
        row["aside"] = row["aside"] or why


def _stacks(rows: list[dict[str, Any]], units: Sequence[Unit]) -> list[list[dict[str, Any]]]:
    """The sites between the blocks of each stack, in the order of the boxes."""
    places = {unit.path: i for i, unit in reversed(list(enumerate(units)))}
    stacks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "block":
            stacks.setdefault(row["path"].rpartition(".")[0], []).append(row)

    def order(row: dict[str, Any]) -> tuple[int, bool]:
        inside = (i for path, i in places.items() if path == row["path"] or path.startswith(f"{row['path']}."))
        return min(inside, default=len(places)), row["side"] == "after"

    return [sorted(own, key=order) for own in stacks.values() if len(own) > 1]


def spent_flops(record: Record) -> Callable[[int], int] | None:
    """The training FLOPs per sample up to a call, without those of the checks; None where the record does not say them.

    A backward pass counts as two forward passes. What grows at a call counts from the next one on.
    """
    grew = [look for look in record.decisions if look.growths]
    if not grew or any(look.flops is None for look in grew):
        return None
    costs = [(0, int(grew[0].flops or 0))]
    costs += [(look.call, int(look.flops or 0) + sum(look.merits[i].flops for i in look.chosen)) for look in grew]
    ends = [call for call, _ in costs[1:]] + [record.calls]

    def total(call: int) -> int:
        return sum(3 * cost * max(0, min(call, end) - start) for (start, cost), end in zip(costs, ends, strict=True))

    return total


def words(data: dict[str, Any]) -> tuple[str, str]:
    """The heading and the text of the page, as HTML."""
    heading = f"<h1>{escape(data['title'])}</h1>"
    text = " ".join(part for part in (data["intro"], data["subtitle"]) if part)
    if text:
        heading += f"<p>{escape(text)}</p>"
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
    text = f"{_count(data['calls'], data['unit'])}, {_count(len(looks), 'check')} of all sites, {_describe_growths(looks)}."
    for curve in data["curves"]:
        pairs = zip(curve["calls"], curve["values"], strict=True)
        known = [(call, value) for call, value in pairs if value is not None]
        if known:
            (first, start), (last, end) = known[0], known[-1]
            name = data["measure"] if curve["name"] == data["measure"] else f"{data['measure']} of {curve['name']}"
            text += f" {caption(name)}: {start:.4g} at {data['unit']} {first:,}, {end:.4g} at {data['unit']} {last:,}."
    return f"<p>{escape(text)}</p>"


def subtitle(history: History, measure: str, values: Sequence[float | None]) -> str:
    """The training in two sentences: how much it has grown, and what came of it."""
    record, numbers = history.record, {growth.number for growth in history}
    times = sum(number in numbers for look in record.decisions for number in look.growths)
    sizes = [sum(unit.parameters for unit in units) for _, units in record.outlines]
    parts = []
    if sizes and times:
        more = f" ({100 * (sizes[-1] / sizes[0] - 1):+.0f} %)" if sizes[0] else ""
        often = {1: "once", 2: "twice"}.get(times, f"{times:,} times")
        parts.append(f"Started with {sizes[0]:,} parameters, grew {often} to {sizes[-1]:,}{more}.")
    elif sizes:
        parts.append(f"{sizes[-1]:,} parameters, {_count(len(record.decisions), 'check')}, nothing grew.")
    known = [value for value in values if value is not None]
    if len(known) > 1:
        parts.append(f"{caption(measure)} {known[0]:.3g} → {known[-1]:.3g}.")
    return " ".join(parts)


def caption(name: str) -> str:
    """A name at the beginning of a line: words get a capital letter, a name as code has it ("eval_loss") stays what it is."""
    return name.capitalize() if name.replace(" ", "").isalpha() and name.islower() else name


def _look_in_words(look: dict[str, Any], unit: str) -> str:
    grew = _describe_growths([look]) if look["inserted"] else "nothing grew"
    title = f"{unit.capitalize()} {look['call']:,}: {grew}"
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
            "yes" if index in look["chosen"] else merit["aside"],
        ]
        for index, merit in enumerate(look["merits"])
    ]
    header = ["site", "merit", "ratio", "+parameters", "+FLOPs", *([PER[per]] if per else []), "chosen"]
    table = html_table(header, rows) if rows else ""
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
        linear = [(path, module.weight) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
        rows = [(path, [[round(value, 2) for value in row] for row in weight.tolist()]) for path, weight in linear]
        self._weights.append([{"path": path, "weight": digits} for path, digits in rows])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        taken = {"calls": self.calls, "pictures": self._pictures, "weights": self._weights}
        return {"name": self.name, "side": SIDE, "extent": EXTENT, **taken}


FRAMES = 150  # positions of the slider, besides the decisions


@dataclass(frozen=True)
class Curve:
    """One line of the chart: a network's loss or metric, call by call."""

    name: str
    calls: Sequence[int]
    values: Sequence[float | None]
    role: str = "grown"  # "grown", "baseline" or "extended": the colour
    flops: Sequence[int] | None = None  # what the training had cost at these calls, per sample


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
    baseline: History | None = None,
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
        baseline: The history of another training, for example of the same model that never grew: a second line of the chart. None
            draws one line.

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
    if not curves:
        curves = _curves(history, measure, baseline)
    main = next((curve for curve in curves if curve.role == "grown"), None)
    numbers = {growth.number for growth in history}
    return {
        "version": __version__,
        "title": title,
        "intro": intro,
        "subtitle": subtitle(history, measure, main.values if main is not None else ()),
        "measure": measure,
        "caption": caption(measure),
        "unit": record.step_name,
        "calls": record.calls,
        "frames": list(films[0].calls) if films else _frames(history),
        "curves": [asdict(curve) for curve in curves],
        "looks": [_look(look, numbers, _units_before(record, look.call)) for look in record.decisions],
        "growths": growths_of(history),
        "outlines": [{"call": call, "units": _boxes(units, call, history)} for call, units in record.outlines],
        "films": [film.to_dict() for film in films],
        "points": [list(point) for point in points],
        "results": list(results),
    }


def _frames(history: History) -> list[int]:
    """Where the slider stops: evenly spread, and at each check just before it and at it."""
    record = history.record
    step = max(1, record.calls // FRAMES)
    stops = {0, record.calls, *range(0, record.calls, step)}
    for look in record.decisions:
        stops |= {look.call - 1, look.call}
    return sorted(stops)


def _curves(history: History, measure: str, baseline: History | None) -> list[Curve]:
    """The metric of the record, and that of another training."""
    if not history.record.metrics:
        return []
    calls, values = zip(*history.record.metrics, strict=True)
    numbers, cost = {growth.number for growth in history}, spent_flops(history.record)
    if not {number for look in history.record.decisions for number in look.growths} <= numbers:
        cost = None  # from when on a growth was undone is not known
    flops = None if cost is None else [cost(call) for call in calls]
    other = None if baseline is None else checks.instance("baseline", baseline, History, "a History or None").record
    if other is None or not other.metrics:
        return [Curve(measure, calls, values, flops=flops)]
    others, other_values = zip(*other.metrics, strict=True)
    other_cost = spent_flops(other)
    per_call = cost(1) if cost is not None and other_cost is None and _start(other) == _start(history.record) else None
    other_flops = [call * per_call for call in others] if per_call else None
    if other_cost is not None:
        other_flops = [other_cost(call) for call in others]
    return [
        Curve("grown", calls, values, "grown", flops if other_flops else None),
        Curve("baseline", others, other_values, "baseline", other_flops if flops else None),
    ]


def _start(record: Record) -> tuple[Unit, ...]:
    return record.outlines[0][1] if record.outlines else ()


def _units_before(record: Record, call: int) -> tuple[Unit, ...]:
    """The boxes that a check at this call saw."""
    earlier = [units for start, units in record.outlines if start < call]
    return earlier[-1] if earlier else _start(record)


def _boxes(units: Sequence[Unit], call: int, history: History) -> list[dict[str, Any]]:
    boxes = separate_boxes(units, call, history)
    resized = resized_in(boxes, call, history)
    return [{**box.to_dict(), "resized": numbers} for box, numbers in zip(boxes, resized, strict=True)]


def _look(look: Decision, numbers: set[int], units: Sequence[Unit]) -> dict[str, Any]:
    """A check with its line, and the mean over the existing weights, of which the threshold is a multiple."""
    mean = next((m.value / m.ratio for m in look.merits if m.ratio and not math.isnan(m.ratio)), None)
    return {
        **look.to_dict(),
        "merits": with_rivals(look, units),
        "line": str(look),
        "mean": mean,
        "undone": [number for number in look.growths if number not in numbers],
    }
