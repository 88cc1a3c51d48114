"""The largest singular value of a kernel: one matrix for each frequency of a circular convolution on its feature map.

At frequency w a convolution is one c_out x c_in matrix, A(w) = sum_t G[t] exp(-2 pi i <w, t / d>), and its operator norm
is the largest singular value of them all. Three things save an SVD per frequency: ||A(w)||_F bounds the singular values
and costs next to nothing, a few Lanczos steps in real numbers settle many frequencies at once, and a frequency that
cannot win any more is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import torch
from torch import Tensor

from sensli.modules.running import decompose
from sensli.moves.roles import Geometry

_CHUNK_BYTES = 2**23  # of one intermediate; a handful live at once, so that the whole stays below about 64 MB
_FIRST_SHARE = 8  # the first chunk is so much smaller
_STEPS = (3, 4, 6, 9, 14, 20, 30, 45, 68, 100)  # Lanczos steps at which we look; real gradients need the first few
_STARTS = 2  # random starts for each frequency: one alone now and then misses the leading singular vector for too long
_SAFETY = 4  # how many residuals a singular value may still rise; with two starts, 2 never failed in 800 hard kernels
_EXACT_SIDE = 16  # matrices up to this side, and up to this many operations, go to LAPACK at once
_EXACT_WORK = 2**20
_KEPT = 2**15  # phases of one grid that are kept for the next kernel, as complex numbers


@dataclass(frozen=True, eq=False)
class Grid:
    """Where the taps lie on the map: place is taps x axes; size is 1 along an axis that makes no difference."""

    place: Tensor
    size: tuple[int, ...]

    @classmethod
    def over(cls, place: Tensor, size: Tensor) -> Grid:
        # Where all taps share a coordinate every frequency has the same singular values.
        flat = (place == place[0]).all(0)
        return cls(place, tuple(torch.where(flat, torch.ones_like(size), size).tolist()))

    @property
    def counts(self) -> tuple[int, ...]:
        """Frequencies along each axis: a real kernel has A(-w) = conj A(w), so half of them do along one axis."""
        longest = max(range(len(self.size)), key=lambda axis: self.size[axis])
        return tuple(size // 2 + 1 if axis == longest else size for axis, size in enumerate(self.size))

    def phases(self, frequency: Tensor, like: Tensor) -> Tensor:
        """exp(-2 pi i <w, place / size>), taps x frequencies; frequency: flat indices into the grid of counts."""
        few = len(self.place) * math.prod(self.counts) <= _KEPT
        found = self._all[:, frequency] if few else self._phases(frequency)
        return found.to(like.dtype.to_complex())

    @cached_property
    def _all(self) -> Tensor:
        return self._phases(torch.arange(math.prod(self.counts), device=self.place.device))

    def _phases(self, frequency: Tensor) -> Tensor:
        turns = torch.zeros(len(self.place), len(frequency), dtype=torch.float64, device=frequency.device)
        for axis, count in reversed(list(enumerate(self.counts))):
            # The remainder in integers: exact angles, and a kernel larger than the map wraps around by itself.
            turns += (
                (self.place[:, axis, None] * (frequency % count)).double() % self.size[axis] / float(self.size[axis])
            )
            frequency = frequency // count
        return torch.polar(torch.ones_like(turns), -2 * math.pi * turns)


def taps(gradient: Tensor, geometry: Geometry) -> tuple[Tensor, Grid]:
    """The kernel as taps x rows x columns, and where these lie; a matrix is a single tap.

    A stride turns the s neighbours it steps over into channels of a map s times smaller: with t = q s + p, tap t of
    channel c is tap q of channel (p, c). That is an isometry, the same as the s aliased frequencies side by side.
    A transposed convolution is taken by its adjoint, which has the same norm: rows and columns change their roles.
    """
    if not geometry.size:
        matrix = gradient.reshape(1, gradient.shape[0] if gradient.dim() else 1, -1)
        return matrix, Grid(torch.zeros(1, 1, dtype=torch.int64, device=gradient.device), (1,))
    taken = (tuple(gradient.shape[2:]), tuple(geometry.size), tuple(geometry.stride), tuple(geometry.dilation))
    grid, index, phases = _places(*taken, geometry.transposed, gradient.device)
    values = gradient.flatten(2).permute(2, 0, 1).contiguous()
    if index is None:
        return values, grid
    rows, columns = gradient.shape[:2]
    added = values.new_zeros(len(grid.place) * phases, rows * columns).index_add_(0, index, values.flatten(1))
    return added.view(len(grid.place), phases, rows, columns).transpose(1, 2).flatten(2), grid


@lru_cache(maxsize=16)
def _places(
    kernel: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    device: torch.device,
) -> tuple[Grid, Tensor | None, int]:
    """Where taps lie, which of them each tap of the kernel is added to (None: it is one by itself), and how many phases a stride has."""
    axes = len(kernel)
    stride = torch.tensor(strides or (1,) * axes, device=device)
    size = torch.tensor(sizes, device=device)
    if not transposed:
        size = (size + stride - 1) // stride
    offset = torch.cartesian_prod(*(torch.arange(k, device=device) for k in kernel)).view(-1, axes)
    offset = offset * torch.tensor(dilation or (1,) * axes, device=device)
    if bool((stride == 1).all() and (offset[-1] < size).all()):  # every tap has its own place: nothing to add up
        return Grid.over(offset, size), None, 1
    place, tap = torch.unique(offset // stride % size, dim=0, return_inverse=True)
    phases, phase = torch.unique(offset % stride, dim=0, return_inverse=True)
    return Grid.over(place, size), tap * len(phases) + phase, len(phases)


def _energies(values: Tensor, grid: Grid) -> Iterator[Tensor]:
    """The squared Frobenius norms of maps at all frequencies, taps x maps x n -> maps x frequencies, in chunks.

    By the Gram matrix of the taps, sum_ts <G[t], G[s]> cos(angle_t - angle_s), or directly where n is the smaller side.
    """
    taps, maps, width = values.shape
    by_gram = width >= taps
    if by_gram:
        stacked = values.transpose(0, 1)
        gram = (stacked @ stacked.mT).flatten(1)
    for frequency in _chunks(grid, max(taps * taps, maps) if by_gram else maps * width, values):
        phases = grid.phases(frequency, values)
        if by_gram:
            yield gram @ (phases[:, None] * phases.conj()).real.flatten(0, 1)
        else:
            yield _spectrum(values, phases).abs().square().sum(2).T


def peaks(values: Tensor, grid: Grid) -> Tensor:
    """The largest energy over all frequencies, taps x maps x n -> maps: the squared norm of a map to one output."""
    return reduce(torch.maximum, (energy.amax(1) for energy in _energies(values, grid)))


def _spectrum(values: Tensor, phases: Tensor) -> Tensor:
    """The matrices themselves, frequencies x rows x columns."""
    flat = values.flatten(1)
    return torch.complex(phases.real.T @ flat, phases.imag.T @ flat).view(-1, *values.shape[1:])


def _chunks(grid: Grid, width: int, like: Tensor) -> Iterator[Tensor]:
    """All frequencies, as many at a time as keep width complex numbers for each within the memory set aside."""
    total = math.prod(grid.counts)
    step = _columns(width, like)
    for start in range(0, total, step):
        yield torch.arange(start, min(start + step, total), device=like.device)


def _columns(width: int, like: Tensor) -> int:
    return max(1, _CHUNK_BYTES // (2 * like.element_size() * width))


# ---- the largest singular value of all ------------------------------------------------------------------------------


def largest_singular_value(values: Tensor, grid: Grid, floor: float = 0.0) -> float:
    """The largest squared singular value over all frequencies, or floor if none exceeds it; taps x rows x columns."""
    bound = _bounds(values, grid)
    side = min(values.shape[1:])
    if side == 1:
        return max(floor, bound.max().item())
    bound, order = bound.sort(descending=True)
    step = _columns(values[0].numel(), values)
    # The frequencies with the largest bounds first: what they reach usually rules out most of the others.
    start, width = 0, max(1, step // _FIRST_SHARE)
    while start < len(order) and bound[start].item() > floor:
        frequency = order[start : start + width][bound[start : start + width] > floor * (1 + _tolerance(values))]
        if len(frequency):
            small = side <= _EXACT_SIDE or len(frequency) * side**3 <= _EXACT_WORK
            floor = (_exact if small else _lanczos)(_parts(values, grid, frequency), floor)
        start, width = start + width, step
    return floor


def _bounds(values: Tensor, grid: Grid) -> Tensor:
    """||A(w)||_F^2 at all frequencies, from the Gram matrix of the taps: the squared singular values add up to it."""
    flat = values.flatten(1)
    gram = flat @ flat.T
    chunks = (grid.phases(frequency, values) for frequency in _chunks(grid, 2 * len(values), values))
    return torch.cat([((gram @ p.real) * p.real + (gram @ p.imag) * p.imag).sum(0) for p in chunks])


def _parts(values: Tensor, grid: Grid, frequency: Tensor) -> Tensor:
    """The matrices at some frequencies, frequencies x parts x rows x columns: real and imaginary, or just real ones."""
    if len(values) == 1:
        return values[:, None]
    phases = torch.view_as_real(grid.phases(frequency, values).T).transpose(1, 2)
    return (phases.flatten(0, 1) @ values.flatten(1)).view(-1, 2, *values.shape[1:])


def _tolerance(values: Tensor) -> float:
    return 1e-12 if values.dtype == torch.float64 else 1e-6


def _exact(matrices: Tensor, floor: float) -> float:
    """By all eigenvalues of A^H A."""
    whole = matrices[:, 0] if matrices.shape[1] == 1 else torch.complex(matrices[:, 0], matrices[:, 1])
    gram = whole @ whole.mH if whole.shape[1] < whole.shape[2] else whole.mH @ whole
    largest: float = decompose(torch.linalg.eigvalsh, gram)[:, -1].max().item()
    return max(floor, largest)


def _lanczos(matrices: Tensor, floor: float) -> float:
    """By Lanczos iterations on A^H A, for each matrix from a few starts; only their tridiagonal matrices are kept.

    The largest Ritz value theta is a lower bound, and some eigenvalue lies within the residual r of it. A matrix is dropped
    when theta plus a few r cannot beat the best, and done when its error, at most r and about r^2 / gap, is negligible.
    What is left after the last step is settled by all eigenvalues.
    """
    tiny, tolerance = torch.finfo(matrices.dtype).tiny, _tolerance(matrices)
    count, parts = matrices.shape[:2]
    generator = torch.Generator().manual_seed(0)  # its own, so that the global random state is not touched
    starts = _STARTS if parts == 2 else 1  # a lone matrix is never dropped, only done
    shape = (count, starts, parts, min(matrices.shape[2:]))
    vectors = torch.randn(shape, generator=generator, dtype=matrices.dtype, device=generator.device).to(matrices.device)
    vectors /= vectors.square().sum((2, 3), keepdim=True).sqrt()
    before = torch.zeros_like(vectors)
    beside = vectors.new_zeros(count, starts, 1)  # of the diagonal: one column ahead
    diagonal = beside[:, :, :0]
    for steps in range(1, _STEPS[-1] + 1):
        images = _gram(matrices, vectors)
        quotient = (vectors * images).sum((2, 3), keepdim=True)
        images = images - quotient * vectors - beside[:, :, -1:, None] * before
        diagonal = torch.cat([diagonal, quotient[:, :, :, 0]], 2)
        beside = torch.cat([beside, images.square().sum((2, 3)).sqrt()[:, :, None]], 2)
        before, vectors = vectors, images / beside[:, :, -1:, None].clamp_min(tiny)
        # An invariant subspace leaves a zero vector or noise here, which adds no eigenvalue above the largest.
        if steps in _STEPS:
            off = torch.diag_embed(beside[:, :, 1:-1], offset=1)
            ritz, weights = decompose(torch.linalg.eigh, torch.diag_embed(diagonal) + off + off.mT)
            theta, gap = ritz[..., -1], ritz[..., -1] - ritz[..., -2]
            residual = beside[:, :, -1] * weights[..., -1, -1].abs()
            floor = max(floor, theta.max().item())
            error = torch.minimum(residual, residual.square() / gap.clamp_min(tiny))
            undecided = (theta + _SAFETY * residual > floor * (1 + tolerance)) & (error > tolerance * theta)
            kept = undecided.any(1)
            if not kept.any():
                return floor
            if not kept.all():
                matrices, diagonal, beside = matrices[kept], diagonal[kept], beside[kept]
                before, vectors = before[kept], vectors[kept]
    return _exact(matrices, floor)


def _gram(matrices: Tensor, vectors: Tensor) -> Tensor:
    """A^H A v, or A A^H v where A is wide: matrices x starts x parts x entries."""
    if matrices.shape[2] < matrices.shape[3]:
        return _forth(matrices, _back(matrices, vectors))
    return _back(matrices, _forth(matrices, vectors))


def _forth(matrices: Tensor, vectors: Tensor) -> Tensor:
    """A v in real numbers. The vectors are rows: from the left a product reads each matrix once and in order."""
    count, parts, rows, _ = matrices.shape
    products = (vectors.flatten(1, 2) @ matrices.flatten(1, 2).mT).view(count, -1, parts, parts, rows)
    if parts == 1:
        return products[:, :, 0]
    real = products[:, :, 0, 0] - products[:, :, 1, 1]
    return torch.stack([real, products[:, :, 0, 1] + products[:, :, 1, 0]], 2)


def _back(matrices: Tensor, vectors: Tensor) -> Tensor:
    """A^H v in real numbers: (re - i im)^T (x + i y) = (re^T x + im^T y) + i (re^T y - im^T x)."""
    count, parts, _, columns = matrices.shape
    if parts == 2:
        real, imaginary = vectors[:, :, 0], vectors[:, :, 1]
        vectors = torch.stack([torch.cat([real, imaginary], 2), torch.cat([imaginary, -real], 2)], 2)
    return (vectors.flatten(1, 2) @ matrices.flatten(1, 2)).view(count, -1, parts, columns)
