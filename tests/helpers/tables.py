"""Tables of tests: through the values of each axis in `make test`, through their product in `make thorough`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def through_axes(*axes: Sequence[Any]) -> list[Any]:
    """All combinations as rows for `parametrize`; those without a value that no row before them has are thorough."""
    rows = max(map(len, axes))
    needed = {tuple(row % len(axis) for axis in axes) for row in range(rows)}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, places, strict=True)),
            marks=[] if places in needed else [pytest.mark.thorough],
        )
        for places in product(*(range(len(axis)) for axis in axes))
    ]
