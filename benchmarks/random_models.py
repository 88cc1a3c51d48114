"""Random models of the project's tests, far more of them than a test run has time for."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.figure import Figure

_HELPERS = Path(__file__).resolve().parents[1] / "tests" / "helpers"
_NAME = "random models that break a promise"


def random_models(count: int = 3000) -> list[Figure]:
    """How many of so many random models break one of the promises that the tests hold every model to."""
    if find_spec("hypothesis") is None:
        return [Figure(_NAME, None, 0, "needs hypothesis: python -m pip install hypothesis")]
    sys.path.insert(0, str(_HELPERS))
    try:
        survey = importlib.import_module("width_promises").survey
    finally:
        sys.path.remove(str(_HELPERS))
    models, sites, broken = survey(count)
    for failure in broken:
        print(failure, file=sys.stderr)
    return [Figure(_NAME, len(broken), 0, f"of {models} models with {sites} sites; those that do are printed")]
