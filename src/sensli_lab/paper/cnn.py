"""The engine of the CIFAR-10 experiments: one network at a time, grown by the core's `Grower`.

`train_runs` reads from top to bottom. All randomness depends on (seed, run, purpose, epoch), so an interrupted run
needs no generator state to resume to the bit.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_max_pool2d, cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sensli import Rates
from sensli.checkpoint.states import load_optimizer, names_in
from sensli.growing.grower import Grower
from sensli.growing.triggers import At
from sensli.merits.catching import Catch
from sensli.merits.merits import Merits
from sensli.merits.norms import NORMS
from sensli.moves.finding import find_sites
from sensli.surgery.growth import replay
from sensli.surgery.history import Growth, History
from sensli_lab.errors import BadExperiment
from sensli_lab.paper import datasets
from sensli_lab.paper.engine import SHOWN, Counts, TrainingJob, TrainingOutcome, check_count, check_like, nans, resuming
from sensli_lab.paper.image_sets import FACTS, Facts
from sensli_lab.paper.machine import Machine, full_precision, generator, has_bf16, run_seed
from sensli_lab.paper.reading import hint_at_known, unknown_name
from sensli_lab.paper.settings import DataSettings, Network, Settings

# ---- The paper's CNN as an ordinary module, and its counts.
#
# A stage is one or more 3 x 3 convolutions with ReLU, then 2 x 2 max-pooling. A place is after a convolution and its
# ReLU, so a stage of r convolutions has r places, and a layer inserted there makes it r + 1; which of them makes no
# difference to the architecture.


def repeats(network: Network) -> list[int]:
    return list(network.repeats or (1,) * len(network.channels))


def stages_after(network: Network, places: Sequence[int]) -> list[int]:
    """Convolutions per stage after insertions at these places, one after another; -1: nothing has grown."""
    stages = repeats(network)
    for place in places:
        if place < 0:
            continue
        end = 0
        for stage, count in enumerate(stages):
            end += count
            if place < end:
                stages[stage] += 1
                break
        else:
            raise ValueError(f"place {place} does not exist in a network with {stages} convolutions per stage")
    return stages


def build_cnn(network: Network, facts: Facts, seed: int, stages: Sequence[int] | None = None) -> nn.Sequential:
    """The network with PyTorch's default initialisation under `seed`; the global random state is left alone."""
    layers: list[nn.Module] = []
    colours, size = facts.colours, facts.size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for channels, count in zip(network.channels, stages or repeats(network), strict=True):
            for _ in range(count):
                layers += [nn.Conv2d(colours, channels, 3, padding=1), nn.ReLU()]
                colours = channels
            layers.append(nn.MaxPool2d(2))
            size //= 2
        layers.append(nn.Flatten())
        features = colours * size * size
        for width in network.widths:
            layers += [nn.Linear(features, width), nn.ReLU()]
            features = width
        layers.append(nn.Linear(features, facts.classes, bias=False))
    return nn.Sequential(*layers)


def _maps(network: Network, facts: Facts) -> list[tuple[int, int, int]]:
    """Of the layers of the baseline, which has one convolution per stage: inputs of a unit, units, positions. The last has no bias."""
    maps, colours, size = [], facts.colours, facts.size
    for channels in network.channels:
        maps.append((9 * colours, channels, size * size))
        colours, size = channels, size // 2
    widths = (colours * size * size, *network.widths, facts.classes)
    return [*maps, *((inputs, units, 1) for inputs, units in pairwise(widths))]


def count_cnn_parameters(network: Network, facts: Facts, stages: Sequence[int]) -> int:
    maps = _maps(network, facts)
    added = zip(stages, network.channels, strict=True)
    baseline = sum((inputs + 1) * units for inputs, units, _ in maps) - facts.classes
    return baseline + sum((count - 1) * (9 * channels + 1) * channels for count, channels in added)


