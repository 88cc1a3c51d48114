"""A model and an example named on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from sensli.errors import BadExample, MissingExtra, UnsupportedModel
from sensli.growing.terminal import how_to_get


def load_model(name: str) -> nn.Module:
    """The model that a name means: a directory of the transformers library, or ``MODULE:FACTORY``.

    MODULE is an importable module or a .py file, FACTORY a function, class or model in it.
    """
    if Path(name).is_dir():
        return _from_directory(Path(name))
    module_name, colon, factory_name = name.rpartition(":")
    if not colon or not module_name or not factory_name:
        raise UnsupportedModel(
            f"'{name}' is not a model: write MODULE:FACTORY, such as mymodels:make_cnn or path/to/file.py:Net."
        )
    module = _import(module_name)
    factory = getattr(module, factory_name, None)
    if factory is None:
        offered = (
            ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")) or "nothing callable"
        )
        raise UnsupportedModel(f"'{module_name}' has no '{factory_name}'; it offers: {offered}.")
    try:
        model = factory if isinstance(factory, nn.Module) else factory()
    except Exception as error:
        raise UnsupportedModel(
            f"calling {name} without arguments failed: {type(error).__name__}: {error}. Give a function that builds the model."
        ) from error
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"{name} returned {type(model).__name__}, not an nn.Module.")
    return model


def _from_directory(path: Path) -> nn.Module:
    """The model that ``save_pretrained`` wrote there; nothing is downloaded."""
    if not (path / "config.json").is_file():
        raise UnsupportedModel(
            f"'{path}' is a directory without config.json, so it does not contain a model of the transformers library. Give one that "
            "save_pretrained wrote, or MODULE:FACTORY."
        )
    try:
        import transformers
    except ImportError:
        raise MissingExtra(
            f"reading the model in '{path}' needs the package transformers. Get it with: {how_to_get('transformers')}"
        ) from None
    try:
        configuration = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        names = configuration.architectures or ["AutoModelForCausalLM"]
        model = getattr(transformers, names[0]).from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise UnsupportedModel(f"the model in '{path}' cannot be loaded: {type(error).__name__}: {error}.") from error
    assert isinstance(model, nn.Module)
    return model


def _import(name: str) -> object:
    try:
        if name.endswith(".py"):
            return _run_file(Path(name))
        sys.path.insert(0, "")  # as `python -m` does: modules of the current folder
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove("")
    except Exception as error:
        raise UnsupportedModel(f"'{name}' cannot be imported: {type(error).__name__}: {error}.") from error


def _run_file(path: Path) -> object:
    # Under its own name, as an import would be, but never in place of another module: a file may be called random.py.
    name = path.stem if path.stem not in sys.modules else f"{path.stem} (a file)"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def parse_input(text: str) -> Tensor:
    """A tensor from ``1x3x32x32`` or, with a type, ``int64:1x128``; whole numbers are zeros, so that they are valid indices."""
    found = re.fullmatch(r"(?:(\w+):)?([1-9][0-9]*(?:x[1-9][0-9]*)*)", text)
    dtype = getattr(torch, found.group(1) or "float32", None) if found else None
    if not found or not isinstance(dtype, torch.dtype):
        raise BadExample(f"'{text}' is not an input: write a shape such as 1x3x32x32, or with a type int64:1x128.")
    shape = [int(size) for size in found.group(2).split("x")]
    try:
        if dtype.is_floating_point:
            return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0), device="cpu")
        return torch.zeros(shape, dtype=dtype, device="cpu")
    except (RuntimeError, TypeError, ValueError, MemoryError) as error:
        why = str(error).partition("\n")[0]
        raise BadExample(
            f"the input '{text}' cannot be created: {why}. Give a smaller shape or another type."
        ) from error
