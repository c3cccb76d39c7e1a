"""The machine: what it is, and how it is brought to rest between two measurements."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
PACKAGES = ("ostraka", "jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy", "xxhash")


def settle() -> None:
    """Give freed memory back and write dirty pages out, so that no turn pays for the one before."""
    free_memory()
    os.sync()


def free_memory() -> None:
    """Give freed memory back to the system.

    Otherwise a contender would get the already mapped pages that the last one left.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def drop_caches(root: Path) -> str:
    """Empty the page cache of the files below `root`; says by which means."""
    os.sync()
    try:
        DROP_CACHES.write_text("3\n")
    except OSError:
        _forget_files(root)
        return "posix_fadvise"
    return "drop_caches"


def _forget_files(root: Path) -> None:
    for path in (p for p in root.rglob("*") if p.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a checkpoint, if there is one."""
    shutil.rmtree(path, ignore_errors=True)


def describe(scratch: Path) -> dict[str, object]:
    """Facts about this machine that bear on the numbers; none that names it."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _first_value("/proc/cpuinfo", "model name"),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "file_system": _file_system(scratch),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first_value(path: str, key: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None


def _file_system(path: Path) -> str | None:
    """The type of the file system that holds `path`: the longest mount point above it."""
    best: tuple[int, str | None] = (-1, None)
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            if path.resolve().is_relative_to(mount) and len(mount) > best[0]:
                best = (len(mount), kind)
    return best[1]
