"""The documentation's code runs and prints what it says, its error texts are those of the code, and it builds strictly."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from torch import nn

import programs
from sensli import Grower, triggers
from sensli.growing.options import tell_log
from sensli.surgery.record import Decision

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# a block of code and, where one follows at once, the block of its output
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.S)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "```python" in page.read_text()]


WITH_LIBRARIES = re.compile(r"^(?:from|import) (?:lightning|sklearn|transformers|sensli\.integrations)", re.M)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.library] * bool(WITH_LIBRARIES.search(page.read_text())), id=page.stem)
        for page in PAGES
    ],
)
def test_code_prints_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks of a page run one after another, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with torch.random.fork_rng():
        for code, output in BLOCK.findall(page.read_text()):
            exec(compile(code, str(page), "exec"), names)
            printed = capsys.readouterr().out
            if not output:
                continue
            # Words to the letter; numbers after training to some per cent, because processors round differently.
            assert NUMBER.sub("#", printed) == NUMBER.sub("#", output)
            found, promised = (list(map(float, NUMBER.findall(text))) for text in (printed, output))
            assert found == pytest.approx(promised, rel=0.1)


def test_what_the_loggers_of_others_get_is_the_size_after_the_growth() -> None:
    """The lines for W&B and MLflow and the writer of TensorBoard, with two neighbouring widths at once."""
    lines = re.findall(r"^best = (lambda decision: .+)$", (DOCS / "tasks" / "advice.md").read_text(), re.M)
    assert len(lines) == 2
    told: list[list[float]] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            if tag == "sensli/parameters":
                told.append([scalar_value])

        def add_text(self, tag: str, text_string: str, global_step: int) -> None: ...

    def log(look: Decision) -> None:
        tell_log(Writer(), look)
        numbers = [eval(line)(look) for line in lines]
        told[-1] += [each[name] for each in numbers for name in each if name.endswith("parameters")]

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    x, y = torch.randn(64, 4), torch.arange(64) % 2
    settings: dict[str, Any] = {"what": "units", "tau": 0.0, "max_growths": 2, "trigger": triggers.Every(1), "log": log}
    grower = Grower(model, torch.optim.SGD(model.parameters(), lr=0.1), preset="paper", example=x[:2], **settings)
    for _ in range(2):
        grower.step([(x, y)], nn.functional.cross_entropy)
        assert told[-1] == [sum(parameter.numel() for parameter in model.parameters())] * 3
    assert len(grower.history) == 4


def test_every_method_and_task_has_code_that_runs() -> None:
    cards = {page for folder in ("methods", "tasks") for page in (DOCS / folder).glob("*.md")}
    assert len(cards) >= 10 and cards <= set(PAGES)


def _texts(pattern: str = "**/*.py") -> Iterator[str]:
    """All texts of the source; what an f-string fills in becomes a sign of its own."""
    for file in (ROOT / "src").glob(pattern):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _is_raised(heading: str, texts: list[str]) -> bool:
    name, _, what = heading.partition(" must be ")
    if name in texts and what:  # a checked argument: the name and what it must be meet when the error is raised
        return _is_raised(what, texts)
    parts = heading.split("…")
    pattern = re.compile(".+?".join(map(re.escape, parts)), re.S)
    return any(
        pattern.search(text) for text in texts if all(part in text for part in parts)
    )  # "in" is many times faster


def _quoted() -> list[str]:
    headings = re.findall(r"^### (.+)$", (DOCS / "errors.md").read_text(), re.M)
    return [text for heading in headings for text in re.findall(r"`([^`]+)`", heading)]


def test_errors_of_every_part_are_there() -> None:
    """Each file that a user's mistake can reach has at least one of its texts on the page."""
    parts = "modules/engines/distributed modules/engines/fsdp modules/wrappers moves/finding moves/trace/flow"
    parts += " merits/measuring merits/merits surgery/averaging surgery/growth surgery/history"
    parts += " surgery/optimizers surgery/rates growing/grower growing/triggers"
    parts += (
        " checkpoint/checkpoint checkpoint/storage text/files page/files integrations/lightning integrations/sklearn"
    )
    parts += " integrations/fitting cli/inputs"
    known = [text for text in _quoted() if len(text) > 12]
    texts = {part: list(_texts(f"sensli/{part}.py")) for part in parts.split()}
    assert [part for part, its in texts.items() if not any(_is_raised(text, its) for text in known)] == []


@pytest.mark.slow
def test_error_texts_are_those_of_the_code() -> None:
    texts = list(_texts())
    quoted = _quoted()
    assert len(quoted) > 25
    assert [text for text in quoted if not _is_raised(text, texts)] == []


TRANSLATED = re.compile(
    r"(?<!here )\b(?:is|are) no\b(?! longer)|\bbehind\b|\bstands?\b|\bgoe?s? on\b|\bof its own\b|\banew\b"
)


def _said() -> Iterator[str]:
    """Texts that are handed to a call, as those of errors, warnings and help are: no docstrings."""
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            given = [*node.args, *(word.value for word in node.keywords)] if isinstance(node, ast.Call) else []
            for part in (part for argument in given for part in ast.walk(argument)):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


@pytest.mark.slow
def test_messages_and_pages_are_in_plain_english() -> None:
    """Phrases that read as if translated: say "is not a", "after", "continue", "separate", "again"."""
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "examples").glob("*.py")]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    meant = ("left behind is removed", "runs behind [the report]")
    found = [text for text in (*_said(), *lines) if TRANSLATED.search(text) and not any(word in text for word in meant)]
    assert found == []


def _build(root: Path, site: Path) -> CompletedProcess[str]:
    """The command of `make docs`, as the Makefile has it, in a copy or in the project itself."""
    recipe = re.search(r"mkdocs (build .*)", (ROOT / "Makefile").read_text())
    assert recipe is not None
    command = [sys.executable, "-m", "mkdocs", *recipe.group(1).split(), "--site-dir", str(site)]
    return programs.run(command, root)


@pytest.mark.process
@pytest.mark.thorough  # `make docs` is the same command, and `.ci/run` calls it after `make test`
def test_it_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is missing. Get it with: pip install 'sensli[docs]'")
    done = _build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    page = "".join(each.read_text() for each in (tmp_path / "site" / "api").rglob("index.html"))
    for name in (
        "find_sites",
        "Grower",
        "Plateau",
        "Decision",
        "load_checkpoint",
        "GrowthCallback",
        "GrowingClassifier",
    ):
        assert f'id="sensli.{name}"' in page or f".{name}" in page
    # nothing is loaded from another server
    front = (tmp_path / "site" / "index.html").read_text()
    assert "fonts.googleapis" not in front
    # raw tables can be read but are not found
    found = (tmp_path / "site" / "search" / "search_index.json").read_text()
    assert '"compare/verdict/' in found and '"compare/when/' not in found and '"replication/' not in found
    assert (tmp_path / "site" / "compare" / "when" / "index.html").exists()
    assert not [path for path in (tmp_path / "site").rglob("*.py") if "__pycache__" not in path.parts]


@pytest.mark.process
def test_a_dead_link_stops_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is missing. Get it with: pip install 'sensli[docs]'")
    dead = ["nowhere.md", "concepts.md#nowhere", "/concepts.md"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n" + "\n".join(f"[gone]({link})\n" for link in dead))
    (tmp_path / "docs" / "concepts.md").write_text("# Concepts\n")
    validation = re.search(r"^validation: .*$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert validation is not None
    (tmp_path / "mkdocs.yml").write_text(f"site_name: links\n{validation.group()}\n")
    done = _build(tmp_path, tmp_path / "site")
    told = done.stdout + done.stderr
    assert done.returncode != 0 and f"Aborted with {len(dead)} warnings in strict mode" in told
    assert [link for link in dead if f"'{link}'" not in told] == []
