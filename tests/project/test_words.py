"""How the pages are written: short, in short sentences, in words that PyTorch users know; generated pages follow from their sources."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from experiments import COMPARED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# raw tables and what is made from a parser; everything else is written by hand
GENERATED = {f"{name}README.md" for name in ("compare/", "compare/when/", "compare/laptop/", "replication/")} | {
    "cli.md"
}
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if str(page.relative_to(DOCS)) not in GENERATED]
TEXTS = [*PAGES, ROOT / "README.md"]

# what only an author would say -> what readers know
BANNED = {
    r"\b(?:a|an|the|this|each|every|one|next|last|first|per|of|at|exact|our) looks?\b|\blooks\b(?! (?:like|for))": "check",
    r"\bto the bit\b": "bit-for-bit identical",
    r"\bbrings? (?:little|a fifth)\b|\btraining on\b(?= brings)": "training has slowed down",
    r"\bfronts?\b(?! ratio\*)": "best fixed size, relative cost",
    r"\bseparated from\b": "significantly different from",
    r"\bbeside\b": "next to, compared with",
    r"\bin vain\b": "without growing",
    r"\bcotangents?\b": "gradients",
    r"\btakes? back\b|\btaken back\b": "undo",
    r"\b(?:linear|weight|last|first|zeroed|second) maps?\b|\bmaps\b": "linear layer",
    r"\b(?:new|random) (?:rows|columns)\b|\b(?:rows|columns) of (?:the |a |new )*(?:units?|layers?)\b": "incoming, outgoing weights",
    r"\bplaces\b": "sites",
    r"\b(?:fixed|two|first|right|this|that|any|its|each) moments?\b": "time",
    r"\blearnt\b|\bspelt\b": "learned",
    r"(?<!residual )\bstream\b": "residual stream",
    r"\b\w*(?:isation|ising|ised|ises?d)\b(?<!noised)(?<!raised)(?<!promised)(?<!revised)(?<!advised)(?<!comprised)"
    r"(?<!rising)(?<!raising)(?<!surprised)(?<!supervised)": "American spelling: -ize",
    r"\b\w*(?:colour|neighbour|favour|behaviour|centre|licence)\w*\b": "American spelling",
}


def prose(text: str) -> str:
    """Without front matter and blocks of code."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)


def words_only(text: str) -> str:
    """Without code, addresses of links and pictures, and marks."""
    text = re.sub(r"`[^`]*`", "code", prose(text))
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)(?:\{[^}]*\})?", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)(?:\{[^}]*\})?", r"\1", text)
    return re.sub(r"<[^>]+>", "\n\n", text)


def sentences(text: str) -> list[str]:
    """The sentences of paragraphs and lists: no headings, no tables, nothing that a generator fills in."""
    text = words_only(text)
    text = re.sub(r"^(?: *\||#|:::| +options:|      \w+:|\?\?\?|!!!).*$", "\n", text, flags=re.M)
    text = re.sub(r"^ *(?:[-*]|\d+\.|:) +", "\n\n", text, flags=re.M)
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split()).replace("*", "")
        found += [part for part in re.split(r"(?<=[.!?])[\")]? (?=[A-Z\"(\d])|(?<=:) (?=[A-Z])", line) if part]
    return found


def length(sentence: str) -> int:
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_words_of_their_readers(page: Path) -> None:
    text = words_only(page.read_text())
    found = {(match.group(), better) for word, better in BANNED.items() for match in re.finditer(word, text, re.I)}
    assert found == set()


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    counts = [length(sentence) for sentence in sentences(page.read_text())]
    assert counts and sum(counts) / len(counts) < 18


def test_what_is_written_by_hand_can_be_read_in_an_afternoon() -> None:
    """Words of text and tables, without blocks of code and what they print."""
    rows = re.compile(r"^\|.*(?:\d| exact ).*$", re.M)  # of results, which a program or a test has written
    assert sum(length(rows.sub("", prose(page.read_text()))) for page in PAGES) <= 32_760


def test_headings_make_a_table_of_contents() -> None:
    """A page of some length has headings that one can link to."""
    long = [page for page in PAGES if length(prose(page.read_text())) > 150]
    assert [page.name for page in long if not re.search(r"^## ", page.read_text(), re.M)] == []


