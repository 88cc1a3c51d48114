"""The README's code runs and prints what the README says; so do the examples run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


@pytest.mark.parametrize(("code", "output"), BLOCKS)
def test_readme_code_prints_what_it_says(
    code: str, output: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them saves its history
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    # Words to the letter; numbers after training to a few per cent, because processors round differently.
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", output)
    found, promised = (list(map(float, NUMBER.findall(text))) for text in (printed, output))
    assert found == pytest.approx(promised, rel=0.05)


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda path: path.stem)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    """mkdocs checks those of docs/."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_readme_has_examples_with_output() -> None:
    assert len(BLOCKS) >= 2


# `test_examples.py` runs the others, and looks at what they print.
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("0[1-5]*.py")), ids=lambda path: path.stem)
@pytest.mark.slow
def test_example_runs(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an empty folder, because some write files."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
