"""The engine of the spiral experiments: all runs of an arm trained at once, each growing at its own place."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.nn.functional import one_hot

from sensli.merits.merits import SELECTIONS
from sensli.modules.running import fit_threads
from sensli_lab.errors import BadExperiment
from sensli_lab.paper.datasets import CLASSES, FEATURES, POINTS, split_spirals
from sensli_lab.paper.engine import SHOWN, Counts, TrainingJob, TrainingOutcome, check_count, check_like, nans, resuming
from sensli_lab.paper.machine import ORDER_BLOCK, Machine, generator, order_block, run_seed
from sensli_lab.paper.settings import Network, Settings

# ---- The small networks of the spiral experiments as ordinary modules, and their counts.
#
# These modules are where the initial weights of a stack come from, so a run starts exactly as plain PyTorch would.


class ResidualBlock(nn.Module):
    """`x + W2 tanh(W1 x + b)`, the residual layer of the paper's ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.activation = nn.Tanh()
        self.outer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.outer(self.activation(self.inner(x)))
        return y


def build_small_network(network: Network, seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The network with PyTorch's default initialisation under `seed`; the global random state is left alone."""
    width = network.widths[0]
    is_fnn = network.kind == "fnn"
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers["first"] = nn.Linear(FEATURES, width, bias=is_fnn or network.end_bias)
        if is_fnn:
            layers["relu0"] = nn.ReLU()
        elif network.first_activation:
            layers["tanh"] = nn.Tanh()
        for i in range(1, len(network.widths)):
            if is_fnn:
                layers[f"hidden{i}"] = nn.Linear(width, width)
                layers[f"relu{i}"] = nn.ReLU()
            else:
                layers[f"block{i}"] = ResidualBlock(width)
        layers["last"] = nn.Linear(width, CLASSES, bias=is_fnn or network.end_bias)
    return nn.Sequential(layers).to(dtype)


def count_parameters(network: Network, grown: int = 0) -> int:
    """How many parameters the network has after `grown` insertions."""
    width, inner = network.widths[0], len(network.widths) - 1 + grown
    if network.kind == "fnn":
        return (FEATURES + 1) * width + inner * (width + 1) * width + (width + 1) * CLASSES
    ends = FEATURES * width + width * CLASSES + (width + CLASSES) * network.end_bias
    return ends + inner * (2 * width + 1) * width


def network_flops(network: Network, grown: int = 0) -> int:
    """FLOPs of one forward pass of one sample: two per weight, biases and activations not counted."""
    width, inner = network.widths[0], len(network.widths) - 1 + grown
    per_layer = width * width * (1 if network.kind == "fnn" else 2)
    return 2 * (FEATURES * width + inner * per_layer + width * CLASSES)


def places(network: Network, grown: int = 0, *, printed: bool = False) -> int:
    """Where a layer can go: after each hidden layer, that is before and after every residual block.

    The paper's FLOP tables count one place fewer for the residual networks (one per block): `printed=True`.
    """
    count = len(network.widths) + grown
    return count - 1 if printed and network.kind == "resnet" else count


def training_flops(settings: Settings, *, printed: bool = False) -> tuple[int, int]:
    """FLOPs per training sample over all epochs, and the part spent on measuring.

    A training step costs three forward passes; a measurement three of the network with a layer at every place; looking for dead
    units one of the network.
    """
    network = settings.network
    ends = (*settings.insert_at, settings.epochs)
    starts = (0, *settings.insert_at)
    training = sum(
        3 * network_flops(network, grown) * (end - start)
        for grown, (start, end) in enumerate(zip(starts, ends, strict=True))
    )
    measuring = sum(
        3 * network_flops(network, grown + places(network, grown, printed=printed))
        for grown in range(len(settings.insert_at))
    ) + sum(network_flops(network, sum(at <= time for at in settings.insert_at)) for time in settings.recycle_at)
    return training + measuring, measuring


# ---- Many networks of one shape as one: every parameter has a leading axis of runs, every product is a `bmm`.
#
# Activations are [runs, features, samples]: with samples last, the products and the sums over samples run over
# contiguous memory, which is four to seven times faster here than samples first. The backward pass is written out,
# since for networks this small the bookkeeping of autograd costs more than the arithmetic.

_relu_backward = torch.ops.aten.threshold_backward
_tanh_backward = torch.ops.aten.tanh_backward


@dataclass
class Affine:
    """`s(W x + b)` with s the identity, ReLU or tanh; W [R, out, in], b [R, out, 1]."""

    weights: ClassVar[slice] = slice(1)  # which of the parameters
    weight: Tensor
    bias: Tensor | None
    activation: str = field(default="", kw_only=True)

    def parameters(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the backward pass needs of it."""
        y = torch.bmm(self.weight, x) if self.bias is None else torch.baddbmm(self.bias, self.weight, x)
        if self.activation == "relu":
            y.relu_()
        elif self.activation == "tanh":
            y.tanh_()
        return y, y

    def backward(self, x: Tensor, y: Tensor, g: Tensor, *, deeper: bool = True) -> tuple[list[Tensor], Tensor]:
        """Gradients in the order of `count_parameters`, and the cotangent of x (of no use where `deeper` is False)."""
        if self.activation == "relu":
            g = _relu_backward(g, y, 0)
        elif self.activation == "tanh":
            g = _tanh_backward(g, y)
        grads = [torch.bmm(g, x.transpose(1, 2))]
        if self.bias is not None:
            grads.append(g.sum(2, keepdim=True))
        return grads, torch.bmm(self.weight.transpose(1, 2), g) if deeper else g


@dataclass
class Residual:
    """`x + W2 tanh(W1 x + b)`."""

    weights: ClassVar[slice] = slice(None, None, 2)
    inner: Tensor
    bias: Tensor
    outer: Tensor

    def parameters(self) -> list[Tensor]:
        return [self.inner, self.bias, self.outer]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.baddbmm(self.bias, self.inner, x).tanh_()
        return torch.baddbmm(x, self.outer, hidden), hidden

    def backward(self, x: Tensor, hidden: Tensor, g: Tensor, *, deeper: bool = True) -> tuple[list[Tensor], Tensor]:
        d_outer = torch.bmm(g, hidden.transpose(1, 2))
        inside = _tanh_backward(torch.bmm(self.outer.transpose(1, 2), g), hidden)
        grads = [torch.bmm(inside, x.transpose(1, 2)), inside.sum(2, keepdim=True), d_outer]
        return grads, torch.baddbmm(g, self.inner.transpose(1, 2), inside) if deeper else g


Layer = Affine | Residual


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass: all that training and measuring read off it."""

    loss: Tensor  # [R]
    grads: list[list[Tensor]]  # per layer, in the order of its parameters
    activations: list[Tensor]  # input of each layer; [i + 1] is the output of layer i
    cotangents: list[Tensor]  # of the output of each layer but the last


@dataclass(frozen=True)
class Looks:
    """What a measurement found, all places of all runs."""

    merits: Tensor  # [R, places]: squared Frobenius norm of the virtual layer's weight gradient
    ratios: Tensor  # [R, places]: merit over the mean squared gradient norm of the existing weights
    dead: Tensor  # [R, places, width]: units that are zero on all data


class NetworkStack:
    """The networks of all runs: a first map, `inner` layers of one shape, a last map."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = list(layers)

    @classmethod
    def of(cls, models: Sequence[nn.Sequential]) -> NetworkStack:
        """Stack plain networks of one architecture; their parameters are copied."""
        layers: list[Layer] = []
        for modules in zip(*models, strict=True):
            module, (stacked, _) = modules[0], stack_module_state(list(modules))
            own = {name: (t if t.ndim == 3 else t.unsqueeze(2)).detach() for name, t in stacked.items()}
            if isinstance(module, nn.Linear):
                layers.append(Affine(own["weight"], own.get("bias")))
            elif isinstance(module, ResidualBlock):
                layers.append(Residual(own["inner.weight"], own["inner.bias"], own["outer.weight"]))
            else:
                affine = layers[-1]
                assert isinstance(affine, Affine) and isinstance(module, (nn.ReLU, nn.Tanh))
                affine.activation = "relu" if isinstance(module, nn.ReLU) else "tanh"
        return cls(layers)

    def parameters(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in layer.parameters()]

    def logits(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer.forward(x)
        return x

    def run(self, x: Tensor, targets: Tensor) -> Pass:
        """Mean cross-entropy and all gradients; x [R, features, N], targets one-hot [R or 1, classes, N]."""
        activations, kept = [x], []
        for layer in self.layers:
            y, hidden = layer.forward(activations[-1])
            activations.append(y)
            kept.append(hidden)
        samples = x.shape[2]
        log_p = torch.log_softmax(activations[-1], 1)
        loss = (log_p * targets).sum((1, 2)).div_(-samples)
        g = log_p.exp_().sub_(targets).div_(samples)
        grads: list[list[Tensor]] = []
        cotangents: list[Tensor] = []
        for i in range(len(self.layers) - 1, -1, -1):
            own, g = self.layers[i].backward(activations[i], kept[i], g, deeper=i > 0)
            grads.append(own)
            if i > 0:
                cotangents.append(g)
        return Pass(loss, grads[::-1], activations, cotangents[::-1])

    def new_layer(self) -> Layer:
        """An identity layer for every run: relu(I x + 0) in a ReLU network, else x + 0 tanh(0.8 I x + 0)."""
        first = self._first
        runs, width = first.weight.shape[:2]
        zeros = first.weight.new_zeros
        eye = torch.eye(width, dtype=first.weight.dtype, device="cpu").expand(runs, width, width)
        if first.activation == "relu":
            return self._inner(eye.clone(), zeros(runs, width, 1))
        return self._inner(0.8 * eye, zeros(runs, width, 1), zeros(runs, width, width))

    def _inner(self, *tensors: Tensor) -> Layer:
        """A layer as those between the first and the last one."""
        return Affine(*tensors, activation="relu") if self._first.activation == "relu" else Residual(*tensors)

    @property
    def _first(self) -> Affine:
        first = self.layers[0]
        assert isinstance(first, Affine)
        return first

    def measure(self, x: Tensor, targets: Tensor) -> Looks:
        """Merits of all places from one pass of the networks as they are: an identity changes no activation and no
        cotangent, so the gradient of a layer that is not there follows from those at its place."""
        done, new = self.run(x, targets), self.new_layer()
        merits, dead = [], []
        for at, g in zip(done.activations[1:-1], done.cotangents, strict=True):
            _, hidden = new.forward(at)
            grads, _ = new.backward(at, hidden, g, deeper=False)
            merits.append(grads[new.weights][-1].square().sum((1, 2)))
            dead.append((at == 0).all(2))
        weights = [w for layer, own in zip(self.layers, done.grads, strict=True) for w in own[layer.weights]]
        existing = torch.stack([w.square().sum((1, 2)) for w in weights]).mean(0)
        merit = torch.stack(merits, 1)
        return Looks(merit, merit / existing.unsqueeze(1), torch.stack(dead, 1))

    def insert(self, places: Tensor) -> None:
        """One identity layer per run, after layer `places[r]`; the inner layers that follow it in each run move up."""
        first, *inner, last = self.layers
        new = self.new_layer()
        grown: list[Layer] = []
        for i in range(len(inner) + 1):
            here = (places == i).view(-1, 1, 1)
            before = (places > i).view(-1, 1, 1)
            stay = inner[i].parameters() if i < len(inner) else new.parameters()
            moved = inner[i - 1].parameters() if i > 0 else new.parameters()
            parts = zip(new.parameters(), stay, moved, strict=True)
            tensors = [torch.where(here, fresh, torch.where(before, a, b)) for fresh, a, b in parts]
            grown.append(self._inner(*tensors))
        self.layers = [first, *grown, last]

    def recycle(self, x: Tensor, sources: Sequence[torch.Generator]) -> Tensor:
        """Give all units that are zero on ``x`` new rows and no outgoing weights; returns how many those were in each run.

        Their new rows are drawn as `nn.Linear` draws its own. What reads them ignores them, so the function on ``x`` stays.
        """
        counts = torch.zeros(x.shape[0], dtype=torch.long, device="cpu")
        for layer, reader in zip(self.layers, self.layers[1:], strict=False):
            assert isinstance(layer, Affine) and isinstance(reader, Affine) and layer.bias is not None
            dead = (layer.forward(x)[0] == 0).all(2, keepdim=True)  # [R, units, 1]
            shape = (layer.weight.shape[1], layer.weight.shape[2] + 1)
            rows = _uniform(shape, sources, x.dtype) * layer.weight.shape[2] ** -0.5
            for _ in range(2):  # rows that are dead again are replaced by their opposite, which is not
                layer.weight = torch.where(dead, rows[:, :, :-1], layer.weight)
                layer.bias = torch.where(dead, rows[:, :, -1:], layer.bias)
                given, _ = layer.forward(x)
                rows = torch.where((given == 0).all(2, keepdim=True), -rows, rows)
            reader.weight = reader.weight.masked_fill(dead.transpose(1, 2), 0.0)
            counts += dead.sum((1, 2))
            x = given
        return counts

    def wake(self, places: Tensor, dead: Tensor, incoming: Tensor) -> None:
        """Give the dead units of the layers just inserted random incoming weights and no outgoing ones.

        places [R], dead [R, width], incoming [R, width, width]. A unit that was zero on all data contributed nothing,
        so neither does its successor with zero outgoing weights: the function on the data stays, the unit can learn.
        """
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, Affine):
                continue
            new = (places + 1 == i).view(-1, 1, 1) & dead.unsqueeze(2)
            after = (places + 2 == i).view(-1, 1, 1) & dead.unsqueeze(1)
            if bool(new.any()):
                layer.weight = torch.where(new, incoming, layer.weight)
            if bool(after.any()):
                layer.weight = layer.weight.masked_fill(after, 0.0)


def _uniform(shape: tuple[int, int], sources: Sequence[torch.Generator], dtype: torch.dtype) -> Tensor:
    """Numbers between -1 and 1, of each run from its own source."""
    draws = [torch.rand(shape, dtype=dtype, generator=source, device=source.device) for source in sources]
    return 2 * torch.stack(draws) - 1


AT_ONCE: int | None = None


def check_settings(settings: Settings) -> None:
    """Refuse what the stack cannot do, before anything is computed."""
    if settings.data.name != "spirals":
        raise BadExperiment(f"data, name must be 'spirals' for the engine 'stacked', got {settings.data.name!r}.")
    if settings.data.train >= 2 * POINTS:
        raise BadExperiment(
            f"data, train must be below {2 * POINTS}, so that points are left for testing, got {settings.data.train}."
        )
    optimizer = settings.optimizer
    if optimizer.name != "sgd" or optimizer.momentum or optimizer.weight_decay:
        raise BadExperiment(
            f"optimizer must be 'sgd' without momentum and weight decay for the engine 'stacked', got {optimizer}."
        )
    if settings.tau > 0:
        raise BadExperiment(
            f"tau must be 0 for the engine 'stacked', which inserts a layer in every run, got {settings.tau}."
        )
    if settings.network.kind == "cnn":
        raise BadExperiment(
            "network, kind must be 'fnn' or 'resnet' for the engine 'stacked', got 'cnn'. Set engine = 'cnn'."
        )
    for name in ("schedule", "confidence", "tolerance", "fresh_optimizer", "from_start", "record_norms"):
        if getattr(settings, name):
            raise BadExperiment(f"{name} is a setting of the engine 'cnn', not of 'stacked'.")
    if settings.dtype == "bfloat16" or settings.data.validation or settings.data.test:
        raise BadExperiment(
            "bfloat16, data.validation and data.test are settings of the engine 'cnn', not of 'stacked'."
        )
    for name in ("wake", "recycle_at"):
        if getattr(settings, name) and settings.network.kind != "fnn":
            raise BadExperiment(f"{name} is for ReLU layers (network kind 'fnn'): a residual layer has no dead units.")


def check_machine(settings: Settings, machine: Machine) -> None:
    """The spirals are computed when needed: nothing can be missing."""


def count_arm(settings: Settings, accepted: tuple[int, ...] | None = None) -> Counts:
    network = settings.network
    sizes = tuple(count_parameters(network, grown) for grown in range(len(settings.insert_at) + 1))
    flops, measuring = training_flops(settings)
    printed = training_flops(settings, printed=True)
    if printed == (flops, measuring):
        return Counts(sizes, flops, measuring)
    return Counts(sizes, flops, measuring, *printed)


def estimate_seconds(settings: Settings, runs: int) -> float:
    """Seconds on one core, from step times measured on a small machine: a price per call and one per number."""
    steps = settings.epochs * -(-settings.data.train // settings.batch)
    layers = len(settings.network.widths) + 1 + len(settings.insert_at)
    size = runs * settings.batch * settings.network.widths[0]
    return steps * layers * (110e-6 + 2e-9 * size)


def train_runs(job: TrainingJob) -> TrainingOutcome:
    """Train the runs of `job` from the start, or from the state it carries."""
    with fit_threads():  # tensors of a few thousand numbers
        return _Training(job).finish()


class _Training:
    """The state of one job: the stack, the epoch, and what was recorded so far."""

    def __init__(self, job: TrainingJob) -> None:
        self.job, self.settings = job, (settings := job.settings)
        dtype = getattr(torch, settings.dtype)
        data = split_spirals(settings.data.train, settings.data.split_seed, dtype)
        runs = len(job.runs)
        self.x = data.train_x.T.contiguous()  # [2, N]
        self.y = one_hot(data.train_y, CLASSES).T.to(dtype).contiguous()  # [classes, N]
        self.train_x = self.x.expand(runs, -1, -1).contiguous()
        self.test_x = data.test_x.T.expand(runs, -1, -1).contiguous()
        self.test_y = one_hot(data.test_y, CLASSES).T.to(dtype).contiguous()
        self.full = settings.batch == settings.data.train
        self.steps_per_epoch = -(-settings.data.train // settings.batch)
        self.epoch = 0
        self.lr = settings.optimizer.lr
        self.since = SHOWN  # iterations since the last insertion, counted up to SHOWN
        self.order = torch.empty(0, device="cpu")
        seeds = [run_seed(job.seed, run, "weights") for run in job.runs]
        self.stack = NetworkStack.of([build_small_network(settings.network, seed, dtype) for seed in seeds])
        self.records = self._empty_records(runs)
        if job.state is not None:
            with resuming():
                self._restore(job.state)

    def _empty_records(self, runs: int) -> dict[str, Tensor]:
        settings = self.settings
        times, width = len(settings.insert_at), settings.network.widths[0]
        most = places(settings.network, max(times - 1, 0))
        weights = 1 if settings.network.kind == "fnn" else 2
        curves = ("train_loss", "test_loss", "test_error")
        records = {name: nans(settings.epochs + 1, runs, dtype=self.x.dtype) for name in curves}
        if times:
            records["place"] = torch.full((times, runs), -1, device="cpu")
            records["merits"] = nans(times, runs, most)
            records["ratios"] = nans(times, runs, most)
            records["dead"] = torch.zeros(times, runs, dtype=torch.long, device="cpu")
            records["new_gradient"] = nans(times, SHOWN, runs, weights, width, width)
        if settings.recycle_at:
            records["recycled"] = torch.zeros(len(settings.recycle_at), runs, dtype=torch.long, device="cpu")
        if settings.record_gradients:
            layers = len(settings.network.widths) + 1 + times
            records["gradient_norm"] = nans(settings.epochs, layers, runs)
        return records

    def finish(self) -> TrainingOutcome:
        saved = time.monotonic()
        while self.epoch < self.settings.epochs:
            if self.epoch % ORDER_BLOCK == 0:
                self.job.tell(self.epoch / self.settings.epochs)
                if time.monotonic() - saved >= self.job.save_every:
                    self.job.save(self._state())
                    saved = time.monotonic()
            self._evaluate()
            self._train_epoch()
            self.epoch += 1
            if self.epoch in self.settings.insert_at:
                self._grow(self.settings.insert_at.index(self.epoch))
            if self.epoch in self.settings.recycle_at:
                self._recycle(self.settings.recycle_at.index(self.epoch))
        self._evaluate()
        if self.full:
            self.records["train_loss"][self.epoch] = self._train_loss()
        self.job.tell(1.0)
        iteration = torch.arange(self.settings.epochs + 1, device="cpu") * self.steps_per_epoch
        runs = {name: _runs_first(name, value) for name, value in self.records.items()}
        return TrainingOutcome(runs, {"iteration": iteration})

    def _evaluate(self) -> None:
        """Losses and error after `self.epoch` epochs. In full-batch training the next step gives the training loss."""
        log_p = torch.log_softmax(self.stack.logits(self.test_x), 1)
        own = (log_p * self.test_y).sum(1)  # [runs, N]
        self.records["test_loss"][self.epoch] = -own.mean(1)
        # wrong where another class is more likely; argmax over the middle axis would cost more than the pass itself
        self.records["test_error"][self.epoch] = (own < log_p.amax(1)).to(own.dtype).mean(1)
        if not self.full:
            self.records["train_loss"][self.epoch] = self._train_loss()

    def _train_loss(self) -> Tensor:
        log_p = torch.log_softmax(self.stack.logits(self.train_x), 1)
        return (log_p * self.y).sum((1, 2)).div_(-self.x.shape[1])

    def _train_epoch(self) -> None:
        if self.full:
            done = self._step(self.train_x, self.y)
            self.records["train_loss"][self.epoch] = done.loss
            self._record_norms(self._norms(done), 1)
            return
        within = self.epoch % ORDER_BLOCK
        if within == 0 or len(self.order) == 0:
            self.order = order_block(self.job.seed, self.job.runs, self.epoch // ORDER_BLOCK, self.x.shape[1])
        order = self.order[within]
        shuffled = [values[:, order].transpose(0, 1) for values in (self.x, self.y)]  # [runs, 2 or classes, N]
        norms = None
        for x, y in zip(*(torch.split(values, self.settings.batch, dim=2) for values in shuffled), strict=True):
            done = self._step(x.contiguous(), y.contiguous())
            own = self._norms(done)
            norms = own if norms is None or own is None else norms + own
        self._record_norms(norms, self.steps_per_epoch)

    def _step(self, x: Tensor, y: Tensor) -> Pass:
        done = self.stack.run(x, y)
        if self.since < SHOWN:
            self._keep_new_gradient(done)
        grads = [grad for own in done.grads for grad in own]
        torch._foreach_add_(self.stack.parameters(), grads, alpha=-self.lr)
        return done

    def _norms(self, done: Pass) -> Tensor | None:
        """The Frobenius norm of each layer's weight gradient: [layers, runs]."""
        if not self.settings.record_gradients:
            return None
        layers = zip(self.stack.layers, done.grads, strict=True)
        squares = [sum(w.square().sum((1, 2)) for w in own[layer.weights]) for layer, own in layers]
        return torch.stack(squares).sqrt()  # type: ignore[arg-type]

    def _record_norms(self, total: Tensor | None, steps: int) -> None:
        if total is not None:
            self.records["gradient_norm"][self.epoch, : len(total)] = total / steps

    def _keep_new_gradient(self, done: Pass) -> None:
        time_index = sum(at <= self.epoch for at in self.settings.insert_at) - 1
        for run, place in enumerate(self.records["place"][time_index].tolist()):
            layer, own = self.stack.layers[place + 1], done.grads[place + 1]
            weights = torch.stack([w[run] for w in own[layer.weights]])
            self.records["new_gradient"][time_index, self.since, run] = weights
        self.since += 1

    def _grow(self, index: int) -> None:
        """Measure on the whole training set, choose a place for each run, insert there."""
        looks = self.stack.measure(self.train_x, self.y)
        places = self._choose(looks, index)
        found = looks.merits.shape[1]
        everyone = torch.arange(len(places), device="cpu")
        self.records["place"][index] = places
        self.records["merits"][index, :, :found] = looks.merits
        self.records["ratios"][index, :, :found] = looks.ratios
        dead = looks.dead[everyone, places]
        self.records["dead"][index] = dead.sum(1)
        self.stack.insert(places)
        if self.settings.wake:
            self.stack.wake(places, dead, self._incoming(index))
        self.lr *= self.settings.lr_scale
        self.since = 0

    def _choose(self, looks: Looks, index: int) -> Tensor:
        merits, select = looks.merits, self.settings.select
        if select == "random":  # from each run's own source, as in the results that are stored
            count = merits.shape[1]
            sources = self._sources(f"place {index}")
            return torch.cat([torch.randint(count, (1,), generator=source, device=source.device) for source in sources])
        order, unused = SELECTIONS[select], torch.Generator()
        nowhere = [None] * merits.shape[1]  # there are no stacks of blocks
        return torch.tensor([order(own, nowhere, 1, unused)[0] for own in merits.tolist()], device="cpu")

    def _recycle(self, index: int) -> None:
        """Give the units that are zero on the whole training set new rows, as PyTorch draws them, and no outgoing weights."""
        self.records["recycled"][index] = self.stack.recycle(self.train_x, self._sources(f"recycle {index}"))

    def _incoming(self, index: int) -> Tensor:
        """Random weights as PyTorch draws them for a linear layer of this width."""
        width = self.settings.network.widths[0]
        return _uniform((width, width), self._sources(f"wake {index}"), self.x.dtype) / math.sqrt(width)

    def _sources(self, purpose: str) -> list[torch.Generator]:
        """Random numbers for a purpose, of each run its own."""
        return [generator(self.job.seed, run, purpose) for run in self.job.runs]

    def _state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "lr": self.lr,
            "since": self.since,
            "layers": len(self.stack.layers),
            "parameters": self.stack.parameters(),
            "records": self.records,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        everyone = torch.zeros(len(self.job.runs), dtype=torch.long, device="cpu")
        layers = check_count(state["layers"], len(self.stack.layers) + len(self.settings.insert_at))
        epoch, since = check_count(state["epoch"], self.settings.epochs), check_count(state["since"], SHOWN)
        rate = float(state["lr"])
        check_like(state["records"], self.records)
        while len(self.stack.layers) < layers:
            self.stack.insert(everyone)  # where does not matter: the saved tensors come next
        for mine, saved in zip(self.stack.parameters(), state["parameters"], strict=True):
            check_like({"weight": saved}, {"weight": mine})
            mine.copy_(saved)
        self.epoch, self.lr, self.since, self.records = epoch, rate, since, state["records"]


def _runs_first(name: str, value: Tensor) -> Tensor:
    axis = 2 if name == "new_gradient" else value.dim() - 1 if name not in ("merits", "ratios") else 1
    return value.movedim(axis, 0).contiguous()
