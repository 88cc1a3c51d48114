"""CIFAR-10 from either official layout. Both are compared with the checksums of the binary one: equal images, equal sums."""

from __future__ import annotations

import tarfile
from pathlib import Path

import torch
from torch import Tensor

from sensli.paper.data.fetching import FetchError, fetch
from sensli.paper.data.images import DataError, Facts, Raw, check_sum, read
from sensli.paper.data.unpickling import PIXELS, UnsafePickle, read_batch
from sensli.text.writing import write_bytes

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"  # of the archive
BINARY, PICKLED = "cifar-10-batches-bin", "cifar-10-batches-py"
FACTS = Facts(50_000, 10_000, 10, 3, 32, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))

SUMS = {  # SHA-1 of the binary batches
    "data_batch_1": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch": "67eb016db431130d61cd03c7ad570b013799c88c",
}


def load(folder: Path, *, address: str = ADDRESS, sha256: str = SHA256, sums: dict[str, str] = SUMS) -> Raw:
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
        records = read(path)
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
        return read_batch(read(path))
    except UnsafePickle as error:
        raise DataError(f"{path} is not an official batch: {error}. Use the files from {ADDRESS}.") from None


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
    try:
        with tarfile.open(archive) as tar:
            for entry in tar:  # by name only: a path in the archive is never used
                name = Path(entry.name).name
                file = tar.extractfile(entry) if name.removesuffix(".bin") in sums and entry.isfile() else None
                if file is not None:
                    contents[name] = file.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(
            f"{archive} cannot be unpacked ({error}). Delete it and run the same command again to download it."
        ) from None
    for name, sha1 in sums.items():
        check_sum(contents.get(f"{name}.bin", b""), sha1, archive)
    for name, content in contents.items():
        write_bytes(folder / BINARY / name, content, DataError)
    archive.unlink()
