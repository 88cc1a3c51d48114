"""A grown model exports with torch.export and to ONNX, and then runs where sensli cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import programs
from sensli import find_sites, insert

pytestmark = pytest.mark.process


class Functional(nn.Module):
    """No activation modules: layers go in front of others, in chains."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = torch.relu(self.b(x))
        out: Tensor = self.c(x.mean((2, 3)))
        return out


def grown(form: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 8, 8)
    model = Functional()
    for site in find_sites(model, x, form=form):
        insert(model, site)
    with torch.no_grad():
        for parameter in model.parameters():  # as if it had trained
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval(), x


RUN_EXPORTED = """
import sys; sys.modules["sensli"] = None
import torch
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    x, expected = torch.load(folder + "/pair", weights_only=True)
    found = torch.export.load(folder + "/model.pt2").module()(x)
    torch.testing.assert_close(found, expected)
"""

RUN_ONNX = """
import sys; sys.modules["sensli"] = sys.modules["torch"] = None
import numpy, onnxruntime
folder = sys.argv[1]
pair = numpy.load(folder + "/pair.npz")
session = onnxruntime.InferenceSession(folder + "/model.onnx", providers=["CPUExecutionProvider"])
(found,) = session.run(None, {session.get_inputs()[0].name: pair["x"]})
numpy.testing.assert_allclose(found, pair["y"], rtol=1e-4, atol=1e-5)
"""


def run(program: str, *folders: Path) -> None:
    done = programs.run([sys.executable, "-I", "-c", program, *map(str, folders)], folders[0])
    assert done.returncode == 0, done.stderr


def test_torch_export_runs_without_sensli(tmp_path: Path) -> None:
    folders = []
    for form in ("auto", "parametric"):
        model, x = grown(form)
        folders.append(tmp_path / form)
        folders[-1].mkdir()
        torch.export.save(torch.export.export(model, (x,)), folders[-1] / "model.pt2")
        torch.save((x, model(x).detach()), folders[-1] / "pair")
    run(RUN_EXPORTED, *folders)


@pytest.mark.filterwarnings("ignore")  # of the exporter about its own future
def test_onnx_runs_without_sensli_and_torch(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    numpy = pytest.importorskip("numpy")
    model, x = grown("auto")
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    numpy.savez(tmp_path / "pair.npz", x=x.numpy(), y=model(x).detach().numpy())
    run(RUN_ONNX, tmp_path)
