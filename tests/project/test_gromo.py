"""The benchmark beside gromo: what it says without that library, and that ours grows where it says; with it, that both do."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks import gromo
from sensli_lab.compare.tasks.spirals import SPIRALS

HAVE = find_spec("gromo") is not None


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gromo, "STEPS", 8)
    monkeypatch.setattr(gromo, "MOMENTS", range(3, 7, 3))
    monkeypatch.setattr(gromo, "SEEDS", 1)


@pytest.mark.skipif(HAVE, reason="gromo is installed")
def test_without_the_library_one_line_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert gromo.main() == 0
    said = "gromo is not installed, so there is nothing to compare with. Get it with: pip install 'sensli[gromo]'\n"
    assert capsys.readouterr().out == said


def test_ours_grows_at_the_moments() -> None:
    (_,), (seconds,), (parameters,) = gromo.measured(gromo.with_ours)
    small = sum(each.numel() for each in SPIRALS.network("small", 0).parameters())
    assert parameters > small and seconds > 0 and gromo.lines_of(gromo.with_ours) < 15


@pytest.mark.skipif(not HAVE, reason="gromo is missing. Get it with: pip install 'sensli[gromo]'")
def test_both_print_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert gromo.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
