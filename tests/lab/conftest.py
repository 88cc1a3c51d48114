"""One thread for the tiny networks of these tests: more only wait for each other."""

from __future__ import annotations

import pytest

from sensli_lab.paper.stacked import one_thread


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield
