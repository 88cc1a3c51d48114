"""Units of other papers: GradMax, TINY, NeST, SENN and NORTH*. Each says where, which rows and which columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.growing.strategy import OptionalLoss
from sensli.merits.measuring import measure
from sensli.merits.merits import Merits
from sensli.moves.sites import Site
from sensli_lab.methods.pairs import Pair, Rival, inverse_root, moment, pseudo_inverse
from sensli_lab.methods.searching import UnitMethod

# ---- GradMax (Evci, van Merrienboer, Unterthiner, Vladymyrov, Pedregosa 2022): zero rows, and columns that give these the
# largest gradient.
#
# How is `init="gradmax"`. Where is not part of the method: its code widens all layers at once or takes them in turn,
# as here; the singular values that it computes could rank them (`Grower(what="units", init="gradmax")` does that).
# It looks at one batch. The function is kept.


class GradMax(UnitMethod):
    """One width after the other, with the singular vectors of one batch."""

    start_of_sites: ClassVar[str] = "gradmax"
    in_turn: ClassVar[bool] = True

    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
        return measure(model, sites, batches, loss_fn, norm="frobenius", ratio=False, max_batches=1)


# ---- TINY (Verbockhaven, Rudkiewicz, Chevallier, Charpiat 2024): units whose first-order decrease of the loss is largest,
# both sides at once.
#
# With h the input of the layer that gets units, a and g the input and the cotangent of the one that reads them: what
# the reader could do itself is left out of g (R = E[aa']^+ E[ag'], g - R'a), and of N = -E[h (g - R'a)'] the singular
# values s of E[hh']^(-1/2) N give the units: rows sqrt(s) E[hh']^(-1/2) u, columns sqrt(s) v. The predicted decrease
# is the sum of s^2, times the square of an amplitude that is found by trying {0, 0.1, 0.5, 1} as the tutorial of its
# library does; the library itself tries 101 and more. We leave the reader's own weights as they are, which is the
# preset of the paper, and drop singular values below 1e-3 as its code does. The function is not kept.

AMPLITUDES = (0.1, 0.5, 1.0)
SMALLEST = 1e-3


class Tiny(Rival):
    """The largest predicted decrease, with the amplitude that lowers the loss most; nowhere if none does."""

    keeps: ClassVar[bool] = False

    def start(self, pair: Pair, try_out: Callable[[Site], float]) -> tuple[Site, float]:
        root = inverse_root(moment(pair.h))
        left, values, right = torch.linalg.svd(root @ -pair.bypass(residual=True), full_matrices=False)
        kept = values >= min(SMALLEST, float(values.max()))
        count = min(pair.width.more, int(kept.sum()))
        values = values[:count]
        rows = (root @ left[:, :count]).T * values.sqrt()[:, None]
        columns = right[:count] * values.sqrt()[:, None]
        sites = [pair.start(each * rows, each * columns) for each in AMPLITUDES]
        losses = [try_out(site) for site in sites]
        best = min(range(len(sites)), key=lambda index: losses[index])
        nothing = try_out(pair.start(0 * rows, 0 * columns))
        return sites[best], float(values.square().sum()) if losses[best] < nothing else 0.0


# ---- NeST (Dai, Yin, Jha 2018): units along the largest entries of the bridging gradient. Growth alone; its pruning is
# `remove_dead`'s trade.
#
# With M the gradient of a bypass around the units, its largest entries (a share ``beta`` of them) are served one by
# one: of a pair (i, j) with M_ij, a row gets e sgn(-M_ij) sqrt|M_ij| at i and a column e sqrt|M_ij| at j, with one
# random sign e for each pair; then both are scaled to ``alpha`` times the mean size of the entries that are there.
# There is no released code; a port in another library drops the sign of M, which the formula has. The pairs are dealt
# out to the new units in turn. The function is not kept.

BETA = 0.4
ALPHA = 0.3


class Nest(Rival):
    """Rows and columns from single entries of M; the score is what these entries add up to, squared."""

    keeps: ClassVar[bool] = False

    def start(self, pair: Pair, try_out: Callable[[Site], float]) -> tuple[Site, float]:
        bypass = pair.bypass()
        count = max(pair.width.more, round(BETA * bypass.numel()))
        sizes, places = bypass.abs().flatten().topk(min(count, bypass.numel()))
        rows, columns = _shared(bypass, sizes, places, pair.width.more, self.generator)
        rows = ALPHA * rows * _mean(pair.existing_rows) / _mean(rows)
        columns = ALPHA * columns * _mean(pair.existing_columns) / _mean(columns)
        return pair.start(rows, columns), float(sizes.square().sum())


def _shared(
    bypass: Tensor, sizes: Tensor, places: Tensor, units: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows and columns of so many units, each with every so-many-th of the pairs."""
    rows = torch.zeros(units, bypass.shape[0], dtype=bypass.dtype, device="cpu")
    columns = torch.zeros(units, bypass.shape[1], dtype=bypass.dtype, device="cpu")
    signs = torch.randint(2, sizes.shape, generator=generator, device=generator.device) * 2.0 - 1.0
    unit = torch.arange(len(sizes), device="cpu") % units
    here, there = places // bypass.shape[1], places % bypass.shape[1]
    rows.index_put_((unit, here), -signs * bypass[here, there].sign() * sizes.sqrt(), accumulate=True)
    columns.index_put_((unit, there), signs * sizes.sqrt(), accumulate=True)
    return rows, columns


