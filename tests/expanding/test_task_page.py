"""The commands on the page "Expand a saved model" print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sensli.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "expand-a-saved-model.md"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


@pytest.mark.library
def test_commands_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model of the first block, then every command; three dots stand for the rest of what it prints."""
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    with torch.random.fork_rng():
        exec(text.split("```python\n")[1].split("```")[0], {})
    capsys.readouterr()
    commands = re.findall(r"```console\n\$ sensli (.*?)\n(.*?)```", text, re.S)
    assert len(commands) >= 2
    for command, output in commands:
        assert main(command.split()) == 0
        shown = output.removesuffix("...\n")
        printed = capsys.readouterr().out
        promised = [float(each) for each in NUMBER.findall(shown)]
        assert NUMBER.sub("#", printed).startswith(NUMBER.sub("#", shown))
        assert [float(each) for each in NUMBER.findall(printed)[: len(promised)]] == pytest.approx(promised, rel=0.1)


def test_the_table_of_families_is_on_the_page() -> None:
    assert (PAGE.parents[1] / "expansion" / "families.txt").read_text() in PAGE.read_text()
