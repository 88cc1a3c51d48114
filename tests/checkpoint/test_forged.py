"""Forged and damaged files: always one clear error, nothing changed, no code run; or a file that can be used."""

from __future__ import annotations

import collections
import hashlib
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from forging import JSON_VALUES, OTHERS, RAN, VALUES, Trap, altered, damaged
from sensli import Grower, Growth, History, Rates, load_checkpoint, replay, save_checkpoint, triggers
from sensli.checkpoint import storage
from sensli.errors import CheckpointError, HistoryError
from sensli.page import page_data, read_history, write_page

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Net(nn.Module):
    """A stack of blocks, in which twins go and which is renumbered, and a plain end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)
        )
        self.end = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.end(x)
        return out


def make_model() -> nn.Module:
    return Net()


def make_optimizer(model: nn.Module) -> Any:
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.01)


def make_scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=100)


def make_grower(model: Any, optimizer: Any, scheduler: Any) -> Grower:
    trigger = triggers.Every(1) | triggers.Plateau(2)
    options: dict[str, Any] = {"tau": 0.0, "rates": Rates(lr_factor=0.9, new_lr_factor=0.5), "scheduler": scheduler}
    return Grower(model, optimizer, preset="paper", example=X[:1], trigger=trigger, **options)


def train(model: Any, optimizer: Any, scheduler: Any) -> None:
    optimizer.zero_grad()
    cross_entropy(model(X), Y).backward()
    optimizer.step()
    scheduler.step()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    """A checkpoint of a network that has grown twice, and its history."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    grower = make_grower(model, optimizer, scheduler)
    for metric in (1.0, 0.5):
        train(model, optimizer, scheduler)
        grower.step([(X, Y)], cross_entropy, metric=metric)
        train(model, optimizer, scheduler)
    file = tmp_path_factory.mktemp("forged") / "good"
    save_checkpoint(file, model, optimizer=optimizer, scheduler=scheduler, grower=grower, extra={"epoch": 2})
    assert len(grower.history) == 2
    return file, grower.history


def sealed(body: bytes) -> bytes:
    """Any bytes as the body of a checkpoint, with a header that is right for them."""
    header = json.dumps({"format": storage.FORMAT, "length": len(body), "sha256": hashlib.sha256(body).hexdigest()})
    return storage.MAGIC + header.ljust(storage._ROOM).encode() + b"\n" + body


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def states() -> list[Any]:
    name, keys, *rest = numpy.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), rest]


def check_checkpoint(file: Path) -> str | None:
    """Load and, if that works, train on: what came of it, or None. Anything but a clear error goes through."""
    before = states()
    try:
        found = load_checkpoint(
            file, make_model, make_optimizer, make_scheduler=make_scheduler, make_grower=make_grower
        )
    except (CheckpointError, HistoryError) as error:
        assert str(error) and "\n" not in str(error).split(" that make_model built: ")[0]
        assert states() == before
        return str(error)
    finally:
        assert RAN == []
    train(found.model, found.optimizer, found.scheduler)
    return None


def forge_checkpoint(run: tuple[Path, History], draw: random.Random) -> tuple[bytes, str]:
    whole = run[0].read_bytes()
    body = whole[len(storage.MAGIC) + storage._ROOM + 1 :]
    kind = draw.choice(["bytes", "body", "entry", "entry", "entry", "entry", "entry"])
    if kind == "bytes":
        return damaged(whole, draw)
    if kind == "body":
        forged, told = damaged(body, draw)
        return sealed(forged), f"body {told}"
    content, told = altered(storage.read_checkpoint(run[0]), draw, [*VALUES, Trap()])
    return sealed(saved(content)), told


def forge_checkpoints(run: tuple[Path, History], folder: Path, seeds: range) -> tuple[int, int]:
    refused = taken = 0
    for seed in seeds:
        forged, told = forge_checkpoint(run, random.Random(seed))
        (folder / "forged").write_bytes(forged)
        try:
            outcome = check_checkpoint(folder / "forged")
        except Exception as error:
            raise AssertionError(f"seed {seed}: {told}: {type(error).__name__}: {error}") from error
        refused, taken = refused + (outcome is not None), taken + (outcome is None)
    return refused, taken


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_forged_checkpoints(run: tuple[Path, History], tmp_path: Path) -> None:
    assert check_checkpoint(run[0]) is None
    refused, taken = forge_checkpoints(run, tmp_path, range(40))
    assert refused > 3 * taken > 0


