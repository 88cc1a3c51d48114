"""What `make quick` runs starts no process: a test without the mark that tries is stopped."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import pytest


def test_a_process_without_the_mark_is_stopped() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"mark it with pytest\.mark\.process"):
        subprocess.run([sys.executable, "-c", ""], check=True)
    with pytest.raises(pytest.fail.Exception, match=r"mark it with pytest\.mark\.process"):
        multiprocessing.Process(target=print).start()


@pytest.mark.process
def test_with_the_mark_it_runs() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)
