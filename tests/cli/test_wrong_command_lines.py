"""Wrong command lines: exit code 2 and one clear line, never a traceback; and output that cannot be written."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import programs
import warm
from sensli import History
from sensli.cli.main import main
from sensli.surgery.record import Decision, Record

MODELS = """
import sys
import torch
from torch import nn

def make(): return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
def tokens(): return nn.Sequential(nn.Embedding(5, 4), nn.ReLU(), nn.Linear(4, 5))
def conv(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
def broken(): raise RuntimeError("no\\nweights")
def exits(): sys.exit(5)
def needs(a): return nn.Linear(a, a)
def none(): return None
def kind(): return nn.Linear
def scripted(): return torch.jit.script(make())
def lazy(): return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
def recursion(): return recursion()
def assertion(): assert False
def meta():
    with torch.device("meta"):
        return make()

class Bad(nn.Module):
    def forward(self, x): raise ValueError("bad\\nforward")

class Exits(nn.Module):
    def forward(self, x): raise SystemExit(3)

class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make()
    def forward(self, x): return {"a": self.net(x)}

number = 3
"""

NAMES = [
    "m",
    "m:",
    "m:gone",
    ":make",
    "nothere:make",
    "nothere.py:make",
    "syntax.py:x",
    "syntax:x",
    "exits:make",
    "exits.py:make",
    "imports:x",
    "m:broken",
    "m:exits",
    "m:needs",
    "m:none",
    "m:kind",
    "m:scripted",
    "m:lazy",
    "m:recursion",
    "m:assertion",
    "m:meta",
    "m:Bad",
    "m:Exits",
    "m:number",
    "m:nn",
    "m:torch",
    "folder",
    "hf",
    "text.txt",
    "text.txt:make",
    "folder:make",
    "folder/x.py:make",
    "m.py",
    "..:make",
    ".m:make",
    "m..x:make",
    "m:make:x",
    "json:loads",
    "1:2",
    "os:getcwd",
    "torch.nn:Linear",
    "/dev/null:make",
    "/dev/null.py:x",
]
SHAPES = [
    "x",
    "1x",
    "x1",
    "1xax3",
    "1,2",
    "1x0",
    "0",
    "0x4",
    "1.5x4",
    "1x5",
    "1X4",
    "int64:1x4",
    "float99:1x4",
    "float64:1x4",
    "bool:1x4",
    "complex64:1x4",
    "int8:",
    "Tensor:1x4",
    "nn:1x4",
    "quint8:1x4",
    "float8_e4m3fn:1x4",
    "uint16:1x4",
    "99999999999999999999x4",
    "1000000x1000000x100",
    "1x4x",
    "__name__:1x4",
]
BATCHES: dict[str, Any] = {
    "number": {"a": 1},
    "nothing": [],
    "single": (torch.zeros(8, 4),),
    "tensor": torch.zeros(3, 4),
    "tensors": [torch.zeros(3, 4), torch.zeros(3)],
    "width": (torch.zeros(8, 3), torch.zeros(8).long()),
    "length": (torch.zeros(8, 4), torch.zeros(9).long()),
    "class": (torch.zeros(8, 4), torch.full((8,), 7)),
    "target": (torch.zeros(8, 4), 3),
    "input": (3, torch.zeros(8)),
    "keyword": {"x": torch.zeros(8, 4)},
    "empty": (torch.zeros(0, 4), torch.zeros(0).long()),
    "nan": (torch.full((8, 4), torch.nan), torch.zeros(8).long()),
    "shape": (torch.zeros(8, 4), torch.zeros(8, 3)),
    "lists": ([1], [2]),
    "whole": (torch.zeros(8, 4).long(), torch.zeros(8).long()),
    "mixed": [(torch.zeros(8, 4), torch.zeros(8).long()), 3],
    "key": {1: torch.zeros(2, 4)},
    "module": torch.nn.Linear(2, 2),
    "kinds": [(torch.zeros(8, 4), torch.zeros(8).long()), {"input": torch.zeros(8, 4)}],
    "scalar": (torch.tensor(1.0), torch.tensor(1)),
}
FILES = ["absent", "folder", "text.txt", "empty.txt", "binary.bin", "cut.pt", "growths.json", "/dev/null"]
OPTIONS = [
    ["--runs", "0"], ["--runs", "-1"], ["--runs", "x"], ["--runs", "1.5"], ["--runs", str(10**12)], ["--seed", "x"], ["--seed", "1.5"],
    ["--epochs-scale", "0"], ["--epochs-scale", "-1"], ["--epochs-scale", "nan"], ["--epochs-scale", "inf"], ["--epochs-scale", "x"],
    ["--epochs-scale", "1e300"], ["--preset", "nope"], ["--preset", ""], ["--out", "text.txt"], ["--unknown"],
]  # fmt: skip


def lines() -> Iterator[list[str]]:
    for name in ["", *NAMES, "x" * 300 + ":make", "a b:c", "\0:make"]:
        yield ["sites", name, "--input", "1x4"]
    for shape in ["", *SHAPES, "\uff11x\uff14"]:
        yield ["sites", "m:make", "--input", shape]
    yield from (["sites", "m:make", "--input=-1x4"], ["sites", "m:make", "--input", "1x4", "--input", "1x4"])
    yield from (
        ["sites", "m:tokens", "--input", "1x4"],
        ["sites", "m:conv", "--input", "1x3x2x2"],
        ["sites", "m:make"],
        ["sites"],
    )
    for options in (
        ["--form", "x"],
        ["--where", "x"],
        ["--count", "0"],
        ["--count", "x"],
        ["--length", "-1"],
        ["--what", "x"],
        ["--what", ""],
        *(
            ["--what", "units", "--units", number]
            for number in ("0", "-1", "x", "", "0.0", "1.0", "1.5", "nan", "inf", "1e400")
        ),
        ["--units", "8"],
        ["--what", "layers", "--units", "0.5"],
        ["--per", "x"],
        ["--per", "parameters"],
        ["--batch", "good.pt"],
    ):
        yield ["sites", "m:make", "--input", "1x4", *options]
    for batch in [*(f"{name}.pt" for name in BATCHES), *FILES, "bad.safetensors", "absent.safetensors"]:
        yield ["sites", "m:make", "--batch", batch]
    yield from (["sites", "m:Mapped", "--batch", "good.pt"], ["sites", "m:lazy", "--batch", "good.pt"])
    for text in FILES:
        yield ["sites", "m:tokens", "--text", text]
    yield ["sites", "m:make", "--text", "text.txt"]
    for file in [*FILES, "good.pt", "\0"]:
        yield ["report", file]
    for out in ("folder", "text.txt/x", "/dev/null", "/dev/full", "\0"):
        yield ["report", "history.json", "--out", out]
    yield from (["report"], ["bench"])
    for out in ("text.txt", "text.txt/x", "/dev/null", "\0"):
        yield ["demo", "--out", out]
    for seed in ("x", "1.5", "-1", str(2**70)):
        yield ["demo", "--seed", seed]
    for command in ("run", "show"):
        for name in (
            "99",
            "",
            "nope",
            "absent.json",
            "list.json",
            "cut.json",
            "cut.toml",
            "name.json",
            "bytes.json",
            "folder",
            "2.5",
            "\0.json",
        ):
            yield ["paper", command, name]
        for options in [*OPTIONS, ["--as", "nope"], ["--as", ""], ["--out", "text.txt/x"]]:
            yield ["paper", command, "2", *options]
        yield ["paper", command]
    for command in ("list", "report"):
        for options in OPTIONS:
            yield ["paper", command, *options]
    cnn = ["paper", "run", "1", "--preset", "smoke"]
    yield from (
        [*cnn, "--device", "cuda"],
        [*cnn, "--device", "x"],
        [*cnn, "--data", "text.txt"],
        [*cnn, "--data", "text.txt/x"],
    )
    ray = ["paper", "run", "2", "--ray-address", "x"]
    yield from (
        ray,
        ["paper", "run", "2", "--ray-cpus", "1"],
        ["paper", "run", "2", "--on", "moon"],
        ["paper", "show", "2", "--device", "cpu"],
    )
    yield from (
        [],
        ["fly"],
        ["--bad"],
        ["paper"],
        ["paper", "fly"],
        ["paper", "report", "--to", "text.txt/x"],
        ["paper", "list", "x"],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and all kinds of files in it."""
    folder = tmp_path_factory.mktemp("wrong")
    texts = {
        "m.py": MODELS, "syntax.py": "def x(:\n", "exits.py": "import sys; sys.exit(4)\n", "imports.py": "import nothere_at_all\n",
        "text.txt": "hello world " * 200, "empty.txt": "", "growths.json": '{"growths": []}', "list.json": "[]", "cut.json": "{",
        "cut.toml": "a = ", "name.json": '{"name": 3}', "hf/config.json": '{"model_type": "nope"}', "bad.safetensors": "nope",
    }  # fmt: skip
    for name in ("folder", "hf"):
        (folder / name).mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name, batch in {**BATCHES, "good": (torch.randn(8, 4), torch.zeros(8).long())}.items():
        torch.save(batch, folder / f"{name}.pt")
    (folder / "cut.pt").write_bytes((folder / "good.pt").read_bytes()[:300])
    (folder / "binary.bin").write_bytes(bytes(range(256)))
    (folder / "bytes.json").write_bytes(b"\xff\xfe\x00")
    History(record=Record(decisions=[Decision(1, 1.0, "largest", "why")], calls=3)).save(folder / "history.json")
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_every_wrong_command_line_gives_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SENSLI_OFFLINE", "1")
    before = sorted(path.name for path in folder.iterdir())
    wrong = list(lines())
    assert len(wrong) > 225
    for line in wrong:
        try:
            code: Any = main(line)
        except SystemExit as error:  # argparse: the usage, then the line
            code = error.code
        except Exception as error:
            raise AssertionError(f"{line}: {type(error).__name__}: {error}") from error
        printed = capsys.readouterr().err
        told = [
            text for text in printed.splitlines() if text.startswith("sensli") and "error: " in text
        ] or printed.splitlines()
        assert code == 2 and len(told) == 1 and told[0].startswith("sensli") and len(told[0]) > 20, (
            line,
            code,
            printed,
        )
    assert sorted(path.name for path in folder.iterdir() if path.name not in ("__pycache__", "results")) == before


# Standard output is a full disk, or a pipe that nobody reads: as after `> /dev/full` and `| true`.
INTO = {"disk": "os.open('/dev/full', os.O_WRONLY)", "pipe": "(ends := os.pipe(), os.close(ends[0]))[0][1]"}
PROGRAM = """
import os, runpy, sys
os.dup2({into}, 1)
runpy.run_module("sensli.cli", run_name="__main__")
"""


@pytest.mark.process
@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_output_that_cannot_be_written(folder: Path) -> None:
    full = warm.run(["-c", PROGRAM.format(into=INTO["disk"]), "sites", "m:make", "--input", "1x4"], folder)
    assert full.returncode == 2 and full.stderr == "sensli: [Errno 28] No space left on device\n"
    cut = warm.run(["-c", PROGRAM.format(into=INTO["pipe"]), "paper", "list"], folder)
    assert cut.returncode == 0 and cut.stderr == ""
    # Python itself notices at its start that there is no standard output
    closed = programs.run(["bash", "-c", f"{sys.executable} -m sensli.cli paper list >&-"], folder)
    assert closed.returncode == 0 and closed.stderr == ""


def test_what_a_terminal_cannot_show_does_not_end_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["paper", "run", "8", "--runs", "1", "--epochs-scale", "0.01", "--out", "plain"]) == 0
    assert b"\\u2192" in written.getvalue()  # an arrow
