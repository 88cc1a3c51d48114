"""One file of tensors and plain data: complete or absent, checked when it is read, and never able to run code.

Layout: a line of text that says what the file is, one line of JSON (format, length and SHA-256 of the rest), then what `torch.save`
writes. The text comes first so that a file of a newer format is recognised before anything in it is interpreted.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import secrets
import shutil
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor

from sensli.errors import CheckpointError, SensliError
from sensli.modules.engines.distributed import Together, number_facts
from sensli.modules.running import let_memory_through
from sensli.surgery.warmup import SAVED
from sensli.text.files import ABANDONED, replacing

FORMAT = 1
MAGIC = b"sensli checkpoint\n"
FILE = "checkpoint"  # its name where a checkpoint is a folder (`shards`)
REMEDY = "Use an intact copy, or an earlier checkpoint."
_ROOM = 160  # bytes of the JSON line, padded: it is filled in when the rest has been written

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class _Hashed:
    """A file that sums up what is written to it, so that a large checkpoint is not held in memory twice.

    Writing never raises: torch writes the end of an archive also when it cleans up, where an error would end the process or be
    lost. What went wrong first is kept instead, and nothing is written after it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.length = file, hashlib.sha256(), 0
        self.failure: BaseException | None = None

    def write(self, data: bytes) -> int:
        try:
            if self.failure is None:
                self.digest.update(data)
                self.length += len(data)
                self._file.write(data)
        except BaseException as error:
            self.failure = error
        return len(data)

    def flush(self) -> None:
        self._file.flush()


class Unusable(Exception):
    """What is wrong with a file, as the rest of a sentence that begins with its path; and what to do about a checkpoint."""

    def __init__(self, reason: str, remedy: str = REMEDY) -> None:
        super().__init__(reason)
        self.remedy = remedy


def write_checkpoint(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a checkpoint: a kill at any moment leaves the old or the new one."""
    content = {name: check_plain(value, name) for name, value in content.items()}
    write_tensors(path, content, MAGIC, CheckpointError)


def write_tensors(
    path: str | os.PathLike[str], content: Mapping[str, Any], magic: bytes, failure: type[SensliError]
) -> str:
    """Write tensors and plain data after a line that says what they are; returns the checksum. Raises ``failure`` if it cannot."""
    with replacing(path, failure) as file:
        file.write(magic + b" " * _ROOM + b"\n")
        body = _Hashed(file)
        try:
            torch.save(content, body)  # type: ignore[arg-type]
        except RuntimeError as error:
            # On its way out torch ends the archive, and reports that this failed instead of what went wrong, such as Ctrl-C.
            if error.__context__ is None:
                raise
            raise error.__context__ from None
        if body.failure is not None:
            raise body.failure
        header = json.dumps({"format": FORMAT, "length": body.length, "sha256": body.digest.hexdigest()})
        file.seek(len(magic))
        file.write(header.ljust(_ROOM).encode())
    return body.digest.hexdigest()


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a file that `write_checkpoint` made, or the one in a folder. Tensors come back on the CPU."""
    try:
        if os.path.isdir(path):
            path = os.path.join(path, FILE)
        return read_tensors(path, MAGIC)[0]
    except (OSError, ValueError) as error:  # a path may hold a character that none can
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"cannot read the checkpoint {path}: {why}.") from error
    except Unusable as error:
        raise CheckpointError(f"{path} {error} {error.remedy}".rstrip()) from error.__cause__


