"""Units that are measured from the first pass on, although their rows are made for what that pass shows.

`measure` has a few samples pass beforehand. In somebody's own training step there is nothing beforehand: so what comes back to the
readers is kept, the candidates are made after the backward pass, and then they run beside the pass that is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

from sensli.moves.factors import Factored, Outer
from sensli.moves.sites import Ahead, Caught, Gauge, Site
from sensli.moves.width.gauge import ReaderGauge, shared_replica
from sensli.moves.width.replica import ReaderCall, Replica
from sensli.moves.width.width import Width


def late_gauges(sites: Sequence[Site], model: nn.Module) -> list[Gauge]:
    """What measures the sites in passes that nothing can come before."""
    gauges = [site.move.gauge(site, model) for site in sites]
    if all(gauge.ahead() is None for gauge in gauges):
        return gauges
    return [
        LateGauge(site, model, gauge) if isinstance(gauge, ReaderGauge) else gauge
        for site, gauge in zip(sites, gauges, strict=True)
    ]


def settle(
    gauges: Sequence[LateGauge], found: Sequence[Mapping[str, Tensor]]
) -> list[list[Mapping[str, Tensor | Outer]]]:
    """Take what was found as the candidates of each. Returns what the passes so far add to the sums of each."""
    for gauge, sums in zip(gauges, found, strict=True):
        gauge.settle(sums)
    replica = gauges[0].replica
    assert replica is not None
    replica.catch_up()
    return [gauge.take_late_sums() for gauge in gauges]


class LateGauge(Gauge):
    """The gauge of a width whose candidates are known only after the first backward pass."""

    raw: ClassVar[bool] = True
    factors: ClassVar[bool] = True

    def __init__(self, site: Site, model: nn.Module, gauge: ReaderGauge) -> None:
        super().__init__(points=gauge.points)
        assert isinstance(site.move, Width)
        self._site, self._model, self._unseen = site, model, gauge
        self._width = site.move.in_model(model)
        self._readers = [axis.module.path for axis in self._width.filled_with("column")]
        self._ahead: Ahead | None = None  # as long as candidates are not known
        self._gauge: ReaderGauge | None = None  # from then on
        self._kept: list[tuple[int, ReaderCall, Tensor]] = []
        self.replica: Replica | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the candidates are known."""
        return self._gauge is not None

    @property
    def has_seen(self) -> bool:
        """Whether a gradient has come back."""
        return bool(self._kept)

    def found(self) -> dict[str, Tensor]:
        """What the candidates are to be made of."""
        return {} if self._ahead is None else self._ahead.found()

    def settle(self, found: Mapping[str, Tensor]) -> None:
        """From now on it is the gauge of these candidates."""
        gauge: Any = self._unseen
        if self._ahead is not None:
            site = self._ahead.settled(self._site, found)
            gauge = site.move.gauge(site, self._model)
        gauge.natural = self.natural
        assert isinstance(gauge, ReaderGauge) and self.replica is not None
        gauge.join(self.replica)
        self._gauge, self._ahead = gauge, None

    def take_late_sums(self) -> list[Mapping[str, Tensor | Outer]]:
        """What came back before the candidates were known, with what they would have given to read."""
        assert self._gauge is not None
        kept, self._kept = self._kept, []
        return [self._gauge.sums_of_call(index, call, cotangent) for index, call, cotangent in kept]

    def hooks(
        self, add: Callable[[Mapping[str, Tensor | Outer]], None], unscaled: Callable[[Tensor], Tensor]
    ) -> list[Any]:
        if self._gauge is not None:
            return []
        self._ahead, self._kept = self._unseen.ahead(), []
        return [] if self._ahead is None else self._ahead.hooks(lambda sums: None, unscaled)

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        if self._gauge is not None:
            with self._gauge.inside(model):
                yield
            return
        with shared_replica(model) as self.replica:
            self.replica.wait_for(self._width)
            try:
                yield
            finally:
                self.replica, self._kept = None, []

    def catching(self, index: int, x: Tensor) -> Caught:
        if self._gauge is not None:
            return self._gauge.catching(index, x)
        assert self.replica is not None
        call = self.replica.call(self._readers[index], x)

        def keep(
            x: Tensor, cotangent: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Mapping[str, Tensor | Outer]:
            if self._gauge is not None:
                return self._gauge.sums_of_call(index, call, cotangent)
            if self._ahead is not None:
                self._ahead.caught(index, x, cotangent, args, kwargs)
            self._kept.append((index, call, cotangent))
            return {}

        return keep

    def gradients(self, sums: Mapping[str, Tensor], shape: tuple[int, ...]) -> Any:
        return () if self._gauge is None else self._gauge.gradients(sums, shape)

    def factored(self, sums: Mapping[str, Tensor]) -> list[Factored]:
        return [] if self._gauge is None else self._gauge.factored(sums)

    def settled(self, site: Site, sums: Mapping[str, Tensor]) -> Site:
        return site if self._gauge is None else self._gauge.settled(site, sums)
