"""The weights of a model folder as bytes: where each tensor lies, and files written piece by piece, never a model in memory.

A safetensors file is eight bytes with the length of a JSON header, the header, and the tensors one after another. So a tensor is copied
under another name without being read as one, whatever its type is.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensli.errors import ExpansionError, brief_text

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE = 2**21  # bytes that are in memory at once: few enough for the cache of a processor
_LONGEST_HEADER = 100 * 2**20  # what the format allows
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64,
}  # fmt: skip
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Content:
    """The bytes of one tensor."""

    dtype: str  # as safetensors names it, for example "BF16"
    shape: tuple[int, ...]  # the lengths of its axes

    @property
    def size(self) -> int:
        """How many bytes it takes."""
        return prod(self.shape) * _BITS[self.dtype] // 8

    def pieces(self, step: int = PIECE) -> Iterator[bytes | bytearray]:
        """Its bytes, so many at a time; a piece may lie in the memory of the one before it."""
        raise NotImplementedError

    def digest(self) -> str:
        """A hash of its type, shape and bytes."""
        found = self.hasher()
        for piece in self.pieces():
            found.update(piece)
        return found.hexdigest()

    def hasher(self) -> hashlib._Hash:
        """A hash to which the bytes are still to be added."""
        return hashlib.sha256(f"{self.dtype}{self.shape}".encode())  # processors have instructions for this one


@dataclass(frozen=True)
class Stored(Content):
    """A tensor in a file, from the byte ``start`` on."""

    file: Path
    start: int

    def pieces(self, step: int = PIECE) -> Iterator[bytes | bytearray]:
        left = self.size
        buffer = bytearray(min(left, step))  # always the same memory: getting new takes longer than reading
        with self.file.open("rb", buffering=0) as source:
            source.seek(self.start)
            while left:
                if len(buffer) > left:
                    buffer = bytearray(left)
                if not _fill(source, memoryview(buffer)):
                    raise ExpansionError(f"{self.file} ends before its last tensor: the file is cut. Get it again.")
                left -= len(buffer)
                yield buffer

    def is_zero(self) -> bool:
        """Whether all its bytes are zero."""
        return all(piece.count(0) == len(piece) for piece in self.pieces())

    def spread(self) -> float:
        """The standard deviation of its numbers."""
        count, total, squares = prod(self.shape), 0.0, 0.0
        for piece in self.pieces():
            values = torch.frombuffer(bytearray(piece), dtype=_FLOATS[self.dtype]).double()
            total += float(values.sum())
            squares += float(values.square().sum())
        return sqrt(max(0.0, squares / count - (total / count) ** 2)) if count else 0.0


def _fill(source: Any, rest: memoryview) -> bool:
    """Read until a buffer is full, which may take several calls of the system; False if the file ends before."""
    while rest:
        count = source.readinto(rest)
        if not count:
            return False
        rest = rest[count:]
    return True


@dataclass(frozen=True)
class Zeros(Content):
    """Nothing but zeros."""

    def pieces(self, step: int = PIECE) -> Iterator[bytes | bytearray]:
        piece = bytes(min(step, self.size))
        for start in range(0, self.size, step):
            yield piece[: self.size - start]


@dataclass(frozen=True)
class Drawn(Content):
    """Random numbers with the spread of another tensor."""

    like: Stored
    seed: int

    def pieces(self, step: int = PIECE) -> Iterator[bytes | bytearray]:
        spread, generator = self.like.spread(), torch.Generator().manual_seed(self.seed)
        for start in range(0, self.size, step):
            count = min(step, self.size - start) * 8 // _BITS[self.dtype]
            drawn = torch.randn(count, generator=generator, device="cpu") * spread
            yield as_bytes(drawn.to(_FLOATS[self.dtype]))


@dataclass(frozen=True)
class Longer(Content):
    """A tensor with more entries along one axis, after each of so many equal parts of it: fused matrices have several."""

    source: Stored
    axis: int
    parts: int
    added: Content = field(repr=False)  # all new entries, in the order in which they lie in the file

    def pieces(self, step: int = PIECE) -> Iterator[bytes | bytearray]:
        rows = prod(self.source.shape[: self.axis]) * self.parts
        old, new = self.source.size // rows, self.added.size // rows  # bytes of a row before, and of what follows it
        if old + new <= step:
            many = step // (old + new)
            fresh = self.added.pieces(many * new)
            for piece in self.source.pieces(many * old):
                joined = [_as_rows(piece, old), _as_rows(next(fresh), new)]
                yield as_bytes(torch.cat(joined, 1))
            return
        for row in range(rows):  # few and long ones
            part = Stored("U8", (old,), self.source.file, self.source.start + row * old)
            yield from part.pieces(step)
            yield from _part(self.added, row * new, new, step)


def _part(content: Content, start: int, size: int, step: int) -> Iterator[bytes | bytearray]:
    """Some of the bytes of a tensor that can only be made from its beginning."""
    place = 0
    for piece in content.pieces(step):
        chosen = piece[max(0, start - place) : max(0, start + size - place)]
        place += len(piece)
        if chosen:
            yield chosen
        if place >= start + size:
            return


def _as_rows(piece: bytes | bytearray, width: int) -> Tensor:
    return torch.frombuffer(bytearray(piece), dtype=torch.uint8).view(-1, width)


def as_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor as a file has them."""
    found: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def load_tensor(tensor: Stored) -> Tensor:
    """A tensor of numbers, in memory."""
    values = bytearray(b"".join(tensor.pieces()))
    return torch.frombuffer(values, dtype=_FLOATS[tensor.dtype]).view(tensor.shape)


