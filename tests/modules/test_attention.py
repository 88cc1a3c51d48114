"""An attention with more heads than torch's allows computes what torch's does, and none of torch's shortcuts reads its weights."""

from __future__ import annotations

import copy
import pickle
import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sensli import find_sites, grow, undo
from sensli.modules.grown import WideAttention, fit_class

SIZE, HEADS, BATCH, TARGETS, SOURCES = 6, 3, 2, 3, 4
MASKS = (None, "bool of two", "float of two", "bool of three")
PADDINGS = (None, "bool", "float")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def masked(kind: str | None, shape: tuple[int, ...]) -> Tensor | None:
    if kind is None or kind.startswith("float"):
        return None if kind is None else normal(*shape)
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False  # a row of nothing else would be NaN, as it is in torch
    return mask


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("more", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["", "appended"])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 5, "vdim": 4}], ids=["", "other sizes"])
@pytest.mark.slow
def test_it_computes_what_torch_does(bias: bool, more: dict[str, Any], sizes: dict[str, int]) -> None:
    for batch_first, batched, mask, padding in product((True, False), (True, False), MASKS, PADDINGS):
        attention = nn.MultiheadAttention(SIZE, HEADS, bias=bias, batch_first=batch_first, **more, **sizes).double()
        for parameter in attention.parameters():
            nn.init.normal_(parameter)
        wide = copy.deepcopy(attention)
        wide.__class__ = WideAttention
        lead = (BATCH,) if batched else ()
        shapes = [(TARGETS, SIZE), (SOURCES, sizes.get("kdim", SIZE)), (SOURCES, sizes.get("vdim", SIZE))]
        given = [normal(*lead, *shape) for shape in shapes]
        if batched and not batch_first:
            given = [x.transpose(0, 1) for x in given]
        heads = (HEADS * (BATCH if batched else 1),) if mask == "bool of three" else ()
        options: dict[str, Any] = {
            "attn_mask": masked(mask, (*heads, TARGETS, SOURCES)), "key_padding_mask": masked(padding, (*lead, SOURCES)),
        }  # fmt: skip
        for need, average in ((False, True), (True, True), (True, False)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, about masks of two types
                expected = attention(*given, need_weights=need, average_attn_weights=average, **options)
            found = wide(*given, need_weights=need, average_attn_weights=average, **options)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_causal_hint_without_a_mask_is_refused_as_torch_does() -> None:
    wide = nn.MultiheadAttention(SIZE, HEADS)
    wide.__class__ = WideAttention
    x = torch.randn(2, 2, SIZE)
    with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        wide(x, x, x, is_causal=True)


def test_a_module_has_the_class_that_runs_its_heads() -> None:
    attention, other = nn.MultiheadAttention(SIZE, HEADS), nn.Linear(2, 2)
    attention.num_heads = HEADS + 1
    fit_class(attention)
    assert type(attention) is WideAttention and isinstance(attention, nn.MultiheadAttention)
    assert type(pickle.loads(pickle.dumps(attention))) is type(copy.deepcopy(attention)) is WideAttention
    attention.num_heads = HEADS
    fit_class(attention)
    fit_class(other)
    assert type(attention) is nn.MultiheadAttention and type(other) is nn.Linear and attention._qkv_same_embed_dim


@pytest.mark.filterwarnings("ignore")  # torch's, about nested tensors
@pytest.mark.parametrize("wider", [0, 1])
def test_the_fused_kernels_of_an_encoder_do_not_read_wider_weights(wider: int) -> None:
    """In evaluation without gradients torch reads weights instead of calling modules, and nests what is padded."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    x, padding = normal(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [4], [2]])

    def outputs() -> list[Tensor]:
        with torch.no_grad():
            fast = [model(x), model(x, src_key_padding_mask=padding)]
        return [*fast, model(x), model(x, src_key_padding_mask=padding)[padding.logical_not()]]

    before = outputs()
    site = next(site for site in find_sites(model, x, what="units") if site.path == f"layers.{wider}.self_attn")
    growth = grow(model, site, check=(x, None))
    assert type(model.layers[wider].self_attn) is WideAttention
    torch.testing.assert_close(outputs(), before, rtol=1e-12, atol=1e-12)
    undo(model, growth)
    assert type(model.layers[wider].self_attn) is nn.MultiheadAttention
    assert all(map(torch.equal, outputs(), before))