def test_pages_of_results_begin_with_a_picture_and_one_sentence() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    part = re.search(r"^  - Results:\n((?:      .*\n)+)", settings, re.M)
    assert part is not None
    pages = re.findall(r"(\S+\.md)$", part.group(1), re.M)
    assert len(pages) >= 8
    for page in pages:
        _, picture, sentence = (DOCS / page).read_text().split("\n\n")[:3]
        assert picture.startswith("![") and sentence.startswith("**") and sentence.endswith("**"), page
        assert len(sentences(sentence)) == 1, page


# --- generated pages ---


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["cli.md", "tutorial.md"])
def test_a_generated_page_is_current(page: str) -> None:
    """`python docs/make_pages.py` writes it again. test_docs.py runs the code of the tutorial, so the notebook's too."""
    assert (DOCS / page).read_text() == loaded("make_pages").PAGES[page]()


def test_the_notebook_is_one() -> None:
    book = json.loads((DOCS / "tutorial.ipynb").read_text())
    assert book["nbformat"] == 4 and {cell["cell_type"] for cell in book["cells"]} == {"markdown", "code"}
    calls = "".join("".join(cell["source"]) for cell in book["cells"])
    assert all(
        f"{name}(" in calls for name in ("find_sites", "measure", "Grower", "save_checkpoint", "load_checkpoint")
    )


def test_raw_tables_are_told_to_the_hook_and_left_out_of_the_navigation() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    navigation = settings[settings.index("\nnav:") :]
    raw = set(loaded("hooks").RAW)
    assert raw == GENERATED - {"cli.md"}
    assert not [page for page in raw if page in navigation] and all(f"  {page}\n" in settings for page in raw)


def test_links_have_contrast() -> None:
    """4.5 to 1 on a white page, as WCAG counts it."""
    css = (DOCS / "assets" / "extra.css").read_text()
    color = re.search(r"--md-typeset-a-color: #(\w{6})", css)
    assert color is not None
    parts = [int(color.group(1)[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    light = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    assert 1.05 / (light + 0.05) >= 4.5


# --- numbers of the verdict ---

ARMS = {
    "units when they pay, or on slowdown": "pays",
    "units on slowdown alone": "when",
    "units at fixed times": "units",
    "layers and units at fixed times": "both",
    "layers at fixed times": "layers",
    "small, never grown": "small",
    "large from the start": "large",
}
OTHERS = {
    "SENN": "senn",
    "ours: units at fixed times": "units",
    "GradMax": "gradmax",
    "random units at random sites": "random-units",
    "Firefly": "firefly",
    "NeST": "nest",
    "NORTH*": "north",
    "TINY": "tiny",
    "Splitting": "splitting",
    "Net2Net": "net2net",
    "NetMorph": "netmorph",
    "variance transfer": "variance-transfer",
}


def stored(summary: str) -> dict[str, Any]:
    entries = json.loads((DOCS / "compare" / summary).read_text())
    return {entry["task"]: entry["front_ratios"] for entry in entries if entry["budget"] == 1}


@pytest.mark.parametrize(
    ("heading", "summary", "column", "arms"),
    [
        ("One setting, five tasks", "when/summary.json", "end", ARMS),
        ("On the way", "when/summary.json", "most", ARMS),
        ("Other methods", "summary.json", "end", OTHERS),
    ],
)
def test_numbers_of_the_verdict_are_those_of_the_stored_results(
    heading: str, summary: str, column: str, arms: dict[str, str]
) -> None:
    page = (DOCS / "compare" / "verdict.md").read_text()
    lines = page[page.index(f"## {heading}\n") :].split("\n| |", 1)[1].split("\n\n")[0].splitlines()
    tasks = [cell.strip() for cell in lines[0].strip("|").split("|")]
    values = stored(summary)
    for line in lines[2:]:
        name, *cells = (cell.strip(" ") for cell in line.strip("|").split("|"))
        for task, cell in zip(tasks, cells, strict=True):
            value, low, high = re.findall(
                r"[\d.]+", values[COMPARED[task]][arms[name.removeprefix("**").removesuffix("**")]][column]
            )
            marks = " ✔" * (float(high) < 1) + " ✘" * (float(low) > 1) if heading.startswith("One") else ""
            assert cell == value + marks, f"{name}, {task}"
