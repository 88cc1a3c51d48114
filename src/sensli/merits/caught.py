"""What was caught in a measurement: sums of each site and of each existing weight, and the merits that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.merits.natural import NATURAL, Metric, natural_merit
from sensli.merits.norms import squared_norm
from sensli.merits.sums import Moment, Sum
from sensli.moves.factors import Outer, factored, is_moment
from sensli.moves.geometry import Geometry
from sensli.moves.move import Gauge
from sensli.moves.sites import Site
from sensli.moves.trace.activations import CONVOLUTIONS
from sensli.moves.uses import Use


class SiteCatch:
    """What was caught at one site: sums, as its move wants them."""

    def __init__(
        self, site: Site, groups: int, model: nn.Module, natural: bool = False, gauge: Gauge | None = None
    ) -> None:
        self.site = site
        self.sums: dict[str, Sum | Moment] = {}
        self.gauge = site.move.gauge(site, model) if gauge is None else gauge
        if natural and not self.gauge.factors:
            raise MeasurementError(
                f"norm='natural' is not known for '{site}': its gradient has no moments to compare with. Use another norm, for example "
                "norm='frobenius'."
            )
        self.gauge.natural = natural
        self._metrics: list[Metric] = []
        self.shape = self.gauge.shape
        self._groups = groups

    def add(self, values: Mapping[str, Tensor | Outer], group: int) -> None:
        """One pass."""
        _add(self.sums, values, group, self._groups)
        self.shape = self.gauge.shape

    @property
    def dead(self) -> float | None:
        """The share of units that were zero on all the data."""
        totals = self._totals()
        return self.gauge.dead(totals) if totals else None

    def settled(self, site: Site) -> Site:
        """The site as it was measured."""
        return self.gauge.settled(site, self._totals())

    def merit(self, norm: str, samples: float, without: int | None = None, whole: float | None = None) -> float:
        """The squared norm of the mean gradient; ``whole``: the number of samples with the group that is left out."""
        if norm == NATURAL:
            return natural_merit(
                self.gauge.factored(self._totals(without)), samples / (whole or samples), self._metrics
            )
        return sum(squared_norm(part, norm, geometry) for part, geometry in self.parts(without)) / samples**2

    def parts(self, without: int | None = None) -> Iterable[tuple[Tensor, Geometry]]:
        """The summed gradients of all measured weights, and how each acts."""
        totals = self._totals(without)
        return self.gauge.gradients(totals, self.shape) if totals else ()

    def _totals(self, without: int | None = None) -> dict[str, Tensor]:
        return _totals(self.sums, without)


class WeightCatch:
    """The gradient of one existing weight."""

    def __init__(self, name: str, parameter: nn.Parameter, owner: nn.Module, groups: int) -> None:
        self.name = name
        self.parameter = parameter
        self.owner = owner
        self.sums: dict[str, Sum | Moment] = {}
        self._groups = groups
        self._metrics: list[Metric] = []
        self._use: Use | None = None  # where the weight was met last, for the natural merit
        self.shape: tuple[int, ...] = ()  # the spatial one of a convolution's input

    @property
    def geometry(self) -> Geometry:
        if not isinstance(self.owner, CONVOLUTIONS) or not self.shape:
            return Geometry()
        conv = self.owner
        return Geometry(self.shape, tuple(conv.stride), tuple(conv.dilation), conv.groups, conv.transposed)

    def add(self, gradient: Tensor, group: int) -> None:
        """The gradient of one pass."""
        name = "gradient"
        if self._use is not None:
            name, gradient = "map0", self._use.matrix(gradient)
        _add(self.sums, {name: gradient}, group, self._groups)

    def met(self, use: Use, cotangent: Tensor, samples: int, group: int) -> None:
        """An operation with the weight in a backward pass; its gradient will follow."""
        self._use = use
        sums = use.sums(0, None, cotangent, samples)
        _add(self.sums, sums, group, self._groups)

    @property
    def factored(self) -> bool:
        """Whether it has a natural merit: an embedding, or a weight that its module uses in another way than as a map, has none."""
        return "map0" in self.sums

    def merit(self, norm: str, samples: float, without: int | None = None, whole: float | None = None) -> float:
        if norm == NATURAL:
            return natural_merit(factored(_totals(self.sums, without)), samples / (whole or samples), self._metrics)
        return sum(squared_norm(part, norm, geometry) for part, geometry in self.parts(without)) / samples**2

    def parts(self, without: int | None = None) -> Iterable[tuple[Tensor, Geometry]]:
        total = _totals(self.sums, without).get("gradient")
        return () if total is None else [(total, self.geometry)]


def _add(sums: dict[str, Sum | Moment], values: Mapping[str, Tensor | Outer], group: int, groups: int) -> None:
    for name, value in values.items():
        if isinstance(value, Outer):
            moment = sums.setdefault(name, Moment())
            assert isinstance(moment, Moment)
            moment.add(value)
        else:  # gradients without one group of batches are measured by the moments of all
            held = sums.setdefault(name, Sum(1 if is_moment(name) else groups))
            assert isinstance(held, Sum)
            held.add(value, group)


def _totals(sums: dict[str, Sum | Moment], without: int | None) -> dict[str, Tensor]:
    totals = {name: each.total(without) for name, each in sums.items()}
    return {name: total for name, total in totals.items() if total is not None}
