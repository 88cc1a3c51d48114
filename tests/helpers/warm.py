"""Programs that start in a process which has imported torch already: importing it costs more than most of what they do.

`run` starts a program as `programs.run` does. The first one starts a server, which imports what most programs need and computes
nothing; each program is a fork of it, with a folder, an environment, arguments and output of its own. What a test claims about the start
itself (which modules it imports, what a signal does meanwhile) needs `programs.run`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import programs

_servers: list[subprocess.Popen[str]] = []  # of this process, at most one


def run(
    arguments: list[str], folder: Path, imports: Sequence[str] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python arguments`` in the folder to its end: a script, or -c and code.

    ``imports``: modules that the server imports now, for this program and those after it. ``more``: variables of the environment.
    """
    if not hasattr(os, "fork"):
        return programs.run([sys.executable, *arguments], folder, **more)
    with tempfile.TemporaryDirectory() as kept:
        out, err = Path(kept, "out"), Path(kept, "err")
        request = {
            "arguments": arguments,
            "imports": list(imports),
            "folder": str(folder),
            "environment": programs.environment(**more),
            "output": [str(out), str(err)],
        }
        code = _ask(request)
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


def _ask(request: dict[str, Any]) -> int:
    """Have the server start it, and wait for its end."""
    if not _servers:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, str(Path(__file__))]
        _servers.append(subprocess.Popen(command, env=programs.environment(), start_new_session=True, **pipes))
        atexit.register(_stop)
    server = _servers[0]
    assert server.stdin is not None and server.stdout is not None
    old = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(programs.HANGS)
    try:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())
    except BaseException:  # of what is still running nothing may stay
        _stop()
        raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def _hangs(*_: Any) -> None:
    raise TimeoutError(f"the program hangs: it has run for {programs.HANGS} seconds")


def _stop() -> None:
    for server in _servers:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
    _servers.clear()


def _serve() -> None:
    import pytest  # noqa: F401
    import torch
    import torch._dynamo  # the first optimizer would import it
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    import sensli

    for name in sensli.__all__:
        getattr(sensli, name)
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        for name in request["imports"]:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # no program need look through what was imported, which would copy all of it for the program
        child = os.fork()
        if child == 0:
            _leave(_become(request))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(request: dict[str, Any]) -> int:
    """Run the program in this process, and return its exit code."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for place, number in ((os.devnull, 0), *zip(request["output"], (1, 2), strict=True)):
        file = os.open(place, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    program, *arguments = request["arguments"]
    try:
        if program == "-c":
            code, *arguments = arguments
            sys.path[0], sys.argv = "", ["-c", *arguments]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path[0], sys.argv = str(Path(program).resolve().parent), [program, *arguments]
            runpy.run_path(program, run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _leave(code: int) -> None:
    """End as Python does, but for taking apart all that was imported: that takes longer than most programs."""
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # Python has its own way to say that
    os._exit(code)


if __name__ == "__main__":
    _serve()
