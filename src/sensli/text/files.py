"""The one way in which a file is written: complete or not at all, also when it is interrupted or several processes write it at once.

Each writer fills a file under a separate name beside the target, forces it to the disk and renames it. A reader sees the old file or a
new one, never a part.
"""

from __future__ import annotations

import glob
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sensli.errors import SensliError

ABANDONED = 3600.0  # seconds after which an untouched part is taken for one of a process that was killed


def write_bytes(path: str | os.PathLike[str], content: bytes, error: type[Exception] = SensliError) -> None:
    """Write a file that is complete from the moment it has this name."""
    with replacing(path, error) as file:
        file.write(content)


@contextmanager
def replacing(path: str | os.PathLike[str], error: type[Exception] = SensliError) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` when the block ends, and is gone without a trace if the block raises.

    Missing folders are made. What goes wrong with the disk is raised as ``error``, in words.
    """
    with _aside(path, error) as (file, target):
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(file.name, target)
        if os.name == "posix":
            with suppress(OSError):  # the file is in place; some file systems cannot force a folder to the disk
                _sync_folder(target.parent)


def check_writable(path: str | os.PathLike[str], error: type[Exception] = SensliError) -> None:
    """Raise now what writing the file would raise later, such as after an hour of work."""
    with _aside(path, error):
        pass


@contextmanager
def _aside(path: str | os.PathLike[str], error: type[Exception]) -> Iterator[tuple[BinaryIO, Path]]:
    """An empty file beside the one that ``path`` leads to; whatever happens, it is not left behind."""
    try:
        target = Path(os.path.realpath(path))  # through a link, as `open` would: the link stays
        if target.exists() and not target.is_file():
            # A rename would put a file in the place of /dev/null.
            raise OSError(f"it is a {'folder' if target.is_dir() else 'device or pipe'}, not a file")
        with suppress(FileExistsError):  # a file in the folder's place: opening will say so
            target.parent.mkdir(parents=True, exist_ok=True)
        start = f".{target.name[:50]}."  # of a long name not all: the part has to fit into the folder too
        _sweep(target.parent, start)
        part = target.parent / f"{start}{secrets.token_hex(8)}.part"
        try:
            # "x" follows no link and shares no file; the mode is what the umask leaves.
            with open(part, "xb") as file:
                yield file, target
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
    except OSError as cause:
        raise error(
            f"{path} cannot be written: {cause.strerror or cause}. Choose another place. An earlier file there was not changed."
        ) from cause


def _sweep(folder: Path, start: str) -> None:
    """Remove parts that processes left behind when they were killed: a run that is killed again and again must not fill the disk."""
    for part in folder.glob(f"{glob.escape(start)}*.part"):
        with suppress(OSError):  # another process may do the same
            if time.time() - part.lstat().st_mtime > ABANDONED:
                part.unlink()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
