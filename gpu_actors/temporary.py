"""Folders for files that must live as long as this process, and no longer."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["process_folder"]


@functools.cache
def process_folder(purpose: str) -> Path:
    """A folder that this user alone can enter, removed when the process that asked first ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"gpu-actors-{purpose}-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # else a forked child, whose parent goes on
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