def layer_flops(network: Network, facts: Facts) -> list[int]:
    """FLOPs of one inserted convolution in each stage: two per multiply-add, nothing else, as the paper counts it."""
    return [2 * 9 * channels**2 * (facts.size // 2**stage) ** 2 for stage, channels in enumerate(network.channels)]


def cnn_flops(network: Network, facts: Facts, stages: Sequence[int]) -> int:
    """FLOPs of one forward pass of one image, by the paper's conventions.

    The layers of the baseline count two per multiply-add and one per element for the bias, the ReLU and the input of the pooling (hidden
    linear layers: bias and ReLU); convolutions beyond one per stage count their multiply-adds alone.
    """
    maps = _maps(network, facts)
    products = sum(2 * inputs * units * positions for inputs, units, positions in maps)
    convolutions = len(network.channels)
    elements = [units * positions for _, units, positions in maps[:-1]]
    others = 3 * sum(elements[:convolutions]) + 2 * sum(elements[convolutions:])
    added = zip(stages, layer_flops(network, facts), strict=True)
    return products + others + sum((count - 1) * flops for count, flops in added)


def extended_flops(network: Network, facts: Facts, stages: Sequence[int]) -> int:
    """The same with one more layer at every place: what the paper counts for a measurement (times three)."""
    return cnn_flops(network, facts, [2 * count for count in stages])


def look_flops(network: Network, facts: Facts, stages: Sequence[int]) -> int:
    """What a measurement of one image computes here: three passes of the network as it is, and a weight gradient at every place."""
    places = zip(stages, layer_flops(network, facts), strict=True)
    return 3 * cnn_flops(network, facts, stages) + sum(count * flops for count, flops in places)


class Logbook:
    """The records of one run, all of them tensors."""

    def __init__(self, settings: Settings, steps: int) -> None:
        epochs, looks = settings.epochs, len(settings.insert_at)
        convolutions = sum(repeats(settings.network))
        weights = convolutions + len(settings.network.widths) + 1
        places = convolutions + max(looks - 1, 0)
        exact = partial(nans, dtype=torch.float64)
        sums = partial(torch.zeros, dtype=torch.float64, device="cpu")
        self.settings, self.steps = settings, steps
        self.records: dict[str, Tensor] = {
            "train_loss": exact(epochs + 1),  # mean over the steps of the epoch
            "test_loss": exact(epochs + 1),
            "test_error": exact(epochs + 1),
            "rate": exact(epochs),
            "step_loss": nans(epochs * steps),
            "seconds": sums(epochs + 1),  # training and looking, not the evaluation
            "flops": sums(epochs + 1),  # per training image, by the paper's rule
        }
        grows = looks > 0 and not settings.from_start
        if grows:
            self.records |= {
                "place": torch.full((looks,), -1, device="cpu"),
                "merits": exact(looks, places),
                "ratios": exact(looks, places),
                "dead": torch.zeros(looks, dtype=torch.long, device="cpu"),
                "look_seconds": sums(looks),
                "look_share": sums(looks),  # of the training images
            }
        if settings.record_norms and grows:
            self.records["norms"] = exact(looks, places, len(NORMS))
        if settings.record_gradients:
            self.records["gradient_norm"] = nans(epochs, weights + (looks if grows else 0))
            if grows:
                side = 3 * min(settings.network.channels)
                self.records["new_gradient"] = nans(looks, SHOWN, 1, side, side)
        self.since = SHOWN  # iterations since the last insertion, counted up to SHOWN
        self._norms: list[Tensor] = []

    def step(self, model: nn.Module, last: Growth | None) -> None:
        """Between the backward pass and the optimizer's step: the gradients, where they are wanted."""
        if not self.settings.record_gradients:
            return
        norms = [p.grad.norm() for p in model.parameters() if p.ndim > 1 and p.grad is not None]
        self._norms.append(torch.stack(norms))
        if self.since < SHOWN and last is not None:
            kernel = model.get_parameter(last.parameters[0]).grad
            assert kernel is not None
            look = self.settings.insert_at.index(last.details["epoch"])
            self.records["new_gradient"][look, self.since, 0] = flatten_kernel(
                kernel, self.records["new_gradient"].shape[-1]
            )
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
                if merit.ratio is not None:
                    self.records["ratios"][look, place] = merit.ratio
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

    def outcome(self) -> TrainingOutcome:
        iteration = torch.arange(self.settings.epochs + 1, device="cpu") * self.steps
        runs = {name: value.unsqueeze(0) for name, value in self.records.items()}
        return TrainingOutcome(runs, {"iteration": iteration})

    def state(self) -> dict[str, Any]:
        return {"records": self.records, "since": self.since}

    def restore(self, state: dict[str, Any]) -> None:
        since = check_count(state["since"], SHOWN)
        check_like(state["records"], self.records)
        self.records, self.since = state["records"], since


def flatten_kernel(kernel: Tensor, side: int) -> Tensor:
    """A kernel [out, in, 3, 3] as one picture, [3 out, 3 in], its largest entries kept where it has more than `side` rows.

    Kernels of different stages then have pictures of one size; a kernel of the smallest stage is shown entry by entry.
    """
    picture = kernel.detach().permute(0, 2, 1, 3).reshape(1, kernel.shape[0] * 3, kernel.shape[1] * 3).float().cpu()
    _, index = adaptive_max_pool2d(picture.abs(), side, return_indices=True)
    return picture.flatten()[index[0]]


EVALUATION_BATCH = 500


class CnnTraining:
    """One run of an arm on one device."""

    def __init__(self, job: TrainingJob, device: torch.device) -> None:
        self.job, self.settings, self.device = job, job.settings, device
        self.facts = FACTS[job.settings.data.name]
        self.compiled = job.machine.compile
        self._prepare(self._build())
        self.fresh()

    def _build(self) -> nn.Sequential:
        seed = run_seed(self.job.seed, self.job.runs[0], "weights")
        model = build_cnn(self.settings.network, self.facts, seed, self._stages([]))
        return model.to(self.device, float_type(self.settings))

    def _prepare(self, model: nn.Sequential) -> None:
        """The layout of the convolutions, also of a new one, and the compiled form of the model as it is now."""
        self.model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.called: Any = torch.compile(self.model) if self.compiled else self.model

    def fresh(self) -> None:
        """Optimizer, schedule and grower for the model as it is; the grower continues to count where it was."""
        settings, chosen = self.settings, self.settings.optimizer
        kind = torch.optim.Adam if chosen.name == "adam" else partial(torch.optim.SGD, momentum=chosen.momentum)
        self.optimizer: torch.optim.Optimizer = kind(
            self.model.parameters(), lr=chosen.lr, weight_decay=chosen.weight_decay
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
                self.model, self.optimizer, preset="paper", example=self.example, trigger=At(*settings.insert_at), tau=settings.tau,
                norm="operator", select=settings.select, form="relu", where="conv", confidence=settings.confidence,
                tolerance=settings.tolerance,
                rates=Rates(lr_factor=settings.lr_scale), scheduler=self.schedule,
                seed=run_seed(self.job.seed, self.job.runs[0], "place"), max_factor=None, floor=0.0,
            )  # fmt: skip
            if before is not None:
                self.grower.load_state_dict(before.state_dict())

    @property
    def last(self) -> Growth | None:
        """The last growth, if there was one."""
        return self.grower.history[-1] if self.grower is not None and len(self.grower.history) else None

    def flops(self, places: list[int]) -> int:
        return cnn_flops(self.settings.network, self.facts, self._stages(places))

    def _stages(self, places: list[int]) -> list[int]:
        """Convolutions per stage after insertions at these places, or those of the arm that grew."""
        if self.settings.from_start:
            assert self.job.grown is not None, "the runner hands over the places of the arm that grew"
            places = self.job.grown["place"].tolist()
        return stages_after(self.settings.network, places)

    def precision(self) -> Any:
        if self.settings.dtype == "bfloat16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def evaluate(self, wanted: datasets.Images) -> tuple[float, float]:
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

    def look(self, log: Logbook, batches: datasets.Batches, epochs: int) -> None:
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
        flops = 3 * extended_flops(self.settings.network, self.facts, stages) * share
        log.look(epochs, merits, growth, seconds, flops, share)
        if growth is not None and self.settings.fresh_optimizer:
            self.fresh()

    def state(self) -> dict[str, Any]:
        """Optimizer state by name: by position it would come back to the wrong tensors of a grown network."""
        return {
            "model": self.model.state_dict(),
            "optimizer": {"names": names_in(self.optimizer, self.model), "state": self.optimizer.state_dict()},
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


def five_norms(model: nn.Module, example: Tensor, batches: datasets.Batches) -> Tensor:
    """The squared norms 1 to 5 of the paper at every place, [places, norms], over all batches in one pass."""
    catch = Catch(model, find_sites(model, example, form="relu", where="conv"), weights=False)
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


AT_ONCE: int | None = 1
# Images, where a look may stop early: small enough to stop early, large enough to cost more than the norms.
LOOK_BATCH = 64
OPTIMIZERS = ("sgd", "adam")
FLOPS_PER_SECOND = 9e10  # of a training step on two cores of a small machine


def check_settings(settings: Settings) -> None:
    """Refuse what cannot be trained, before anything is computed."""
    data, network, optimizer = settings.data, settings.network, settings.optimizer
    if data.name not in FACTS:
        raise BadExperiment(
            f"data, name: the engine 'cnn' trains on images, got {data.name!r}. {hint_at_known(data.name, FACTS)}"
        )
    if network.kind != "cnn":
        raise BadExperiment(f"network, kind must be 'cnn' for the engine 'cnn', got {network.kind!r}.")
    facts = FACTS[data.name]
    if data.train + data.validation > facts.train or data.test > facts.test:
        raise BadExperiment(
            f"data: {data.name} has {facts.train:,} training and {facts.test:,} test images, fewer than requested: train "
            f"{data.train:,} + validation {data.validation:,}, test {data.test:,}."
        )
    if facts.size >> len(network.channels) == 0:
        raise BadExperiment(
            f"channels: {len(network.channels)} poolings leave nothing of a {facts.size} x {facts.size} image."
        )
    if optimizer.name not in OPTIMIZERS:
        raise BadExperiment(f"optimizer, name: {unknown_name('optimizer', optimizer.name, OPTIMIZERS)}")
    if optimizer.name == "adam" and optimizer.momentum:
        raise BadExperiment(f"optimizer, momentum must be 0 for 'adam', which has its own, got {optimizer.momentum}.")
    for name in ("wake", "recycle_at"):
        if getattr(settings, name):
            raise BadExperiment(f"{name} is a setting of the engine 'stacked', not of 'cnn'.")


def check_machine(settings: Settings, machine: Machine) -> None:
    """Find out what is missing (a device, the images) before the first hour of work."""
    device = machine.chosen()
    if settings.dtype == "bfloat16" and not has_bf16(device.type):
        raise BadExperiment(
            f"--bf16: a training step in bfloat16 does not work on this {device.type}. Leave the option out."
        )
    cached_images(settings.data, machine.data, device, float_type(settings))


def count_arm(settings: Settings, accepted: tuple[int, ...] | None = None) -> Counts:
    """Parameters and FLOPs if the looks at these epochs insert a layer in the first stage (default: all looks)."""
    facts, network = FACTS[settings.data.name], settings.network
    stages = repeats(network)
    times = settings.insert_at if accepted is None else accepted
    if settings.from_start:
        stages[0] += len(times)
        forward = cnn_flops(network, facts, stages)
        return Counts((count_cnn_parameters(network, facts, stages),), 3 * settings.epochs * forward, 0)
    sizes, training, measuring = [count_cnn_parameters(network, facts, stages)], 0, 0
    for start, end in zip((0, *settings.insert_at), (*settings.insert_at, settings.epochs), strict=True):
        if start in times:
            stages[0] += 1
            sizes.append(count_cnn_parameters(network, facts, stages))
        training += 3 * (end - start) * cnn_flops(network, facts, stages)
        if end < settings.epochs:
            measuring += 3 * extended_flops(network, facts, stages)
    return Counts(tuple(sizes), training + measuring, measuring)


def estimate_seconds(settings: Settings, runs: int) -> float:
    """Seconds on two cores, evaluation included."""
    data, epochs = settings.data, settings.epochs
    evaluated = (data.validation + (data.test or FACTS[data.name].test)) * epochs / 3
    share = 1 + evaluated / (data.train * epochs)
    return runs * count_arm(settings).flops * data.train * share / FLOPS_PER_SECOND


@lru_cache(maxsize=1)  # all arms and runs of an experiment train on the same images
def cached_images(data: DataSettings, folder: Path | None, device: torch.device, dtype: torch.dtype) -> datasets.Split:
    return datasets.load_split(data, folder, device, dtype)


@full_precision()
def train_runs(job: TrainingJob) -> TrainingOutcome:
    """Train one run from the start, or from the state that the job carries."""
    settings, run = job.settings, job.runs[0]
    device = job.machine.chosen()
    data = cached_images(settings.data, job.machine.data, device, float_type(settings))
    steps = -(-len(data.train) // settings.batch)
    one = CnnTraining(job, device)
    log = Logbook(settings, steps)
    done = 0
    if job.state is not None:
        with resuming():
            done = check_count(job.state["epoch"], settings.epochs)
            one.restore(job.state)
            log.restore(job.state["log"])
    else:
        log.test(0, *one.evaluate(data.test))
    saved = time.monotonic()

    def order_of(purpose: str, epoch: int) -> Tensor:
        source = generator(job.seed, run, f"{purpose} {epoch}")
        return torch.randperm(len(data.train), generator=source, device="cpu")

    for epoch in range(done, settings.epochs):
        began = time.perf_counter()
        source = generator(job.seed, run, f"augment {epoch}")
        rate, losses = one.optimizer.param_groups[0]["lr"], []
        one.model.train()
        for step, index in enumerate(order_of("order", epoch).split(settings.batch)):
            x, y = data.train.augmented(index, source)
            one.optimizer.zero_grad()
            with one.precision():
                loss = cross_entropy(one.called(x), y)
            torch.autograd.backward(loss)
            log.step(one.model, one.last)
            one.optimizer.step()
            losses.append(loss.detach())
            job.tell((epoch + (step + 1) / steps) / settings.epochs)
        wait_for(device)
        log.epoch(epoch, losses, rate, time.perf_counter() - began, 3 * one.flops(log.places))

        test_loss, test_error = one.evaluate(data.test)
        log.test(epoch + 1, test_loss, test_error)
        if one.schedule is not None and settings.schedule is not None:
            followed = test_error if settings.schedule.metric == "test" else one.evaluate(data.validation)[1]
            one.schedule.step(followed)
        if one.grower is not None:
            size = settings.batch if settings.confidence is None else LOOK_BATCH
            one.look(log, data.train.batches(size, order_of("look", epoch)), epoch + 1)

        finished = epoch + 1 == settings.epochs
        if not finished and time.monotonic() - saved >= job.save_every:
            job.save({"epoch": epoch + 1, "log": log.state(), **one.state()})
            saved = time.monotonic()
    return log.outcome()
