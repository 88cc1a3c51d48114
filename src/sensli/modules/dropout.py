"""A model without its dropout, whatever mode it is in."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.multi_head_attention_forward,
}  # fmt: skip


class NoDropout(TorchFunctionMode):
    """Dropout as in eval mode, and everything else as it is; also where it is called as a function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["training"] = False
            return func(*bound.args, **bound.kwargs)
        if func is F.scaled_dot_product_attention:  # query, key, value, mask, dropout_p
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
