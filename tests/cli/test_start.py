"""The command as a process of its own: help without torch, Ctrl-C while it still imports, a batch that is none."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

import programs
import warm
from sensli.cli.main import main

pytestmark = pytest.mark.process

# What the installed command runs, but the process interrupts itself at the moment when it begins to import a module.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes what runs in the background ignore it
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
sys.argv = ["sensli", *{words!r}]
from sensli.cli.start import main
sys.exit(main())
"""
START = "import os, sys; import _signal as signal"  # the module of that name is loaded later
LOADED = """
import sys
sys.argv = ["sensli", *{words!r}]
from sensli.cli.start import main
try:
    main()
except SystemExit as left:
    print(left.code, "torch" in sys.modules, "numpy" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--help"], "commands:"), (["--version"], "sensli 0"), (["paper", "run", "--help"], "--preset"), (["sites"], "")],
    ids=" ".join,
)
def test_help_and_wrong_words_are_answered_without_torch(words: list[str], told: str, tmp_path: Path) -> None:
    done = programs.run([sys.executable, "-c", LOADED.format(words=words)], tmp_path)
    assert told in done.stdout and done.stdout.endswith(f"{0 if told else 2} False False\n"), done.stderr


@pytest.mark.parametrize("module", ["sensli.cli.main", "argparse", "torch"])
def test_ctrl_c_is_quiet_while_it_imports(module: str, tmp_path: Path) -> None:
    program = INTERRUPTED.format(module=module, words=["paper", "list"])
    done = programs.run([sys.executable, "-c", program], tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (130, "Interrupted.\n", "")


def test_ctrl_c_is_quiet_before_the_handler_is_set(tmp_path: Path) -> None:
    program = INTERRUPTED.format(module="signal", words=["--help"]).replace("import os, signal, sys", START)
    done = programs.run([sys.executable, "-c", program], tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (130, "Interrupted.\n", "")


def test_little_is_imported_before_the_handler_is_set(tmp_path: Path) -> None:
    program = (
        "import signal, sys; before = {*sys.modules}; import sensli.cli.start; print(sorted({*sys.modules} - before))"
    )
    done = programs.run([sys.executable, "-c", program], tmp_path)
    assert "'typing'" not in done.stdout and "'re'" not in done.stdout, done.stdout
    ours = [name for name in ast.literal_eval(done.stdout) if name.startswith("sensli")]
    assert ours == ["sensli", "sensli.cli", "sensli.cli.start"]


def test_ctrl_c_is_quiet_in_the_modules_of_a_command(tmp_path: Path) -> None:
    program = INTERRUPTED.format(module="sensli_lab.paper.commands", words=["paper", "list"])
    done = programs.run([sys.executable, "-c", program], tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (130, "Interrupted.\n", "")


def test_a_bare_tensor_for_a_batch_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(4, 2)\n")
    torch.save(torch.zeros(3, 4), tmp_path / "x.pt")
    program = "import runpy, sys; sys.argv[0] = 'sensli'; runpy.run_module('sensli', run_name='__main__')"
    done = warm.run(["-c", program, "sites", "m.py:make", "--batch", "x.pt"], tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    told = "sensli: 'x.pt' contains a float32 tensor of shape (3, 4), but merits need targets too. Save a pair, torch.save((x, y), path)"
    assert told in done.stderr


def test_a_dict_for_a_model_without_a_loss_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))\n"
    Path("small.py").write_text(text)
    torch.save({"input": torch.zeros(3, 4), "labels": torch.zeros(3)}, "d.pt")
    assert main(["sites", "small.py:make", "--batch", "d.pt"]) == 2
    told = "sensli: the batch is a dict ('input', 'labels'), but the model returns a Tensor without .loss. Save pairs instead"
    assert told in capsys.readouterr().err
