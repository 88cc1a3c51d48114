"""What a measurement sums over batches, of each site and of each existing weight, and the merits that follow from the sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.merits.norms import NATURAL, SKETCHABLE, SUMS_OF_SQUARES, Metric, Sketcher, natural_merit, squared_norm
from sensli.modules.running import nothing_like, upcast, whole_tensor
from sensli.modules.wrappers import own_modules
from sensli.moves.factors import Factored, Outer, Use, factored_maps, is_moment, mirror_moment
from sensli.moves.roles import CONVOLUTIONS, Geometry, map_of
from sensli.moves.sites import MIXED, Gauge, Site

# ---- What is summed over batches: gradients, and the moments that the natural merit measures them by.


class Sum:
    """A gradient summed over batches: of all of them, and of groups of batches where an estimate of its noise is wanted."""

    def __init__(self, groups: int = 1) -> None:
        # The last one is the sum over all, in the order of the batches: the same bits with groups and without.
        self.groups: list[Tensor | None] = [None] * (groups + 1 if groups > 1 else 1)
        self._owned = [False] * len(self.groups)

    def __len__(self) -> int:
        """How many groups there are."""
        return max(len(self.groups) - 1, 1)

    def add(self, gradient: Tensor, group: int) -> None:
        gradient = _plain(gradient)
        for j in {group % len(self), len(self.groups) - 1}:
            held = self.groups[j]
            if held is None:
                self.groups[j] = gradient
            elif self._owned[j]:
                held.add_(gradient)
            else:  # the first one came from autograd: it may be expanded, or the gradient of another weight as well
                self.groups[j], self._owned[j] = held + gradient, True

    def total(self, without: int | None = None) -> Tensor | None:
        """The sum over all groups, or over all but one."""
        if without is None or len(self.groups) == 1:
            return self.groups[-1]
        whole, part = self.groups[-1], self.groups[without]
        return whole if whole is None or part is None else whole - part


def _plain(gradient: Tensor) -> Tensor:
    """Dense, real and in single precision at least."""
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return upcast(gradient)  # type: ignore[no-any-return]


class MomentSum:
    """A moment summed over batches, in place: of a symmetric matrix one half, and the other when it is read."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._whole = True

    def add(self, value: Outer, group: int = 0) -> None:
        """To the one group that all batches are in."""
        self._total, self._whole = value.added_to(self._total), False

    def total(self, without: int | None = None) -> Tensor | None:
        """The sum over all batches: gradients without a group of batches are measured by it too."""
        if self._total is not None and not self._whole:
            self._total, self._whole = mirror_moment(self._total), True
        return self._total

    @property
    def groups(self) -> list[Tensor | None]:
        return [self.total()]


# ---- What was caught in a measurement: sums of each site and of each existing weight, and the merits that follow from
# them.


class Catches:
    """What is summed over batches for one thing that has a merit, and the merit that follows from it."""

    def __init__(self, groups: int) -> None:
        self.sums: dict[str, Sum | MomentSum] = {}
        self.shape: tuple[int, ...] = ()  # of the activation, which the geometry of a convolution needs
        self.sketcher: Sketcher | None = None  # of gradients that are too large to be summed
        self.sketched: set[str] = set()  # sums that are sketches
        self._groups = groups
        self._metrics: list[Metric] = []

    def forget(self) -> None:
        """Begin once more."""
        self.sums = {}

    def sketch_by(self, sketcher: Sketcher | None) -> None:
        """Sum sketches where gradients are large; None: gradients themselves."""
        self.sketcher = sketcher

    def add(self, values: Mapping[str, Tensor | Outer], group: int) -> None:
        """One pass."""
        for name, value in values.items():
            if self.sketcher is not None and name.startswith("gradient") and self.sketcher.takes(value):
                value = self.sketcher.sketch(_plain(value))
                self.sketched.add(name)
            held: Any = self.sums.get(name)
            if held is None:
                held = MomentSum() if isinstance(value, Outer) else Sum(self._groups_of(name))
                self.sums[name] = held
            held.add(value, group)

    def _groups_of(self, name: str) -> int:
        # Gradients without one group of batches are measured by the moments of all.
        return 1 if is_moment(name) else self._groups

    def totals(self, without: int | None = None) -> dict[str, Tensor]:
        """The sums over all batches, or over all but one group."""
        totals = {name: each.total(without) for name, each in self.sums.items()}
        return {name: total for name, total in totals.items() if total is not None}

    def parts(self, without: int | None = None) -> Iterable[tuple[Tensor, Geometry]]:
        """The summed gradients of all measured weights, and how each acts."""
        raise NotImplementedError

    def maps(self, without: int | None = None) -> list[Factored]:
        """The same for the natural merit."""
        return factored_maps(self.totals(without))

    def merit(self, norm: str, samples: float, without: int | None = None, whole: float | None = None) -> float:
        """The squared norm of the mean gradient; ``whole``: the number of samples with the group that is left out."""
        if norm == NATURAL:
            return natural_merit(self.maps(without), samples / (whole or samples), self._metrics)
        parts = ((part, Geometry() if norm == SKETCHABLE else geometry) for part, geometry in self.parts(without))
        return sum(squared_norm(part, norm, geometry) for part, geometry in parts) / samples**2

    @property
    def spread(self) -> float:
        """How far the merit may be off because it comes from sketches, as a share of it: one standard deviation."""
        if self.sketcher is None or not self.sketched:
            return 0.0
        totals = self.totals()
        norms = {name: total for name, total in totals.items() if name in self.sketched or name.startswith("gradient")}
        known = {name: float(total.square().sum()) for name, total in norms.items()}
        off = [known[name] * self.sketcher.spread(totals[name]) for name in self.sketched if name in known]
        return math.hypot(*off) / max(sum(known.values()), math.ulp(0.0))