def test_files_of_another_kind_are_no_checkpoints(run: tuple[Path, History], tmp_path: Path) -> None:
    contents = [*OTHERS.values(), saved({"model": 1}), saved(Trap()), run[1].to_json().encode()]
    for number, content in enumerate(contents):
        for forged in (content, sealed(content)):
            (tmp_path / str(number)).write_bytes(forged)
            assert check_checkpoint(tmp_path / str(number)) is not None
    for place in (tmp_path, tmp_path / "absent", tmp_path / "nul\0l", tmp_path / "0" / "x"):
        assert "cannot read the checkpoint" in (check_checkpoint(place) or "")
    for header in (
        "[]",
        "{}",
        '{"format": 1e999}',
        '{"format": true}',
        '{"format": 0}',
        '{"format": -1}',
        '{"format": "1"}',
        "NaN",
    ):
        (tmp_path / "a").write_bytes(storage.MAGIC + header.ljust(storage._ROOM).encode() + b"\nbody")
        assert "header cannot be read" in (check_checkpoint(tmp_path / "a") or "")


def test_a_checkpoint_of_another_model_is_refused(run: tuple[Path, History], tmp_path: Path) -> None:
    other = nn.Linear(2, 2)
    save_checkpoint(tmp_path / "other", other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    assert "do not fit the Net" in (check_checkpoint(tmp_path / "other") or "")


def check_history(data: Any) -> bool:
    """Read, show and replay: whether that worked. Anything but a clear error goes through, and a refused replay changes nothing."""
    try:
        history = History.from_dict(data)
        assert str(history) is not None and history._repr_html_()
        assert History.from_json(history.to_json()) == history
        if history.record:
            write_page("page.html", page_data(history))
            [str(look) for look in history.record.decisions]
        model = make_model()
        before = [(name, id(value)) for name, value in (*model.named_modules(), *model.named_parameters())]
        state = {
            key: list(vars(module).items()) for key, module in model.named_modules() if key == "" or key == "blocks"
        }
        try:
            replay(model, history)
        except HistoryError:
            assert before == [(name, id(value)) for name, value in (*model.named_modules(), *model.named_parameters())]
            assert repr(state) == repr(
                {key: list(vars(m).items()) for key, m in model.named_modules() if key in ("", "blocks")}
            )
            raise
        model(X)
    except HistoryError as error:
        assert str(error)
        return False
    return True


def forge_histories(history: History, seeds: range) -> tuple[int, int]:
    data = json.loads(history.to_json())
    refused = taken = 0
    for seed in seeds:
        draw = random.Random(seed)
        forged, told = altered(data, draw, JSON_VALUES)
        try:
            fine = check_history(forged)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {told}: {type(error).__name__}: {error}") from error
        refused, taken = refused + (not fine), taken + fine
    return refused, taken


@pytest.mark.slow
def test_forged_histories(run: tuple[Path, History], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_history(run[1].to_dict())
    refused, taken = forge_histories(run[1], range(250))
    assert refused > taken > 0


def test_damaged_texts_of_histories(run: tuple[Path, History], tmp_path: Path) -> None:
    text = run[1].to_json().encode()
    for seed in range(150):
        forged, told = damaged(text, random.Random(seed))
        (tmp_path / "a").write_bytes(forged)
        for read in (History.load, read_history):
            try:
                read(tmp_path / "a")
            except HistoryError as error:
                assert str(error), told


def test_what_is_no_history_is_refused(tmp_path: Path) -> None:
    deep = "[" * 100_000
    for number, content in enumerate(
        [*OTHERS.values(), deep.encode(), b"\xff\xfe", b"[" + b"9" * 5000 + b"]", saved(Trap())]
    ):
        (tmp_path / str(number)).write_bytes(content)
        for read in (History.load, read_history):
            with pytest.raises(HistoryError):
                read(tmp_path / str(number))
    assert RAN == []
    for place in (tmp_path, tmp_path / "absent", tmp_path / "0" / "x"):
        for read in (History.load, read_history):
            with pytest.raises(HistoryError, match=r"cannot |without a history"):
                read(place)
    for data in (None, 3, "x", [], {}, {"growths": {}}, {"growths": "x"}, collections.Counter("growths")):
        with pytest.raises(HistoryError):
            History.from_dict(data)  # type: ignore[arg-type]
        with pytest.raises(HistoryError):
            Growth.from_dict(data)  # type: ignore[arg-type]
