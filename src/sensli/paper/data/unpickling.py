"""Reading the pickled batches of CIFAR-10 without executing anything that is in the file.

A pickle may name any function to be called. Here the few names that a pickled array needs are mapped to an inert record;
any other name is refused. Their checksum tells whether the bytes are those of the images.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

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
