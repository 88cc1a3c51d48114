"""Counts that can be worked out by hand, and a model that is only read."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sensli.errors import BadExample, UnsupportedModel
from sensli.modules.flops import Flops, count_flops


class Block(nn.Module):
    """x + W2 tanh(W1 x + b)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Call(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)


def fnn(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def resnet(blocks: int) -> nn.Sequential:
    ends = nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)
    return nn.Sequential(ends[0], *(Block(3) for _ in range(blocks)), ends[1])


def cnn(extra: int = 0, inplace: bool = False) -> nn.Sequential:
    features: list[nn.Module] = []
    for i, o in ((3, 64), (64, 128), (128, 256)):
        features += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(inplace)]
        if o == 64:
            features += [module for _ in range(extra) for module in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(inplace))]
        features.append(nn.MaxPool2d(2))
    head = [nn.Linear(4096, 500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 10, bias=False)]
    return nn.Sequential(*features, nn.Flatten(), *head)


@pytest.mark.parametrize(
    ("model", "expected"),
    [(fnn(2, 5, 2), 40), (fnn(2, 5, 5, 2), 90), (fnn(2, 4, 4, 2), 64), (resnet(1), 60), (resnet(2), 96)],
)
def test_small_networks_of_the_paper(model: nn.Module, expected: int) -> None:
    for samples in (1, 7):
        flops = count_flops(model, torch.randn(samples, 2))
        assert flops == expected
        assert flops.unknown == {}


@pytest.mark.parametrize("inplace", [False, True])
def test_cnn_of_the_paper(inplace: bool) -> None:
    image = torch.randn(2, 3, 32, 32)
    assert count_flops(cnn(inplace=inplace), image) == 83_642_416
    assert count_flops(cnn(inplace=inplace), image, elementwise=True) == 83_988_480
    assert count_flops(cnn(extra=1), image) - count_flops(cnn(), image) == 75_497_472


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv1d(3, 4, 5), (3, 10), 2 * 6 * 4 * 3 * 5),
        (nn.Conv3d(2, 3, 2), (2, 4, 5, 6), 2 * (3 * 4 * 5) * 3 * 2 * 8),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=1), (4, 8, 8), 2 * 16 * 6 * 4 * 9),
        (nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 8, 8), 2 * 64 * 6 * 2 * 9),
        (nn.Conv2d(4, 4, 3, groups=4, padding=1), (4, 8, 8), 2 * 64 * 4 * 9),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 8, 8), 2 * 64 * 4 * 6 * 9),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), (4, 8), 2 * 8 * 4 * 3 * 3),
        (nn.Linear(3, 4), (5, 3), 2 * 5 * 3 * 4),
        (nn.LSTM(3, 4, batch_first=True), (5, 3), 2 * 5 * 16 * (3 + 4)),
        (nn.GRU(3, 4, batch_first=True), (5, 3), 2 * 5 * 12 * (3 + 4)),
        (nn.BatchNorm2d(4), (4, 8, 8), 0),
        (nn.LayerNorm(8), (4, 8), 0),
        (nn.MaxPool2d(2), (4, 8, 8), 0),
        (nn.Upsample(scale_factor=2), (4, 8, 8), 0),
        (nn.Flatten(), (4, 8, 8), 0),
    ],
)
def test_layers(layer: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    for samples in (1, 3):
        flops = count_flops(layer, torch.randn(samples, *shape))
        assert flops == expected
        assert flops.unknown == {}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (F.relu, 12),
        (lambda x: x + x, 12),
        (lambda x: x.sum(1), 12),
        (lambda x: F.softmax(x, -1), 12),
        (lambda x: x.mT.clone().flatten(1).unsqueeze(0).to(torch.float64), 0),
        (lambda x: torch.cat([x, x], 1)[:, :1], 0),
        (lambda x: F.linear(x, torch.ones(5, 4), torch.ones(5)), 2 * 3 * 20 + 3 * 5),
        (lambda x: F.linear(x, torch.ones(5, 4)), 2 * 3 * 20),
    ],
)
def test_elementwise(function: Callable[..., object], expected: int) -> None:
    assert count_flops(Call(function), torch.randn(2, 3, 4), elementwise=True) == expected


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    # 4 heads, 5 queries, 7 keys, 8 features: the scores and their products with the values
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    model = Call(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=causal))
    flops = count_flops(model, (query, key))
    assert flops == 2 * 2 * 4 * 5 * 7 * 8
    assert flops.unknown == {}


