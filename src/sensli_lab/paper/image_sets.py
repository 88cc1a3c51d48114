"""CIFAR-10 and Fashion-MNIST: fetched, compared with their checksums, read without running anything that is in the files."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import os
import pickle
import struct
import sys
import tarfile
import urllib.error
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensli.text.files import write_bytes
from sensli_lab.errors import PaperError


class DataError(PaperError):
    """The images are missing, or not the official ones."""


@dataclass(frozen=True)
class Raw:
    """Images uint8 [N, height, width, colours] and labels int64 [N], as published."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Facts:
    """What is known of a data set without reading it."""

    train: int
    test: int
    classes: int
    colours: int
    size: int  # height and width
    mean: tuple[float, ...]
    std: tuple[float, ...]


def check_sum(content: bytes, sha1: str, path: Path) -> None:
    found = hashlib.sha1(content).hexdigest()
    if found != sha1:
        raise DataError(
            f"{path} is not the published file (SHA-1 {found[:12]}..., expected {sha1[:12]}...): it is damaged or altered. "
            "Delete it and run the same command again to download it."
        )


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Check the folder given with --data.") from None


@contextmanager
def unpacking(path: Path) -> Iterator[None]:
    """Say what to do about an archive that is damaged."""
    try:
        yield
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be unpacked ({error}). Delete it and run the same command again to download it."
        ) from None


class FetchError(Exception):
    """The file could not be downloaded; the text says why."""


def fetch(url: str, target: Path, sha256: str) -> None:
    """Download `url` to `target`, with a progress bar in a terminal. A file other than the published one is not kept."""
    if os.environ.get("SENSLI_OFFLINE"):
        raise FetchError("SENSLI_OFFLINE is set, as it is for the workers of a Ray cluster, so nothing is downloaded")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(target), hash_prefix=sha256, progress=sys.stderr.isatty())
    except urllib.error.HTTPError as error:
        raise FetchError(f"the server answered {error.code} {error.reason}") from None
    except RuntimeError:  # what torch raises for a wrong checksum
        raise FetchError(
            "what arrived is not the published file, or not all of it; run the same command to try again"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise FetchError(str(reason) or type(error).__name__) from None
    print(f"downloaded {url}")


# ---- Reading the pickled batches of CIFAR-10 without executing anything that is in the file.
#
# A pickle may name any function to be called. Here the few names that a pickled array needs are mapped to an inert
# record; any other name is refused. Their checksum tells whether the bytes are those of the images.

PIXELS = 3 * 32 * 32


class UnsafePickle(Exception):
    """The pickle names something that a batch of images does not need."""


class _Inert:
    """Instead of an array, or the type of one: keeps the bytes."""

    def __init__(self, *_: Any) -> None:
        self.content = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.content = state[-1]


def _bytes(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Inert,
    ("numpy._core.multiarray", "_reconstruct"): _Inert,
    ("numpy", "ndarray"): _Inert,
    ("numpy", "dtype"): _Inert,
    ("_codecs", "encode"): _bytes,  # how Python 3 writes bytes in the old protocols
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[(module, name)]
        except KeyError:
            raise UnsafePickle(f"it asks for {module}.{name}, which no batch of images needs") from None


def read_batch(content: bytes) -> bytes:
    """One `data_batch` in the bytes of the binary layout: for each image a label and 3072 bytes."""
    try:
        batch = _Reader(io.BytesIO(content), encoding="bytes").load()
        data, labels = (batch[key] if key in batch else batch[key.decode()] for key in (b"data", b"labels"))
        pixels = memoryview(data.content)
        return b"".join(bytes([label]) + pixels[i * PIXELS : (i + 1) * PIXELS] for i, label in enumerate(labels))
    except UnsafePickle:
        raise
    except Exception as error:  # a damaged pickle may fail in any way
        raise UnsafePickle(f"it cannot be read ({type(error).__name__})") from None


# ---- CIFAR-10 from either official layout. Both are compared with the checksums of the binary one: equal images, equal
# sums.

CIFAR10_ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"  # of the archive
BINARY, PICKLED = "cifar-10-batches-bin", "cifar-10-batches-py"
CIFAR10_FACTS = Facts(50_000, 10_000, 10, 3, 32, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))

CIFAR10_SUMS = {  # SHA-1 of the binary batches
    "data_batch_1": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch": "67eb016db431130d61cd03c7ad570b013799c88c",
}


def load_cifar10(
    folder: Path, *, address: str = CIFAR10_ADDRESS, sha256: str = CIFAR10_SHA256, sums: dict[str, str] = CIFAR10_SUMS
) -> Raw:
    """All images; downloaded into `folder` first if neither layout is there."""
    if not any((folder / layout).is_dir() for layout in (BINARY, PICKLED)):
        download(folder, address, sha256, sums)
    batches = {name: _batch(folder, name, sha1) for name, sha1 in sums.items()}
    train = [batches[name] for name in batches if name != "test_batch"]
    train_x, train_y = (torch.cat([batch[i] for batch in train]) for i in (0, 1))
    return Raw(train_x, train_y, *batches["test_batch"])


def _batch(folder: Path, name: str, sha1: str) -> tuple[Tensor, Tensor]:
    if (folder / BINARY).is_dir():
        path = folder / BINARY / f"{name}.bin"
        records = read_file(path)
    else:
        path = folder / PICKLED / name
        records = _records(path)
    check_sum(records, sha1, path)
    table = torch.frombuffer(bytearray(records), dtype=torch.uint8).view(-1, 1 + PIXELS)
    # a record is one label byte, then the red, the green and the blue plane
    return table[:, 1:].view(-1, 3, 32, 32).permute(0, 2, 3, 1).contiguous(), table[:, 0].long()


def _records(path: Path) -> bytes:
    """A pickled batch in the bytes of the binary layout."""
    try:
        return read_batch(read_file(path))
    except UnsafePickle as error:
        raise DataError(f"{path} is not an official batch: {error}. Use the files from {CIFAR10_ADDRESS}.") from None


def download(folder: Path, address: str, sha256: str, sums: dict[str, str]) -> None:
    """Fetch the binary layout and unpack the batches, each checked before it is written."""
    archive = folder / "cifar-10-binary.tar.gz"
    try:
        if not archive.exists():
            fetch(address, archive, sha256)
    except FetchError as error:
        raise DataError(
            f"CIFAR-10 is not in {folder} and cannot be downloaded ({error}). Put the folder {BINARY} from {address} there "
            "(or cifar-10-batches-py), or give its parent folder with --data DIR or SENSLI_DATA."
        ) from None
    contents: dict[str, bytes] = {}
    with unpacking(archive), tarfile.open(archive) as tar:
        for entry in tar:  # by name only: a path in the archive is never used
            name = Path(entry.name).name
            file = tar.extractfile(entry) if name.removesuffix(".bin") in sums and entry.isfile() else None
            if file is not None:
                contents[name] = file.read()
    for name, sha1 in sums.items():
        check_sum(contents.get(f"{name}.bin", b""), sha1, archive)
    for name, content in contents.items():
        write_bytes(folder / BINARY / name, content, DataError)
    archive.unlink()


# ---- Fashion-MNIST from its four IDX files, compressed or not, compared with checksums of their content.

FASHION_ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FOLDERS = ("fashion_mnist", "FashionMNIST/raw", "fashion-mnist", ".")
FASHION_FACTS = Facts(60_000, 10_000, 10, 1, 28, (0.2860,), (0.3530,))

FASHION_SUMS = {  # SHA-1 of the uncompressed files
    "train-images-idx3-ubyte": "b9bd999c0106c9b8b4b0cefce58c9a6060f27095",
    "train-labels-idx1-ubyte": "4bccf37222e01638381eaa326bf730337a597267",
    "t10k-images-idx3-ubyte": "880056926db704f9f713097915f99da346f5b1d1",
    "t10k-labels-idx1-ubyte": "958122e8b4b97fd4e71eca2d08ef754ed77c3ad9",
}
FASHION_SHA256 = {  # of the compressed ones
    "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}


def load_fashion_mnist(folder: Path, *, address: str = FASHION_ADDRESS, sums: dict[str, str] = FASHION_SUMS) -> Raw:
    """All images; missing files are downloaded into `folder`/fashion_mnist."""
    places = [folder / name for name in FOLDERS]
    home = next((place for place in places if any(_file(place, name) for name in sums)), places[0])
    tensors = []
    for name, sha1 in sums.items():
        path = _file(home, name) or _download(home, name, address)
        tensors.append(_idx(path, sha1))
    train_x, train_y, test_x, test_y = tensors
    return Raw(train_x.unsqueeze(-1), train_y.long(), test_x.unsqueeze(-1), test_y.long())


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.exists()), None)