class SiteCatch(Catches):
    """What was caught at one site: sums, as its move wants them."""

    def __init__(
        self, site: Site, groups: int, model: nn.Module, natural: bool = False, gauge: Gauge | None = None
    ) -> None:
        super().__init__(groups)
        self.site = site
        self.gauge = site.move.gauge(site, model) if gauge is None else gauge
        if natural and not self.gauge.factors:
            raise MeasurementError(
                f"norm='natural' is not known for '{site}': its gradient has no moments to compare with. Use another norm, for example "
                "norm='frobenius'."
            )
        self.gauge.natural = natural
        self.shape = self.gauge.shape

    def sketch_by(self, sketcher: Sketcher | None) -> None:
        super().sketch_by(sketcher)
        if sketcher is not None and sketcher.can_mix(self.gauge.columns):
            self.gauge.mix = sketcher.mix
            self.sketched.add(MIXED)

    def _groups_of(self, name: str) -> int:
        # What mixtures stand for has no groups: which units are taken is chosen once, by all batches.
        return 1 if self.gauge.mix is not None and name != MIXED else super()._groups_of(name)

    def add(self, values: Mapping[str, Tensor | Outer], group: int) -> None:
        super().add(values, group)
        self.shape = self.gauge.shape

    @property
    def dead(self) -> float | None:
        """The share of units that were zero on all the data."""
        totals = self.totals()
        return self.gauge.dead(totals) if totals else None

    def measured_site(self, site: Site) -> Site:
        """The site as it was measured."""
        return self.gauge.settled(site, self.totals())

    def parts(self, without: int | None = None) -> Iterable[tuple[Tensor, Geometry]]:
        totals = self.totals(without)
        return self.gauge.gradients(totals, self.shape) if totals else ()

    def maps(self, without: int | None = None) -> list[Factored]:
        return self.gauge.factored(self.totals(without))


class WeightCatch(Catches):
    """The gradient of one existing weight."""

    joined = False  # whether the sums are those of all processes already

    def __init__(self, name: str, parameter: nn.Parameter, owner: nn.Module, groups: int) -> None:
        super().__init__(groups)
        self.name = name
        self.parameter = parameter
        self.owner = owner
        self._use: Use | None = None  # where the weight was met last, for the natural merit

    @property
    def geometry(self) -> Geometry:
        if not isinstance(self.owner, CONVOLUTIONS) or not self.shape:
            return Geometry()
        return map_of(self.owner).geometry(self.shape)

    def see_input(self, module: nn.Module, args: Any) -> None:
        """Before a convolution runs: the shape of its map."""
        if args and isinstance(args[0], Tensor):
            axes = self.parameter.dim() - 2
            self.shape = tuple(args[0].shape[-axes:])  # from the end: a single sample may come without its batch

    def add_gradient(self, gradient: Tensor, group: int) -> None:
        """The gradient of one pass."""
        if self._use is None:
            self.add({"gradient": gradient}, group)
        else:
            self.add({"map0": self._use.matrix(gradient)}, group)

    def met(self, use: Use, cotangent: Tensor, samples: int, group: int) -> None:
        """An operation with the weight in a backward pass; its gradient will follow."""
        self._use = use
        self.add(use.sums(0, None, cotangent, samples), group)

    @property
    def factored(self) -> bool:
        """Whether it has a natural merit: an embedding, or a weight that its module uses in another way than as a map, has none."""
        return "map0" in self.sums

    def parts(self, without: int | None = None) -> Iterable[tuple[Tensor, Geometry]]:
        total = self.totals(without).get("gradient")
        return () if total is None else [(total, self.geometry)]

    def watch(self, take: Callable[[Tensor], bool], *, drop: bool) -> Any:
        """Hand on gradients as they arrive; ``drop``: nobody else wants those that were taken. Returns the handle that ends it."""

        def arrived(gradient: Tensor) -> Tensor | None:
            return nothing_like(gradient) if take(gradient) and drop else None

        return self.parameter.register_hook(arrived)


