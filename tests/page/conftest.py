"""One browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browser import chromium


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running
