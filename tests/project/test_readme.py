"""The README's code runs and prints what the README says; so do the examples run."""

from __future__ import annotations

import json
import re
import runpy
import statistics
from pathlib import Path

import pytest

from experiments import COMPARED
from sensli import Grower
from sensli_lab.compare.front import end_costs
from sensli_lab.compare.jobs import Run
from sensli_lab.compare.tasks.code import CODE
from sensli_lab.work.statistics import interval

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.S)

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


def test_readme_has_an_example_with_output() -> None:
    assert BLOCKS


def test_readme_tells_the_loss_without_growing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grower, "step", lambda *_, **__: None)
    exec(compile(BLOCKS[0][0], "README.md", "exec"), {})
    printed = re.search(r"^loss ([\d.]+)", capsys.readouterr().out, re.M)
    told = re.search(r"Without growing, .* end at a loss of ([\d.]+)", README)
    assert printed is not None and told is not None
    assert float(printed.group(1)) == pytest.approx(float(told.group(1)), rel=0.1)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120 and len(README.split()) <= 900


ARMS = {"grown": "pays", "small": "small", "large": "large"}


def test_every_number_of_the_results_is_that_of_the_stored_ones() -> None:
    """One number for each cell, and a mark if and only if the interval excludes 1: ✔ below it, ✘ above."""
    summary = json.loads((ROOT / "docs/compare/when/summary.json").read_text())
    stored = {entry["task"]: entry["front_ratios"] for entry in summary if entry["budget"] == 1}
    head, _, *rows = README[README.index("| task | grown |") :].split("\n\n")[0].splitlines()
    names = [cell.strip() for cell in head.strip("|").split("|")][1:-1]
    assert names == list(ARMS) and 3 <= len(rows) <= 5
    worst = []
    for row in rows:
        task, *cells, sentence = (cell.strip() for cell in row.strip("|").split("|"))
        for name, cell in zip(names, cells, strict=True):
            value, low, high = re.findall(r"[\d.]+", stored[COMPARED[task]][ARMS[name]]["end"])
            mark = " ✔" * (float(high) < 1) + " ✘" * (float(low) > 1)
            assert cell == value + mark, f"{task}, {name}"
        assert sentence.count(".") == 1 and sentence.endswith(".")
        worst.append(float(stored[COMPARED[task]]["pays"]["most"].split()[0]))
    told = re.search(r"reached up to ([\d.]+) on the first four tasks", README)
    assert told is not None and float(told.group(1)) == max(worst[:4])


def test_the_figures_of_long_budgets_are_those_of_the_stored_runs() -> None:
    stored = json.loads((ROOT / "docs/compare/long/ends.json").read_text())
    runs = {
        float(budget): {
            name: {int(seed): Run(test_loss=loss) for seed, loss in own.items()} for name, own in methods.items()
        }
        for budget, methods in stored.items()
    }
    means = {name: sum(run.test_loss for run in own.values()) / len(own) for name, own in runs[1.0].items()}
    page = (ROOT / "docs/results/long-budgets.md").read_text()
    assert all(f"| {mean:.3f}" in page or f"**{mean:.3f}**" in page for mean in means.values())
    fixed = {name: mean for name, mean in means.items() if name in CODE.sizes}
    best = min(fixed, key=lambda name: fixed[name])
    assert all(run.test_loss < runs[1.0][best][seed].test_loss for seed, run in runs[1.0]["default"].items())
    below = interval([run.test_loss - runs[1.0][best][seed].test_loss for seed, run in runs[1.0]["default"].items()])
    assert f"[{below.low:.3f}, {below.high:.3f}], is below zero" in page and below.high < 0
    (cost, early), (large, _) = (end_costs(runs, other) for other in (best, "large"))
    assert f"needed {cost} of the FLOPs" in README and str(large) == "at most 0.50 [0.50, 0.50]"
    assert f"**It needs {cost} of the FLOPs**" in page and f"(`stack-10-25`) needs {early} of them" in page


