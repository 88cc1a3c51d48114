"""Downloading a published file: complete and as published, or not at all."""

from __future__ import annotations

import http.client
import os
import sys
import urllib.error
from pathlib import Path

import torch


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
