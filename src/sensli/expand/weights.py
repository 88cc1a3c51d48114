"""The weights of a model folder as bytes: where each tensor lies, and files written piece by piece, never a model in memory.

A safetensors file is eight bytes with the length of a JSON header, the header, and the tensors one after another. So a tensor is copied
under another name without being read as one, whatever its type is.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from sensli.errors import SensliError, brief

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE = 16 * 2**20  # bytes that are in memory at once
_LONGEST_HEADER = 100 * 2**20  # what the format allows
# bytes of a number; what is smaller than a byte lies in a multiple of it
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64,
}  # fmt: skip


class ExpansionError(SensliError):
    """A saved model cannot be expanded, or an expansion cannot be undone. Nothing was written."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its type, shape and bytes; where nothing is stored, of zeros.

    Attributes:
        dtype: As safetensors names it, for example ``"BF16"``.
        shape: The lengths of its axes.
        file: The file, or None for zeros.
        start: The first of its bytes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path | None
    start: int = 0

    @property
    def size(self) -> int:
        """How many bytes it takes."""
        return prod(self.shape) * _BITS[self.dtype] // 8

    def zeros(self) -> Stored:
        """The same, of zeros."""
        return replace(self, file=None, start=0)

    def pieces(self) -> Iterator[bytes]:
        """Its bytes, a piece at a time."""
        left = self.size
        if self.file is None:
            while left:
                piece = bytes(min(left, PIECE))
                left -= len(piece)
                yield piece
            return
        with self.file.open("rb") as source:
            source.seek(self.start)
            while left:
                piece = source.read(min(left, PIECE))
                if not piece:
                    raise ExpansionError(f"{self.file} ends before its last tensor: the file is cut. Get it again.")
                left -= len(piece)
                yield piece

    def digest(self) -> str:
        """A hash of its type, shape and bytes."""
        found = hashlib.blake2b(f"{self.dtype}{self.shape}".encode(), digest_size=16)
        for piece in self.pieces():
            found.update(piece)
        return found.hexdigest()

    def is_zero(self) -> bool:
        """Whether all its bytes are zero."""
        return self.file is None or not any(piece.strip(b"\0") for piece in self.pieces())


def read_weights(folder: Path) -> dict[str, Stored]:
    """Every tensor of a model folder by its name. Raises if a file is missing, cut or something else."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        if not single.is_file():
            raise _no_weights(folder)
        return read_header(single)
    try:
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = sorted(set(names.values()))
        if any(Path(file).name != file for file in files):
            raise ValueError("a file of another folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExpansionError(f"{index} cannot be read: {type(error).__name__}: {error}. Get it again.") from error
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ExpansionError(f"{folder} lacks {missing[0]} ({len(missing)} of {len(files)} files). Get it again.")
    headers = {file: read_header(folder / file) for file in files}
    lacking = [name for name, file in names.items() if name not in headers[file]]
    if lacking:
        raise ExpansionError(f"{names[lacking[0]]} lacks the tensor {lacking[0]}, which {INDEX} says it has.")
    return {name: headers[file][name] for name, file in names.items()}


def _no_weights(folder: Path) -> ExpansionError:
    if (folder / "adapter_config.json").is_file():
        return ExpansionError(
            f"{folder} has an adapter and no model. Merge it first: peft's model.merge_and_unload(), then save_pretrained."
        )
    others = [each.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for each in sorted(folder.glob(pattern))]
    if others:
        return ExpansionError(
            f"{folder} has {others[0]} and no safetensors. Load the model with from_pretrained and save_pretrained it again."
        )
    return ExpansionError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}.")


def read_header(file: Path) -> dict[str, Stored]:
    """Where the tensors of a file lie. Raises if the file is cut or no safetensors."""
    size = file.stat().st_size
    try:
        with file.open("rb") as source:
            (length,) = struct.unpack("<Q", source.read(8))
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
            header = json.loads(source.read(length))
        found = {}
        for name, facts in header.items():
            if name == "__metadata__":
                continue
            start, end = facts["data_offsets"]
            found[name] = Stored(facts["dtype"], tuple(facts["shape"]), file, 8 + length + start)
            if found[name].size != end - start:
                raise ValueError(f"{name} has {end - start:,} bytes for the shape {facts['shape']}")
            if 8 + length + end > size:
                raise ExpansionError(f"{file} is cut: it ends before the tensor {name} does. Get it again.")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ExpansionError(f"{file} is no intact safetensors file: {type(error).__name__}: {error}.") from error
    return found


@dataclass(frozen=True)
class Shard:
    """One file that will be written: its name and its tensors."""

    name: str
    tensors: dict[str, Stored]


def divide(tensors: Mapping[str, Stored], most: int) -> list[Shard]:
    """The files for so many bytes at most each; a larger tensor has one of its own."""
    parts: list[dict[str, Stored]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.size > most:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.size
    if len(parts) == 1:
        return [Shard(SINGLE, parts[0])]
    return [Shard(f"model-{number:05d}-of-{len(parts):05d}.safetensors", part) for number, part in enumerate(parts, 1)]


def write_weights(folder: Path, tensors: Mapping[str, Stored], most: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Write the files of a model, with their index if there are several.

    Yields after each tensor how many bytes it took and, in the end, the hashes of all by name: read as they are written.
    """
    shards, hashes = divide(tensors, most), dict[str, str]()
    for shard in shards:
        with ExitStack() as stack:
            target = stack.enter_context((folder / shard.name).open("xb"))
            _write_header(target, shard.tensors)
            for name, tensor in shard.tensors.items():
                found = hashlib.blake2b(f"{tensor.dtype}{tensor.shape}".encode(), digest_size=16)
                for piece in tensor.pieces():
                    target.write(piece)
                    found.update(piece)
                hashes[name] = found.hexdigest()
                yield tensor.size, {}
    if len(shards) > 1:
        places = {name: shard.name for shard in shards for name in shard.tensors}
        total = sum(tensor.size for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(text + "\n")
    yield 0, hashes


def _write_header(target: BinaryIO, tensors: Mapping[str, Stored]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.size],
        }
        place += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    target.write(struct.pack("<Q", len(text)) + text)


def parse_size(text: str) -> int:
    """``"5GB"`` in bytes, as transformers counts them."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    plain = str(text).strip().upper()
    for unit, factor in sorted(units.items(), key=lambda each: -len(each[0])):
        if plain.endswith(unit):
            try:
                number = float(plain.removesuffix(unit))
            except ValueError:
                break
            if number > 0:
                return int(number * factor)
    raise ExpansionError(f"shard size must be a number with KB, MB or GB (for example 5GB), got {brief(text)}.")


def largest(tensors: Iterable[Stored]) -> int:
    """The bytes of the largest tensor."""
    return max((tensor.size for tensor in tensors), default=0)
