"""The size of the house, counted: how much there is to read, and through how many files one call leads."""

from __future__ import annotations

import ast
import gc
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli import Grower, find_sites, load_checkpoint, measure, save_checkpoint, triggers
from sensli_lab.paper.engine import Engine

SOURCE = Path(__file__).parents[2] / "src"
CORE, LAB = sorted((SOURCE / "sensli").rglob("*.py")), sorted((SOURCE / "sensli_lab").rglob("*.py"))
X, Y = torch.randn(32, 4), torch.randint(0, 3, (32,))


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_core_does_not_grow() -> None:
    """A bound on what there is to read: lower it when something goes."""
    assert len(CORE) <= 140 and lines(CORE) <= 33_900 and lines(CORE + LAB) <= 45_265


def test_imports_are_a_small_part_of_what_one_reads() -> None:
    imports = 0
    for path in CORE + LAB:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imports += (node.end_lineno or node.lineno) - node.lineno + 1
    assert imports <= 0.06 * lines(CORE + LAB)


def test_every_class_has_one_home() -> None:
    """But for the callback, which is called alike for both trainers."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in CORE + LAB:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in homes.items() if len(where) > 1}.keys() <= {"GrowthCallback"}


ENTRIES = {"main", "add_parser"}  # what runs a command, and what adds one to the others
# What cannot be told from a noun or a verb by its ending, and what ends alike and is one.
ADJECTIVES = (
    "affordable|alike|around|aside|bare|brief|capable|eager|equal|existing|few|flat|fresh|"
    "functional|generic|greedy|inner|inside|lenient|missing|odd|overall|plain|positive|quiet|"
    "ready|reusable|same|spent|strict|told|unknown|when|whole"
)
NOUNS_AND_VERBS = {"digest", "markdown", "need", "shorten"}
# Read with what stands beside them: `checks.whole("steps", steps)`, `bare(model)`.
READ_WITH = {"bare", "odd", "positive", "whole"}
ENGINES = {"paper/cnn.py", "paper/stacked.py"}  # modules with the functions of the protocol `Engine`


def functions() -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """The public functions at module level: name, file and definition."""
    for path in CORE + LAB:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield node.name, path.relative_to(SOURCE).as_posix(), node


def test_every_public_function_has_one_home() -> None:
    """But for the entries of commands, and what an engine of the paper's experiments must have."""
    engine = {name for name in vars(Engine) if not name.startswith("_")}
    homes: dict[str, list[str]] = defaultdict(list)
    for name, where, _ in functions():
        if name not in ENTRIES and not (name in engine and where.removeprefix("sensli_lab/") in ENGINES):
            homes[name].append(where)
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_functions_are_not_named_by_a_lone_participle_or_adjective() -> None:
    """A verb with its object, or a noun. A context manager may be: `with untouched(model)` is a sentence."""
    lone = set()
    for name, _, node in functions():
        manages = any(ast.unparse(each) == "contextmanager" for each in node.decorator_list)
        if not manages and re.fullmatch(rf"[a-z]+(ed|en|wn|est)|{ADJECTIVES}", name):
            lone.add(name)
    assert not lone - NOUNS_AND_VERBS - READ_WITH


def network() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 3))


def files(call: Callable[[], Any]) -> int:
    """How many files of ours a call leads through."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(str(SOURCE)):
            seen.add(frame.f_code.co_filename)

    gc.collect()  # what earlier tests left would be collected in the call, which leads through other files
    before = sys.getprofile()
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    assert not any(name.endswith("/engines/fsdp.py") for name in seen)  # no model here is sharded
    return len(seen)


def growing(model: nn.Module, grow: str) -> tuple[torch.optim.Optimizer, Grower]:
    optimizer = torch.optim.Adam(model.parameters())
    return optimizer, Grower(
        model, optimizer, preset="paper", example=X[:2], trigger=triggers.Every(1), tau=0.0, what=grow
    )


def test_a_search_and_a_measurement_lead_through_few_files() -> None:
    model = network()
    sites = find_sites(model, X[:2])
    assert files(lambda: find_sites(model, X[:2])) <= 20
    assert files(lambda: measure(model, sites, [(X, Y)], cross_entropy)) <= 18


@pytest.mark.parametrize(("grow", "most"), [("layers", 46), ("units", 53), ("both", 56)])
def test_a_step_leads_through_few_files(grow: str, most: int) -> None:
    model = network()
    _, grower = growing(model, grow)
    assert files(lambda: grower.step([(X, Y)], cross_entropy)) <= most and len(grower.history) == 1


def test_loading_leads_through_few_files(tmp_path: Path) -> None:
    model = network()
    optimizer, grower = growing(model, "both")
    grower.step([(X, Y)], cross_entropy)
    save_checkpoint(tmp_path / "run.ckpt", model, optimizer=optimizer, grower=grower)

    def load() -> None:
        load_checkpoint(
            tmp_path / "run.ckpt",
            network,
            lambda model: torch.optim.Adam(model.parameters()),
            make_grower=lambda model, optimizer, scheduler: Grower(
                model, optimizer, preset="paper", example=X[:2], trigger=triggers.Every(1), tau=0.0, what="both"
            ),
        )

    assert files(load) <= 38
