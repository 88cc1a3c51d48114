"""The examples of the engines run, each in a process of its own, and none is over 40 lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(script: str, folder: Path, command: list[str] | None = None, arguments: list[str] | None = None) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    full = [*(command or [sys.executable]), str(EXAMPLES / script), *(arguments or [])]
    done = subprocess.run(full, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 40


def test_resume_goes_on_where_it_stopped(tmp_path: Path) -> None:
    assert "from call 0, 0 growths" in run("10_resume.py", tmp_path)
    assert "from call 30, 3 growths" in run("10_resume.py", tmp_path)


def test_ddp(tmp_path: Path) -> None:
    printed = run("11_ddp.py", tmp_path, TORCHRUN)
    assert "all 2 processes: growth 2" in printed
    assert "weights the same on all ranks: True" in printed


def test_lightning_in_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    printed = run("12_lightning.py", tmp_path, arguments=["2"])
    sums = [line.split("sum of weights ")[1] for line in printed.splitlines() if "sum of weights" in line]
    assert printed.count("2 growths") == 2
    assert len(sums) == 2 and sums[0] == sums[1]


def test_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    printed = run("13_hugging_face.py", tmp_path)
    assert "rank 0: 3 blocks" in printed and "growth 2: Twin(LlamaDecoderLayer)" in printed
    assert (tmp_path / "grown" / "checkpoint-48" / "sensli.json").is_file()


def test_scikit_learn(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    printed = run("14_scikit_learn.py", tmp_path)
    assert "growth 1: Linear(32, 32) + ReLU" in printed


def test_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    printed = run("15_many_runs_with_ray.py", tmp_path)
    assert "3 of 3 arms computed" in printed and "wide (stated), large: 20 runs" in printed


def test_mixed_precision(tmp_path: Path) -> None:
    assert "2 layers inserted, the averaged model is right on 9" in run("16_mixed_precision.py", tmp_path)
