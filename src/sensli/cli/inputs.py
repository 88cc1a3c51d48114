"""A model, an example and batches named on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from sensli.checkpoint import storage
from sensli.cli.terminal import how_to_get
from sensli.errors import BadExample, MissingExtra, UnsupportedModel
from sensli.merits.catching import LossFunction
from sensli.modules.running import describe


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
        offered = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise UnsupportedModel(f"'{module_name}' has no '{factory_name}'; it offers: {offered or 'nothing callable'}.")
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


def read_batches(path: Path) -> list[Any]:
    """One batch or a list of them: dicts of keyword arguments, or (input, target) pairs; from torch.save or a safetensors file."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            found = torch.load(path, weights_only=True)  # runs no code from the file
    except OSError:
        raise
    except Exception as error:
        raise BadExample(
            f"'{path}' cannot be read as a batch: {type(error).__name__}: {storage.reason_in(error)}. Give a dict or a tuple of tensors "
            "written by torch.save, or a .safetensors file."
        ) from error
    if isinstance(found, Tensor) or (isinstance(found, list) and found and all(isinstance(x, Tensor) for x in found)):
        what = f"a {describe(found)}" if isinstance(found, Tensor) else f"a list of {len(found)} tensors"
        raise BadExample(
            f"'{path}' contains {what}, but merits need targets too. Save a pair, torch.save((x, y), path), or a list of pairs; to list "
            "the sites without ranking them give --input."
        )
    batches = found if isinstance(found, list) else [found]
    if not batches:
        raise BadExample(f"'{path}' contains an empty list. Give at least one batch.")
    for batch in batches:
        if not _is_batch(batch):
            raise BadExample(
                f"'{path}' contains a {type(batch).__name__}, but a batch must be a dict of keyword arguments or a pair (input, target) "
                "of tensors."
            )
    if len({type(batch) for batch in batches}) > 1:
        raise BadExample(f"'{path}' contains both dicts and pairs. Give batches of one kind.")
    return batches


def _is_batch(batch: Any) -> bool:
    if isinstance(batch, dict):
        return bool(batch) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in batch.items())
    return isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)


_WINDOWS, _BATCHES = 8, 8  # windows in a batch, and batches, that are read of a text


def text_batches(path: Path, model: nn.Module, directory: Path | None, length: int) -> list[Any]:
    """The text in windows of ``length`` tokens, by the tokenizer in the model's directory, or byte by byte where there is none."""
    tokens = _tokens(path.read_text(errors="replace"), directory)
    # How many positions the model knows, if its configuration says so.
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    length = min(length, longest) if isinstance(longest, int) else length
    if len(tokens) < length + 1:
        raise BadExample(
            f"'{path}' has {len(tokens)} tokens, fewer than the {length + 1} of one window. Give a longer text."
        )
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    known = max(tables, default=None)
    if known is not None and int(tokens.max()) >= known:
        raise BadExample(
            f"'{path}' read byte by byte needs a vocabulary of {int(tokens.max()) + 1}, but the model knows only {known} tokens. Put its "
            "tokenizer into the model's directory, or give ready batches with --batch."
        )
    windows = tokens[: (len(tokens) - 1) // length * length + 1].unfold(0, length + 1, length)[: _WINDOWS * _BATCHES]
    if "labels" in inspect.signature(model.forward).parameters:
        return [{"input_ids": rows[:, :-1], "labels": rows[:, :-1].clone()} for rows in windows.split(_WINDOWS)]
    return [(rows[:, :-1], rows[:, 1:]) for rows in windows.split(_WINDOWS)]


def _own_loss(output: Any, batch: Any) -> Tensor:
    loss: Tensor | None = getattr(output, "loss", None)
    if loss is None:
        raise BadExample(
            f"the batch is a dict ({', '.join(map(repr, batch))}), but the model returns a {type(output).__name__} without .loss. "
            "Save pairs instead, torch.save((input, target), path), or name a factory whose model returns its loss."
        )
    return loss


def loss_for(batches: list[Any]) -> LossFunction:
    """The loss that fits the batches: the model's own for dicts, cross-entropy for whole-number targets, mean squares for others."""
    if isinstance(batches[0], dict):
        return _own_loss

    def loss(output: Any, target: Tensor) -> Tensor:
        output = getattr(output, "logits", output)
        if not isinstance(output, Tensor):
            raise BadExample(
                f"the model returns a {type(output).__name__}, so it is unclear which of its values the target belongs to. Name a "
                "factory whose model returns a tensor, or give dicts with labels, for the model's own loss."
            )
        try:
            if target.is_floating_point():
                return mse_loss(output, target)
            return cross_entropy(output.flatten(0, -2), target.flatten())
        except (IndexError, RuntimeError, ValueError) as error:
            raise BadExample(
                f"the target of shape {tuple(target.shape)}, {target.dtype}, does not fit the output of shape {tuple(output.shape)}: "
                f"{error}. Give whole numbers for classes, floats for regression."
            ) from error

    return loss


def _tokens(text: str, directory: Path | None) -> Tensor:
    if directory is not None and any(directory.glob("tokenizer*")):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return torch.tensor(tokenizer(text)["input_ids"], device="cpu")
    return torch.tensor(list(text.encode()), dtype=torch.long, device="cpu")
