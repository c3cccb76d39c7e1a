"""A file system of a test's own: a small one, or one that nobody may write to."""

import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

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
        subprocess.run(["umount", str(place)], check=True)
