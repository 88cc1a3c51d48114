"""Tables as HTML, for notebooks and for the growth page. Everything that comes from a model is escaped."""

from __future__ import annotations

from collections.abc import Container, Sequence
from html import escape


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
