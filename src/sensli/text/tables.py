"""Tables for the terminal, for notebooks and for the growth page. No dependency, so that every record can print itself."""

from __future__ import annotations

from collections.abc import Container, Sequence
from html import escape

WIDTH = 100  # of a line in a terminal


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Container[int] = (0,), width: int | None = None
) -> str:
    """Columns separated by two blanks; those listed in ``left`` are text. To fit the ``width``, names in the first lose their middle."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    if width is not None:
        widths[0] = min(widths[0], width - sum(2 + each for each in widths[1:]))
        rows = [[shorten(row[0], widths[0]), *row[1:]] for row in rows]

    def line(cells: Sequence[str]) -> str:
        aligned = (c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *(line(row) for row in rows)])


def shorten(text: str, length: int) -> str:
    """A text without its middle where it would be longer: a name begins with what it is, and ends with where it is."""
    kept = length - 3
    return text if len(text) <= length else f"{text[: kept - kept // 2]}...{text[-(kept // 2) :]}"


def short_number(value: float) -> str:
    """A count in the fewest characters that still tell: 36,928 stays, 75,497,472 becomes 75.5M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:,.0f}"


def html_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "", left: Container[int] = (0,)
) -> str:
    """A table with numbers to the right; columns listed in ``left`` are text."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f'<{tag} style="text-align:{"left" if i in left else "right"}">{escape(value)}</{tag}>'
            for i, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>"
