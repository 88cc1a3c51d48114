"""What holds on every device, told without one: nothing is made where `torch.set_default_device` happens to point."""

from __future__ import annotations

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

SOURCE = Path(__file__).parents[2] / "src" / "sensli"
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
    assert len(found) > 200 and {path: lines for path, lines in found.items() if lines} == {}
