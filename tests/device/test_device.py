"""An accelerator on machines that have none: tests with it run in processes of their own, since it stays where it was registered."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
import ranks_on_the_device

import ranks
import warm

HERE = Path(__file__).parent
MISSING = [
    *(
        ["a C++ compiler (c++, or the one that CXX names)"]
        if shutil.which(os.environ.get("CXX", "c++")) is None
        else []
    ),
    *(["Python's headers"] if not Path(sysconfig.get_path("include"), "Python.h").exists() else []),
    *(["fork"] if not hasattr(os, "fork") else []),
]
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(MISSING), reason=f"the accelerator of these tests needs {' and '.join(MISSING)}"),
]


def run(file: str, *options: str, imports: Sequence[str] = ()) -> None:
    # The process that this is a fork of may have imported what pytest would rewrite.
    call = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "sim_device", "-p", "no:cacheprovider"]
    call += [str(HERE / file), *options]
    program = f"import sys, pytest; sys.path.insert(0, {str(HERE)!r}); sys.exit(pytest.main({call!r}))"
    done = warm.run(["-c", program], HERE.parents[1], imports)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_on_one_device_and_on_two() -> None:
    run("on_the_device.py")


@pytest.mark.library
def test_with_lightning_and_scikit_learn() -> None:
    run("libraries_on_the_device.py", imports=["lightning.pytorch", "sklearn.model_selection"])


def test_on_ranks_whose_group_takes_tensors_of_the_device_alone(tmp_path: Path) -> None:
    told = ranks.run(ranks_on_the_device.work, 2, tmp_path)
    assert "device type cpu" in told["refused"]
    assert told["natural"] >= 4 and told["sure"] >= 1 and told["resumed"]
    assert set(told["histories"]) == {"sensli", "splitting", "tiny"} and min(told["histories"].values()) >= 1


@pytest.mark.thorough
@pytest.mark.library
@pytest.mark.parametrize("which", ["library", "not library"])
def test_every_architecture(which: str) -> None:
    run("architectures_on_the_device.py", "-m", which)