def test_the_tables_of_mechanisms_are_those_of_the_stored_runs() -> None:
    stored = json.loads((ROOT / "docs/compare/long/mechanisms.json").read_text())
    page = (ROOT / "docs/results/long-budgets.md").read_text()
    seen = set()
    for name, words, *cells in re.findall(r"^\| `([\w-]+)` \| (.+?) \| (.+) \| (.+) \| (.+) \| (.+) \|$", page, re.M):
        run, best = stored[name], stored["middle"]["test"]
        less = interval([loss - best[seed] for seed, loss in run["test"].items()])
        difference = f"**{less.mean:+.3f}**" if less.high < 0 else f"{less.mean:+.3f}"
        mean = statistics.mean(run["test"].values())
        assert words and cells == [f"{run['rate']:g}", f"{mean:.3f}", difference, f"{less.half:.3f}"], name
        assert run["rate"] == CODE.rates.get(name, 1.0) and len(run["test"]) == 3, name
        seen.add(name)
    assert seen == {*(arm.name for arm in CODE.arms), "default"}


def test_the_table_of_other_methods_is_that_of_the_stored_runs() -> None:
    stored = json.loads((ROOT / "docs/compare/long/rivals.json").read_text())
    page = (ROOT / "docs/results/long-budgets.md").read_text()
    head = "| | seed 0 | seed 1 | seed 2 | parameters | checks |"
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in page[page.index(head) :].split("\n\n")[0].splitlines()[2:]
    ]
    own = [run for name, run in stored.items() if name != "autogrow-gauss"]  # as with Adam
    assert stored["autogrow-gauss"]["test"]["0"] == stored["autogrow-adam"]["test"]["0"]
    assert [row[1:] for row in rows] == [
        [
            *(f"{run['test'][seed]:.3f}" if seed in run["test"] else "" for seed in "012"),
            f"{run['parameters']:,}",
            f"{run['decisions']:.1%}" if run["grown"] else "",
        ]
        for run in own
    ]
    means = {name: statistics.mean(run["test"].values()) for name, run in stored.items() if len(run["test"]) == 3}
    assert len(means) == 8 and sorted(means, key=lambda name: means[name])[:2] == ["default", "g-stack"]
    assert f"which was higher by {means['g-stack'] - means['default']:.3f} on average" in page
    assert f"below the best fixed size by {means['middle'] - means['default']:.3f}." in page
    order = [run["test"]["0"] for run in stored.values()]
    assert order == sorted(order) and list(stored)[:2] == ["default", "g-stack"]


def test_the_long_task_with_images_is_shown_as_it_came_out() -> None:
    stored = json.loads((ROOT / "docs/compare/long/cifar.json").read_text())
    page = (ROOT / "docs/results/long-budgets.md").read_text()
    page = page[page.index("## Widths of a CNN") :]
    seeds = sorted({seed for run in stored.values() for seed in run["test"]})
    head = f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | parameters | checks |"
    rows = page[page.index(head) :].split("\n\n")[0].splitlines()[2:]
    for row, run in zip(rows, stored.values(), strict=True):
        losses = [f"{run['test'][seed]:.3f}" if seed in run["test"] else "" for seed in seeds]
        checks = f"{run['decisions']['0']:.1%}" if run["decisions"]["0"] else ""
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:] == [*losses, f"{run['parameters'][0]:,}", checks]
    means = {name: statistics.mean(run["test"].values()) for name, run in stored.items()}
    for seed in seeds:
        small, default, large = (stored[name]["test"][seed] for name in ("small", "default", "large"))
        assert small > default > large
    below, above = means["small"] - means["default"], means["default"] - means["large"]
    assert f"by {below:.3f} on average, and above the large one, by {above:.3f}." in page
    warmed = means["uniform-10-15-20-25"] - means["warmup-10-15-20-25"]
    assert f"growing all widths alike by {warmed:.3f}." in page


def test_readme_cites_the_paper() -> None:
    cited = (ROOT / "CITATION.cff").read_text()
    for text in (README, cited):
        assert "2311.15995" in text and "independent implementation" in text
        assert all(name in text for name in ("Kreis", "Herberg", "Köhne", "Schiela", "Herzog"))


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
