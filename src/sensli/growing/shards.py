"""A checkpoint as a folder, to which each process writes its own shards: no process ever holds the whole model.

``FOLDER/checkpoint`` is a file of `storage` with all that is small; in the place of a sharded tensor it has one of the same shape on the
device "meta", and it lists where the shards lie. ``FOLDER/shards-...`` is what `torch.distributed.checkpoint` writes. Each save
makes a new folder of shards, then replaces the small file, then removes the shards of the one before, so a kill at any moment leaves one
complete checkpoint. torch's own list of shards (``.metadata``) is a pickle, which could run code: it is never read here.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensli.errors import CheckpointError
from sensli.growing import storage
from sensli.modules.engines.distributed import Together, numbered
from sensli.modules.failing import let_memory_through
from sensli.text.writing import ABANDONED

_START = "shards-"
_REMEDY = "Use an intact copy, or an earlier checkpoint."


def key_of_weight(name: str) -> str:
    """Under which name a weight of the model is among the shards."""
    return f"model/{name}"


def key_of_state(number: int, name: str, entry: str) -> str:
    """Under which name an entry of an optimizer's state of a parameter is among the shards."""
    return f"optimizer{number}/{name}/{entry}"


def replaced(content: Mapping[str, Any], change: Callable[[str, Tensor], Any]) -> dict[str, Any]:
    """The content with each tensor of the model and the optimizers, known by its key, replaced by what ``change`` makes of it."""

    def of(key: str, value: Any) -> Any:
        return change(key, value) if isinstance(value, Tensor) else value

    model = {name: of(key_of_weight(name), value) for name, value in content["model"].items()}
    optimizers = []
    for number, saved in enumerate(content["optimizers"]):
        names = [name for group in saved["names"] for name in group]
        states = {
            index: {entry: of(key_of_state(number, names[index], entry), value) for entry, value in its.items()}
            for index, its in saved["state"]["state"].items()
        }
        optimizers.append({**saved, "state": {**saved["state"], "state": states}})
    return {**content, "model": model, "optimizers": optimizers}


# --- writing ---


