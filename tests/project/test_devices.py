"""What holds on every device, told without one: where tensors are made, and what TF32 does."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from sensli import find_sites, grow

SOURCE = Path(__file__).parents[2] / "src"
MAKERS = {maker.__name__ for maker in _device_constructors()}


def without_a_device(text: str) -> list[int]:
    """The lines that make a tensor and do not say where."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in MAKERS}:
            if "device" not in {each.arg for each in node.keywords}:
                lines.append(node.lineno)
        elif (
            isinstance(node, ast.ImportFrom) and node.module == "torch" and MAKERS & {each.name for each in node.names}
        ):
            lines.append(node.lineno)  # by another name than torch.zeros nobody would find it
    return sorted(lines)


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    """Otherwise it follows the user's default device, where generators of the CPU and indices do not fit."""
    assert without_a_device("x = torch.zeros(3)\nfrom torch import rand\ny = torch.zeros(3, device=x.device)") == [1, 2]
    found = {str(path.relative_to(SOURCE)): without_a_device(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert len(found) > 100 and {path: lines for path, lines in found.items() if lines} == {}


class RoundedAsTF32(TorchDispatchMode):
    """Products round their operands to ten bits, as a GPU does where TF32 is allowed."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.convolution, torch.ops.aten.mm, torch.ops.aten.addmm):
            args = [_rounded(each) if isinstance(each, Tensor) and each.dim() > 1 else each for each in args]
        return function(*args, **(kwargs or {}))


def _rounded(value: Tensor) -> Tensor:
    return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_with_tf32_a_residual_layer_is_offered_and_the_output_stays() -> None:
    """A convolution that rounds is not an identity; the documentation says so, and how to switch it off."""
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()]
    model, x = nn.Sequential(*layers, nn.Flatten(), nn.Linear(54, 2)), torch.randn(4, 3, 3, 3)
    assert {str(site).split("(")[0] for site in find_sites(model, x[:2])} == {"Conv2d"}
    with RoundedAsTF32():
        sites = find_sites(model, x[:2])
        assert {str(site).split("(")[0] for site in sites} == {"Residual"}
        before = model(x)
        grow(model, sites[0], check=x)
        assert torch.equal(before, model(x))