def seed_of(name: str, seed: int) -> int:
    """A seed of its own for each tensor, the same in every run."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True)
class Shorter(Content):
    """A tensor without the last entries of each of so many equal parts of one axis: what `Longer` was made from."""

    source: Stored
    axis: int
    parts: int

    def pieces(self, step: int = PIECE) -> Iterator[bytes | bytearray]:
        rows = prod(self.shape[: self.axis]) * self.parts
        kept, long = self.size // rows, self.source.size // rows
        if long <= step:
            many = step // long
            for piece in self.source.pieces(many * long):
                yield as_bytes(_as_rows(piece, long)[:, :kept])
            return
        for row in range(rows):
            yield from Stored("U8", (kept,), self.source.file, self.source.start + row * long).pieces(step)


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
    found = {name: headers[file][name] for name, file in names.items()}
    return dict(sorted(found.items(), key=lambda each: (each[1].file, each[1].start)))  # as they lie on the disk


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
        raise ExpansionError(
            f"{file} is not an intact safetensors file: {type(error).__name__}: {error}. Get it again."
        ) from error
    return found


def divide(tensors: Mapping[str, Content], most: int) -> dict[str, dict[str, Content]]:
    """The names of the files for so many bytes at most each, with their tensors; a larger tensor has one of its own."""
    parts: list[dict[str, Content]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.size > most:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.size
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}


def write_weights(
    folder: Path, tensors: Mapping[str, Content], most: int, hashes: dict[str, str] | None = None
) -> Iterator[int]:
    """Write the files of a model, with their index if there are several. Yields after each piece how many bytes it took.

    ``hashes`` gets those of all tensors by name, taken of the bytes as they pass.
    """
    shards = divide(tensors, most)
    with ThreadPoolExecutor(1) as beside:  # hashes while the system writes
        for file, part in shards.items():
            with (folder / file).open("xb", buffering=0) as target:
                _write_header(target, part)
                for name, tensor in part.items():
                    found = tensor.hasher()
                    for piece in tensor.pieces():
                        hashed = beside.submit(found.update, piece) if hashes is not None else None
                        write_all(target, piece)
                        if hashed is not None:
                            hashed.result()
                        yield len(piece)
                    if hashes is not None:
                        hashes[name] = found.hexdigest()
    if len(shards) > 1:
        places = {name: file for file, part in shards.items() for name in part}
        total = sum(tensor.size for tensor in tensors.values())
        numbers = sum(prod(tensor.shape) for tensor in tensors.values())
        index = {"metadata": {"total_parameters": numbers, "total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_all(target: Any, piece: bytes | bytearray) -> None:
    """Write all of it: a call of the system may write less."""
    rest = memoryview(piece)
    while rest:
        rest = rest[target.write(rest) :]


def _write_header(target: Any, tensors: Mapping[str, Content]) -> None:
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
    write_all(target, struct.pack("<Q", len(text)) + text)


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
    raise ExpansionError(f"shard size must be a number with KB, MB or GB (for example 5GB), got {brief_text(text)}.")
