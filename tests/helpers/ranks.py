"""Runs a function of a test module in several real processes under torchrun, with gloo."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import programs

PROGRAM = """
import importlib, os, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
module, function, file = sys.argv[1:4]
result = getattr(importlib.import_module(module), function)()
if dist.get_rank() == 0:
    torch.save(result, file)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
sys.stderr.flush()
# A thread of gloo may drop the last reference to a tensor while the interpreter ends, which aborts the process.
os._exit(0)
"""


def launch(function: Any, processes: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """torchrun the function; it must be importable by its name."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    arguments = [str(program), function.__module__, function.__name__, str(folder / "result")]
    return programs.run([*torchrun, *arguments], folder)


def without_torchrun(function: Any, processes: int, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """The same from processes that nobody watches, by rank."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(processes)}
        command = [sys.executable, str(program), function.__module__, function.__name__, str(folder / "result")]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=programs.environment(**place), cwd=folder, **pipes))
    ended = []
    for process in started:
        try:
            out, err = process.communicate(timeout=programs.HANGS)
        finally:
            process.kill()
        ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return ended


def run(function: Any, processes: int, folder: Path) -> Any:
    """What the function returned on rank 0: tensors and plain data."""
    done = launch(function, processes, folder)
    assert done.returncode == 0, done.stderr[-6000:]
    return torch.load(folder / "result", weights_only=True)