def test_transformer_layer_is_counted_in_parts() -> None:
    # 16 tokens, 8 features, 32 hidden: four projections, attention, two layers; no opaque fast path
    layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
    flops = count_flops(layer, torch.randn(3, 16, 8))
    assert flops == 2 * 16 * (4 * 8 * 8 + 2 * 8 * 32) + 2 * 2 * 16 * 16 * 8
    assert flops.unknown == {}
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    ("function", "name"),
    [(torch.linalg.svdvals, "svd"), (torch.fft.fft, "fft"), (lambda x: torch.cdist(x, x), "cdist")],
)
def test_unknown_operations_are_reported(function: Callable[..., object], name: str) -> None:
    flops = count_flops(Call(lambda x: (function(x), function(x), x @ x.mT)), torch.randn(2, 3, 3))
    assert flops == 2 * 27
    assert list(flops.unknown.values()) == [2]
    assert name in next(iter(flops.unknown))
    assert f"{next(iter(flops.unknown))} (2 x)" in flops.explain()
    assert "unknown" in repr(flops)


def test_flops_is_a_number() -> None:
    flops = Flops(1234567, {"svd": 2})
    assert flops == 1234567
    assert f"{flops} {flops:,}" == "1234567 1,234,567"
    assert json.dumps(flops) == "1234567"
    for same in (pickle.loads(pickle.dumps(flops)), copy.deepcopy(flops)):
        assert same == flops
        assert same.unknown == flops.unknown
    assert repr(Flops(40)) == "Flops(40)"
    assert Flops(40).explain() == "40 floating-point operations per sample; every operation was known."


def test_examples_of_every_kind() -> None:
    class Two(nn.Module):
        def forward(self, left: Tensor, right: list[Tensor], flag: bool = False) -> Tensor:
            return left @ right[0]

    left, right = torch.randn(2, 3, 4), [torch.randn(2, 4, 5)]
    assert count_flops(Two(), (left, right)) == 2 * 3 * 4 * 5
    assert count_flops(Two(), {"flag": True, "right": right, "left": left}) == 2 * 3 * 4 * 5


def test_same_count_under_inference_mode() -> None:
    with torch.inference_mode():
        assert count_flops(cnn(), torch.randn(1, 3, 32, 32), elementwise=True) == 83_988_480


class Restless(nn.Module):
    """Changes all it can in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.full((2,), torch.nan))

    def train(self, mode: bool = True) -> nn.Module:
        raise AssertionError("the model's own train() must not be called")

    def forward(self, x: Tensor) -> Tensor:
        assert not any(module.training for module in self.modules())
        self.calls += 1
        self.replaced = torch.zeros(2)
        return self.layer(x + torch.rand_like(x))


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_only_read(fails: bool) -> None:
    model = Restless()
    model.layer[1].training = False
    modes = [module.training for module in model.modules()]
    buffers = dict(model.named_buffers())
    values = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    if fails:
        with pytest.raises(BadExample):
            count_flops(model, torch.randn(2, 5, 8, 8, generator=torch.Generator()))
    else:
        count_flops(model, torch.randn(2, 3, 8, 8, generator=torch.Generator()))
    assert [module.training for module in model.modules()] == modes
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, values[name], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_gradients_stay() -> None:
    model, x = fnn(2, 5, 2), torch.randn(3, 2)
    model(x).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    count_flops(model, x)
    assert all(torch.equal(parameter.grad, old) for parameter, old in zip(model.parameters(), before, strict=True))


def test_errors_say_what_was_given() -> None:
    with pytest.raises(
        BadExample, match=r"does not run through Sequential.*float32 tensor of shape \(1, 7\).*RuntimeError"
    ):
        count_flops(fnn(2, 5, 2), torch.randn(1, 7))
    with pytest.raises(BadExample, match=r"does not run.*\{wrong: float32 tensor of shape \(1, 2\)"):
        count_flops(fnn(2, 5, 2), {"wrong": torch.randn(1, 2)})
    with pytest.raises(BadExample, match="with a tensor in it"):
        count_flops(fnn(2, 5, 2), (1, "two"))
    with pytest.raises(BadExample, match="no sample"):
        count_flops(fnn(2, 5, 2), torch.randn(0, 2))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_layers_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UnsupportedModel, match="lazy"):
        count_flops(model, torch.randn(1, 2))
    assert isinstance(model[0], nn.LazyLinear)
