"""Fashion-MNIST from its four IDX files, compressed or not, compared with checksums of their content."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from sensli.paper.data.fetching import FetchError, fetch
from sensli.paper.data.images import DataError, Facts, Raw, check_sum, read

ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FOLDERS = ("fashion_mnist", "FashionMNIST/raw", "fashion-mnist", ".")
FACTS = Facts(60_000, 10_000, 10, 1, 28, (0.2860,), (0.3530,))

SUMS = {  # SHA-1 of the uncompressed files
    "train-images-idx3-ubyte": "b9bd999c0106c9b8b4b0cefce58c9a6060f27095",
    "train-labels-idx1-ubyte": "4bccf37222e01638381eaa326bf730337a597267",
    "t10k-images-idx3-ubyte": "880056926db704f9f713097915f99da346f5b1d1",
    "t10k-labels-idx1-ubyte": "958122e8b4b97fd4e71eca2d08ef754ed77c3ad9",
}
SHA256 = {  # of the compressed ones
    "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}


def load(folder: Path, *, address: str = ADDRESS, sums: dict[str, str] = SUMS) -> Raw:
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
        fetch(f"{address}/{name}.gz", path, SHA256[name])
    except FetchError as error:
        raise DataError(
            f"Fashion-MNIST is incomplete in {folder} and cannot be downloaded ({error}). Put the four files "
            f"{', '.join(f'{one}.gz' for one in SUMS)} from {address} there, or give its parent folder with --data DIR or SENSLI_DATA."
        ) from None
    return path


def _idx(path: Path, sha1: str) -> Tensor:
    """An IDX file of bytes: two zeros, the type 8, the number of axes, their lengths, the content."""
    content = read(path)
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path} cannot be unpacked ({error}). Delete it and run the same command again to download it."
            ) from None
    check_sum(content, sha1, path)
    axes = content[3]
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    return torch.frombuffer(bytearray(content[4 + 4 * axes :]), dtype=torch.uint8).view(shape)
