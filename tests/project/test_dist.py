"""What is published: the wheel holds the package and nothing else, and its metadata agree with the project."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import programs
import sensli

ROOT = Path(__file__).parents[2]


def test_the_citation_has_the_version_and_the_licence() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {sensli.__version__}\n" in text and "\nlicense: MIT\n" in text
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")


@pytest.mark.process
def test_what_is_published_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="build is missing. Get it with: pip install build hatchling")
    pytest.importorskip("hatchling", reason="hatchling is missing. Get it with: pip install build hatchling")
    recipe = re.search(r"-m build (.*) --outdir", (ROOT / "Makefile").read_text())
    assert recipe is not None
    command = [sys.executable, "-m", "build", *recipe.group(1).split(), "--outdir", str(tmp_path), str(ROOT)]
    done = programs.run(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        info = f"sensli-{sensli.__version__}.dist-info"
        names = {name for name in archive.namelist() if not name.startswith(f"{info}/")}
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
        commands = archive.read(f"{info}/entry_points.txt").decode()
    source = ROOT / "src"
    ours = {
        str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and ".egg-info" not in str(path)
    }
    assert names == {name for name in ours if "__pycache__" not in name}
    assert {"sensli/py.typed", "sensli/page/page.html", "sensli_lab/paper/experiments/exp02.json"} <= names
    assert not [name for name in names if re.search(r"(^|/)(tests?|results?)(/|$)|/test_|\.(pt|ckpt|png|pdf)$", name)]
    (sources,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in names} <= packed and {
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "pyproject.toml",
    } <= packed
    stray = re.compile(r"\.(whl|gz|zip|pt|ckpt|npz|log)$|^(dist|site|results)/|^docs/replication/results/")
    assert not [name for name in packed if stray.search(name) and not name.startswith("tests/data/")]
    assert "sensli = sensli.cli.start:main" in commands
    assert metadata["License-Expression"] == "MIT" and metadata["Requires-Python"] == ">=3.10"
    for version in ("3.10", "3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in metadata.get_all("Classifier", [])