def read_tensors(path: str | os.PathLike[str], magic: bytes) -> tuple[dict[str, Any], str]:
    """Read and check what `write_tensors` wrote: the content and its checksum. Raises `Unusable`, or an OSError."""
    with open(path, "rb") as file:
        begin, header, body = file.read(len(magic)), file.read(_ROOM + 1), file.read()
    what = magic.decode().strip()
    if begin != magic:
        wrong = "is cut short" if magic.startswith(begin) else f"is not a {what}: it does not begin like one"
        raise Unusable(f"{wrong}.", "Give a file that save_checkpoint wrote, or an earlier intact one.")
    try:
        facts = json.loads(header)
        version, length, digest = facts["format"], facts.get("length", -1), facts.get("sha256")
        if type(version) is not int or version < 1 or type(length) is not int:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unusable("is cut short or altered: its header cannot be read.") from None
    if version > FORMAT:
        newer = f"has format {version}, newer than {FORMAT}, the newest known here."
        raise Unusable(newer, "Update sensli to read it.")
    if len(body) != length:
        cut = "cut short" if len(body) < length else "too long"
        raise Unusable(f"is {cut}: {len(body):,} of {length:,} bytes.")
    found = hashlib.sha256(body).hexdigest()
    if found != digest:
        raise Unusable("was altered after it was written: its checksum does not match.")
    try:
        content = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        why = f"holds more than tensors and plain data, and was not loaded because that could run code: {reason_in(error)}"
        raise Unusable(why, "") from error
    except Exception as error:  # what torch raises for bytes that are not an archive is not a short list
        raise Unusable(f"does not hold what torch.save wrote: {type(error).__name__}: {reason_in(error)}") from error
    if not isinstance(content, dict):
        raise Unusable(f"holds a {type(content).__name__} instead of named parts.")
    return content, found


def reason_in(error: Exception) -> str:
    """The line that says what is wrong; torch adds many that advise to load the file nevertheless."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "WeightsUnpickler error: " in line]
    return (*telling, *lines, "no reason given")[0].rpartition("WeightsUnpickler error: ")[2]


def check_plain(value: Any, place: str) -> Any:
    """The value with its tensors detached, or an error that names what could not be read back without running code."""
    try:
        return _plain(value, place)
    except RecursionError:
        raise CheckpointError(
            f"{place} holds itself, or is nested too deeply to be saved. Store numbers, strings and tensors, in few levels of lists and "
            "dicts."
        ) from None


def _plain(value: Any, place: str) -> Any:
    """Types are compared exactly: a numpy number is an instance of float, but is stored as an object that has to be rebuilt by code."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, Tensor):
        return value.detach()
    if kind in (list, tuple):
        return kind(_plain(part, f"{place}[{index}]") for index, part in enumerate(value))
    if kind is set:
        return {_plain(part, f"an element of {place}") for part in value}
    if kind in (dict, OrderedDict, Counter):
        pairs = [(_plain(key, f"a key of {place}"), _plain(part, f"{place}[{key!r}]")) for key, part in value.items()]
        return Counter(dict(pairs)) if kind is Counter else kind(pairs)
    hint = "its state_dict(), or numbers, strings and tensors"
    if isinstance(value, (int, float)):
        hint = "float(...) or int(...) of it"
    raise CheckpointError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which only code could rebuild, and loading a checkpoint runs none. "
        f"Store {hint}."
    )


# ---- A checkpoint as a folder, to which each process writes its own shards: no process ever holds the whole model.
#
# ``FOLDER/checkpoint`` is a file of `storage` with all that is small; in the place of a sharded tensor it has one of
# the same shape on the device "meta", and it lists where the shards lie. ``FOLDER/shards-...`` is what
# `torch.distributed.checkpoint` writes. Each save makes a new folder of shards, then replaces the small file, then
# removes the shards of the one before, so a kill at any moment leaves one complete checkpoint. torch's own list of
# shards (``.metadata``) is a pickle, which could run code: it is never read here.

_START = "shards-"


# From a key among the shards, a tensor, and the names of the weight and, of an optimizer, of what it keeps of it.
Change: TypeAlias = Callable[[str, Tensor, str, str | None], Tensor]


