"""What changes while a CNN trains: the model, its optimizer, its schedule, and what makes it grow; saved and restored."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sensli.growing.by_name import load_optimizer, names_in
from sensli.growing.grower import Grower
from sensli.growing.triggers import At
from sensli.merits.norms import NORMS
from sensli.merits.sensitivity import Catch
from sensli.moves.finding import find_sites
from sensli.paper.data import FACTS, pipeline
from sensli.paper.engines import convnets
from sensli.paper.engines.engine import Job
from sensli.paper.engines.logbook import Logbook
from sensli.paper.plans.seeds import run_seed
from sensli.paper.plans.settings import Settings
from sensli.surgery.history.growth import Growth
from sensli.surgery.history.history import History
from sensli.surgery.replaying import replay

EVALUATION_BATCH = 500


class Training:
    """One run of an arm on one device."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.settings, self.device = job, job.settings, device
        self.facts = FACTS[job.settings.data.name]
        self.compiled = job.machine.compile
        self._prepare(self._build())
        self.fresh()

    def _build(self) -> nn.Sequential:
        seed = run_seed(self.job.seed, self.job.runs[0], "weights")
        model = convnets.build(self.settings.network, self.facts, seed, self._stages([]))
        return model.to(self.device, float_type(self.settings))

    def _prepare(self, model: nn.Sequential) -> None:
        """The layout of the convolutions, also of a new one, and the compiled form of the model as it is now."""
        self.model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.called: Any = torch.compile(self.model) if self.compiled else self.model

    def fresh(self) -> None:
        """Optimizer, schedule and grower for the model as it is; the grower continues to count where it was."""
        settings, chosen = self.settings, self.settings.optimizer
        self.optimizer: torch.optim.Optimizer
        if chosen.name == "adam":
            self.optimizer = torch.optim.Adam(self.model.parameters(), chosen.lr, weight_decay=chosen.weight_decay)
        else:
            self.optimizer = torch.optim.SGD(
                self.model.parameters(), chosen.lr, chosen.momentum, weight_decay=chosen.weight_decay
            )
        self.schedule: ReduceLROnPlateau | None = None
        if settings.schedule is not None:
            patience, factor = settings.schedule.patience, settings.schedule.factor
            self.schedule = ReduceLROnPlateau(self.optimizer, patience=patience, factor=factor)
        before: Grower | None = getattr(self, "grower", None)
        self.grower: Grower | None = None
        if settings.insert_at and not settings.from_start:
            size, colours = self.facts.size, self.facts.colours
            self.example = torch.zeros(1, colours, size, size, device=self.device, dtype=float_type(settings))
            self.grower = Grower(
                self.model, self.optimizer, example=self.example, trigger=At(*settings.insert_at), tau=settings.tau,
                norm="operator", select=settings.select, layer="relu", where="conv", confidence=settings.confidence,
                tolerance=settings.tolerance,
                lr_scale=settings.lr_scale, scheduler=self.schedule,
                seed=run_seed(self.job.seed, self.job.runs[0], "place"), max_factor=None, floor=0.0,
            )  # fmt: skip
            if before is not None:
                self.grower.load_state_dict(before.state_dict())

    @property
    def last(self) -> Growth | None:
        """The last growth, if there was one."""
        return self.grower.history[-1] if self.grower is not None and len(self.grower.history) else None

    def flops(self, places: list[int]) -> int:
        return convnets.forward_flops(self.settings.network, self.facts, self._stages(places))

    def _stages(self, places: list[int]) -> list[int]:
        """Convolutions per stage after insertions at these places, or those of the arm that grew."""
        if self.settings.from_start:
            assert self.job.grown is not None, "the runner hands over the places of the arm that grew"
            places = self.job.grown["place"].tolist()
        return convnets.grown(self.settings.network, places)

    def precision(self) -> Any:
        if self.settings.dtype == "bfloat16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def evaluate(self, wanted: pipeline.Images) -> tuple[float, float]:
        """Mean loss and error on images as they are."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device if self.device.type != "mps" else "cpu")
        wrong = torch.zeros_like(loss)
        self.model.eval()
        with torch.no_grad(), self.precision():
            for x, y in wanted.batches(EVALUATION_BATCH):
                output = self.model(x).float()
                loss += cross_entropy(output, y, reduction="sum").to(loss)
                wrong += (output.argmax(1) != y).sum().to(loss)
        return loss.item() / len(wanted), wrong.item() / len(wanted)

    def look(self, log: Logbook, batches: pipeline.Batches, epochs: int) -> None:
        """One call of the grower, once per epoch; most do nothing but count."""
        assert self.grower is not None
        if epochs not in self.settings.insert_at:
            self.grower.step(batches, cross_entropy)
            return
        places = log.places[: self.settings.insert_at.index(epochs)]
        stages = self._stages(places)
        if self.settings.record_norms:
            log.norms(epochs, five_norms(self.model, self.example, batches))
        began = time.perf_counter()
        self.grower.last_merits = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing to insert in a dead network: the records say so
            growth = self.grower.step(batches, cross_entropy)
        merits = self.grower.last_merits
        if growth is not None:
            self._prepare(self.model)
        wait_for(self.device)
        seconds = time.perf_counter() - began
        share = merits.batches / len(batches) if merits is not None else 1.0
        flops = 3 * convnets.extended_flops(self.settings.network, self.facts, stages) * share
        log.look(epochs, merits, growth, seconds, flops, share)
        if growth is not None and self.settings.fresh_optimizer:
            self.fresh()

    def state(self) -> dict[str, Any]:
        """Optimizer state by name: by position it would come back to the wrong tensors of a grown network."""
        return {
            "model": self.model.state_dict(),
            "optimizer": {
                "names": names_in(self.optimizer, self.model),
                "state": self.optimizer.state_dict(),
            },
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "grower": self.grower.state_dict() if self.grower is not None else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state["grower"] is not None:
            self._prepare(replay(self.model, History.from_dict(state["grower"]["history"])))  # type: ignore[arg-type]
            self.grower = None
            self.fresh()
            assert self.grower is not None
            self.grower.load_state_dict(state["grower"])
        self.model.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"], self.model, state["model"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])


def five_norms(model: nn.Module, example: Tensor, batches: pipeline.Batches) -> Tensor:
    """The squared norms 1 to 5 of the paper at every place, [places, norms], over all batches in one pass."""
    catch = Catch(model, find_sites(model, example, layer="relu", where="conv"), weights=False)
    parameters = list(model.parameters())
    samples = 0
    with catch.hooked(), torch.enable_grad():
        for x, y in batches:
            torch.autograd.grad(cross_entropy(model(x), y, reduction="sum"), parameters)
            samples += len(y)
            catch.forget_pass()
    return torch.tensor(
        [[site.merit(norm, samples) for norm in NORMS] for site in catch.sites], dtype=torch.float64, device="cpu"
    )


def float_type(settings: Settings) -> torch.dtype:
    return torch.float64 if settings.dtype == "float64" else torch.float32


def wait_for(device: torch.device) -> None:
    """A GPU works asynchronously; a time means something only when it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()
