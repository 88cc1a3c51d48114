"""Wrong arguments as a table: each gives one clear error of our own, which names the argument and what it got, and nothing has changed."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

import sensli
from models import batches, cnn, deep, fnn, images, loss_fn, points, snapshot
from sensli import (
    Grower,
    Growth,
    History,
    Probe,
    Rates,
    SensliError,
    Trial,
    count_flops,
    find_sites,
    grow,
    insert,
    load_checkpoint,
    measure,
    recycle,
    remove_dead,
    replay,
    save_checkpoint,
    undo,
)
from sensli.growing.looking import Sensli
from sensli.growing.options import Options
from sensli.growing.triggers import At, Every, Limit, Plateau
from sensli.merits.merits import compare_choices
from sensli.merits.norms import choose_norm, squared_norm
from sensli.modules import checks
from sensli.moves.roles import Geometry
from sensli.page import page_data, read_history, write_page
from sensli_lab.methods.blocks import AutoGrow, GStack, LlamaPro
from sensli_lab.methods.convsenn import ConvSenn
from sensli_lab.methods.units import GradMax

NAN, INF = float("nan"), float("inf")


class Setting:
    """A training that has grown once: whatever a call could touch is in here."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, self.file = folder, folder / "run.ckpt"
        self.model, self.x, self.data, self.loss_fn = deep(3), points(), batches(), loss_fn
        self.fresh, self.stranger = copy.deepcopy(self.model), cnn()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = StepLR(self.optimizer, 5)
        self.average = AveragedModel(self.model)
        self.trigger = Plateau(9) | Every(1)
        self.grower = self.make_grower(self.model, self.optimizer, self.scheduler)
        for _ in range(2):
            loss_fn(self.model(self.x), self.data[0][1]).backward()
            self.optimizer.step()
            self.scheduler.step()
        self.growth = self.grower.step(self.data, loss_fn, metric=1.0)
        assert self.growth is not None
        self.model[0].register_forward_hook(lambda *_: None)
        self.sites = find_sites(self.model, self.x)
        self.widths = find_sites(self.model, self.x, what="units", units=2)
        self.merits = measure(self.model, self.sites, self.data, loss_fn)
        self.alien = find_sites(self.stranger, images())[0]
        save_checkpoint(self.file, self.model, optimizer=self.optimizer, grower=self.grower)

    def make_grower(self, model: Any, optimizer: Any, scheduler: Any = None) -> Grower:
        return Grower(
            model, optimizer, preset="paper", example=self.x, trigger=self.trigger, tau=0.0, scheduler=scheduler
        )

    def state(self) -> dict[str, Any]:
        kept = snapshot(self.model, self.optimizer)
        kept["others"] = [snapshot(each) for each in (self.fresh, self.stranger, self.average)]
        kept["scheduler"] = self.scheduler.state_dict()
        kept["grower"] = (self.grower.state_dict(), id(self.grower.history), id(self.grower.last_merits))
        kept["numbers"] = (random.getstate(), np.random.get_state()[1].tobytes())  # noqa: NPY002
        kept["files"] = {file.name: file.read_bytes() for file in self.folder.iterdir()}
        return kept


