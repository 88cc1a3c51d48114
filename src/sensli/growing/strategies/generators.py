"""The state of a random generator in a strategy's `state_dict`: one text, which is a third of the size of a list of numbers as JSON."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor


def saved(generator: torch.Generator) -> str:
    """Its state as plain data."""
    return base64.b64encode(bytes(generator.get_state().tolist())).decode()


def read(state: Any) -> Tensor:
    """What `saved` returned, for `set_state`; a list of numbers, too, as states of before had it. Raises ValueError if it is neither."""
    try:
        numbers = base64.b64decode(state, validate=True) if isinstance(state, str) else bytes(_numbers(state))
        found = torch.tensor(list(numbers), dtype=torch.uint8, device="cpu")
        torch.Generator().set_state(found)  # raises if it is none
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"the state of a random generator is damaged: {error}") from error
    return found


def _numbers(state: Any) -> list[int]:
    if not isinstance(state, list) or any(type(number) is not int for number in state):
        raise TypeError("it is neither a text nor a list of bytes")
    return state
