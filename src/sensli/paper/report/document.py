"""A page as a list of blocks, written as Markdown (pictures beside it) or as one self-contained HTML file."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
