"""The records of one training of a CNN: curves by epoch and by step, and everything seen at a look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_max_pool2d

from sensli.merits.merits import Merits
from sensli.merits.norms import NORMS
from sensli.paper.engines import convnets
from sensli.paper.engines.engine import SHOWN, Outcome
from sensli.paper.engines.restoring import check_alike, check_count
from sensli.paper.plans.settings import Settings
from sensli.surgery.history.growth import Growth

NAN = float("nan")


class Logbook:
    """The records of one run. All are tensors of a shape known in advance, so a resumed run continues with the same ones."""

    def __init__(self, settings: Settings, steps: int) -> None:
        epochs, looks = settings.epochs, len(settings.insert_at)
        weights = sum(convnets.repeats(settings.network)) + len(settings.network.widths) + 1
        places = sum(convnets.repeats(settings.network)) + max(looks - 1, 0)
        double = torch.float64
        self.settings, self.steps = settings, steps
        self.records: dict[str, Tensor] = {
            "train_loss": torch.full(
                (epochs + 1,), NAN, dtype=double, device="cpu"
            ),  # mean over the steps of the epoch
            "test_loss": torch.full((epochs + 1,), NAN, dtype=double, device="cpu"),
            "test_error": torch.full((epochs + 1,), NAN, dtype=double, device="cpu"),
            "rate": torch.full((epochs,), NAN, dtype=double, device="cpu"),
            "step_loss": torch.full((epochs * steps,), NAN, device="cpu"),
            "seconds": torch.zeros(epochs + 1, dtype=double, device="cpu"),  # training and looking, not the evaluation
            "flops": torch.zeros(epochs + 1, dtype=double, device="cpu"),  # per training image, by the paper's rule
        }
        grows = looks > 0 and not settings.from_start
        if grows:
            self.records |= {
                "place": torch.full((looks,), -1, device="cpu"),
                "merits": torch.full((looks, places), NAN, dtype=double, device="cpu"),
                "ratios": torch.full((looks, places), NAN, dtype=double, device="cpu"),
                "dead": torch.zeros(looks, dtype=torch.long, device="cpu"),
                "look_seconds": torch.zeros(looks, dtype=double, device="cpu"),
                "look_share": torch.zeros(looks, dtype=double, device="cpu"),  # of the training images
            }
        if settings.record_norms and grows:
            self.records["norms"] = torch.full((looks, places, len(NORMS)), NAN, dtype=double, device="cpu")
        if settings.record_gradients:
            self.records["gradient_norm"] = torch.full((epochs, weights + (looks if grows else 0)), NAN, device="cpu")
            if grows:
                side = 3 * min(settings.network.channels)
                self.records["new_gradient"] = torch.full((looks, SHOWN, 1, side, side), NAN, device="cpu")
        self.since = SHOWN  # iterations since the last insertion, counted up to SHOWN
        self._norms: list[Tensor] = []

    def step(self, model: nn.Module, last: Growth | None) -> None:
        """Between the backward pass and the optimizer's step: the gradients, where they are wanted."""
        if not self.settings.record_gradients:
            return
        self._norms.append(
            torch.stack([p.grad.norm() for p in model.parameters() if p.ndim > 1 and p.grad is not None])
        )
        if self.since < SHOWN and last is not None:
            kernel = model.get_parameter(last.parameters[0]).grad
            assert kernel is not None
            look = self.settings.insert_at.index(last.details["epoch"])
            self.records["new_gradient"][look, self.since, 0] = flat(kernel, self.records["new_gradient"].shape[-1])
            self.since += 1

    def epoch(self, epoch: int, losses: Sequence[Tensor], rate: float, seconds: float, flops: int) -> None:
        """After the steps of an epoch (counted from 0)."""
        values = torch.stack(list(losses)).float().cpu()
        self.records["step_loss"][epoch * self.steps : (epoch + 1) * self.steps] = values
        self.records["train_loss"][epoch + 1] = values.double().mean()
        if epoch == 0:
            self.records["train_loss"][0] = values[0]
        self.records["rate"][epoch] = rate
        self.records["seconds"][epoch + 1] = self.records["seconds"][epoch] + seconds
        self.records["flops"][epoch + 1] = self.records["flops"][epoch] + flops
        if self._norms:
            mean = torch.stack(self._norms).mean(0).cpu()
            self.records["gradient_norm"][epoch, : len(mean)] = mean
            self._norms.clear()

    def test(self, epochs: int, loss: float, error: float) -> None:
        self.records["test_loss"][epochs] = loss
        self.records["test_error"][epochs] = error

    def look(
        self, epochs: int, merits: Merits | None, growth: Growth | None, seconds: float, flops: float, share: float
    ) -> None:
        """After a look at the end of epoch number `epochs`, whether it inserted a layer or not."""
        look = self.settings.insert_at.index(epochs)
        self.records["look_seconds"][look] = seconds
        self.records["look_share"][look] = share
        self.records["seconds"][epochs] += seconds
        self.records["flops"][epochs] += flops
        if merits is not None:
            for place, merit in enumerate(merits):
                self.records["merits"][look, place] = merit.value
                self.records["ratios"][look, place] = NAN if merit.ratio is None else merit.ratio
                if growth is not None and str(merit.site) == str(growth.site):  # a site prints as one unique line
                    self.records["place"][look] = place
                    self.records["dead"][look] = round((merit.dead or 0.0) * merit.site.shape[0])
        if growth is not None:
            self.since = 0

    def norms(self, epochs: int, values: Tensor) -> None:
        self.records["norms"][self.settings.insert_at.index(epochs), : len(values)] = values

    @property
    def places(self) -> list[int]:
        return [int(place) for place in self.records.get("place", torch.empty(0, device="cpu"))]

    def outcome(self) -> Outcome:
        iteration = torch.arange(self.settings.epochs + 1, device="cpu") * self.steps
        return Outcome({name: value.unsqueeze(0) for name, value in self.records.items()}, {"iteration": iteration})

    def state(self) -> dict[str, Any]:
        return {"records": self.records, "since": self.since}

    def restore(self, state: dict[str, Any]) -> None:
        since = check_count(state["since"], SHOWN)
        check_alike(state["records"], self.records)
        self.records, self.since = state["records"], since


def flat(kernel: Tensor, side: int) -> Tensor:
    """A kernel [out, in, 3, 3] as one picture, [3 out, 3 in], its largest entries kept where it has more than `side` rows.

    Kernels of different stages then have pictures of one size; a kernel of the smallest stage is shown entry by entry.
    """
    picture = kernel.detach().permute(0, 2, 1, 3).reshape(1, kernel.shape[0] * 3, kernel.shape[1] * 3).float().cpu()
    _, index = adaptive_max_pool2d(picture.abs(), side, return_indices=True)
    return picture.flatten()[index[0]]