class Writer:
    """A writer like TensorBoard's."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def add_text(self, tag: str, text_string: str, global_step: int) -> None: ...


class Of:
    """A bad value that is made of the setting."""

    def __init__(self, name: str, make: Callable[[Setting], Any], *words: str) -> None:
        self.name, self.make, self.words = name, make, words

    def __repr__(self) -> str:
        return self.name


# Every function with arguments that are right; a row of the table puts a wrong one in the place of one of them.
CALLS: dict[str, Callable[..., Any]] = {
    "find_sites": lambda s, **given: find_sites(**{"model": s.model, "example": s.x, **given}),
    "measure": lambda s, **given: measure(
        **{"model": s.model, "sites": s.sites, "batches": s.data, "loss_fn": loss_fn, **given}
    ),
    "Probe": lambda s, **given: Probe(**{"model": s.model, "sites": s.sites, **given}),
    "insert": lambda s, **given: insert(
        **{"model": s.model, "site": s.sites[0], "optimizer": s.optimizer, "scheduler": s.scheduler, **given}
    ),
    "grow": lambda s, **given: grow(
        **{"model": s.model, "site": s.widths[0], "optimizer": s.optimizer, "scheduler": s.scheduler, **given}
    ),
    "insert without an optimizer": lambda s, **given: insert(s.model, s.sites[0], **given),
    "undo": lambda s, **given: undo(
        **{"model": s.model, "growth": s.growth, "optimizer": s.optimizer, "scheduler": s.scheduler, **given}
    ),
    "recycle": lambda s, **given: recycle(
        **{"model": s.model, "example": s.x, "batches": s.data, "optimizer": s.optimizer, **given}
    ),
    "remove_dead": lambda s, **given: remove_dead(
        **{"model": s.model, "example": s.x, "batches": s.data, "optimizer": s.optimizer, **given}
    ),
    "replay": lambda s, **given: replay(**{"model": s.fresh, "history": s.grower.history, **given}),
    "count_flops": lambda s, **given: count_flops(**{"model": s.model, "example": s.x, **given}),
    "Grower": lambda s, **given: Grower(
        **{
            "preset": "paper",
            "model": s.model,
            "optimizer": s.optimizer,
            "scheduler": s.scheduler,
            "example": s.x,
            "trigger": Every(2),
            **given,
        },
    ),
    "Grower without an optimizer": lambda s, **given: Grower(
        s.model, preset="paper", example=s.x, trigger=Every(2), **given
    ),
    "Rates": lambda s, **given: Grower(
        s.model, s.optimizer, scheduler=s.scheduler, preset="paper", example=s.x, trigger=Every(2), rates=Rates(**given)
    ),
    "Rates without an optimizer": lambda s, **given: Grower(
        s.model, preset="paper", example=s.x, trigger=Every(2), rates=Rates(**given)
    ),
    "Grower.step": lambda s, **given: s.grower.step(**{"batches": s.data, "loss_fn": loss_fn, "metric": 0.5, **given}),
    "Grower.watch": lambda s, **given: s.grower.watch(**given),
    "Grower.load_state_dict": lambda s, **given: s.grower.load_state_dict(**{"state": s.grower.state_dict(), **given}),
    "Trial": lambda s, **given: Trial(**{"steps": 3, **given}),
    "GStack": lambda s, **given: GStack(**given),
    "AutoGrow": lambda s, **given: AutoGrow(**given),
    "ConvSenn": lambda s, **given: ConvSenn(**given),
    "GradMax": lambda s, **given: GradMax(**given),  # and all others that add units, which begin alike
    "LlamaPro": lambda s, **given: LlamaPro(**given),
    "At": lambda s, calls=(3,): At(*calls),
    "Every": lambda s, calls=3: Every(calls),
    "Plateau": lambda s, **given: Plateau(**given),
    "Limit": lambda s, **given: Limit(**(given or {"depth": 3})),
    "squared_norm": lambda s, **given: squared_norm(**{"gradient": torch.ones(2, 2), "norm": "operator", **given}),
    "choose": lambda s, **given: choose_norm(**{"norm": "auto", "kinds": ["conv"], **given}),
    "Merits.per": lambda s, **given: s.merits.per(**{"cost": "flops", **given}),
    "compare_choices": lambda s, **given: compare_choices(**{"merits": s.merits, "count": 1, **given}),
    "History": lambda s, **given: History(**given),
    "History.append": lambda s, **given: s.grower.history.append(**{"growth": s.growth, **given}),
    "History.from_dict": lambda s, **given: History.from_dict(**{"data": s.grower.history.to_dict(), **given}),
    "History.from_json": lambda s, **given: History.from_json(**{"text": s.grower.history.to_json(), **given}),
    "History.save": lambda s, **given: s.grower.history.save(**{"path": s.folder / "history.json", **given}),
    "History.load": lambda s, **given: History.load(**{"path": s.folder / "history.json", **given}),
    "Growth.from_dict": lambda s, **given: Growth.from_dict(**{"data": s.growth.to_dict(), **given}),
    "page_data": lambda s, **given: page_data(**{"history": s.grower.history, **given}),
    "write_page": lambda s, **given: write_page(
        **{"path": s.folder / "page.html", "data": page_data(s.grower.history), **given}
    ),
    "read_history": lambda s, **given: read_history(**{"path": s.file, **given}),
    "save_checkpoint": lambda s, **given: save_checkpoint(
        **{
            "path": s.folder / "new.ckpt",
            "model": s.model,
            "optimizer": s.optimizer,
            "scheduler": s.scheduler,
            "grower": s.grower,
            **given,
        }
    ),
    "load_checkpoint": lambda s, **given: load_checkpoint(
        **{
            "path": s.file,
            "make_model": lambda: copy.deepcopy(s.fresh),
            "make_optimizer": lambda m: torch.optim.Adam(m.parameters()),
            "make_grower": s.make_grower,
            **given,
        }
    ),
}

NOT_A_NUMBER = ("1", [1.0], {"a": 1}, True, 1j, torch.ones(2), nn.ReLU, NAN)
NOT_WHOLE = (*NOT_A_NUMBER, 2.5, INF)
NOT_A_FLAG = (1, 0.0, "yes", None, [True])
NOT_A_NAME = (5, 1.5, True, [], ["auto"], b"auto", nn.ReLU, "nonsense", "")
NOT_A_MODEL = (
    None, "net.pt", 3, [nn.ReLU()], nn.ReLU, Of("state_dict", lambda s: s.model.state_dict(), "OrderedDict"),
    Of("parameters", lambda s: s.model.parameters(), "generator"), Of("factory", lambda s: lambda: s.fresh, "function"),
)  # fmt: skip
NOT_AN_OPTIMIZER = (
    "adam", 0.1, True, torch.optim.SGD, {"lr": 0.1}, [None], Of("model", lambda s: s.model, "Sequential"),
    Of("parameters", lambda s: list(s.model.parameters()), "tensor"),
    Of("one that is none", lambda s: [s.optimizer, "x"], "'x'"), Of("its scheduler", lambda s: s.scheduler, "StepLR"),
)  # fmt: skip
NOT_A_SCHEDULER = (
    "x", 0.1, True, StepLR, {"gamma": 0.1}, [None], Of("optimizer for it", lambda s: s.optimizer, "Adam"),
    Of("one that is none", lambda s: [s.scheduler, "x"], "'x'"),
)  # fmt: skip
ANOTHER_ONES = Of(
    "of another optimizer", lambda s: StepLR(torch.optim.SGD(s.fresh.parameters()), 3), "other than those given"
)
NOT_AN_EXAMPLE = (None, 3, 1.5, True, (), [], {}, ("a", 2), {"x": 1}, nn.ReLU)
NOT_SITES = (
    None, 3, "auto", Of("one site", lambda s: s.sites[0], "a Site"), ["0"], [None], {"a": 1}, nn.ReLU, torch.ones(2),
    Of("the model", lambda s: s.model, "a Linear"), Of("a site and a path", lambda s: [s.sites[0], "2"], "'2'"),
)  # fmt: skip
NOT_A_SITE = (
    None, 3, "nowhere", "", nn.ReLU, {"path": "2"},
    Of("all sites", lambda s: s.sites, "Sites"), Of("all merits", lambda s: s.merits, "Merits"),
    Of("a module", lambda s: s.model[1], "ReLU"), Of("a growth", lambda s: s.growth, "Growth"),
)  # fmt: skip
ANOTHER_MODELS_SITE = Of("of another model", lambda s: s.alien, "another model")
NOT_BATCHES = (
    None, 3, "train", True, b"train", nn.ReLU, Of("a tensor", lambda s: s.x, "tensor"), Of("a pair", lambda s: s.data[0], "tensor"),
    Of("a list of a pair's parts", lambda s: list(s.data[0]), "tensor"), Of("a dict", lambda s: {"x": s.x}, "tensor"),
    Of("a dataset class", lambda s: torch.utils.data.TensorDataset, "TensorDataset"), Of("the loss", lambda s: s.loss_fn, "cross_entropy"),
)  # fmt: skip
BAD_BATCHES = (
    Of("used up", lambda s: iter(()), "used up"), Of("empty", lambda s: [], "empty"), Of("of numbers", lambda s: [1, 2], "int"),
    Of("of tensors", lambda s: iter([s.x]), "tensor"), Of("of triples", lambda s: [(1, 2, 3)], "int"),
    Of("of None", lambda s: [None], "NoneType"),
)  # fmt: skip
NOT_A_LOSS = (3, "mse", True, [loss_fn], torch.ones(2), nn.MSELoss)
BAD_LOSSES = (
    Of("returns None", lambda s: lambda o, t: None, "NoneType"), Of("returns a float", lambda s: lambda o, t: 1.0, "float"),
    Of("returns a vector", lambda s: lambda o, t: o[:, 0], "shape (6,)"),
)  # fmt: skip
NOT_A_PATH = (
    None, 3, True, 1.5, b"run.ckpt", "", [], ["run.ckpt"], nn.ReLU, Of("the model", lambda s: s.model, "Sequential"),
)  # fmt: skip
NOT_A_FACTORY = (
    3, "Net", [fnn], {"a": 1}, Of("a model", lambda s: s.fresh, "Sequential"),
    Of("a state dict", lambda s: s.fresh.state_dict(), "OrderedDict"),
)  # fmt: skip
NOT_A_HISTORY = (
    None, 3, "h.json", {"growths": []}, [1], [None], nn.ReLU, Of("one growth", lambda s: s.growth, "Growth"),
    Of("its dicts", lambda s: [s.growth.to_dict()], "dict"),
)  # fmt: skip
NOT_A_GROWTH = (
    3, "grown1", {}, [], nn.ReLU, Of("a history", lambda s: s.grower.history, "History"),
    Of("a site", lambda s: s.sites[0], "Site"), Of("its dict", lambda s: s.growth.to_dict(), "dict"),
)  # fmt: skip
NOT_DATA = (None, 3, "text", [], {}, nn.ReLU, {"format": 1})

TABLE: dict[tuple[str, str], tuple[Any, ...]] = {
    ("find_sites", "model"): NOT_A_MODEL,
    ("find_sites", "example"): (*NOT_AN_EXAMPLE, Of("text", lambda s: "text", "str"), points()[:, :2]),
    ("find_sites", "form"): (*NOT_A_NAME, None),
    ("find_sites", "what"): (*NOT_A_NAME, None),
    ("find_sites", "units"): (*NOT_A_NUMBER, None, 0, -1, 1.5, INF),
    ("find_sites", "where"): NOT_A_NAME[:6] + NOT_A_NAME[7:],
    ("find_sites", "kernel_size"): ("3", 2.5, True, [3], (3, 3), NAN, INF, 0, -1, -3, 2, 4, torch.ones(2)),
    ("find_sites", "init"): (*NOT_A_NAME, ("copy", "fresh"), ("copy", 3)),
    ("measure", "model"): NOT_A_MODEL,
    ("measure", "sites"): (*NOT_SITES, [], Of("another's", lambda s: [s.alien], "another model")),
    ("measure", "batches"): (*NOT_BATCHES, *BAD_BATCHES),
    ("measure", "loss_fn"): (*NOT_A_LOSS, Of("None", lambda s: None, "is missing"), *BAD_LOSSES),
    ("measure", "norm"): (*NOT_A_NAME, None),
    ("measure", "ratio"): NOT_A_FLAG,
    ("measure", "max_batches"): (*NOT_WHOLE, 0, -1),
    ("measure", "confidence"): (*NOT_A_NUMBER, 0, 1, -0.1, 2, INF),
    ("measure", "tolerance"): (*NOT_A_NUMBER, None, 1, -0.1, 2, INF),
    ("Probe", "model"): NOT_A_MODEL,
    ("Probe", "sites"): (*NOT_SITES, [], Of("another's", lambda s: [s.alien], "another model")),
    ("Probe", "norm"): (*NOT_A_NAME, None),
    ("Probe", "ratio"): NOT_A_FLAG,
    ("Probe", "scaler"): (5, "amp", True, 1024.0, torch.amp.GradScaler),
    ("insert", "model"): NOT_A_MODEL,
    ("insert", "site"): (*NOT_A_SITE, ANOTHER_MODELS_SITE),
    ("insert", "optimizer"): NOT_AN_OPTIMIZER,
    ("insert", "scheduler"): (*NOT_A_SCHEDULER, ANOTHER_ONES),
    ("insert", "lr_factor"): (*NOT_A_NUMBER, None, 0, -1, INF),
    ("insert", "check"): (Of("three", lambda s: (s.x, s.x, s.x), "tensor"), 5, 1.5, True, (), [], {}, (None, 1), {"x": 1}, nn.ReLU),
    ("insert", "group"): (99, -1, True, 0.0, "0", {"params": []}, [0]),
    ("insert", "freeze_rest"): NOT_A_FLAG,
    ("insert", "new_lr_factor"): (*NOT_A_NUMBER, 0, -1, INF),
    ("insert", "warmup"): (*NOT_WHOLE, 0, 1, -1),
    ("insert", "depth_power"): (*NOT_A_NUMBER, None, -1, INF),
    ("insert without an optimizer", "lr_factor"): (Of("0.5", lambda s: 0.5, "needs optimizer="),),
    ("insert without an optimizer", "new_lr_factor"): (Of("0.5", lambda s: 0.5, "needs optimizer="),),
    ("insert without an optimizer", "warmup"): (Of("9", lambda s: 9, "needs optimizer="),),
    ("insert without an optimizer", "depth_power"): (Of("0.5", lambda s: 0.5, "needs optimizer="),),
    ("insert without an optimizer", "group"): (Of("0", lambda s: 0, "needs optimizer="),),
    ("insert without an optimizer", "scheduler"): (Of("one", lambda s: s.scheduler, "other than those given"),),
    ("grow", "model"): NOT_A_MODEL,
    ("grow", "site"): (*NOT_A_SITE, ANOTHER_MODELS_SITE),
    ("grow", "optimizer"): NOT_AN_OPTIMIZER,
    ("grow", "scheduler"): (*NOT_A_SCHEDULER, ANOTHER_ONES),
    ("grow", "lr_factor"): (*NOT_A_NUMBER, None, 0, -1, INF),
    ("grow", "new_lr_factor"): (*NOT_A_NUMBER, 0, -1, INF),
    ("grow", "warmup"): (*NOT_WHOLE, 0, 1, -1),
    ("grow", "depth_power"): (*NOT_A_NUMBER, None, -1, INF),
    ("grow", "freeze_rest"): NOT_A_FLAG,
    ("undo", "model"): NOT_A_MODEL,
    ("undo", "growth"): NOT_A_GROWTH,
    ("undo", "optimizer"): NOT_AN_OPTIMIZER,
    ("undo", "scheduler"): NOT_A_SCHEDULER,
    ("recycle", "model"): NOT_A_MODEL,
    ("recycle", "example"): NOT_AN_EXAMPLE,
    ("recycle", "batches"): (*(each for each in NOT_BATCHES if each is not None), *BAD_BATCHES),
    ("recycle", "optimizer"): NOT_AN_OPTIMIZER,
    ("remove_dead", "model"): NOT_A_MODEL,
    ("remove_dead", "example"): NOT_AN_EXAMPLE,
    ("remove_dead", "batches"): (*(each for each in NOT_BATCHES if each is not None), *BAD_BATCHES),
    ("remove_dead", "optimizer"): NOT_AN_OPTIMIZER,
    ("replay", "model"): NOT_A_MODEL,
    ("replay", "history"): NOT_A_HISTORY,
    ("count_flops", "model"): NOT_A_MODEL,
    ("count_flops", "example"): NOT_AN_EXAMPLE,
    ("count_flops", "elementwise"): NOT_A_FLAG,
    ("Grower", "model"): NOT_A_MODEL,
    ("Grower", "optimizer"): NOT_AN_OPTIMIZER,
    ("Grower", "scheduler"): (*NOT_A_SCHEDULER, ANOTHER_ONES),
    ("Grower", "example"): tuple(value for value in NOT_AN_EXAMPLE if value is not None),  # which is the first batch
    ("Grower", "trigger"): (None, 5, "every", True, Every, [Every(2)], lambda context: True),
    ("Grower", "tau"): (*NOT_A_NUMBER, None, -1, INF),
    ("Grower", "norm"): (*NOT_A_NAME, None),
    ("Grower", "select"): (5, 1.5, True, [], "nonsense", None),
    ("Grower", "max_growths"): (*NOT_WHOLE, None, 0, -1),
    ("Grower", "form"): (*NOT_A_NAME, None),
    ("Grower", "what"): NOT_A_NAME,
    ("Grower", "units"): (*NOT_A_NUMBER, None, 0, -1, 1.5, INF),
    ("Grower", "per"): NOT_A_NAME,
    ("Grower", "where"): (5, True, [], "nonsense", "", ["conv", 5], Of("no such path", lambda s: ["0", "head.*"], "'head.*'")),
    ("Grower", "kernel_size"): ("3", 2.5, True, [3], (3, 3), NAN, INF, 0, -1, -3, 2, 4, torch.ones(2)),
    ("Grower", "init"): (*NOT_A_NAME, ("copy", "fresh"), ("copy", 3)),
    ("Grower", "confidence"): (*NOT_A_NUMBER, 0, 1, -0.1, 2, INF),
    ("Grower", "tolerance"): (*NOT_A_NUMBER, None, 1, -0.1, INF, 0.5),
    ("Rates", "lr_factor"): (*NOT_A_NUMBER, None, 0, -1, INF),
    ("Rates", "new_lr_factor"): (*NOT_A_NUMBER, 0, -1, INF),
    ("Rates", "group"): (99, -1, True, 0.0, "0", {"params": []}, [0]),
    ("Rates", "freeze_rest"): NOT_A_FLAG,
    ("Rates", "warmup"): (*NOT_WHOLE, 0, 1, -1),
    ("Rates", "depth_power"): (*NOT_A_NUMBER, None, -1, INF),
    ("Grower", "rates"): (3, "x", True, [], Rates, {"lr_factor": 0.5}),
    ("Grower", "preset"): (*NOT_A_NAME, None),
    ("Grower", "max_factor"): (*NOT_A_NUMBER, 1, 0, -2),
    ("Grower", "floor"): (*NOT_A_NUMBER, None, 1, -0.1, INF),
    ("Grower", "max_check_share"): (*NOT_A_NUMBER, 0, 1, -0.1, INF),
    ("Grower", "averaged"): (3, "ema", [None], nn.ReLU, {"a": 1}),
    ("Grower", "seed"): ("a", 1.5, True, None, [0], -1, 2**64, NAN),
    ("Grower", "log"): (5, "print", True, [print, 3], Writer),
    ("Grower", "recycle"): NOT_A_FLAG,
    ("Grower", "strategy"): (*NOT_A_NAME, Of("a class", lambda s: Sensli, "Call it: strategy=Sensli(...)")),
    ("Grower", "step_name"): (*NOT_A_NAME, None),
    ("Grower", "trial"): (3, "yes", True, [], Trial, {"steps": 3}),
    ("Grower without an optimizer", "trial"): (Of("one", lambda s: Trial(3), "needs optimizer="),),
    ("Grower", "factor"): (*NOT_WHOLE, None, 1, 0, -1, 3),
    ("Grower", "order"): (*NOT_A_NAME, None),
    ("Grower", "spare"): (*NOT_WHOLE, None, -1),
    ("Grower", "noise"): (*NOT_A_NUMBER, None, -1, INF),
    ("GStack", "factor"): (*NOT_WHOLE, None, 1, 0, -1),
    ("AutoGrow", "start"): (*NOT_A_NAME, None),
    ("AutoGrow", "least"): (*NOT_A_NUMBER, None, -1, INF),
    ("AutoGrow", "seed"): (*NOT_WHOLE, None, -1, 2**64),
    ("ConvSenn", "tau"): (*NOT_A_NUMBER, None, -1, INF),
    ("ConvSenn", "price"): (*NOT_A_NUMBER, None, -1, INF),
    ("ConvSenn", "units"): (*NOT_A_NUMBER, None, 0, -1, 1.5, INF),
    ("ConvSenn", "seed"): (*NOT_WHOLE, None, -1, 2**64),
    ("GradMax", "units"): (*NOT_A_NUMBER, None, 0, -1, 1.5, INF),
    ("GradMax", "seed"): (*NOT_WHOLE, None, -1, 2**64),
    ("LlamaPro", "count"): (*NOT_WHOLE, None, 0, -1),
    ("Trial", "steps"): (*NOT_WHOLE, None, 0, -1),
    ("Trial", "candidates"): (*NOT_WHOLE, None, 0, -1),
    ("Trial", "batches"): (3, "train", True, b"train", nn.ReLU, Of("a tensor", lambda s: s.x, "tensor"), {"x": 1}, loss_fn),
    ("Trial", "step"): (
        3, "sgd", True, [loss_fn], nn.MSELoss, Of("of two", lambda s: lambda model, batch: 0.0, "(model, batch)"),
        Of("of five", lambda s: lambda model, optimizer, batch, scheduler, scaler: 0.0, "scaler"),
    ),
    ("Trial", "metric"): (3, "loss", True, [loss_fn], nn.MSELoss, Of("of two", lambda s: lambda model, data: 0.0, "(model, data)")),
    ("Trial", "mode"): (*NOT_A_NAME, None),
    ("Trial", "last"): (*NOT_A_NUMBER, None, 0, 1, -0.1, INF),
    ("Trial", "stateful"): (None, 3, "x", [3], Of("the model's class", lambda s: [nn.ReLU], "ReLU"), {}),
    ("Rates without an optimizer", "lr_factor"): (Of("0.5", lambda s: 0.5, "needs optimizer="),),
    ("Rates without an optimizer", "new_lr_factor"): (Of("0.5", lambda s: 0.5, "needs optimizer="),),
    ("Rates without an optimizer", "warmup"): (Of("9", lambda s: 9, "needs optimizer="),),
    ("Rates without an optimizer", "depth_power"): (Of("0.5", lambda s: 0.5, "needs optimizer="),),
    ("Grower without an optimizer", "scheduler"): (Of("one", lambda s: s.scheduler, "other than those given"),),
    ("Grower.step", "batches"): (*NOT_BATCHES, *BAD_BATCHES),
    ("Grower.watch", "scaler"): (5, "amp", True, 1024.0, torch.amp.GradScaler),
    ("Grower.step", "loss_fn"): (*NOT_A_LOSS, Of("None", lambda s: None, "is missing"), *BAD_LOSSES),
    ("Grower.step", "metric"): ("0.5", [0.5], {"loss": 1}, True, 1j, torch.ones(2), nn.ReLU, np.ones(3)),
    ("Grower.load_state_dict", "state"): NOT_DATA,
    ("At", "calls"): ((), (0,), (-3,), ("a",), (2.5,), (True,), (None,), ([],), ([0],), (["a"],), (NAN,), ([3], 4), ({3: 4},)),
    ("Every", "calls"): (*NOT_WHOLE, None, 0, -1),
    ("Plateau", "patience"): (*NOT_WHOLE, None, 0, -1),
    ("Plateau", "mode"): (*NOT_A_NAME, None),
    ("Plateau", "threshold"): (*NOT_A_NUMBER, None, -1, INF),
    ("Plateau", "min_delta"): (*NOT_A_NUMBER, None, -1, INF),
    ("Limit", "growths"): (*NOT_WHOLE, 0, -1),
    ("Limit", "parameters"): (*NOT_A_NUMBER, Of("none", lambda s: None, "needs a limit"), 0, -1, INF),
    ("Limit", "flops"): (*NOT_A_NUMBER, 0, -1, INF),
    ("Limit", "depth"): (*NOT_A_NUMBER, 0, -1, INF),
    ("squared_norm", "gradient"): (None, 3.0, "g", [[1.0]], np.ones((2, 2)), nn.ReLU, torch.ones(2, 2, dtype=torch.complex64)),
    ("squared_norm", "norm"): (*NOT_A_NAME, None, "auto"),
    ("squared_norm", "geometry"): (None, 3, (4, 4), {"size": 4}, Geometry),
    ("choose", "norm"): (*NOT_A_NAME, None),
    ("Merits.per", "cost"): NOT_A_NAME,
    ("compare_choices", "merits"): (
        None, 3, "x", [], [1], Of("sites", lambda s: s.sites, "Sites"), Of("one merit", lambda s: s.merits.best, "Merit"),
    ),
    ("compare_choices", "count"): (*NOT_WHOLE, None, 0, -1),
    ("History", "growths"): (None, 3, "h.json", {"growths": []}, [1], [None], Of("one growth", lambda s: s.growth, "Growth")),
    ("History", "record"): (3, "x", {}, []),
    ("History.append", "growth"): (*NOT_A_GROWTH, None),
    ("History.from_dict", "data"): NOT_DATA,
    ("History.from_json", "text"): (None, 3, [], {}, nn.ReLU),
    ("History.save", "path"): NOT_A_PATH,
    ("History.load", "path"): NOT_A_PATH,
    ("Growth.from_dict", "data"): NOT_DATA,
    ("page_data", "history"): NOT_A_HISTORY,
    ("write_page", "path"): NOT_A_PATH,
    ("write_page", "data"): (None, 3, "x", [], nn.ReLU, Of("a history", lambda s: s.grower.history, "History")),
    ("read_history", "path"): NOT_A_PATH,
    ("save_checkpoint", "path"): NOT_A_PATH,
    ("save_checkpoint", "model"): NOT_A_MODEL,
    ("save_checkpoint", "optimizer"): NOT_AN_OPTIMIZER,
    ("save_checkpoint", "scheduler"): NOT_A_SCHEDULER,
    ("save_checkpoint", "grower"): (3, "x", {}, Grower, Of("a history", lambda s: s.grower.history, "History")),
    ("save_checkpoint", "history"): NOT_A_HISTORY[1:],
    ("save_checkpoint", "extra"): (
        Of("a module", lambda s: s.model, "Sequential"), Of("a class", lambda s: nn.ReLU, "type"),
        Of("an array", lambda s: [np.ones(2)], "ndarray"),
        Of("a number of numpy", lambda s: {"loss": np.float64(1)}, "float64"), Of("a function", lambda s: {1: loss_fn}, "function"),
    ),
    ("load_checkpoint", "path"): NOT_A_PATH,
    ("load_checkpoint", "make_model"): (*NOT_A_FACTORY, None),
    ("load_checkpoint", "make_optimizer"): NOT_A_FACTORY,
    ("load_checkpoint", "make_scheduler"): NOT_A_FACTORY,
    ("load_checkpoint", "make_grower"): NOT_A_FACTORY,
    ("load_checkpoint", "wrap"): NOT_A_FACTORY,
    ("load_checkpoint", "random"): NOT_A_FLAG,
}  # fmt: skip


def got(value: Any) -> tuple[str, ...]:
    """The words by which a value is known again in a message."""
    if isinstance(value, Of):
        return value.words
    if isinstance(value, type):
        return (value.__name__,)
    if isinstance(value, torch.Tensor | np.ndarray):
        return ("shape",)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return (repr(value),)
    return (type(value).__name__,) if not isinstance(value, tuple | list | dict) else ()


def fault(setting: Setting, before: dict[str, Any], function: str, argument: str, value: Any) -> str | None:
    """What is wrong with the answer to a wrong call, or None."""
    wrong = value.make(setting) if isinstance(value, Of) else value
    try:
        CALLS[function](setting, **{argument: wrong})
    except (SensliError, TypeError, ValueError) as error:
        raised: Exception = error
    except Exception as error:
        return f"raised {error!r}"
    else:
        return "accepted"
    if setting.state() != before:
        return "something has changed"
    text = str(raised)
    name = "history" if function == "History.from_dict" else argument.rstrip("s")  # one of several, or all of them
    missing = [word for word in (name, *got(value)) if word not in text]
    if missing:
        return f"does not say {missing}: {text}"
    if len(text) > 400 or not text.endswith("."):
        return f"is too long, or not a sentence: {text}"
    where = Path(traceback.extract_tb(raised.__traceback__)[-1].filename)
    return None if Path(sensli.__file__).parent in where.parents else f"comes from {where}: {text}"


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(("function", "argument"), TABLE)
def test_a_wrong_argument_is_told_clearly_and_changes_nothing(setting: Setting, function: str, argument: str) -> None:
    before = setting.state()
    faults = {repr(value): fault(setting, before, function, argument, value) for value in TABLE[function, argument]}
    assert {value: fault for value, fault in faults.items() if fault is not None} == {}


# of both callbacks, which check the options of the Grower that they will make
OPTIONS: dict[str, tuple[Any, ...]] = {
    "monitor": (5, True, ["val_loss"], nn.ReLU),
    "batches": (*NOT_WHOLE, 0, -1),
    "watch": (*NOT_WHOLE, 0, -1),
    "metrics": NOT_A_FLAG,
    "example": NOT_AN_EXAMPLE,
    "averaged": TABLE["Grower", "averaged"],
    **{field.name: TABLE["Grower", field.name] for field in dataclasses.fields(Options)},
    "trial": (*TABLE["Grower", "trial"], Of("one", lambda s: Trial(3, batches=[1]), "is not an option")),
    "where": (5, True, [], "", ["conv", 5]),  # and whether the model has such a path when there is one
    "optimizer": (Of("one", lambda s: s.optimizer, "belongs to the trainer"),),
    "scheduler": (Of("one", lambda s: s.scheduler, "belongs to the trainer"),),
    "model": (Of("one", lambda s: s.model, "belongs to the trainer"),),
    "step_name": (Of("step", lambda s: "step", "belongs to the trainer"),),
}


@pytest.mark.library
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_callback_is_not_made_with_wrong_options(
    setting: Setting, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    make = importlib.import_module(f"sensli.integrations.{library}").GrowthCallback
    monkeypatch.setitem(CALLS, library, lambda s, **given: make(**{"preset": "paper", "trigger": Every(2), **given}))
    before = setting.state()
    faults = {
        (name, repr(value)): fault(setting, before, library, name, value) for name in OPTIONS for value in OPTIONS[name]
    }
    assert {row: fault for row, fault in faults.items() if fault is not None} == {}
    if library == "transformers":
        monkeypatch.setitem(CALLS, "attach", lambda s, trainer: make(Every(2)).attach(trainer))
        assert [fault(setting, before, "attach", "trainer", value) for value in (None, 3, "x", nn.ReLU)] == [None] * 4
    make(
        Every(2),
        monitor="loss",
        batches=np.int64(3),
        metrics=np.True_,
        tau=torch.tensor(0.5),
        rates=Rates(lr_factor=0.5),
    )


def test_what_is_as_good_as_the_right_type_is_taken(setting: Setting) -> None:
    """Numbers of numpy and torch, a merit for its site, merits for sites, a list of calls."""
    sites, data = setting.sites, setting.data
    merits = measure(
        setting.model,
        setting.merits,
        data,
        loss_fn,
        max_batches=np.int64(2),
        ratio=np.True_,
        confidence=np.float32(0.9),
    )
    assert [merit.site for merit in merits] == list(sites) and merits.batches <= 2 and type(merits.confidence) is float
    assert [m.site for m in measure(setting.model, iter(sites), data, loss_fn)] == list(sites)
    with Probe(setting.model, setting.merits) as probe:
        loss_fn(setting.model(setting.x), data[0][1]).backward()
    assert [merit.site for merit in probe.merits()] == list(sites)

    assert At([3, 6]).calls == At(3, 6).calls == At((6, 3)).calls == At(range(3, 7, 3)).calls == {3, 6}
    assert Every(np.int32(4)).calls == 4 and type(Every(torch.tensor(4)).calls) is int
    assert Limit(parameters=1e6).limits == {"parameters": 1_000_000}
    assert Plateau(threshold=0).threshold == 0.0

    model = deep(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.5))
    kinds = find_sites(setting.stranger, images(), kernel_size=np.int64(1))
    assert all("1)" in str(site) for site in kinds if site.kind == "conv")
    grower = Grower(
        model, optimizer, preset="paper",
            example=setting.x, trigger=Every(1), tau=torch.tensor(0.0), max_growths=np.int64(1), rates=Rates(lr_factor=torch.tensor(0.5)),
        seed=np.uint8(3),
    )  # fmt: skip
    for metric in (torch.tensor(0.5, requires_grad=True), np.float32(0.5), torch.tensor([0.5]), 1, NAN):
        grower.step(data, loss_fn, metric=metric)
    assert optimizer.param_groups[0]["lr"] == 0.5**6
    assert all(type(metric) in (float, type(None)) for _, metric in grower.history.record.metrics)
    json.dumps(grower.state_dict(), allow_nan=False)  # plain data still

    other = deep(3)
    found = measure(other, find_sites(other, setting.x), data, loss_fn)
    growth = insert(other, found.best, lr_factor=np.float64(1.0), check=data[0])
    assert str(growth.site) == str(found.best.site)
    assert replay(deep(3), [growth])[0] is not None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * 1000, "'" + "x" * 29 + "..." + "x" * 14 + "'"),
        (10**400, "..."),
        (torch.zeros(500, 500), "a float32 tensor of shape (500, 500)"),
        (list(range(1000)), "a list of 1000 entries"),
        ((1,), "(1)"),
        ({"a": [1, {}]}, "{'a': [1, {}]}"),
        (np.zeros((2, 3)), "a ndarray of shape (2, 3)"),
        (nn.Linear(2, 2), "a Linear"),
        (nn.Linear, "the class Linear"),
        (print, "the function print"),
        (Path("a") / "b", "a/b"),
    ],
)
def test_a_value_in_a_text_is_short(value: Any, text: str) -> None:
    assert text in checks.show_value(value) and len(checks.show_value(value)) < 80


@pytest.mark.slow
def test_the_table_is_long_and_its_calls_are_right_but_for_the_wrong_argument(tmp_path: Path) -> None:
    assert sum(map(len, TABLE.values())) >= 300 and {function for function, _ in TABLE} == set(CALLS)
    for name, call in CALLS.items():
        folder = tmp_path / name
        folder.mkdir()
        setting = Setting(folder)
        if name == "History.load":
            setting.grower.history.save(setting.folder / "history.json")
        call(setting)
