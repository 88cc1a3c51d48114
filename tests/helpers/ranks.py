"""Runs a function of a test module in several real processes with gloo: forked from one, or watched by nobody.

`torchrun` itself runs an example in `make thorough` (`tests/project/test_examples.py`); where nothing can be forked it starts
these processes too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
import gc, importlib, json, os, signal, sys
import torch, torch._dynamo, torch.distributed as dist  # the first optimizer would import dynamo
torch.set_num_threads(1)
module, function, file, processes, watched = *sys.argv[1:4], int(sys.argv[4]), sys.argv[5] == "watched"
work = getattr(importlib.import_module(module), function)
ranks, codes = {}, {}
gc.freeze()  # or each rank would copy what it looks through
for rank in range(processes):
    started = os.fork()
    if started == 0:
        torch.set_num_threads(1)  # makes the pool of threads again, which several threads of autograd would do at once
        break
    ranks[started] = rank
else:
    while ranks:
        ended, status = os.wait()
        codes[ranks.pop(ended)] = os.waitstatus_to_exitcode(status)
        if status != 0 and watched:  # as torchrun does: the others would wait for the one that has failed
            for left in ranks:
                os.kill(left, signal.SIGKILL)
            sys.exit(1)
    print(json.dumps([codes[rank] for rank in range(processes)]))
    sys.exit(0)
if not watched:
    os.dup2(os.open(f"{file}.{rank}", os.O_CREAT | os.O_WRONLY), 2)
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


def launch(
    function: Any, processes: int, folder: Path, imports: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the function on every rank; it must be importable by its name. ``imports``: as for `warm.run`."""
    if hasattr(os, "fork"):
        return _forked(function, processes, folder, "watched", imports)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    arguments = [str(program), function.__module__, function.__name__, str(folder / "result")]
    return programs.run([*command, *arguments], folder)


def unwatched(function: Any, processes: int, folder: Path) -> list[tuple[int, str]]:
    """The same on ranks of which none is ended because another one fails: by rank, the exit code and what it said of its error."""
    done = _forked(function, processes, folder, "unwatched")
    codes = json.loads(done.stdout.splitlines()[-1])
    return [(code, (folder / f"result.{rank}").read_text()) for rank, code in enumerate(codes)]


def _forked(
    function: Any, processes: int, folder: Path, how: str, imports: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(FORKED)
    (folder / "result.store").unlink(missing_ok=True)  # of earlier ranks, which cannot be met any more
    arguments = [function.__module__, function.__name__, str(folder / "result"), str(processes), how]
    return warm.run([str(program), *arguments], folder, imports)


def run(function: Any, processes: int, folder: Path, imports: Sequence[str] = ()) -> Any:
    """What the function returned on rank 0: tensors and plain data. ``imports``: as for `warm.run`."""
    done = launch(function, processes, folder, imports)
    assert done.returncode == 0, done.stderr[-6000:]
    return torch.load(folder / "result", weights_only=True)


def wholes(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors, whole where they were sharded. One exchange for all: `full_tensor` of each would take longer than the tests."""
    local = {name: each.to_local() if hasattr(each, "to_local") else each for name, each in tensors.items()}
    local = {name: each.detach().clone() for name, each in local.items()}
    # On a mesh of two dimensions each row of processes holds the whole, and the first is taken.
    sharded = {name: each.placements[-1].dim for name, each in tensors.items() if hasattr(each, "placements")}
    if not sharded:
        return local
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: local[name] for name in sharded})
    parts = parts[: tensors[next(iter(sharded))].device_mesh.size(-1)]
    return {**local, **{name: torch.cat([part[name] for part in parts], axis) for name, axis in sharded.items()}}
