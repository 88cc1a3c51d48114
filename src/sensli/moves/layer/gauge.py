"""What a layer that is not there would be worth: the gradient of its weight from what passes its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from sensli.modules.running import widened
from sensli.moves.factors import Outer, Rows, Windows, of_channels, of_features, of_windows, parts_of
from sensli.moves.geometry import Geometry
from sensli.moves.move import Gauge

if TYPE_CHECKING:
    from sensli.moves.layer.forms import Layer


@dataclass(kw_only=True)
class LayerGauge(Gauge):
    """Sums the gradient of the virtual layer's measured weight, and counts the passes in which a unit was alive."""

    factors: ClassVar[bool] = True

    layer: Layer
    anchor: nn.Module
    _bend: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self._bend = self.layer.features().eval()  # a random activation (RReLU) by its mean: no number is drawn

    def caught(
        self, index: int, x: Tensor, cotangent: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Mapping[str, Tensor | Outer]:
        self.shape = tuple(x.shape)
        x = widened(x)
        if any(True for _ in self._bend.parameters()):
            self._bend.to(x)
        if self.layer.norm:  # statistics of the batch where the model takes them
            next(self._bend.children()).train(self.anchor.training)
        dim = 1 if self.layer.kind == "conv" else x.dim() - 1
        low, high = x.transpose(0, dim).flatten(1).aminmax(dim=1) if dim != 1 else _range(x)
        alive = ((low != 0) | (high != 0)).float()
        features, g = self.layer.sides(x, cotangent, self._bend)
        gradient = self.layer.weight_gradient(features, g)
        if not self.natural:
            return {"gradient": gradient, "alive": alive}
        inputs, outputs = self._rows(features, g)
        groups = len(inputs.values)
        matrix = gradient.reshape(groups, self.layer.width // groups, -1)
        return {**parts_of(0, matrix, inputs, outputs, len(x)), "alive": alive}

    def _rows(self, features: Tensor, g: Tensor) -> tuple[Rows, Rows]:
        if self.layer.kind == "linear":
            return of_features(features), of_features(g)
        kernel, ones = self.layer.kernel, (1,) * len(self.layer.kernel)
        windows = Windows(kernel, ones, [k // 2 for k in kernel], ones, self.layer.groups)
        return of_windows(features, windows, g.shape[2:]), of_channels(g, self.layer.groups)

    def gradients(self, sums: Mapping[str, Tensor], shape: tuple[int, ...]) -> Iterable[tuple[Tensor, Geometry]]:
        return [(sums["gradient"], self.layer.geometry(shape))]

    def dead(self, sums: Mapping[str, Tensor]) -> float | None:
        return 1.0 - (sums["alive"] > 0).float().mean().item()


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    others = [d for d in range(x.dim()) if d != 1]
    return x.amin(others), x.amax(others)