class ShardCatch(WeightCatch):
    """The same of a sharded weight: FSDP2 sums gradients over the processes, and each of them keeps its shard of the sum."""

    joined = True

    def __init__(self, name: str, parameter: nn.Parameter, owner: nn.Module, groups: int, divisor: float) -> None:
        super().__init__(name, parameter, owner, groups)
        self._divisor = divisor  # of the sum over the processes
        self._before: Tensor | None = None  # the shard as it was before this pass, which adds to it
        self._arrived: Tensor | None = None  # in this pass

    def watch(self, take: Callable[[Tensor], bool], *, drop: bool) -> Any:
        def arrived(parameter: Any) -> None:
            with torch.no_grad():
                gradient = parameter.grad.to_local() * self._divisor
                if self._before is not None:
                    gradient -= self._before * self._divisor
                if take(gradient) and drop:
                    parameter.grad = None

        return self.parameter.register_post_accumulate_grad_hook(arrived)

    def begin_pass(self) -> None:
        """A backward pass of the user's begins: what its gradient is now, this pass adds to."""
        self.end_pass()
        held: Any = self.parameter.grad
        self._before = None if held is None else held.to_local().clone()

    def end_pass(self) -> None:
        """What has arrived is final."""
        if self._arrived is not None:
            self.add({"gradient": self._arrived}, 0)
        self._arrived = self._before = None

    def forget(self) -> None:
        super().forget()
        self._arrived = None

    def replace_gradient(self, gradient: Tensor) -> None:
        """What this pass has given so far: where a module is used twice, more will come."""
        self._arrived = gradient

    def parts(self, without: int | None = None) -> Iterable[tuple[Tensor, Geometry]]:
        """The whole gradient, for which all processes are needed."""
        like: Any = self.parameter
        form = {"shape": like.shape, "stride": like.stride(), "run_check": False}
        for shard, geometry in super().parts(without):
            yield whole_tensor(like.data.from_local(shard, like.device_mesh, like.placements, **form)), geometry

    def merit(self, norm: str, samples: float, without: int | None = None, whole: float | None = None) -> float:
        """Of a sum of squares each process adds its part; for other norms the gradient is gathered."""
        shard = self.totals(without).get("gradient")
        if shard is None or norm not in SUMS_OF_SQUARES:
            return super().merit(norm, samples, without, whole)
        like: Any = self.parameter
        total = torch.tensor(squared_norm(shard, SKETCHABLE), dtype=torch.float64, device=shard.device)
        axis = next(axis for axis, placement in enumerate(like.placements) if placement.is_shard())
        dist.all_reduce(total, group=like.device_mesh.get_group(axis))
        return float(total) / samples**2 / (1 if norm == SKETCHABLE else like.numel())


def existing_weights(model: nn.Module, groups: int, divided: Mapping[int, float]) -> Iterator[WeightCatch]:
    """Weights that train: parameters with at least two dimensions; biases and scales are left out as in the merits.

    ``divided``: by the id of a sharded one, what the sum of its gradients over the processes is divided by.
    """
    seen: set[int] = set()  # a tied weight is one weight
    for path, module in own_modules(model):
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.requires_grad and parameter.ndim >= 2 and id(parameter) not in seen:
                seen.add(id(parameter))
                divisor = divided.get(id(parameter))
                own = name, parameter, module, groups
                yield WeightCatch(*own) if divisor is None else ShardCatch(*own, divisor)
