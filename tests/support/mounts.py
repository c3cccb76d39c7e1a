"""A file system of a test's own: small, read-only, or with sectors that are lost."""

import errno
import gc
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def mounted(place: Path, *, options: str, for_what: str) -> Generator[Path]:
    """A real file system at `place`, as long as the block lasts; skips aloud where it can't be."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.call(command, stderr=subprocess.DEVNULL):
        pytest.skip(f"NOT TESTED HERE: {for_what}. Mounting a file system needs root.")
    try:
        yield place
    finally:
        _unmount(place)


@contextmanager
def in_memory(otherwise: Path) -> Generator[Path]:
    """A folder in memory, where there is such a place: many syncs take long elsewhere."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield otherwise
        return
    folder = Path(tempfile.mkdtemp(dir=memory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unmount(place: Path) -> None:
    """Anyone may be looking at it for a moment, and then it is busy.

    So it is while an error that was caught, and its traceback, hold the handle of a directory.
    """
    deadline = time.monotonic() + 60
    gc.collect()
    while subprocess.call(["umount", str(place)], stderr=subprocess.DEVNULL):
        if time.monotonic() > deadline:
            subprocess.run(["umount", str(place)], check=True)
            return
        time.sleep(0.1)


def lose_sectors(files: Iterable[Path], monkeypatch: pytest.MonkeyPatch, at: int = 0) -> None:
    """Have the system say what it says of files whose disk can't give byte `at` any more."""
    lost = {file.stat().st_ino for file in files}
    read = os.preadv

    def preadv(file: int, buffers: list[Any], offset: int) -> int:
        count = read(file, buffers, offset)
        if offset <= at < offset + count and os.fstat(file).st_ino in lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
