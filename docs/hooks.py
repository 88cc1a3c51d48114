"""What mkdocs asks while it builds: raw tables are kept out of the search, and say where their meaning is."""

from __future__ import annotations

from typing import Any

RAW = {
    "compare/README.md": "[Does it pay?](verdict.md)",
    "compare/when/README.md": "[Does it pay?](../verdict.md)",
    "compare/laptop/README.md": "[Does it pay?](../verdict.md)",
    "replication/README.md": "[Which claims hold?](../results/replication.md)",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    summary = RAW.get(page.file.src_uri)
    if summary is None:
        return markdown
    page.meta["search"] = {"exclude": True}
    return f'!!! info "Raw data"\n    This page is generated. {summary} says what it means.\n\n{markdown}'
