"""Each norm against the explicit matrix of the convolution, column by column from its definition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sensli.merits import spectrum
from sensli.merits.norms import NORMS, choose_norm, squared_norm
from sensli.moves.roles import Geometry

NAMES = ("frobenius", "mean_square", "operator", "operator_l2", "operator_l1")


def explicit_matrix(kernel: Tensor, geometry: Geometry) -> Tensor:
    """outputs x out places x inputs x in places, from y[o, n] = sum G[o, c, t] x[c, (n s + t dilation) mod d].

    A transposed convolution spreads instead: y[o, (n s + t dilation) mod (d s)] += G[c, o, t] x[c, n].
    """
    axes = len(geometry.size)
    stride, dilation = geometry.stride or (1,) * axes, geometry.dilation or (1,) * axes
    if geometry.transposed:
        small = geometry.size
    else:
        small = tuple(-(-d // s) for d, s in zip(geometry.size, stride, strict=True))
    large = tuple(d * s for d, s in zip(small, stride, strict=True))
    first, second = kernel.shape[:2]
    groups = geometry.groups
    per_group = first // groups
    shape = (first, *small, groups * second, *large)
    matrix = torch.zeros(shape, dtype=kernel.dtype)
    for a, b in itertools.product(range(first), range(second)):
        for tap in itertools.product(*(range(k) for k in kernel.shape[2:])):
            for place in itertools.product(*(range(d) for d in small)):
                other = tuple(
                    (n * s + t * r) % d for n, s, t, r, d in zip(place, stride, tap, dilation, large, strict=True)
                )
                matrix[(a, *place, (a // per_group) * second + b, *other)] += kernel[(a, b, *tap)]
    matrix = matrix.reshape(first, math.prod(small), groups * second, math.prod(large))
    return matrix.permute(2, 3, 0, 1) if geometry.transposed else matrix


def oracle(kernel: Tensor, norm: str, matrix: Tensor) -> float:
    if norm == "frobenius":
        return float((kernel**2).sum())
    if norm == "mean_square":
        return float((kernel**2).sum() / kernel.numel())
    if norm == "operator":
        return float(torch.linalg.matrix_norm(matrix.flatten(2).flatten(0, 1), 2) ** 2)
    outputs = torch.stack([torch.linalg.matrix_norm(row.flatten(1), 2) for row in matrix])
    return float((outputs**2).sum() if norm == "operator_l2" else outputs.sum() ** 2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES = {
    "matrix": ((5, 7), Geometry()),
    "vector": ((6,), Geometry()),
    "kernel flattened": ((4, 3, 3, 3), Geometry()),
    "1d": ((4, 3, 3), Geometry((7,))),
    "2d": ((3, 4, 3, 3), Geometry((5, 6))),
    "3d": ((2, 3, 2, 3, 3), Geometry((3, 4, 3))),
    "1x1 kernel": ((4, 5, 1, 1), Geometry((5, 4))),
    "1 x 3 kernel": ((4, 5, 1, 3), Geometry((5, 4))),
    "map of one place": ((4, 3, 3, 3), Geometry((1, 1))),
    "kernel larger than map": ((3, 2, 5, 5), Geometry((3, 2))),
    "stride": ((4, 3, 3, 3), Geometry((6, 8), stride=(2, 2))),
    "stride over the kernel": ((4, 3, 2, 1), Geometry((6, 9), stride=(2, 3))),
    "stride beyond the kernel": ((4, 3, 1, 1), Geometry((6, 6), stride=(2, 2))),
    "stride does not divide": ((4, 3, 3, 3), Geometry((5, 7), stride=(2, 2))),
    "patches": ((5, 2, 4, 4), Geometry((8, 8), stride=(4, 4))),
    "dilation": ((4, 3, 3, 3), Geometry((7, 8), dilation=(2, 3))),
    "stride and dilation": ((4, 3, 3), Geometry((12,), stride=(2,), dilation=(3,))),
    "dilation wraps": ((4, 3, 3), Geometry((4,), dilation=(2,))),
    "groups": ((6, 2, 3, 3), Geometry((5, 4), groups=3)),
    "depthwise": ((4, 1, 3, 3), Geometry((5, 4), groups=4)),
    "depthwise with stride": ((4, 1, 3, 3), Geometry((6, 4), stride=(2, 2), groups=4)),
    "groups, stride, dilation": ((4, 2, 3, 3), Geometry((6, 8), stride=(2, 1), dilation=(1, 2), groups=2)),
    "transposed": ((3, 4, 3, 3), Geometry((4, 5), transposed=True)),
    "transposed, stride": ((3, 4, 3, 3), Geometry((3, 4), stride=(2, 2), transposed=True)),
    "transposed, stride is the kernel": ((3, 4, 2, 2), Geometry((3, 4), stride=(2, 2), transposed=True)),
    "transposed, groups": ((4, 3, 3), Geometry((5,), stride=(2,), groups=2, transposed=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_explicit_matrix(case: str) -> None:
    shape, geometry = CASES[case]
    gradient = random(*shape)
    matrix = explicit_matrix(gradient, geometry) if geometry.size else gradient.reshape(len(gradient), 1, 1, -1)
    for norm in NAMES:
        expected = oracle(gradient, norm, matrix)
        assert squared_norm(gradient, norm, geometry) == pytest.approx(expected, rel=1e-10), norm
        assert squared_norm(gradient.float(), norm, geometry) == pytest.approx(expected, rel=1e-5), norm


def test_a_channel_that_only_adds_up_at_no_frequency() -> None:
    # Two input channels with opposite kernels: added up they cancel, as a map from both channels they do not.
    kernel = torch.tensor([[[1.0, 1.0], [-1.0, -1.0]]], dtype=torch.float64)
    assert squared_norm(kernel, "operator_l2", Geometry((6,))) == pytest.approx(8.0)


def hard_kernels(out: int, into: int) -> dict[str, Tensor]:
    """Flat spectra, ties between all frequencies, low rank, structure: what an iteration could get wrong."""
    noise, more = random(out, into, 3, 3, seed=1), random(out, into, 3, 3, seed=2)
    dirac = torch.nn.init.dirac_(torch.zeros(out, into, 3, 3, dtype=torch.float64))
    low = torch.einsum("or,ri,rk->oik", random(out, 3), random(3, into), random(3, 9)).view(out, into, 3, 3)
    centre = torch.zeros(out, into, 3, 3, dtype=torch.float64)
    centre[:, :, 1, 1] = torch.linalg.qr(random(max(out, into), max(out, into)))[0][:out, :into]
    signs = torch.ones(out, into, 3, 3, dtype=torch.float64)
    signs[:, ::2] = -1
    return {
        "random": noise,
        "symmetric": noise + noise[:into, :out].transpose(0, 1).flip(2, 3) if out == into else noise,
        "dirac": dirac,
        "dirac and noise": dirac + 1e-3 * noise,
        "orthogonal": centre,
        "rank one": torch.einsum("o,i,k->oik", random(out), random(into), random(9)).view(out, into, 3, 3),
        "low rank and noise": low + 0.01 * noise,
        "decaying": noise * torch.logspace(0, -4, out, dtype=torch.float64)[:, None, None, None],
        "sparse": noise * (more.abs() > 2),
        "constant": torch.ones(out, into, 3, 3, dtype=torch.float64),
        "alternating": signs + 1e-6 * noise,
    }


def by_svd(kernel: Tensor, size: tuple[int, int]) -> float:
    return float(torch.linalg.matrix_norm(torch.fft.fft2(kernel, size).permute(2, 3, 0, 1), 2).max() ** 2)


@pytest.mark.parametrize("name", hard_kernels(2, 2))
@pytest.mark.parametrize("channels", [(20, 20), (24, 40)])
def test_iteration_equals_svd_at_every_frequency(
    name: str, channels: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spectrum, "_EXACT_WORK", 0)  # no shortcut by LAPACK for matrices as small as these
    kernel, size = hard_kernels(*channels)[name], (8, 9)
    expected = by_svd(kernel, size)
    assert squared_norm(kernel, "operator", Geometry(size)) == pytest.approx(expected, rel=1e-10)
    assert squared_norm(kernel.float(), "operator", Geometry(size)) == pytest.approx(expected, rel=1e-5)


def test_real_gradient_of_a_virtual_layer() -> None:
    # sum over images and places of g x^T, with rectified activations: what the sites hand over
    x, g = random(16, 32, 10, 10, seed=3).relu(), random(16, 32, 10, 10, seed=4) * 0.1 + random(1, 32, 1, 1, seed=5)
    kernel = torch.nn.grad.conv2d_weight(x, (32, 32, 3, 3), g, padding=1)
    expected = by_svd(kernel, (10, 10))
    assert squared_norm(kernel, "operator", Geometry((10, 10))) == pytest.approx(expected, rel=1e-10)
    assert squared_norm(kernel.float(), "operator", Geometry((10, 10))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("channels, kernel, size", [(32, 7, 48), (64, 5, 16), (256, 3, 8), (96, 3, 32)])
@pytest.mark.parametrize("flat", [False, True], ids=["real gradient", "noise"])
@pytest.mark.slow
def test_costs_less_than_the_gradient_of_a_small_batch(channels: int, kernel: int, size: int, flat: bool) -> None:
    # In multiplications, which a busy machine does not change. Noise has a flat spectrum: no frequency can be ruled out early.
    shape, batch = (channels, channels, kernel, kernel), 32
    if flat:
        gradient = random(*shape).float()
    else:
        x, g = (
            random(batch, channels, size, size, seed=3).float().relu(),
            random(batch, channels, size, size, seed=4).float(),
        )
        gradient = torch.nn.grad.conv2d_weight(x, shape, g + random(1, channels, 1, 1).float(), padding=kernel // 2)
    with FlopCounterMode(display=False) as counter:
        squared_norm(gradient, "operator", Geometry((size, size)))
    assert counter.get_total_flops() < 2 * gradient.numel() * batch * size**2


@pytest.mark.parametrize("shape", [(60, 300), (300, 60), (110, 110)])
def test_large_matrix_is_its_spectral_norm(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectrum, "_EXACT_WORK", 0)
    gradient = random(*shape)
    expected = float(torch.linalg.matrix_norm(gradient, 2) ** 2)
    assert squared_norm(gradient, "operator") == pytest.approx(expected, rel=1e-10)


def test_small_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, geometry = random(20, 20, 3, 3), Geometry((12, 12))
    expected = {norm: squared_norm(kernel, norm, geometry) for norm in NAMES}
    monkeypatch.setattr(spectrum, "_CHUNK_BYTES", 2**14)
    assert {norm: squared_norm(kernel, norm, geometry) for norm in NAMES} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("norm", NAMES)
@pytest.mark.parametrize("geometry", [Geometry(), Geometry((6, 6))])
def test_zero_and_not_finite(norm: str, geometry: Geometry) -> None:
    gradient = torch.zeros(20, 20, 3, 3)
    assert squared_norm(gradient, norm, geometry) == 0.0
    for bad in (math.nan, math.inf, -math.inf):
        gradient[1, 2, 0, 0] = bad
        assert math.isnan(squared_norm(gradient, norm, geometry))


@pytest.mark.parametrize("norm", NAMES)
def test_scale_neither_overflows_nor_vanishes(norm: str) -> None:
    gradient, geometry = random(20, 20, 3, 3).float(), Geometry((6, 6))
    expected = squared_norm(gradient, norm, geometry)
    for exponent in (-60, 60):  # 2^-120 and 2^120 after squaring: exact, though float32 sums of squares would overflow
        scaled = squared_norm(gradient * 2.0**exponent, norm, geometry)
        assert scaled == pytest.approx(expected * 2.0 ** (2 * exponent), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_up_to_float32(dtype: torch.dtype) -> None:
    gradient, geometry = random(6, 5, 3, 3).to(dtype), Geometry((6, 6))
    for norm in NAMES:
        value = squared_norm(gradient, norm, geometry)
        assert isinstance(value, float)
        assert value == squared_norm(gradient.float(), norm, geometry)


def test_random_state_and_gradient_are_left_alone() -> None:
    gradient = random(20, 20, 3, 3).requires_grad_()
    copy, state = gradient.detach().clone(), torch.get_rng_state()
    first = squared_norm(gradient, "operator", Geometry((16, 16)))
    assert squared_norm(gradient, "operator", Geometry((16, 16))) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(gradient, copy)
    assert gradient.grad is None


def test_registry_and_choice() -> None:
    assert tuple(NORMS) == NAMES
    assert choose_norm("auto", ["conv", "conv"]) == "operator"
    assert choose_norm("auto", ["conv", "linear"]) == "frobenius"
    assert choose_norm("auto", []) == "frobenius"
    assert choose_norm("operator_l1", ["linear"]) == "operator_l1"


def test_errors_name_what_is_known() -> None:
    with pytest.raises(
        ValueError, match=r"norm must be one of 'auto', 'frobenius', .*'operator_l1', 'natural', got 'spectral'"
    ):
        choose_norm("spectral", [])
    with pytest.raises(ValueError, match=r"norm must be one of .*, got 'auto'"):
        squared_norm(torch.zeros(2, 2), "auto")
    with pytest.raises(ValueError, match=r"size \(4,\) has 1 entries.* 2 spatial axes"):
        squared_norm(torch.zeros(2, 2, 3, 3), "operator", Geometry((4,)))
    with pytest.raises(ValueError, match=r"stride \(1,\) has 1 entries"):
        squared_norm(torch.zeros(2, 2, 3, 3), "operator", Geometry((4, 4), stride=(1,)))
    with pytest.raises(ValueError, match=r"size\[1\] must be a whole number of at least 1"):
        squared_norm(torch.zeros(2, 2, 3, 3), "operator", Geometry((4, 0)))
    with pytest.raises(ValueError, match="3 groups do not divide"):
        squared_norm(torch.zeros(2, 2, 3, 3), "operator", Geometry((4, 4), groups=3))
    with pytest.raises(ValueError, match="complex"):
        squared_norm(torch.zeros(2, 2, dtype=torch.complex64), "operator")


@pytest.mark.parametrize("form", ["2d", "stride", "dilation", "kernel larger than map"])
def test_what_is_kept_of_one_kernel_serves_others(form: str) -> None:
    """Another precision, another layout, other numbers of channels, and what was made in inference mode."""
    shape, geometry = CASES[form]
    spectrum._places.cache_clear()
    with torch.inference_mode():
        squared_norm(random(*shape).float(), "operator", geometry)
    for seed, more in ((1, 0), (2, 3)):
        kernel = random(shape[0] + more, *shape[1:], seed=seed).contiguous(memory_format=torch.channels_last)
        expected = oracle(kernel, "operator", explicit_matrix(kernel, geometry))
        assert squared_norm(kernel, "operator", geometry) == pytest.approx(expected, rel=1e-9)
    assert spectrum._places.cache_info().misses == 1
