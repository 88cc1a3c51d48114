"""Fetching a file over HTTP: with progress, and after a cut from where it stopped, also in another process."""

from __future__ import annotations

import http.client
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sensli.growing.terminal import progress

CHUNK = 1 << 18
PAUSES = (0.5, 2.0, 5.0)  # seconds before the next attempt when one brought nothing new
TIMEOUT = 30.0


class FetchError(Exception):
    """The file could not be had; the text says why."""


def fetch(url: str, target: Path, *, pauses: tuple[float, ...] = PAUSES) -> None:
    """Bring `url` to `target`. What has arrived waits in `<target>.part`, and the next attempt or process goes on there."""
    if os.environ.get("SENSLI_OFFLINE"):
        raise FetchError("nothing is downloaded where SENSLI_OFFLINE is set, as it is for the workers of a Ray cluster")
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(part) as file:
            _fetch(url, target.name, file, pauses)
            os.fsync(file.fileno())
            os.replace(part, target)
    except _Disk as error:
        part.unlink(missing_ok=True)  # it holds what is left of the disk
        raise FetchError(f"{target}: {error}") from None
    except OSError as error:
        raise FetchError(f"{error.filename or target}: {error.strerror}") from None
    print(f"fetched {url}")


class _Disk(Exception):
    """The disk failed, not the network."""


@contextmanager
def _only_one(path: Path) -> Iterator[BinaryIO]:
    """The part, open at its end, for this process alone. A link of that name is not followed."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, flags, 0o666), "r+b")
    try:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FetchError(f"another process is fetching {path}; run again when it is done") from None
        file.seek(0, os.SEEK_END)
        yield file
    finally:
        with suppress(OSError):  # the rest of a chunk that did not fit; that was reported
            file.close()


def _fetch(url: str, name: str, part: BinaryIO, pauses: tuple[float, ...]) -> None:
    failures = 0
    with progress(f"fetching {name}", 1.0) as reach:
        while True:
            before = part.tell()
            try:
                if _attempt(url, part, reach):
                    return
                reason = "the connection was cut"
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    raise FetchError(f"the server says {error.code} {error.reason}") from None
                reason = f"the server says {error.code} {error.reason}"
            except (http.client.HTTPException, OSError) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            failures = 0 if part.tell() > before else failures + 1
            if failures > len(pauses):
                raise FetchError(reason)
            if failures:
                time.sleep(pauses[failures - 1])


def _attempt(url: str, part: BinaryIO, tell: Callable[[float], None]) -> bool:
    """One request for what is missing; whether the file is complete then."""
    have = part.tell()
    headers = {"User-Agent": "sensli", **({"Range": f"bytes={have}-"} if have else {})}
    request = urllib.request.Request(url, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        # nothing lies behind what we have: complete if the server names that size, else it is another file
        if error.headers.get("Content-Range", "").endswith(f"/{have}"):
            return True
        _start_over(part)
        return False
    with answer:
        if have and answer.status != 206:  # the server starts over
            have = 0
            _start_over(part)
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        while chunk := answer.read(CHUNK):
            have += len(chunk)
            _write(part, chunk)
            if total:
                tell(have / total)
    return total is None or have >= total


def _start_over(part: BinaryIO) -> None:
    part.seek(0)
    part.truncate()


def _write(part: BinaryIO, chunk: bytes) -> None:
    """Write at once, so that a failure can be told from one of the network."""
    try:
        part.write(chunk)
        part.flush()
    except OSError as error:
        raise _Disk(error.strerror) from None
