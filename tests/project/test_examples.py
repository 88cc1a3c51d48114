"""The examples of the engines run, in processes of their own where it matters, and none is over 40 lines."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import programs
import ranks
import warm

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Runs an example in this process, which has imported its libraries already, and returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run_here(script: str) -> str:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return run_here


def run(script: str, folder: Path, command: list[str] | None = None, arguments: list[str] | None = None) -> str:
    program = [str(EXAMPLES / script), *(arguments or [])]
    done = warm.run(program, folder) if command is None else programs.run([*command, *program], folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 40


def test_width_and_depth(here: Callable[[str], str]) -> None:
    printed = here("06_width_and_depth.py")
    assert "per parameter" in printed and "units in 0 (Linear 4 -> 6), read by 2" in printed
    grown = [line for line in printed.splitlines() if line.startswith("epoch ") and "| merit " in line]
    assert any(": +2 units in " in line for line in grown) and any(" + ReLU after " in line for line in grown)
    parameters = int(printed.split(" parameters\nSequential")[0].split()[-1])
    assert 56 < parameters <= 120


def test_grow_where_it_pays(here: Callable[[str], str]) -> None:
    narrow, wide, _ = here("08_grow_where_it_pays.py").split("\n\n")
    assert narrow.count(": grown") >= 2 and "began with 3 units a layer" in narrow
    assert ": grown" not in wide and "a payoff of" in wide and "ended with [64, 64]" in wide


def test_try_before_you_keep(here: Callable[[str], str]) -> None:
    printed = here("07_try_before_you_keep.py")
    assert "won the trial of 4 networks: mean loss" in printed and "trials ended with a growth" in printed


@pytest.mark.process
def test_resume_goes_on_where_it_stopped(here: Callable[[str], str], tmp_path: Path) -> None:
    assert "from call 0, 0 growths" in here("10_resume.py")
    assert "from call 30, 3 growths" in run("10_resume.py", tmp_path)


def ddp() -> None:
    """The example on this rank, in the environment that torchrun makes. (torchrun imports torch in three processes.)"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]))
    # What the example made lives until the end: to take a process group apart may wait for a thread that waits for Python.
    kept = runpy.run_path(str(EXAMPLES / "11_ddp.py"), run_name="__main__")
    sys.stdout.flush()
    os._exit(0 if kept else 1)


@pytest.mark.process
@pytest.mark.parametrize("way", ["forked", pytest.param("torchrun", marks=pytest.mark.thorough)])
def test_ddp(tmp_path: Path, way: str) -> None:
    if way == "forked":
        done = ranks.launch(ddp, 2, tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]
        printed = done.stdout
    else:
        printed = run("11_ddp.py", tmp_path, TORCHRUN)
    assert "all 2 processes: growth 2" in printed
    assert "weights the same on all ranks: True" in printed


@pytest.mark.process
@pytest.mark.thorough  # Lightning starts the second one; `tests/integrations/test_lightning.py` has it in processes that are there
def test_lightning_in_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    printed = run("12_lightning.py", tmp_path, arguments=["2"])
    sums = [line.split("sum of weights ")[1] for line in printed.splitlines() if "sum of weights" in line]
    assert printed.count("2 growths") == 2
    assert len(sums) == 2 and sums[0] == sums[1]


@pytest.mark.library
@pytest.mark.filterwarnings("default")
def test_hugging_face(here: Callable[[str], str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    printed = here("13_hugging_face.py")
    assert "rank 0: 3 blocks" in printed and "growth 2: Twin(LlamaDecoderLayer)" in printed
    assert (tmp_path / "grown" / "checkpoint-48" / "sensli.json").is_file()


@pytest.mark.library
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_scikit_learn(here: Callable[[str], str]) -> None:
    pytest.importorskip("sklearn")
    printed = here("14_scikit_learn.py")
    assert "growth 1: Linear(32, 32) + ReLU" in printed


@pytest.mark.process
@pytest.mark.thorough  # `tests/lab/paper/test_ray.py` starts a Ray as it does
def test_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    printed = run("15_many_runs_with_ray.py", tmp_path)
    assert "3 of 3 arms computed" in printed and "wide (stated), large: 20 runs" in printed


@pytest.mark.process
def test_mixed_precision(tmp_path: Path) -> None:
    """In its own process: on some processors bf16 kernels end it with an illegal instruction."""
    assert "2 growths, the averaged model is right on 9" in run("16_mixed_precision.py", tmp_path)


@pytest.mark.library
@pytest.mark.filterwarnings("default")
def test_language_model(here: Callable[[str], str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    printed = here("17_language_model.py")
    assert "growth 1: Twin(LlamaDecoderLayer) after model.layers.0" in printed
    assert "growth 2: +32 units in model.layers.0.mlp.gate_proj and in 2 blocks like it" in printed
    assert "3 blocks of 96 hidden units" in printed, "as the saved configuration says"
