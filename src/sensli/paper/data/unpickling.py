"""Reading the pickled batches of CIFAR-10 without executing anything that is in the file.

A pickle may name any function to be called. Here the few names that a pickled array needs stand for inert records of
our own; any other name is refused.
"""

from __future__ import annotations

import io
import pickle
from typing import Any


class UnsafePickle(Exception):
    """The pickle names something that a batch of images has no use for."""


class _Array:
    """What numpy would have made an array of: shape, type and bytes."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, self.shape, self.dtype, self.fortran, self.content = state


class _Dtype:
    def __init__(self, name: Any = "", *_: Any) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        pass  # byte order: nothing to say for bytes


def _array(*_: Any) -> _Array:
    return _Array()


def _bytes(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _bytes,  # how Python 3 writes bytes in the old protocols
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[(module, name)]
        except KeyError:
            raise UnsafePickle(f"it asks for {module}.{name}, which no batch of images needs") from None


def read_batch(content: bytes) -> tuple[bytes, list[int]]:
    """The pixels (one row of 3072 bytes per image) and the labels of one `data_batch`."""
    try:
        batch = _Reader(io.BytesIO(content), encoding="bytes").load()
        data, labels = (batch[key] if key in batch else batch[key.decode()] for key in (b"data", b"labels"))
        is_bytes = isinstance(data, _Array) and data.dtype.name in ("u1", "|u1", "uint8") and not data.fortran
        if not is_bytes or len(data.content) != 3072 * len(labels):
            raise UnsafePickle("its arrays are not images of 3072 bytes with a label each")
        return data.content, [int(label) for label in labels]
    except UnsafePickle:
        raise
    except Exception as error:  # a damaged pickle may fail in any way
        raise UnsafePickle(f"it cannot be read ({type(error).__name__})") from None
