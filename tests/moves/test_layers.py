"""Every layer starts as the identity to the last bit, and its virtual gradient is what autograd says of the real one."""

import itertools
import json

import pytest
import torch
from torch import nn

from sensli.moves.layers import Layer, grouped_like, same_size_kernel
from sensli.moves.point import Point, Ref
from sensli.moves.sites import Cost
from sensli.moves.trace.stacks import ACTIVATIONS, Activation

LAYERS = [
    Layer(form, kind, 4, kernel, groups, activation)
    for form, (kind, kernel, groups), activation in itertools.product(
        ("relu", "residual", "parametric"),
        [
            ("linear", (), 1), ("conv", (3,), 1), ("conv", (3, 3), 1), ("conv", (1, 5), 1), ("conv", (3, 3), 2),
            ("conv", (3, 3), 4), ("conv", (3, 1, 3), 1),
        ],
        [Activation("Tanh"), Activation("PReLU", (("num_parameters", 4),)), Activation("LeakyReLU", (("negative_slope", 0.3),))],
    )
    if form != "relu" or activation.name == "Tanh"
]  # fmt: skip


def cost(layer: Layer, positions: int = 1) -> Cost:
    shape = (4, positions) if layer.kind == "conv" else (positions, 4)
    return layer.cost(Point(Ref("0"), "after", shape))


def values(layer: Layer) -> torch.Tensor:
    """An activation as it may stand at the layer's place: after a ReLU for the relu form, with some units at zero."""
    tokens = () if layer.activation.name == "PReLU" else (2,)  # torch has a slope per entry of the second dimension
    shape = (3, 4, *[5] * len(layer.kernel)) if layer.kind == "conv" else (3, *tokens, 4)
    x = torch.randn(shape, dtype=torch.float64)
    return x.relu() if layer.form == "relu" else x


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_new_layer_is_the_identity_to_the_last_bit_and_draws_no_random_number(layer):
    x = values(layer)
    state = torch.get_rng_state()
    module = layer.build(dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(module(x), x)
    assert sum(p.numel() for p in module.parameters()) == cost(layer).parameters
    assert {p.dtype for p in module.parameters()} == {torch.float64}


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_gradient_of_the_layer_that_is_not_there_is_that_of_the_real_one(layer):
    x, module = values(layer), layer.build(dtype=torch.float64)
    y = module(x)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    (name,) = layer.measured
    real = module.get_parameter(name).grad
    arrived = cotangent * (x > 0) if layer.form == "relu" and not layer.leading else cotangent
    virtual = layer.weight_gradient(*layer.sides(x, arrived, layer.activation.build().double()))
    assert virtual.shape == layer.weight_shape
    torch.testing.assert_close(virtual, real, rtol=1e-13, atol=1e-13)
    assert real.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer.activation.name == "Tanh"][::3], ids=str)
def test_identity_holds_in_low_precision_too(layer, dtype):
    x = values(layer).to(dtype)
    assert torch.equal(layer.build(dtype=dtype)(x), x)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_layer_goes_to_json_and_comes_back_equal(layer):
    assert Layer.from_dict(json.loads(json.dumps(layer.to_dict()))) == layer


@pytest.mark.parametrize(
    "change",
    [
        {"form": "magic"}, {"kind": "attention"}, {"width": 0}, {"width": "4"}, {"width": 4.0}, {"groups": 3},
        {"kernel": [2, 2]}, {"kernel": []}, {"kernel": [3, 3, 3, 3]}, {"activation": {"name": "Linear", "arguments": []}},
    ],
    ids=str,
)  # fmt: skip
def test_a_layer_from_an_altered_file_is_refused(change):
    plan = Layer("relu", "conv", 4, (3, 3)).to_dict()
    with pytest.raises((ValueError, TypeError)):
        Layer.from_dict({**plan, **change})


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_known_activation_is_read_off_a_module_and_built_again_as_the_same_function(name):
    arguments = {
        "Threshold": (0.1, 20.0), "LeakyReLU": (0.3,), "ELU": (0.7,), "CELU": (0.7,), "Softplus": (2.0, 15.0),
        "Softshrink": (0.2,), "Hardshrink": (0.2,), "Hardtanh": (-0.5, 0.7), "GELU": ("tanh",), "RReLU": (0.2, 0.2001),
    }  # fmt: skip
    module = getattr(nn, name)(*arguments.get(name, ())).eval()
    known = Activation.of(module)
    x = torch.randn(100)
    assert torch.equal(known.build().eval()(x), module(x))


def test_a_subclass_or_a_module_of_the_same_name_is_no_known_activation():
    class ReLU(nn.Module):
        pass

    class Mine(nn.ReLU):
        pass

    assert Activation.of(ReLU()) is None and Activation.of(Mine()) is None and Activation.of(nn.Linear(2, 2)) is None


def test_kernels_keep_the_size_and_groups_divide():
    assert same_size_kernel((3, 4, 1), (8, 8, 8)) == (3, 3, 1)
    assert same_size_kernel((7, 7), (1, 2)) == (1, 3)  # no entry that never lies on the map
    assert [grouped_like(8, g) for g in (1, 2, 3, 8)] == [1, 2, 1, 8]


@pytest.mark.parametrize(
    "layer, text, flops",
    [
        (Layer("relu", "conv", 64, (3, 3)), "Conv2d(64, 64, 3) + ReLU", 2 * 64 * 64 * 9 * 10),
        (Layer("relu", "conv", 4, (1, 3), 2), "Conv2d(4, 4, (1, 3), groups=2) + ReLU", 2 * 4 * 2 * 3 * 10),
        (Layer("residual", "linear", 3, (), 1, Activation("Tanh")), "Residual(Linear(3, 3), Tanh)", 2 * 2 * 9 * 10),
        (Layer("parametric", "linear", 3, (), 1, Activation("GELU", (("approximate", "none"),))),
         "Parametric(Linear(3, 3), GELU)", 2 * 9 * 10),
    ],
)  # fmt: skip
def test_text_and_cost(layer, text, flops):
    assert (str(layer), cost(layer, 10).flops) == (text, flops)
