"""Net2Net (Chen, Goodfellow, Shlens 2016), deeper: identity layers after ReLUs, with a batch norm where the network has them.

A new layer is relu(W x + b) with W = I (for a convolution the kernel that is one at its centre), b = 0; it fits only where the activation
is idempotent, that is after a ReLU. After a batch norm it is relu(norm(W x + b)), and the norm has to undo itself: its weight is the
standard deviation of what arrives there and its bias the mean, both of one pass over the batches, as in the released code; its running
statistics are those of the same pass. The function is kept to the bit where there is no norm. With one it is kept up to rounding in eval
mode, and in training mode only as far as a batch has the statistics of the pass, so the log says that it is not kept.

Where and when are left to the user: the paper deepens a trained network once, at all places that one likes (``count`` says at how
many, in turn), and trains on with a tenth of the learning rate (``lr_scale=0.1``). SensLI's own layers after a batch norm have the
residual form instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.growing.strategies.by_one import by_one
from sensli.growing.strategies.in_turn import InTurn
from sensli.merits.backward import LossFunction, split
from sensli.merits.measuring import EMPTY
from sensli.merits.merits import Merit, Merits
from sensli.modules.running import capable, device_of, run, to_device, untouched
from sensli.modules.wrappers import bare
from sensli.moves.layer.forms import Layer
from sensli.moves.sites import Site
from sensli.moves.taps import tap
from sensli.text.names import UNMEASURED


class Net2NetDeeper(InTurn):
    """Identity layers, one place after the other."""

    form: ClassVar[str] = "relu"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._keeps = True  # as of the last look

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        network = bare(model)
        normed = [site for site in sites if _norm_beside(network, site)]
        self._keeps = not normed
        if not normed:
            return super().score(model, sites, batches, loss_fn)
        return by_one(self._with_norms, self, model, sites, batches, loss_fn)

    def _with_norms(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        network = bare(model)
        normed = [site for site in sites if _norm_beside(network, site)]
        found, count = _statistics(network, normed, batches, loss_fn)
        merits = [Merit(found.get(site, site), 1.0) for site in sites]
        return Merits(merits, norm=UNMEASURED, batches=count)

    def keeps_function(self) -> bool:
        return self._keeps


def _norm_beside(network: nn.Module, site: Site) -> bool:
    """Whether what arrives at a site was normalised: the nearest module with parameters is a batch norm of its channels."""
    assert isinstance(site.move, Layer)
    near = next((module for _, module in site.point.around(network)), None)
    known = isinstance(near, nn.modules.batchnorm._BatchNorm) and near.num_features == site.move.width
    return known and (site.move.kind == "conv" or len(site.shape) == 1)


def _statistics(
    network: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
) -> tuple[dict[Site, Site], int]:
    """The sites with norms that undo themselves, by the mean and the variance of each channel over one pass; and the batches of it."""
    sums: dict[Site, list[Tensor]] = {}
    with ExitStack() as hooks, untouched(network), torch.inference_mode(False), torch.enable_grad():
        for site in sites:
            hooks.callback(tap(site.point, site.find(network)[1], _adding(site, sums)).remove)
        count = 0
        for index, batch in enumerate(batches):
            given, _ = split(batch, index, network if loss_fn is not None else None)
            run(network, to_device(given, device_of(network)))
            count += 1
    if not count:
        raise MeasurementError(EMPTY)
    found: dict[Site, Site] = {}
    for site, (number, total, squares) in sums.items():
        assert isinstance(site.move, Layer)
        mean = total / number
        variance = (squares / number - mean.square()).clamp_min(0.0)
        dims = max(1, len(site.move.kernel))
        found[site] = replace(site, move=replace(site.move, norm=dims, _undone=(mean.cpu(), variance.cpu())))
    return found, count


def _adding(site: Site, sums: dict[Site, list[Tensor]]) -> Any:
    assert isinstance(site.move, Layer)
    leading = site.move.leading

    def watch(value: Tensor, args: Any, kwargs: Any) -> Tensor:
        x = capable(value.detach()).double()
        x = (x.relu() if leading else x).transpose(0, 1).flatten(1)
        own = [torch.tensor(float(x.shape[1]), device="cpu").to(x), x.sum(1), x.square().sum(1)]
        sums[site] = own if site not in sums else [a + b for a, b in zip(sums[site], own, strict=True)]
        return value

    return watch
