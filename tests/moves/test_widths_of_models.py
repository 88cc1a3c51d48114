"""What is offered in the usual networks for images and sequences, written as their authors write them; every width keeps its promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sensli import find_sites, grow, measure, undo
from sensli.modules.running import run
from widening import column_gradients, widened


def normed(into: int, out: int, size: int = 3, stride: int = 1, groups: int = 1, act: Any = None) -> list[nn.Module]:
    conv = nn.Conv2d(into, out, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out), *([] if act is None else [act(inplace=True)])]


class Residual(nn.Module):
    """Convolutions with norms and a shortcut, added and activated in place, as in torchvision."""

    def __init__(self, *sizes: int, kernels: tuple[int, ...], stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number, size in enumerate(kernels):
            last, middle = number == len(kernels) - 1, number == len(kernels) // 2
            act = None if last else nn.ReLU
            layers += normed(
                sizes[number], sizes[number + 1], size, stride if number == 0 else 1, groups if middle else 1, act
            )
        self.body, self.act = nn.Sequential(*layers), nn.ReLU(inplace=True)
        changes = stride != 1 or sizes[0] != sizes[-1]
        self.shortcut = nn.Sequential(*normed(sizes[0], sizes[-1], 1, stride)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.shortcut(x)
        return self.act(y)


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)), inplace=True)).sigmoid()


class Inverted(nn.Module):
    """The block of MobileNetV2, and with ``squeeze`` that of EfficientNet."""

    def __init__(self, into: int, out: int, act: Any, *, squeeze: bool = False) -> None:
        super().__init__()
        wide = 2 * into
        inner = [*normed(into, wide, 1, act=act), *normed(wide, wide, groups=wide, act=act)]
        self.body = nn.Sequential(*inner, *([Squeeze(wide)] if squeeze else []), *normed(wide, out, 1))
        self.skip = into == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skip else self.body(x)


class Unet(nn.Module):
    """One level: a skip connection by concatenation, transposed convolution on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = (nn.Sequential(*normed(into, out, act=nn.ReLU)) for into, out in ((3, 4), (4, 6)))
        self.up, self.join, self.out = nn.ConvTranspose2d(6, 3, 2, 2), nn.Conv2d(7, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        y = torch.cat([self.up(self.middle(F.max_pool2d(skip, 2))), skip], 1)
        return self.out(F.relu(self.join(y), inplace=True)).mean((2, 3))


class Convnext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(self.deep(x).movedim(1, -1)))))
        return x + (self.scale * y).movedim(-1, 1)


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(3, 4), kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(self.first(x).tanh())[0][:, -1])


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Transformer(4, 2, 1, 1, 6, 0.0, batch_first=True), nn.Linear(4, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.out(self.inner(source, target).mean(1))


def on_images(*blocks: nn.Module, channels: int) -> nn.Module:
    stem = nn.Sequential(*normed(3, 4, act=nn.ReLU), nn.MaxPool2d(2))
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3))


def vgg() -> nn.Module:
    features = [nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.ReLU(inplace=True)]
    return nn.Sequential(
        *features, nn.Flatten(), nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(6, 3)
    )


def autoencoder() -> nn.Module:
    down = [nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 5, 3, 2, 1), nn.ReLU()]
    up = [nn.ConvTranspose2d(5, 4, 2, 2), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2, 2)]
    return nn.Sequential(*down, *up, nn.AdaptiveAvgPool2d(1), nn.Flatten())


# A model, the shape of its input, and the layers that would get units or heads.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "VGG": (vgg, (3, 8, 8), ["0", "3", "6"]),
    "ResNet": (
        lambda: on_images(Residual(4, 4, 4, kernels=(3, 3)), Residual(4, 6, 6, kernels=(3, 3), stride=2), channels=6), (3, 8, 8),
        ["0.0", "1.body.0", "2.body.0", "2.body.3"],
    ),
    "bottleneck ResNet": (
        lambda: on_images(Residual(4, 3, 3, 8, kernels=(1, 3, 1)), channels=8), (3, 8, 8), ["0.0", "1.body.0", "1.body.3", "1.body.6"],
    ),
    "ResNeXt": (lambda: on_images(Residual(4, 4, 4, 8, kernels=(1, 3, 1), groups=2), channels=8), (3, 8, 8), ["0.0", "1.body.6"]),
    "MobileNetV2": (
        lambda: on_images(Inverted(4, 4, nn.ReLU6), Inverted(4, 6, nn.ReLU6), channels=6), (3, 8, 8),
        ["0.0", "1.body.0", "2.body.0", "2.body.6"],
    ),
    "EfficientNet": (
        lambda: on_images(Inverted(4, 6, nn.SiLU, squeeze=True), channels=6), (3, 8, 8), ["0.0", "1.body.0", "1.body.6.down", "1.body.7"],
    ),
    "U-Net": (Unet, (3, 8, 8), ["down.0", "middle.0", "up", "join"]),
    "ConvNeXt": (lambda: on_images(Convnext(), Convnext(), channels=4), (3, 8, 8), ["1.up", "2.up"]),
    "autoencoder": (autoencoder, (3, 8, 8), ["0", "2", "4"]),
    "LSTM": (lambda: Recurrent(nn.LSTM), (4, 3), []),
    "GRU": (lambda: Recurrent(nn.GRU), (4, 3), []),
    "Transformer": (
        Translator, (5, 4),
        [
            *(f"inner.encoder.layers.0.{name}" for name in ("self_attn", "linear1")),
            *(f"inner.decoder.layers.0.{name}" for name in ("self_attn", "multihead_attn", "linear1")),
        ],
    ),
}  # fmt: skip


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_is_offered_grows_trains_and_is_taken_back(name: str) -> None:
    torch.manual_seed(0)
    make, shape, expected = MODELS[name]
    model, x, y = make().double().eval(), torch.randn(3, *shape, dtype=torch.float64), torch.arange(3)
    given: Any = (x, x.flip(1)) if name == "Transformer" else x
    sites = find_sites(model, given, what="units")
    assert [site.path for site in sites] == expected
    merits = measure(model, sites, [(given, y)], loss_fn, norm="frobenius") if expected else []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for merit in merits:
        wider, edit = widened(model, merit.site)
        loss_fn(run(wider, given), y).backward()
        assert merit.value == pytest.approx(column_gradients(edit), rel=1e-9)
    for merit in merits:
        state, output = {key: value.clone() for key, value in model.state_dict().items()}, run(model, given)
        growth = grow(model, merit, optimizer=optimizer, check=(given, None))
        assert torch.allclose(run(model, given), output, rtol=1e-10, atol=1e-10)
        undo(model, growth, optimizer=optimizer)
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        growth = grow(model, merit, optimizer=optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            loss_fn(run(model, given), y).backward()
            optimizer.step()
        undo(model, growth, optimizer=optimizer)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_is_refused_with_the_reason(kind: Any) -> None:
    skipped = dict(find_sites(Recurrent(kind), torch.randn(2, 4, 3), what="units").skipped)
    assert (
        skipped["inner"]
        == "no more units: a recurrent layer keeps its units in one call, where none can be added alone"
    )
    assert "mixed with each other by inner" in skipped["first"]
