"""One network at a time in plain PyTorch: slow and obviously right. The stacked engine is tested against it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sensli_lab.paper import datasets, stacked
from sensli_lab.paper.machine import ORDER_BLOCK, order_block, run_seed
from sensli_lab.paper.settings import Settings
from sensli_lab.paper.stacked import ResidualBlock


@dataclass
class Trained:
    train_loss: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    test_error: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    merits: list[list[float]] = field(default_factory=list)
    ratios: list[list[float]] = field(default_factory=list)


def train(settings: Settings, seed: int, run: int) -> Trained:
    dtype = getattr(torch, settings.dtype)
    data = datasets.split_spirals(settings.data.train, settings.data.split_seed, dtype)
    model: nn.Sequential = stacked.build_small_network(settings.network, run_seed(seed, run, "weights"), dtype)
    lr = settings.optimizer.lr
    log = Trained()
    for epoch in range(settings.epochs):
        evaluate(model, data, log)
        for batch in batches(settings, seed, run, epoch):
            model.zero_grad()
            cross_entropy(model(data.train_x[batch]), data.train_y[batch]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= lr * parameter.grad
        if epoch + 1 in settings.insert_at:
            merits, ratios = measure(model, data)
            log.merits.append(merits)
            log.ratios.append(ratios)
            wanted = max(merits) if settings.select == "largest" else min(merits)
            log.places.append(merits.index(wanted))
            model = with_layers(model, [log.places[-1]])
            lr *= settings.lr_scale
    evaluate(model, data, log)
    return log


def batches(settings: Settings, seed: int, run: int, epoch: int) -> list[Tensor]:
    count = settings.data.train
    if settings.batch == count:
        return [torch.arange(count)]
    block, within = divmod(epoch, ORDER_BLOCK)
    return list(order_block(seed, [run], block, count)[within, 0].split(settings.batch))


def evaluate(model: nn.Module, data: datasets.SpiralSplit, log: Trained) -> None:
    with torch.no_grad():
        log.train_loss.append(cross_entropy(model(data.train_x), data.train_y).item())
        output = model(data.test_x)
        log.test_loss.append(cross_entropy(output, data.test_y).item())
        log.test_error.append((output.argmax(1) != data.test_y).double().mean().item())


def hidden_ends(model: nn.Sequential) -> list[int]:
    """Where a hidden layer ends: after every ReLU; after the first map (and its tanh) and every block."""
    kinds = list(model)
    if any(isinstance(module, nn.ReLU) for module in kinds):
        return [i for i, module in enumerate(kinds) if isinstance(module, nn.ReLU)]
    first = 1 if isinstance(kinds[1], nn.Tanh) else 0
    return [first] + [i for i, module in enumerate(kinds) if isinstance(module, ResidualBlock)]


def identity(model: nn.Sequential) -> list[nn.Module]:
    width, dtype = model[0].out_features, model[0].weight.dtype
    with torch.no_grad():
        if any(isinstance(module, nn.ReLU) for module in model):
            linear = nn.Linear(width, width, dtype=dtype)
            linear.weight.copy_(torch.eye(width))
            linear.bias.zero_()
            return [linear, nn.ReLU()]
        block = ResidualBlock(width).to(dtype)
        block.inner.weight.copy_(0.8 * torch.eye(width))
        block.inner.bias.zero_()
        block.outer.weight.zero_()
        return [block]


def with_layers(model: nn.Sequential, places: list[int]) -> nn.Sequential:
    """A copy of the model with an identity layer at each of the places."""
    ends, modules = hidden_ends(model), []
    for i, module in enumerate(copy.deepcopy(model)):
        modules.append(module)
        if i in [ends[place] for place in places]:
            modules.extend(identity(model))
    return nn.Sequential(*modules)


def measure(model: nn.Sequential, data: datasets.SpiralSplit) -> tuple[list[float], list[float]]:
    """Merits and ratios by really building the extended network, as the paper does."""
    places = list(range(len(hidden_ends(model))))
    extended = with_layers(model, places)
    cross_entropy(extended(data.train_x), data.train_y).backward()
    step = len(identity(model))
    new = [extended[end + 1 + place * step] for place, end in enumerate(hidden_ends(model))]
    merits = [(m.outer if isinstance(m, ResidualBlock) else m).weight.grad.square().sum().item() for m in new]
    fresh = {id(p) for module in new for p in module.parameters()}
    old = [p.grad.square().sum().item() for p in extended.parameters() if p.dim() == 2 and id(p) not in fresh]
    return merits, [merit / (sum(old) / len(old)) for merit in merits]
