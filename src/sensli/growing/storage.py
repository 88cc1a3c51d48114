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
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sensli.errors import CheckpointError, SensliError
from sensli.text.writing import replacing

FORMAT = 1
MAGIC = b"sensli checkpoint\n"
FILE = "checkpoint"  # its name where a checkpoint is a folder (`shards`)
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

    def __init__(self, reason: str, remedy: str = "Use an intact copy, or an earlier checkpoint.") -> None:
        super().__init__(reason)
        self.remedy = remedy


def write(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
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


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a file that `write` made, or the one in a folder. Tensors come back on the CPU."""
    try:
        if os.path.isdir(path):
            path = os.path.join(path, FILE)
        return read_tensors(path, MAGIC)[0]
    except (OSError, ValueError) as error:  # a path may hold a character that none can
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}.") from error
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
        raise Unusable(
            f"has format {version}, newer than {FORMAT}, the newest known here.", "Update sensli to read it."
        )
    if len(body) != length:
        cut = "cut short" if len(body) < length else "too long"
        raise Unusable(f"is {cut}: {len(body):,} of {length:,} bytes.")
    found = hashlib.sha256(body).hexdigest()
    if found != digest:
        raise Unusable("was altered after it was written: its checksum does not match.")
    try:
        content = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Unusable(
            f"holds more than tensors and plain data, and was not loaded because that could run code: {told(error)}", ""
        ) from error
    except Exception as error:  # what torch raises for bytes that are not an archive is not a short list
        raise Unusable(f"does not hold what torch.save wrote: {type(error).__name__}: {told(error)}") from error
    if not isinstance(content, dict):
        raise Unusable(f"holds a {type(content).__name__} instead of named parts.")
    return content, found


def told(error: Exception) -> str:
    """The line that says what is wrong; torch adds many that advise to load the file nevertheless."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = next(
        (line for line in lines if "WeightsUnpickler error: " in line), lines[0] if lines else "no reason given"
    )
    return found.rpartition("WeightsUnpickler error: ")[2]


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
    hint = (
        "float(...) or int(...) of it"
        if isinstance(value, (int, float))
        else "its state_dict(), or numbers, strings and tensors"
    )
    raise CheckpointError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which only code could rebuild, and loading a checkpoint runs none. "
        f"Store {hint}."
    )
