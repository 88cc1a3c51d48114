"""Little work takes one thread, and gives the others back."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Thread

import pytest
import torch

from sensli.merits import norms
from sensli.merits.norms import squared_norm
from sensli.modules.running import fit_threads
from sensli.moves.roles import Geometry


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_little_work_takes_one_thread_and_gives_the_others_back() -> None:
    with fit_threads(1e6):
        with fit_threads(1e6):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(KeyError), fit_threads(1e6):
        raise KeyError
    assert torch.get_num_threads() == 2
    with fit_threads(1e12):
        assert torch.get_num_threads() == 2


def test_two_at_the_same_time_each_have_their_threads_again() -> None:
    found: list[int] = []
    inside, left = Event(), Event()

    def other() -> None:
        with fit_threads(1e6):
            inside.set()
            left.wait()
            found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())

    thread = Thread(target=other)
    with fit_threads(1e6):
        thread.start()
        inside.wait()
    found.append(torch.get_num_threads())
    left.set()
    thread.join()
    assert found == [2, 1, 2]


@pytest.mark.parametrize("norm, side, threads", [("operator", 8, 1), ("operator", 4096, 2), ("frobenius", 8, 2)])
def test_norms_of_small_kernels_take_one_thread(
    norm: str, side: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def look(gradient: object, geometry: object) -> float:
        found.append(torch.get_num_threads())
        return 1.0

    monkeypatch.setitem(norms.NORMS, norm, look)
    squared_norm(torch.ones(4, 4, 3, 3), norm, Geometry((side, side)))
    assert found == [threads]
    assert torch.get_num_threads() == 2
