"""Bytes to seconds, and how often to save. No JAX.

The times are those of the transfer alone: what is moved, at the bandwidths that were given or
measured. A save also agrees and commits, which takes milliseconds.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import sqrt
from uuid import uuid4

from ostraka.errors import store_error
from ostraka.manager._advice import best_interval_s
from ostraka.planner._state import default_writers

_PROBE_BYTES = 256 << 20
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """In bytes a second; None where it is not known."""

    host_write: float | None = None
    """What one host writes."""
    host_read: float | None = None
    storage: float | None = None
    """What the storage takes or gives in all, for all hosts together."""
    device: float | None = None
    """From the devices of a host to its memory."""

    def write_s(self, host_bytes: int, total_bytes: int) -> float | None:
        """How long a save takes whose slowest host writes `host_bytes`."""
        return _slower(host_bytes, self.host_write, total_bytes, self.storage)

    def read_s(self, host_bytes: int, total_bytes: int) -> float | None:
        return _slower(host_bytes, self.host_read, total_bytes, self.storage)

    def peak_write(self, hosts: int) -> float | None:
        """The rate at which all hosts together write."""
        return _least(None if self.host_write is None else hosts * self.host_write, self.storage)

    def peak_read(self, hosts: int) -> float | None:
        return _least(None if self.host_read is None else hosts * self.host_read, self.storage)


def _slower(
    host_bytes: int, host: float | None, total_bytes: int, storage: float | None
) -> float | None:
    times = [
        size / rate
        for size, rate in ((host_bytes, host), (total_bytes, storage))
        if rate is not None
    ]
    return max(times, default=None)


def _least(*rates: float | None) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)


@dataclass(frozen=True, slots=True)
class Interval:
    """How often to save, so that least time is lost."""

    young_s: float
    daly_s: float
    """Daly's estimate, which holds for long saves, too."""
    lost_share: float
    """Of all time, what goes into saving, into work done again, and into restoring."""


def advise_interval(save_s: float, restore_s: float, mtbf_s: float) -> Interval:
    """The time between saves that Young (1974) and Daly (2006) advise.

    `mtbf_s` is the mean time between failures of the whole job.
    """
    young = sqrt(2 * save_s * mtbf_s)
    daly = best_interval_s(save_s, mtbf_s)
    if save_s < 2 * mtbf_s:
        daly = max(daly, save_s)
    lost = save_s / (daly + save_s) + (daly / 2 + restore_s) / mtbf_s
    return Interval(young, daly, min(lost, 1.0))


def probe(directory: str) -> Bandwidths:
    """Measure what this machine writes to, and reads from, a directory, as a save and restore do.

    Several threads write a file each, sync it, forget what is cached, and read it again. The files
    are removed. Raises StoreError where that is not allowed.
    """
    threads = default_writers()
    each = _PROBE_BYTES // threads
    names = [os.path.join(directory, f".ostraka-probe-{uuid4().hex}") for _ in range(threads)]
    try:
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            list(pool.map(lambda name: _write(name, each), names))
            written = time.perf_counter()
            list(pool.map(_read, names))
            read = time.perf_counter()
    except OSError as error:
        raise store_error("measure the speed of", directory, error) from error
    finally:
        for name in names:
            if os.path.exists(name):
                os.remove(name)
    total = each * threads
    return Bandwidths(host_write=total / (written - started), host_read=total / (read - written))


def _write(name: str, size: int) -> None:
    # Contents that don't compress: some file systems do.
    block = os.urandom(_BLOCK_BYTES)
    with open(name, "wb", buffering=0) as file:
        for start in range(0, size, _BLOCK_BYTES):
            file.write(block[: min(_BLOCK_BYTES, size - start)])
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(name: str) -> None:
    block = bytearray(_BLOCK_BYTES)
    with open(name, "rb", buffering=0) as file:
        while file.readinto(block):
            pass
