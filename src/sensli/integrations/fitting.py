"""Train networks that grow together while what each holds out gets better, and that stop by themselves.

Every sample is held out by one network, so all samples together decide about a growth; or by two that differ in their first weights
alone, whose mean then tells whether an ensemble would pay.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from torch.nn.utils.rnn import pad_sequence

from sensli.growing.grower import Grower
from sensli.growing.triggers import Trigger, TriggerContext
from sensli.modules.running import to_device
from sensli.moves.sites import Site
from sensli.surgery.growth import repeat, undo
from sensli.surgery.history import Growth, History
from sensli.surgery.outline import outline
from sensli.text.progress import Reach

# ---- Samples that are mostly zero.


class SparseRows:
    """Samples as their entries other than zero, which are all that the first product of a network needs.

    Those of a row lie from ``starts[row]`` to ``starts[row + 1]`` in ``columns`` and ``values``. Rows are chosen as from a tensor.
    """

    def __init__(self, starts: Tensor, columns: Tensor, values: Tensor, shape: Sequence[int]) -> None:
        self.starts, self.columns, self.values, self.shape = starts, columns, values, torch.Size(shape)
        self.device = values.device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Tensor) -> SparseRows:
        first, counts = self.starts[rows].flatten(), self.starts.diff()[rows].flatten()
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        places = torch.arange(int(starts[-1]), device=self.device) + (first - starts[:-1]).repeat_interleave(counts)
        return SparseRows(starts, self.columns[places], self.values[places], (*rows.shape, self.shape[-1]))

    def product(self, weight: Tensor, bias: Tensor) -> Tensor:
        """What a layer gives for samples of several networks: (networks, samples, units)."""
        networks, samples, inputs = self.shape
        own = torch.arange(networks, device=self.device).repeat_interleave(samples) * inputs
        # The weights of all networks, one after another, and the columns there.
        weights, columns = (
            weight.mT.reshape(networks * inputs, -1),
            self.columns + own.repeat_interleave(self.starts.diff()),
        )
        settings: dict[str, Any] = {"mode": "sum", "per_sample_weights": self.values, "include_last_offset": True}
        return embedding_bag(columns, weights, self.starts, **settings).view(networks, samples, -1) + bias

    def to_dense(self) -> Tensor:
        """The same as a tensor."""
        row = torch.arange(len(self.starts) - 1, device=self.device).repeat_interleave(self.starts.diff())
        dense = self.values.new_zeros(len(self.starts) - 1, self.shape[-1])
        return dense.index_put_((row, self.columns), self.values, accumulate=True).view(self.shape)


# ---- Several networks of one shape, trained as one: their weights are stacked, so a step of all takes little longer than
# a step of one.


HORIZON = 100  # steps that the running average of the weights looks back, and a fifth of all as long as there are few


class Stacked:
    """The weights of plain networks (`nn.Linear` and `nn.ReLU`), stacked for training, and their running average.

    All of them lie in one flat tensor, which the optimizer and the average see: with small networks it is the number of operations
    that costs. The networks themselves change only in `write`.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        learning_rate: float,
        weight_decay: float,
        device: torch.device | None = None,
    ) -> None:
        """``device``: where to train (default: that of the networks, which stay where they are)."""
        self._networks = networks
        layers = list(zip(*map(_linear, networks), strict=True))
        self._relus = [isinstance(after, nn.ReLU) for after in _after_linear(networks[0])]
        stacked = [torch.stack([layer.weight.detach() for layer in same]) for same in layers]
        stacked += [torch.stack([layer.bias.detach() for layer in same]).unsqueeze(1) for same in layers]
        self._shapes = [tensor.shape for tensor in stacked]
        self.flat = torch.cat([tensor.flatten() for tensor in stacked]).to(device)
        self.average = self.flat.clone()
        self.flat.grad = torch.zeros_like(self.flat)
        self._weights = self._parts(self.flat)
        for weight, gradient in zip(self._weights, self._parts(self.flat.grad), strict=True):
            weight.requires_grad_().grad = gradient
        self.optimizer = torch.optim.AdamW([self.flat], lr=learning_rate, weight_decay=weight_decay, fused=True)
        self._steps = 0

    def __getstate__(self) -> dict[str, Any]:
        # Tensors that share their memory would come back as separate ones. On the CPU: every machine can read them there.
        state = {"flat": self.flat.detach().clone(), "average": self.average, "optimizer": self.optimizer.state_dict()}
        return {"networks": self._networks, "steps": self._steps, **to_device(state, torch.device("cpu"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, torch.device("cpu"))

    def on(self, device: torch.device) -> Stacked:
        """A copy of the training on a device, for the same networks."""
        made = object.__new__(Stacked)
        made._restore(self.__getstate__(), device)
        return made

    def _restore(self, state: dict[str, Any], device: torch.device) -> None:
        networks = [copy.deepcopy(network).to(state["flat"].dtype) for network in state["networks"]]
        Stacked.__init__(self, networks, 0.0, 0.0, device)  # the rate and the decay are the optimizer's
        self._networks = state["networks"]
        self.flat.copy_(state["flat"])
        self.average.copy_(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._steps = state["steps"]

    def forward(self, x: Tensor | SparseRows, *, average: bool = False) -> Tensor:
        """The outputs of all networks, each for its own inputs: (networks, samples, features) to (networks, samples, outputs)."""
        tensors, layers = self._parts(self.average) if average else self._weights, len(self._relus)
        for weight, bias, relu in zip(tensors[:layers], tensors[layers:], self._relus, strict=True):
            x = x.product(weight, bias) if isinstance(x, SparseRows) else torch.baddbmm(bias, x, weight.mT)
            x = x.relu() if relu else x
        assert isinstance(x, Tensor)
        return x

    def step(self, loss: Tensor) -> None:
        """One step of the optimizer on a loss of `forward`, after which the average follows."""
        assert self.flat.grad is not None
        self.flat.grad.zero_()
        loss.backward()
        self.optimizer.step()
        self._steps += 1
        self.average.lerp_(self.flat, 1 / min(HORIZON, 1 + self._steps / 5))

    def write(self, flat: Tensor) -> None:
        """Give the networks these weights: `flat`, `average` or an earlier copy of one."""
        parts, layers = self._parts(flat), len(self._relus)
        with torch.no_grad():
            for place, network in enumerate(self._networks):
                for index, layer in enumerate(_linear(network)):
                    layer.weight.copy_(parts[index][place])
                    layer.bias.copy_(parts[layers + index][place, 0])

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = flat.detach().split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _linear(network: nn.Module) -> list[nn.Linear]:
    return [module for module in network.modules() if isinstance(module, nn.Linear)]


def _after_linear(network: nn.Module) -> Iterator[nn.Module | None]:
    """What comes after each linear layer in the data flow, which is the order in which the modules were given."""
    leaves = [module for module in network.modules() if not list(module.children())]
    for module, after in zip(leaves, [*leaves[1:], None], strict=True):
        if isinstance(module, nn.Linear):
            yield after


# ---- Samples divided among networks that train together: what each trains on, what each holds out, and one epoch of all.


Samples = Callable[[Tensor, Tensor], Tensor]  # outputs and targets to one number per sample
Part = tuple[Tensor | SparseRows, Tensor, Tensor]  # inputs, targets, weights
DENSE = 2_000_000  # cells of a sparse matrix that may become a tensor at once


class Diverged(ValueError):
    """The loss is not a finite number any more."""


class FoldData:
    """Samples, and which of them each network trains on and holds out. Without the latter nothing grows.

    ``copies``: by how many networks each sample is held out: the networks come in so many equal rounds.
    """

    def __init__(
        self, x: Tensor | SparseRows, y: Tensor, weight: Tensor, rows: Sequence[Tensor], held_out: Sequence[Tensor] = (), copies: int = 1
    ) -> None:  # fmt: skip
        self.x, self.y = x, y
        self.weight = weight / weight.mean()  # the scale of the loss does not depend on that of the weights
        self.rows, self._shares = self._padded(rows)
        self.watched = self._padded(held_out or rows)
        self.grows, self.copies = len(held_out) > 0, copies

    def _padded(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Rows of equal number for every network, and the weights of these samples: zero where a row fills up."""
        padded = pad_sequence(list(rows), batch_first=True)
        real = torch.arange(padded.shape[1], device="cpu") < torch.tensor([[len(each)] for each in rows], device="cpu")
        padded = padded.to(self.x.device)
        return padded, self.weight[padded] * real.to(self.x.device)

    def part(self, rows: Tensor, weight: Tensor) -> Part:
        """The samples of these rows."""
        return self.x[rows], self.y[rows], weight

    def count(self, size: int) -> int:
        """How many batches of about this size there are in an epoch."""
        return math.ceil(self.rows.shape[1] / size)

    def batches(self, size: int) -> Iterator[Part]:
        """One epoch in equally large batches, for each network its own; one batch keeps its order."""
        count = self.count(size)
        if count == 1:
            yield self._whole
            return
        order = (
            torch.rand(self.rows.shape, device="cpu").argsort(dim=1).to(self.rows.device)
        )  # the same on every device
        rows, weight = self.rows.gather(1, order), self._shares.gather(1, order)
        for some, its in zip(rows.chunk(count, dim=1), weight.chunk(count, dim=1), strict=True):
            yield self.part(some, its)

    def measured(self) -> Part:
        """Samples of the first network, all of them unless they are many as a tensor."""
        most = len(self.x) if isinstance(self.x, Tensor) else max(1, DENSE // (len(self.rows) * self.x.shape[-1]))
        x, y, weight = next(self.batches(most))
        return x.to_dense()[0], y[0], weight[0]

    @cached_property
    def _whole(self) -> Part:
        return self.part(self.rows, self._shares)


def train_on(stacked: Stacked, data: FoldData, losses: Samples, batch_size: int) -> float:
    """One epoch of all networks; their mean training loss."""
    loss = float(sum(_step(stacked, part, losses) for part in data.batches(batch_size))) / data.count(batch_size)
    if not math.isfinite(loss):
        rate = stacked.optimizer.param_groups[0]["lr"]
        raise Diverged(f"learning_rate must be small enough for a finite loss, got {rate:g} and a loss of {loss}.")
    return loss


def _step(stacked: Stacked, part: Part, losses: Samples) -> Tensor:
    """One step of all networks; their mean loss before it."""
    x, y, weight = part
    each = losses(stacked.forward(x).flatten(0, 1), y.flatten(0, 1)) * weight.flatten()
    loss = each.sum() / weight.shape[1]  # a sum over the networks: none of them feels the others
    stacked.step(loss)
    return loss.detach() / len(weight)


STAGE = 10  # evaluations after which a growth is tried even if the loss still falls
STEPS = 10  # the smallest number between two evaluations: an epoch of few data says little
DOUBLE = 0.999  # a layer gets about as many units as it has: a share below one, which is rounded
FINISH = 0.5  # epochs on all samples at the end, as a share of those that led to the best weights
FALLING = 1.0  # the same where the loss still fell when growing ended


@dataclass(frozen=True)
class FitPlan:
    """How to train: the numbers that a user may want to change."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    max_epochs: int
    patience: int
    tolerance: float  # improvement of the loss that counts, relative to it; and a tenth of that, relative to the first
    max_layers: int
    max_width: int
    tau: float


@dataclass
class Fitted:
    """What came out, besides the networks themselves."""

    history: History
    loss: float  # on what was held out, of the weights that were kept
    curve: list[float] = field(default_factory=list)  # the training loss of each epoch
    stopped: bool = False  # by max_epochs, before it was clear that nothing helps any more


class _Asked(Trigger):
    """Fires when the fit asks for a layer or for units, and lets nothing else in."""

    kind, before = "", 0

    def fires(self, context: TriggerContext) -> bool:
        self.before = context.growths
        return self.kind != ""

    def allows(self, site: Site, context: TriggerContext) -> bool:
        if self.kind == "units":
            return site.kind == "units"
        return site.kind != "units" and context.growths == self.before  # one layer at a time


class Fit:
    """One training: networks of equal shape, the data, and what a sample loses in training and where it is held out."""

    def __init__(
        self, networks: Sequence[nn.Module], data: FoldData, losses: Samples, scores: Samples, plan: FitPlan,
        say: Callable[[str], None], history: History, reach: Reach,
    ) -> None:  # fmt: skip
        self.networks, self.data, self.plan, self.say, self.reach = list(networks), data, plan, say, reach
        self.losses, self.scores = losses, scores
        self._began, self._asked = history.record.calls, _Asked()
        # What trains is stacked, and begins again after each growth: this optimizer only says what can be trained.
        example = data.x[data.rows[:1, :1]].to_dense()[0]
        self._grower = Grower(
            networks[0], torch.optim.SGD(networks[0].parameters()), preset="auto", example=example, trigger=self._asked, tau=plan.tau,
            form="relu", what="both", units=DOUBLE, max_growths=plan.max_layers, max_factor=None, floor=0.0,
        )  # fmt: skip
        self._grower.history = history
        self._watched = data.part(*data.watched)
        first = data.watched[1][: len(data.watched[1]) // data.copies]  # the other rounds hold out the same
        self._share = (first / first.sum()).flatten()
        self._best = self._watch(self._stacked())  # the score of each sample
        self.fitted = Fitted(history, self._mean(self._best))
        self._first = self.fitted.loss
        self._led = 0  # epochs that led to the best weights, without those that were in vain
        self._falls = False  # whether the last stage that was kept ended before the loss stalled

    def run(self) -> Fitted:
        """Train, grow while it helps, stop. The networks have the weights that were best."""
        self._stage(max(STAGE, self.plan.patience))  # a network that has learned nothing yet may need a while
        helps = {"layer": True, "units": True}
        while any(helps.values()) and self._left:
            kind = "units" if helps["units"] else "layer"
            if self._room(kind) and self._try(kind):
                helps = {"layer": True, "units": True}
            else:
                helps[kind] = False
        return self.fitted

    @property
    def _epoch(self) -> int:
        return len(self.fitted.curve)

    @property
    def _left(self) -> int:
        return self.plan.max_epochs - self._epoch

    def _stacked(self) -> Stacked:
        return Stacked(self.networks, self.plan.learning_rate, self.plan.weight_decay)

    def _mean(self, scores: Tensor) -> float:
        return float(self._share @ scores)

    def _enough(self, value: float, before: float) -> bool:
        return value < before - self.plan.tolerance * max(before, 0.1 * self._first)

    def _clear(self, before: Tensor) -> bool:
        """Whether the watched samples got better by more than the standard error of their mean, compared one by one."""
        gain = before - self._best
        error = float((self._share * (gain - self._mean(gain))).square().sum().sqrt())
        return self._mean(gain) > error

    def _room(self, kind: str) -> bool:
        """Whether the limits and the data allow another layer, or more units."""
        if not self.data.grows:
            return False
        hidden = [layer.out_features for layer in self.networks[0].modules() if isinstance(layer, nn.Linear)][:-1]
        if kind == "layer":
            return len(hidden) < self.plan.max_layers
        return 2 * max(hidden) <= self.plan.max_width  # a growth doubles a layer

    def _stage(self, patience: int) -> None:
        """Train until the watched loss stalls, or for a while if something could still grow; then the best weights."""
        stacked, waited, mark, looks = self._stacked(), 0, self.fitted.loss, 0
        best, led, began = stacked.average.clone(), self._led, self._epoch
        limit = STAGE if self._room("layer") or self._room("units") else math.inf
        while waited < patience and looks < limit and self._left:
            epochs = max(1, STEPS // self.data.count(self.plan.batch_size))
            for _ in range(min(epochs, self._left)):
                self._train(stacked)
            scores = self._watch(stacked)
            value, looks = self._mean(scores), looks + 1
            self.reach(self._epoch, f"loss {value:.4g}")
            self._note(value)
            if self._enough(value, mark):
                waited, mark = 0, value
            else:
                waited += 1
            if value < self.fitted.loss:
                self.fitted.loss, self._best, best = value, scores, stacked.average.clone()
                self._led = led + self._epoch - began
        stacked.write(best)
        self.fitted.stopped = not self._left and waited < patience
        self._falls = looks >= limit and waited < patience
        layers = sum(isinstance(module, nn.Linear) for module in self.networks[0].modules()) - 1
        where = "held-out samples" if self.data.grows else "training samples"
        self.say(f"epoch {self._epoch}: hidden layers: {layers}, loss {self.fitted.loss:.4g} on the {where}")

    def _train(self, stacked: Stacked) -> None:
        """One epoch of all networks."""
        self.fitted.curve.append(train_on(stacked, self.data, self.losses, self.plan.batch_size))

    def _watch(self, stacked: Stacked) -> Tensor:
        """The score of every watched sample, with the averaged weights of the network that does not train on it."""
        x, y, _ = self._watched
        with torch.no_grad():
            each = self.scores(stacked.forward(x, average=True).flatten(0, 1), y.flatten(0, 1))
        return each.view(self.data.copies, -1).mean(0)

    def held_out(self, mean: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, targets and shares of the watched samples; ``mean`` takes the outputs of all rounds to one."""
        x, y, _ = self._watched
        with torch.no_grad():
            outputs = self._stacked().forward(x)
        outputs, y = (each.unflatten(0, (self.data.copies, -1)).flatten(1, 2) for each in (outputs, y))
        return outputs[0] if mean is None else mean(outputs), y[0], self._share

    def pays(self, mean: Callable[[Tensor], Tensor]) -> bool:
        """Whether the mean of all networks would be better than one of them by what counts, as the mean of two tells.

        What two win is half of what very many would: the part of the error that differs from network to network.
        """
        output, target, share = self.held_out(mean)
        gain = self._best - self.scores(output, target)
        mean_gain = self._mean(gain)
        error = float((share * (gain - mean_gain)).square().sum().sqrt())
        of_all = mean_gain * 2 * (1 - 1 / len(self.networks))
        self.say(f"the mean of {len(self.networks)} networks would lower the loss by {of_all / self.fitted.loss:.1%}")
        return mean_gain > error and self._enough(self.fitted.loss - of_all, self.fitted.loss)

    def _note(self, value: float | None) -> Growth | None:
        """Tell the record the watched loss of this epoch; if a growth was asked for, make it."""
        grower, batches = self._grower, list[Any]()
        if self._asked.kind:
            x, y, weight = self.data.measured()
            batches = [(x, (y, weight))]  # of the first network, which the Grower sees
        grower.calls = self._began + self._epoch - 1
        return grower.step(batches, lambda output, rest: (self.losses(output, rest[0]) * rest[1]).mean(), metric=value)

    def _try(self, kind: str) -> bool:
        """Grow all networks and train on; what did not help is taken out again."""
        history, kept = self._grower.history, len(self._grower.history)
        before = self.fitted.loss, self._best, self._led, self._falls
        weights = [{name: value.clone() for name, value in each.state_dict().items()} for each in self.networks]
        self._asked.kind = kind
        grown = self._note(None)  # the loss of this epoch has been told
        self._asked.kind = ""
        if grown is None:  # no place is worth it
            return False
        for growth in history[kept:]:
            self.say(str(growth))
            for network in self.networks[1:]:
                repeat(network, growth)
        self._stage(self.plan.patience)
        if self._enough(self.fitted.loss, before[0]) and self._clear(before[1]):
            return True
        self.say("taken out again: it did not help")
        self._take_out(kept)
        for network, state in zip(self.networks, weights, strict=True):
            network.load_state_dict(state)
        self.fitted.loss, self._best, self._led, self._falls = before
        return False

    def _take_out(self, kept: int) -> None:
        """Undo all growths but the first ones, and let the record say so."""
        history, record = self._grower.history, self._grower.history.record
        while len(history) > kept:
            growth = history.pop()
            for network in self.networks:
                undo(network, growth)
        epoch = self._began + self._epoch
        tried = ", ".join(record.decisions[-1].merits[index].site for index in record.decisions[-1].chosen)
        why = f"tried {tried} and took it out again at epoch {epoch}, because the held-out samples did not get better"
        record.decisions[-1] = replace(record.decisions[-1], growths=(), chosen=(), added=(), reason=why)
        record.draw(epoch, outline(self.networks[0]))

    def finish(self) -> None:
        """Train the networks on all samples for a while, with a learning rate that falls to zero."""
        everything = [torch.arange(len(self.data.x), device="cpu")] * len(self.networks)
        data = FoldData(self.data.x, self.data.y, self.data.weight, everything)
        stacked, epochs = self._stacked(), math.ceil((FALLING if self._falls else FINISH) * self._led)
        self.say(f"{epochs} epochs on all {len(self.data.x)} samples")
        for epoch in range(epochs):
            stacked.optimizer.param_groups[0]["lr"] = self.plan.learning_rate * (1 - epoch / epochs)
            train_on(stacked, data, self.losses, self.plan.batch_size)
        stacked.write(stacked.flat)
