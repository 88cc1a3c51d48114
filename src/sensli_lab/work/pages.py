"""What is shown: pages as lists of blocks (as Markdown, as one HTML file), tables for a terminal, and what figures share."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sensli.errors import MissingExtra
from sensli.text.files import write_bytes
from sensli.text.records import dumps as strict_json
from sensli.text.tables import text_table
from sensli_lab.errors import StoreError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; margin-top: 2.2em; }
h1 { margin-top: 0; }
table { border-collapse: collapse; margin: 1em 0; font-size: 0.88em; display: block; overflow-x: auto; }
th, td { text-align: left; padding: 0.3em 0.7em; border-bottom: 1px solid #8884; vertical-align: top; }
img { max-width: 100%; background: #fff; border-radius: 4px; }
figure { margin: 1.4em 0; }
figcaption { font-size: 0.88em; opacity: 0.8; }
code { font-size: 0.92em; background: #8882; padding: 0.1em 0.3em; border-radius: 3px; }
""".strip()


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Plain text with `code` and **bold** as the only marks."""

    text: str


@dataclass(frozen=True)
class Bullets:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    path: Path
    caption: str


Block = Heading | Paragraph | Bullets | Table | Picture


def markdown(blocks: Sequence[Block], folder: Path) -> str:
    """Markdown to be kept in `folder`, pictures linked by relative path."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def _markdown(block: Block, folder: Path) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Paragraph):
        return block.text
    if isinstance(block, Bullets):
        return "\n".join(f"- {item}" for item in block.items)
    if isinstance(block, Table):
        return "\n".join((_row(block.header), _row(["---"] * len(block.header)), *map(_row, block.rows)))
    return f"![{block.caption}]({block.path.relative_to(folder).as_posix()})"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(blocks: Sequence[Block], title: str) -> str:
    """One HTML file with everything in it: no script, no request to anywhere."""
    body = "\n".join(_html(block) for block in blocks)
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'
    )


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{_inline(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{_inline(block.text)}</p>"
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Table):
        head = "".join(f"<th>{_inline(cell)}</th>" for cell in block.header)
        rows = ("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in block.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    data = base64.b64encode(block.path.read_bytes()).decode()
    caption = _inline(block.caption)
    alt = html.escape(block.caption)
    return f'<figure><img src="data:image/png;base64,{data}" alt="{alt}"><figcaption>{caption}</figcaption></figure>'


def _inline(text: str) -> str:
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


def terminal_table(table: Table) -> str:
    """The table for a terminal, columns aligned."""
    return text_table(table.header, table.rows, left=range(len(table.header)))


def without_empty(table: Table, *columns: str) -> Table:
    """The table without its empty columns; if some are named, only those may be left out."""
    among = columns or table.header
    keep = [i for i, name in enumerate(table.header) if name not in among or any(row[i] for row in table.rows)]
    return Table(tuple(table.header[i] for i in keep), tuple(tuple(row[i] for i in keep) for row in table.rows))


def write_report(folder: Path, title: str, blocks: Sequence[Block], summary: Any) -> list[Path]:
    """Write a page as README.md and report.html, and its numbers for programs as summary.json."""
    files = {
        "README.md": markdown(blocks, folder),
        "report.html": page(blocks, title),
        "summary.json": strict_json(summary, indent=1) + "\n",
    }
    for name, content in files.items():
        write_bytes(folder / name, content.encode(), StoreError)
    return [folder / name for name in files]


# ---- What figures share: colours, a figure without pyplot, axes, and how a file is written.

COLOURS = ("#1f5fbf", "#d9822b", "#2e8b57", "#8e44ad", "#6b7780")
DPI = 110


def check_available() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra("figures need matplotlib. Install it with: pip install 'sensli[plots]'") from None


def new_figure(width: float, height: float) -> Figure:
    """Not one of pyplot: nothing global is changed and no window can open."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def open_axes(axes: Iterable[Axes]) -> None:
    """No frame above and on the right, and a light grid."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, color="0.92", linewidth=0.7)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as its file name says; the same figure gives the same bytes."""
    buffer, kind = io.BytesIO(), path.suffix.removeprefix(".")
    # no date in the file: the same results give the same bytes
    figure.savefig(buffer, format=kind, metadata={"CreationDate": None} if kind == "pdf" else None)
    write_bytes(path, _palette(buffer) if kind == "png" else buffer.getvalue(), StoreError)


def _palette(picture: io.BytesIO) -> bytes:
    """A palette of 256 colours is enough for a plot and takes a third of the space."""
    from PIL import Image

    small = io.BytesIO()
    Image.open(picture).convert("RGB").quantize(256, kmeans=1).save(small, format="png", optimize=True)
    return small.getvalue()
