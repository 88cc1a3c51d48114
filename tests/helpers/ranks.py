"""Runs a function of a test module in several real processes with gloo: forked from one, or watched by nobody.

`torchrun` itself runs an example (`tests/project/test_examples.py`); where nothing can be forked it starts these processes too.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import programs
import warm

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


# The ranks are forked before anything is computed, from one process that was forked itself.
FORKED = """
import importlib, os, signal, sys
import torch, torch._dynamo, torch.distributed as dist  # the first optimizer would import dynamo
torch.set_num_threads(1)
module, function, file, processes = *sys.argv[1:4], int(sys.argv[4])
work = getattr(importlib.import_module(module), function)
ranks = set()
for rank in range(processes):
    started = os.fork()
    if started == 0:
        break
    ranks.add(started)
else:
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status != 0:  # as torchrun does: the others would wait for the one that has failed
            for left in ranks:
                os.kill(left, signal.SIGKILL)
            sys.exit(1)
    sys.exit(0)
place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
os.environ.update({name: str(value) for name, value in place.items()})  # which libraries look at, as torchrun says it
dist.init_process_group("gloo", init_method=f"file://{file}.store", rank=rank, world_size=processes)
result = work()
if rank == 0:
    torch.save(result, file)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # see above
"""


def launch(function: Any, processes: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the function on every rank; it must be importable by its name."""
    program = folder / "program.py"
    if hasattr(os, "fork"):
        program.write_text(FORKED)
        arguments = [function.__module__, function.__name__, str(folder / "result"), str(processes)]
        return warm.run([str(program), *arguments], folder)
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    arguments = [str(program), function.__module__, function.__name__, str(folder / "result")]
    return programs.run([*command, *arguments], folder)


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