def _download(folder: Path, name: str, address: str) -> Path:
    path = folder / f"{name}.gz"
    try:
        fetch(f"{address}/{name}.gz", path, FASHION_SHA256[name])
    except FetchError as error:
        raise DataError(
            f"Fashion-MNIST is incomplete in {folder} and cannot be downloaded ({error}). Put the four files "
            f"{', '.join(f'{one}.gz' for one in FASHION_SUMS)} from {address} there, or give its folder with --data DIR or SENSLI_DATA."
        ) from None
    return path


def _idx(path: Path, sha1: str) -> Tensor:
    """An IDX file of bytes: two zeros, the type 8, the number of axes, their lengths, the content."""
    content = read_file(path)
    if path.suffix == ".gz":
        with unpacking(path):
            content = gzip.decompress(content)
    check_sum(content, sha1, path)
    axes = content[3]
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    return torch.frombuffer(bytearray(content[4 + 4 * axes :]), dtype=torch.uint8).view(shape)


# ---- The images of the CNN experiments, by name: where they are, and what is known of them without reading them.

FACTS: dict[str, Facts] = {"cifar10": CIFAR10_FACTS, "fashion_mnist": FASHION_FACTS}
_LOADERS: dict[str, Callable[[Path], Raw]] = {"cifar10": load_cifar10, "fashion_mnist": load_fashion_mnist}


def folder(given: Path | None = None) -> Path:
    """Where data sets are: the folder given, otherwise SENSLI_DATA, otherwise `data` beside the results."""
    return given or Path(os.environ.get("SENSLI_DATA") or "data")


def load_images(name: str, given: Path | None = None) -> Raw:
    """The data set, downloaded if it is missing."""
    return _LOADERS[name](folder(given))
