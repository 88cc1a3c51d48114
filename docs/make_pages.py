"""Write the pages that follow from something else: run `python docs/make_pages.py` from the repository.

`cli.md` is made from the parser of the command, `tutorial.md` from the notebook `tutorial.ipynb`. With `--run` the notebook runs first, and
what its cells print is stored in it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "src"))


# --- the command line ---


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser, and those of the commands in it, in their order."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action.choices.values()):
                yield from commands(each)


def argument(action: argparse.Action) -> str:
    """How the argument is written: its name, or all its options and what they take."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else (action.dest or "").upper())
    takes = "" if action.nargs == 0 else f" {value}"
    return ", ".join(f"`{name}{takes}`" for name in action.option_strings) or f"`{value}`"


def meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    told = {**vars(action), "prog": parser.prog, "type": None}
    return " ".join(((action.help or "") % told).split()).replace("|", "\\|")


def cli_page() -> str:
    from sensli.cli.main import _parser

    text = "# Command line\n\nThis page is made from the parser of `sensli`; `--help` prints the same after every command.\n"
    for parser in commands(_parser()):
        shown = [a for a in parser._actions if not isinstance(a, (argparse._HelpAction, argparse._SubParsersAction))]
        text += f"\n## {parser.prog}\n\n{' '.join((parser.description or '').split())}\n"
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if inner:
            text += "\n| command | |\n|---|---|\n"
            for choice in inner[0]._choices_actions:
                anchor = f"{parser.prog} {choice.dest}".replace(" ", "-")
                text += f"| [`{choice.dest}`](#{anchor}) | {' '.join((choice.help or '').split())} |\n"
        if shown:
            text += "\n| argument | meaning |\n|---|---|\n"
            for action in shown:
                text += f"| {argument(action)} | {meaning(parser, action)} |\n"
        if parser.epilog:
            lines = re.sub(r"^examples?:\s*", "", parser.epilog.strip())
            text += "\n```sh\n" + "\n".join(line.strip() for line in lines.splitlines() if line.strip()) + "\n```\n"
    return text


# --- the tutorial ---


def notebook() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "tutorial.ipynb").read_text())
    return found


def code(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def run(book: dict[str, Any]) -> None:
    """Run the cells one after another in an empty folder, and store what they print."""
    names: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for number, cell in enumerate((each for each in book["cells"] if each["cell_type"] == "code"), 1):
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile(code(cell), f"cell {number}", "exec"), names)
                cell["execution_count"] = number
                text = printed.getvalue().splitlines(keepends=True)
                cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
        finally:
            os.chdir(before)


def tutorial_page() -> str:
    text = ""
    for cell in notebook()["cells"]:
        if cell["cell_type"] == "markdown":
            text += (
                code(cell).strip().replace('src="films/', 'src="../films/') + "\n\n"
            )  # a page is a folder in the site
            continue
        text += f"```python\n{code(cell).strip()}\n```\n\n"
        for output in cell["outputs"]:
            text += f"```\n{''.join(output['text']).rstrip()}\n```\n\n"
    return text.rstrip() + "\n"


PAGES = {"cli.md": cli_page, "tutorial.md": tutorial_page}


def main() -> None:
    if "--run" in sys.argv[1:]:
        book = notebook()
        run(book)
        (DOCS / "tutorial.ipynb").write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n")
    for name, made in PAGES.items():
        (DOCS / name).write_text(made())


if __name__ == "__main__":
    main()
