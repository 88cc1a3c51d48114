"""Which parts of an optimizer's state are copies or averages of the parameter itself: slow weights, a starting point, a master copy.

New entries of such a state are the parameter's: zeros would pull new weights to zero at the next synchronisation. Those of a moment
are zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_COPIES = {  # by name, in optimizers of torch, torch-optimizer, pytorch_optimizer, dadaptation, timm and others
    "ax", "backup_params", "lookahead_params", "lookahead_slow_buff", "mov_avg_param", "old_p", "p0", "param_avg", "prev_param",
    "slow_buffer", "slow_param", "slow_params", "swa_buffer", "x0", "x_k",
}  # fmt: skip
_COPIES_OF = {"AccSGD": {"momentum_buffer"}, "ScheduleFree": {"x", "y", "z"}}  # by a part of the name of the class
# What is made of gradients may happen to equal the parameter: the gradient of |w|^2 / 2 is w.
_MOMENT = re.compile("avg|mom|grad|sum|sq|var|hess|^[bdghmnrsuv]$")
_NEAR = 0.5  # of 200 optimizers, copies are within 0.13 after seven steps, and moments beyond 0.85


def is_copy(optimizer: Optimizer, key: str) -> bool | None:
    """Whether a state of this name is a copy of its parameter; None if only its values tell."""
    kind = type(optimizer)
    for cls in kind.__mro__:
        if any(part in cls.__name__ and key in keys for part, keys in _COPIES_OF.items()):
            return True
    if key in _COPIES:
        return True
    return False if _MOMENT.search(key) or kind.__module__.startswith("torch.optim") else None


def is_near(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether states are nearer to their parameters than constants could be, over all (state, parameter) together.

    A constant parameter, such as the weight of a new norm, tells nothing: many states are constant too.
    """
    apart = spread = 0.0
    for state, parameter in pairs:
        value = parameter.detach().to(state)
        apart += float((state - value).abs().square().sum())
        spread += float((value - value.mean()).abs().square().sum())
    return apart < _NEAR**2 * spread


def first_copies(optimizer: Optimizer, states: Mapping[Any, Any], parameter: Tensor) -> dict[str, Tensor]:
    """What a wrapper with these states keeps of a new parameter, if it keeps copies of all others: some make them when they are built."""
    others = [states.get(each) or {} for group in optimizer.param_groups for each in group["params"]]
    keys = set.intersection(*map(set, others)) if others else set()
    return {key: parameter.detach().clone() for key in sorted(keys) if is_copy(optimizer, key)}