def _mean(values: Tensor) -> float:
    """The mean size of the entries that are not zero."""
    found = values[values != 0].abs()
    return float(found.mean()) if len(found) else 1.0


# ---- SENN (Mitchell, Menzenbach, Kersting, Mundt 2023): units by the natural gradient that they would add.
#
# With C = E[f r'] of a new unit's activation f and the part r of the cotangent that the reader cannot serve, the
# score is C' E[ff']^-1 C E[gg']^-1 summed up. Its authors search for f among 100 candidates with 3,000 steps each;
# for small activations the best value has a closed form, the squared singular values of A^(-1/2) N E^(-1/2) with A =
# E[hh'], N = -E[h r'] and E = E[gg'] damped by a tenth of its mean diagonal, and the rows A^(-1/2) u. We use it, with
# both signs: for a ReLU they differ. Columns are zero, so the function is kept. Its layers are not here: they begin
# as an identity because each unit there has an activation that can be one, which the networks of others do not have.
# A width grows only if its score is at least ``THRESHOLD`` times the natural gradient of the reader's own weights, as
# in their code.

THRESHOLD = 0.007  # of their MNIST experiment; 1.0 in the toy ones, 0.03 for images of 28 pixels
DAMPING = 0.1


class Senn(Rival):
    """Rows by a singular value decomposition instead of a search."""

    def start(self, pair: Pair, try_out: Callable[[Site], float]) -> tuple[Site, float]:
        root, cotangents = inverse_root(moment(pair.h)), moment(pair.g)
        cotangents = (
            cotangents + DAMPING * cotangents.diagonal().mean() * torch.eye(len(cotangents), device="cpu").double()
        )
        bypass = -pair.bypass(residual=True)
        whitened = (pair.by_output(bypass) @ inverse_root(cotangents)).flatten(1)
        left, values, _ = torch.linalg.svd(root @ whitened, full_matrices=False)
        half = -(-pair.width.more // 2)
        rows = (root @ left[:, :half]).T
        rows = torch.cat([rows, -rows])[: pair.width.more]
        score = float(values[: pair.width.more].square().sum())
        own = pair.a.T @ pair.g / len(pair.a)
        present = float((own * (pseudo_inverse(moment(pair.a)) @ own @ pseudo_inverse(cotangents))).sum())
        return pair.start(pair.as_long(rows)), score if score > THRESHOLD * present else 0.0


# ---- NORTH* (Maile, Rachelson, Luga, Wilson 2022), in its variant Pre: units whose pre-activations no unit has yet, where
# those that are there are already independent of each other.
#
# Where and how many: of the activations H of a layer on n samples, the share phi of singular values of H / sqrt(n)
# above 0.01; as long as phi stays above 0.97 of what it was at first, the layer gets units, by that excess. How: rows
# pinv(h) V r with V orthogonal to the existing pre-activations and r normal, as long as the rows that are there are
# on average; columns are zero, so the function is kept. Only forward statistics decide. The paper asks after every
# mini-batch; here it is asked at a look. Its code sorts candidates of dense layers the wrong way round; this variant
# does not sort.

RANK = 0.01  # singular values above it count
KEPT = 0.97  # of the first share


class North(Rival):
    """The score is the number of units by which the activations exceed the rank that they began with."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first: dict[str, float] = {}  # the share of each layer at its first look

    def start(self, pair: Pair, try_out: Callable[[Site], float]) -> tuple[Site, float]:
        units = pair.width.units
        rank = int((torch.linalg.svdvals(pair.activations / len(pair.activations) ** 0.5) > RANK).sum())
        share = self.first.setdefault(pair.site.path, rank / units)
        excess = rank - int(units * KEPT * share)
        made = pair.h @ pair.existing_rows.T
        basis = torch.linalg.svd(made, full_matrices=False)
        taken = basis.U[:, RANK * basis.S.max() < basis.S]
        drawn = torch.randn(len(made), pair.width.more, generator=self.generator, dtype=torch.float64, device="cpu")
        free = drawn - taken @ (taken.T @ drawn)
        rows = torch.linalg.lstsq(pair.h, free, driver="gelsd").solution.T
        return pair.start(pair.as_long(rows)), max(0.0, float(excess))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "first": dict(self.first)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        first = state["first"]
        if not isinstance(first, dict) or not all(type(value) is float for value in first.values()):
            raise ValueError(f"first is {first!r}")
        super().load_state_dict(state)
        self.first = dict(first)
