"""One thread for the tiny networks of these tests: more only wait for each other."""

from __future__ import annotations

import pytest

from sensli.modules.running import fit_threads


@pytest.fixture(autouse=True)
def _one_thread():
    with fit_threads():
        yield