def write(path: str | os.PathLike[str], content: Mapping[str, Any], together: Together) -> None:
    """Write the folder; all processes that hold shards call it at once, and what fails on one fails on all."""
    tensors: dict[str, Tensor] = {}

    def taken(key: str, tensor: Tensor) -> Tensor:
        if not hasattr(tensor, "full_tensor"):
            return tensor
        tensors[key] = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    plain = {name: storage.check_plain(value, name) for name, value in replaced(content, taken).items()}
    target = Path(os.path.realpath(path))
    token = together.agree_on(numbered("shard", tensors), secrets.token_hex(8), last=False)[0]
    folder = target / f"{_START}{token}"
    try:
        with _in_words(path):
            if together.rank == 0:
                if target.exists() and not target.is_dir():
                    raise OSError("it is a file, and a sharded model is saved as a folder")
                folder.mkdir(parents=True)
            together.agree(last=False)
            index = _write_shards(folder, tensors, together)
            # By name and not by rank: a process may have had nothing to write.
            own = [file.name for file in sorted(folder.glob(f"__{together.rank}_*.distcp"))]
            files = together.agree({name: _digest(folder / name) for name in own}, last=False)
        if together.rank == 0:
            plain["shards"] = {
                "folder": folder.name,
                "files": {name: its for part in files for name, its in part.items()},
                "index": index,
            }
            earlier = _earlier(target)
            storage.write(target / storage.FILE, plain)
            _sweep(target, folder, earlier)
    except BaseException:
        if together.rank == 0 and _earlier(target) != folder.name:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_shards(folder: Path, tensors: dict[str, Tensor], together: Together) -> dict[str, Any]:
    """Each process its own shards. Returns, for each tensor, its parts: offsets, sizes, file, first byte, bytes."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        metadata = save(tensors, storage_writer=FileSystemWriter(folder), process_group=together.group)
    except CheckpointException as error:  # derived from BaseException
        rank, (cause, _) = min(error.failures.items())
        text = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}"
        raise OSError(f"{text} (on rank {rank})") from cause
    index: dict[str, Any] = {key: [] for key in tensors}
    if together.rank != 0:
        return index
    for key, found in metadata.state_dict_metadata.items():
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in found.chunks}
        for offsets, size in sizes.items():
            place = metadata.storage_data[MetadataIndex(key, offsets)]
            index[key].append([list(offsets), list(size), place.relative_path, place.offset, place.length])
    return index


@contextmanager
def _in_words(path: Any) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror or error}. Choose another place; an earlier checkpoint there is as it was."
        ) from error


def _earlier(target: Path) -> str | None:
    """The folder of shards that the checkpoint at this place uses now."""
    with suppress(CheckpointError, KeyError, TypeError):
        return str(storage.read(target / storage.FILE)["shards"]["folder"])
    return None


def _sweep(target: Path, folder: Path, earlier: str | None) -> None:
    """Remove the shards of the checkpoint that was replaced, and those that a killed process left."""
    for each in target.glob(f"{_START}*"):
        with suppress(OSError):
            old = time.time() - each.stat().st_mtime > ABANDONED
            if each != folder and (each.name == earlier or old):
                shutil.rmtree(each, ignore_errors=True)


def _digest(file: Path) -> list[Any]:
    """Length and SHA-256 of a file."""
    digest, length = hashlib.sha256(), 0
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            length += len(block)
    return [length, digest.hexdigest()]


# --- reading ---


def is_missing(tensor: Any) -> bool:
    """Whether the tensor only tells what lies in the shards."""
    return isinstance(tensor, Tensor) and tensor.is_meta


def check_files(path: Any, content: Mapping[str, Any], together: Together) -> None:
    """Refuse files of shards that are missing, cut short or altered; each process looks at some of them."""
    if "shards" not in content:
        return
    folder, files, _ = _places(path, content)
    world = len(together.agree(last=False))
    for name in sorted(files)[together.rank :: world]:
        try:
            found = _digest(folder / name)
        except OSError as error:
            raise CheckpointError(f"cannot read {name} of the checkpoint {path}: {error}. {_REMEDY}") from error
        if found != files[name]:
            what = "is cut short" if found[0] < files[name][0] else "was altered after it was written"
            raise CheckpointError(f"{name} of the checkpoint {path} {what}. {_REMEDY}")
    together.agree(last=False)


def read(path: Any, content: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Fill the tensors, whole ones or shards, each with its part of what was saved under its key. No process waits for another."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    if not tensors:
        return
    try:
        reader = _reader(path, content, tensors)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads what it needs
            load(tensors, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
        failures = getattr(error, "failures", None)
        cause: Any = next(iter(failures.values()))[0] if failures else error
        let_memory_through(cause)
        raise CheckpointError(
            f"the shards of {path} cannot be read: {type(cause).__name__}: {storage.told(cause)}. {_REMEDY}"
        ) from error


def _places(path: Any, content: Mapping[str, Any]) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The folder of shards, its files and the index; names lead to nowhere else."""
    found = content.get("shards")
    try:
        folder, files, index = found["folder"], found["files"], found["index"]  # type: ignore[index]
        used = {part[2] for parts in index.values() for part in parts}
        fine = used <= files.keys() and all(Path(name).name == name for name in (folder, *files))
    except (TypeError, KeyError, AttributeError, IndexError):
        fine = False
    if not fine:
        raise CheckpointError(f"the part 'shards' of {path} is missing or was altered. {_REMEDY}")
    return Path(path) / folder, files, index


def _reader(path: Any, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """A reader of torch that takes its list of shards from the small file instead of from a pickle."""
    from torch.distributed.checkpoint import metadata as parts
    from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

    folder, _, index = _places(path, content)
    lacking = sorted(tensors.keys() - index.keys())
    if lacking:
        raise CheckpointError(f"{path} has no shards of {lacking[0]} ({len(lacking)} such). {_REMEDY}")
    described, places = {}, {}
    for key, tensor in tensors.items():
        chunks = []
        for offsets, sizes, name, first, length in index[key]:
            chunks.append(parts.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[parts.MetadataIndex(key, offsets)] = _StorageInfo(name, first, length)
        # torch's loader does not mind a part of a tensor that no shard covers: it would stay as it is.
        if sum(chunk.sizes.numel() for chunk in chunks) != tensor.numel():
            raise CheckpointError(
                f"the shards of {key} in {path} do not make up a whole of {tuple(tensor.shape)}. {_REMEDY}"
            )
        properties = parts.TensorProperties(dtype=tensor.dtype)
        described[key] = parts.TensorStorageMetadata(properties, tensor.shape, chunks)

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return parts.Metadata(described, storage_data=places, storage_meta=parts.StorageMeta())  # type: ignore[arg-type]

    return Reader(folder)
