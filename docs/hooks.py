"""What mkdocs asks while it builds.

Raw tables are kept out of the search, and say where their meaning is. Long lines of output wrap, unless they are a table.
"""

from __future__ import annotations

import re
from typing import Any

RAW = {
    "compare/README.md": "[Does it pay?](verdict.md)",
    "compare/when/README.md": "[Does it pay?](../verdict.md)",
    "compare/laptop/README.md": "[Does it pay?](../verdict.md)",
    "replication/README.md": "[Which claims hold?](../results/replication.md)",
}


OUTPUT = re.compile(r"^```\n(.*?)^```$", re.S | re.M)


def wrapping(markdown: str) -> str:
    """Lines of a log wrap where they end at the edge of their box; columns would fall apart, so tables scroll."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.S | re.M)
    for number, part in enumerate(parts):
        if OUTPUT.fullmatch(part) and "---" not in part:
            parts[number] = "``` { .text .wrap }" + part.removeprefix("```")
    return "".join(parts)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    markdown = wrapping(markdown)
    summary = RAW.get(page.file.src_uri)
    if summary is None:
        return markdown
    page.meta["search"] = {"exclude": True}
    return f'!!! info "Raw data"\n    This page is generated. {summary} says what it means.\n\n{markdown}'