def replace_tensors(content: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The content with each tensor of the model and the optimizers replaced by what ``change`` makes of it."""

    def of(key: str, value: Any, name: str, entry: str | None = None) -> Any:
        return change(key, value, name, entry) if isinstance(value, Tensor) else value

    def of_state(number: int, name: str, its: Mapping[str, Any]) -> dict[str, Any]:
        return {entry: of(f"optimizer{number}/{name}/{entry}", value, name, entry) for entry, value in its.items()}

    model = {name: of(f"model/{name}", value, name) for name, value in content["model"].items()}
    optimizers = []
    for number, saved in enumerate(content["optimizers"]):
        names = [name for group in saved["names"] for name in group]
        states = {index: of_state(number, names[index], its) for index, its in saved["state"]["state"].items()}
        groups = [dict(group) for group in saved["state"]["param_groups"]]
        for group in groups:
            if SAVED in group:
                its_names = [names[index] for index in group["params"]]
                group[SAVED] = {i: of_state(number, its_names[i], its) for i, its in group[SAVED].items()}
        optimizers.append({**saved, "state": {**saved["state"], "state": states, "param_groups": groups}})
    return {**content, "model": model, "optimizers": optimizers}


# --- writing ---


def write_shards(path: str | os.PathLike[str], content: Mapping[str, Any], together: Together) -> None:
    """Write the folder; all processes that hold shards call it at once, and what fails on one fails on all."""
    tensors: dict[str, Tensor] = {}

    def take(key: str, tensor: Tensor, *_: str | None) -> Tensor:
        if not hasattr(tensor, "full_tensor"):
            return tensor
        tensors[key] = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    plain = {name: check_plain(value, name) for name, value in replace_tensors(content, take).items()}
    target = Path(os.path.realpath(path))
    token = together.agree_on(number_facts("shard", tensors), secrets.token_hex(8), last=False)[0]
    folder = target / f"{_START}{token}"
    try:
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
            found = {name: its for part in files for name, its in part.items()}
            plain["shards"] = {"folder": folder.name, "files": found, "index": index}
            earlier = _earlier(target)
            write_checkpoint(target / FILE, plain)
            _sweep(target, folder, earlier)
    except BaseException as error:
        if together.rank == 0 and _earlier(target) != folder.name:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{path} cannot be written: {error.strerror or error}. Choose another place; an earlier checkpoint there is as it was."
            ) from error
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


def _earlier(target: Path) -> str | None:
    """The folder of shards that the checkpoint at this place uses now."""
    with suppress(CheckpointError, KeyError, TypeError):
        return str(read_checkpoint(target / FILE)["shards"]["folder"])
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
            raise CheckpointError(f"cannot read {name} of the checkpoint {path}: {error}. {REMEDY}") from error
        if found != files[name]:
            what = "is cut short" if found[0] < files[name][0] else "was altered after it was written"
            raise CheckpointError(f"{name} of the checkpoint {path} {what}. {REMEDY}")
    together.agree(last=False)


def read_shards(path: Any, content: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
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
            f"the shards of {path} cannot be read: {type(cause).__name__}: {reason_in(cause)}. {REMEDY}"
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
        raise CheckpointError(f"the part 'shards' of {path} is missing or was altered. {REMEDY}")
    return Path(path) / folder, files, index


def _reader(path: Any, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """A reader of torch that takes its list of shards from the small file instead of from a pickle."""
    from torch.distributed.checkpoint import metadata as parts
    from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

    folder, _, index = _places(path, content)
    lacking = sorted(tensors.keys() - index.keys())
    if lacking:
        raise CheckpointError(f"{path} has no shards of {lacking[0]} ({len(lacking)} such). {REMEDY}")
    described, places = {}, {}
    for key, tensor in tensors.items():
        chunks = []
        for offsets, sizes, name, first, length in index[key]:
            chunks.append(parts.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[parts.MetadataIndex(key, offsets)] = _StorageInfo(name, first, length)
        # torch's loader does not mind a part of a tensor that no shard covers: it would stay as it is.
        if sum(chunk.sizes.numel() for chunk in chunks) != tensor.numel():
            raise CheckpointError(
                f"the shards of {key} in {path} do not make up a whole of {tuple(tensor.shape)}. {REMEDY}"
            )
        properties = parts.TensorProperties(dtype=tensor.dtype)
        described[key] = parts.TensorStorageMetadata(properties, tensor.shape, chunks)

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return parts.Metadata(described, storage_data=places, storage_meta=parts.StorageMeta())  # type: ignore[arg-type]

    return Reader(folder)
