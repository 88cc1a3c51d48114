"""The accelerator of device.cpp as `torch.device("sim")`: importing this compiles it, once for each torch, and tells torch of it.

It belongs into a process of its own that has computed nothing yet: autograd counts the devices at its first backward pass, and
none but this process's tests should see an accelerator. A plugin of pytest too: `-p sim_device`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "sim"
MODULE = "sensli_sim_device"


def build() -> Any:
    """The compiled device, from a folder outside of the source tree; others who need it meanwhile wait."""
    made_of = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    folders = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    folder = folders / f"{MODULE}-torch{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{made_of}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{MODULE}.so"
    with (folder / "compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the system, even if this process is killed
        if not (folder / "done").exists():
            _compile(folder)
            (folder / "done").touch()
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(library))
    spec = importlib.util.spec_from_file_location(MODULE, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(folder: Path) -> None:
    from torch.utils import cpp_extension

    for left in ("lock", f"{MODULE}.so"):  # by one who was killed
        (folder / left).unlink(missing_ok=True)
    os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]  # where ninja is
    options = {"extra_cflags": ["-O0", "-g0", "-w"], "build_directory": str(folder), "is_python_module": False}
    cpp_extension.load(MODULE, [str(SOURCE)], **options)


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return c.current_device() if index is None or index < 0 else index


class _Device:
    """As `torch.cuda.device`: the current device inside of a `with`."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = c.current_device()
        c.set_device(self.index)

    def __exit__(self, *_: Any) -> None:
        c.set_device(self.before)


def _seed_all(seed: int) -> None:
    for index in range(c.device_count()):
        c.default_generator(index).manual_seed(seed)


def _device_module() -> types.ModuleType:
    """What torch expects of `torch.sim`. No function for the states of all devices at once: torch asks for none either."""
    made = types.ModuleType(f"torch.{NAME}")
    made.__dict__.update(
        device=_Device,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        device_count=c.device_count,
        current_device=c.current_device,
        set_device=lambda device: c.set_device(_index(device)),
        synchronize=lambda device=None: c.synchronize(),
        empty_cache=lambda: None,
        get_rng_state=lambda device=NAME: c.default_generator(_index(device)).get_state(),
        set_rng_state=lambda state, device=NAME: c.default_generator(_index(device)).set_state(state),
        manual_seed=lambda seed: c.default_generator(c.current_device()).manual_seed(seed),
        manual_seed_all=_seed_all,
        initial_seed=lambda: c.default_generator(c.current_device()).initial_seed(),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    return made


def waits() -> int:
    """How often the host has waited for the device since `reset_counts`."""
    return sum(c.waits().values())


c = build()
reset_counts, uploads = c.reset_counts, c.uploads
torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _device_module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
torch.manual_seed = torch.random.manual_seed  # that of conftest.py seeds the CPU alone

if __name__ == "__main__":
    print(f"torch.device({NAME!r}) works with torch {torch.__version__}", file=sys.stderr)
