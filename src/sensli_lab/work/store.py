"""Results on disk: files that are whole or noticed, the folder that holds them, and which code computed them."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sensli import __version__
from sensli.checkpoint import storage
from sensli.text.files import check_writable, write_bytes
from sensli_lab.errors import StoreError

_MAGIC = b"file of sensli results\n"


class Damaged(Exception):
    """The file is not what was once written."""


def write_results(path: Path, content: dict[str, Any]) -> str:
    """Store tensors and plain values; returns the checksum of what was written."""
    return storage.write_tensors(path, content, _MAGIC, StoreError)


def read_results(path: Path, checksum: str | None = None) -> dict[str, Any]:
    """Read what `write_results` wrote, or raise Damaged; nothing in the file is executed."""
    try:
        content, found = storage.read_tensors(path, _MAGIC)
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from None
    except storage.Unusable as error:
        raise Damaged(str(error)) from None
    if checksum not in (None, found):
        raise Damaged("is not the file that was written with its facts: the checksum does not match")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Store plain values with their checksum."""
    body = {**content, "checksum": _json_checksum(content)}
    write_bytes(path, (json.dumps(body, indent=2) + "\n").encode(), StoreError)


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote, or raise Damaged."""
    try:
        content = json.loads(path.read_text("utf-8"))
        known = content.pop("checksum", None) if isinstance(content, dict) else None
        found = _json_checksum(content)
    except (OSError, ValueError, RecursionError):
        raise Damaged("it cannot be read as JSON") from None
    if not isinstance(content, dict) or known != found:
        raise Damaged("the checksum does not match")
    return content


def _json_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of(content: dict[str, Any]) -> str:
    """A short name for all that decides a result: equal digests may share results, different ones never do."""
    return _json_checksum(content)[:12]


class ResultsFolder:
    """Where results are kept. Names in it contain a digest, so results of a changed configuration never mix with old ones."""

    def __init__(self, root: Path) -> None:
        if root.exists() and not root.is_dir():
            raise StoreError(f"{root} is a file, not a results folder. Choose a folder with --out.")
        self.root = root

    def check_writable(self) -> None:
        """Find out before the first hour of work, not after it."""
        check_writable(self.root / "results", StoreError)


@lru_cache
def provenance() -> dict[str, Any]:
    """Which code on which software computes a result here: stored with each."""
    return {
        "commit": _commit(),
        "versions": {"sensli": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _commit() -> str | None:
    """The commit of the checkout this package runs from, marked where files differ from it; None if installed."""
    here = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        call = ["git", "-C", str(here), *arguments]
        return subprocess.run(call, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # an installed package may lie inside somebody else's repository: only our own source tree counts
        if Path(git("rev-parse", "--show-toplevel")) / "src" / "sensli_lab" != here:
            return None
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
