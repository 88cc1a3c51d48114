"""A library that is not installed: the error says how to get it."""

from __future__ import annotations

import importlib
import sys

import pytest

from sensli.errors import MissingExtra


@pytest.mark.parametrize(
    ("name", "library"),
    [("lightning", "lightning.pytorch"), ("transformers", "transformers"), ("sklearn", "sklearn.base")],
)
def test_an_integration_without_its_library_says_how_to_get_it(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not there
    monkeypatch.delitem(sys.modules, f"sensli.integrations.{name}", raising=False)
    with pytest.raises(MissingExtra, match=rf"pip install 'sensli\[{name}\]'"):
        importlib.import_module(f"sensli.integrations.{name}")
