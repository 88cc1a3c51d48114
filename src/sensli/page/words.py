"""The training in words: what the film shows, for readers who cannot see it, or without JavaScript."""

from __future__ import annotations

from html import escape
from typing import Any

from sensli.text.html_tables import html_table
from sensli.text.names import PER, UNMEASURED
from sensli.text.tables import short_number


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
        parts.append(_look(look, data["unit"]))
    return heading, "\n".join(parts)


def _summary(data: dict[str, Any]) -> str:
    looks = data["looks"]
    text = f"{_count(data['calls'], data['unit'])}, {_count(len(looks), 'look')} at all sites, {_grown(looks)}."
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


def _look(look: dict[str, Any], unit: str) -> str:
    title = f"{unit.capitalize()} {look['call']:,}: " + (_grown([look]) if look["inserted"] else "nothing inserted")
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


def _grown(looks: list[dict[str, Any]]) -> str:
    """How often layers were inserted, and existing ones widened."""
    kinds = [look["merits"][index]["kind"] for look in looks for index in look["chosen"]]
    wider = kinds.count("units")
    inserted = f"{_count(len(kinds) - wider, 'layer')} inserted"
    widened = f"{_count(wider, 'layer')} widened"
    return ", ".join([inserted] * (len(kinds) > wider or not wider) + [widened] * (wider > 0))


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")
