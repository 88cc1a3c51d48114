"""What mkdocs asks while it builds.

Raw tables are kept out of the search, say where their meaning is, and begin each part with its picture.
Long lines of output wrap, unless they are a table.
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


def folded(markdown: str) -> str:
    """The picture of each part comes first, and the list that repeats its table in words can be opened."""
    first, *parts = re.split(r"^(?=## )", markdown, flags=re.M)
    for number, part in enumerate(parts):
        pictures = re.findall(r"^!\[.*\n", part, re.M)
        listed = re.search(r"(?:^- .*\n)+", part, re.M)
        if pictures and listed:
            words = '??? note "In words"\n\n' + re.sub(r"^", "    ", listed.group().rstrip(), flags=re.M) + "\n"
            part = part.replace(listed.group(), words).replace(pictures[0], "")
            heading, _, rest = part.partition("\n")
            parts[number] = f"{heading}\n\n{pictures[0]}\n{rest}"
    return "".join([first, *parts])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    markdown = wrapping(markdown)
    summary = RAW.get(page.file.src_uri)
    if summary is None:
        return markdown
    page.meta["search"] = {"exclude": True}
    heading, _, rest = folded(markdown).partition("\n")
    return f'{heading}\n\n!!! info "Raw data"\n    This page is generated. {summary} says what it means.\n{rest}'
