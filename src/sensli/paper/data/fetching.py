"""Fetching a file over HTTP: with progress, and after a cut from where it stopped, also in another process."""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from sensli.terminal import progress

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
        failures = 0
        with progress(f"fetching {target.name}", 1.0) as reach:
            while True:
                before = part.stat().st_size if part.exists() else 0
                try:
                    if _attempt(url, part, before, reach):
                        break
                    reason = "the connection was cut"
                except urllib.error.HTTPError as error:
                    if error.code < 500:
                        raise FetchError(f"the server says {error.code} {error.reason}") from None
                    reason = f"the server says {error.code} {error.reason}"
                except (http.client.HTTPException, OSError) as error:
                    if isinstance(error, OSError) and error.filename is not None:
                        raise  # the disk, not the network
                    reason = str(getattr(error, "reason", error)) or type(error).__name__
                failures = 0 if part.exists() and part.stat().st_size > before else failures + 1
                if failures > len(pauses):
                    raise FetchError(reason)
                if failures:
                    time.sleep(pauses[failures - 1])
            print(f"fetched {url}")
        os.replace(part, target)
    except OSError as error:
        raise FetchError(f"{error.filename or target}: {error.strerror}") from None


def _attempt(url: str, part: Path, have: int, tell: Callable[[float], None]) -> bool:
    """One request for what is missing; whether the file is complete then."""
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
        part.unlink()
        return False
    with answer:
        if have and answer.status != 206:  # the server starts over
            have = 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if have else "wb") as file:
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                if total:
                    tell(have / total)
    return total is None or have >= total
