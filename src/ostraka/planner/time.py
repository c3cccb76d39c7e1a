"""Bytes to seconds, and how often to save. No JAX.

The times are those of the transfer alone, at given or measured bandwidths. A save also agrees and
commits, which takes milliseconds.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf, sqrt
from pathlib import Path
from uuid import uuid4

from ostraka.common.record import best_interval_s
from ostraka.errors import store_error
from ostraka.storage import USUAL_WRITERS

_PROBE_BYTES = 256 << 20
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bandwidths in bytes a second. None if not known."""

    host_write: float | None = None
    """The writes of one host."""
    host_read: float | None = None
    storage: float | None = None
    """The storage, for all hosts together."""
    device: float | None = None
    """From the devices of a host to its memory."""

    def write_s(self, host_bytes: int, total_bytes: int) -> float | None:
        """The time of a save whose slowest host writes `host_bytes`."""
        return _slowest_s((host_bytes, self.host_write), (total_bytes, self.storage))

    def read_s(self, host_bytes: int, total_bytes: int) -> float | None:
        return _slowest_s((host_bytes, self.host_read), (total_bytes, self.storage))

    def peak_write(self, hosts: int) -> float | None:
        """The rate at which all hosts together write."""
        return _peak(hosts, self.host_write, self.storage)

    def peak_read(self, hosts: int) -> float | None:
        return _peak(hosts, self.host_read, self.storage)


def _slowest_s(*transfers: tuple[int, float | None]) -> float | None:
    return max((size / rate for size, rate in transfers if rate is not None), default=None)


def _peak(hosts: int, host: float | None, storage: float | None) -> float | None:
    return storage if host is None else min(hosts * host, storage or inf)


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between saves that loses the least time."""

    interval_s: float
    """Time to work between two saves: Daly's, but at least the time of a write."""
    blocked_s: float
    """Time that a save blocks the loop."""
    young_s: float
    daly_s: float
    """Daly's estimate. It refines Young's, and holds for long saves, too."""
    lost_share: float
    """Share of all time that goes into saving, repeated work and restoring."""


def advise_interval(
    blocked_s: float, background_s: float, restore_s: float, mtbf_s: float
) -> Interval:
    """The time between saves that Young (1974) and Daly (2006) advise.

    A save blocks the loop for `blocked_s`: the whole write for `save`, the copy to host memory for
    `save_async`. Its write then runs in the background for `background_s`. The next save waits for
    it, so this is the shortest interval. Until it has ended, a failure falls back to the save
    before. `mtbf_s` is the mean time between failures of the whole job.
    """
    young = sqrt(2 * blocked_s * mtbf_s)
    daly = best_interval_s(blocked_s, mtbf_s)
    interval = max(daly, background_s, blocked_s if blocked_s < 2 * mtbf_s else 0.0)
    lost = blocked_s / (interval + blocked_s) if blocked_s else 0.0
    lost += (interval / 2 + background_s + restore_s) / mtbf_s
    return Interval(interval, blocked_s, young, daly, min(lost, 1.0))


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a save and a restore. None if the bandwidth is not known."""

    save_s: float | None
    """Until all is on disk. `save` blocks for this time."""
    save_async_blocked_s: float | None
    """Until arrays on accelerators are copied to host memory. On CPUs nothing is copied."""
    restore_s: float | None
    """To restore everything with its saved sharding."""
    save_every: Interval | None = None
    """Interval of `save`, if the mean time between failures was given."""
    save_async_every: Interval | None = None
    """Interval of `save_async`. It blocks for less."""


def work_out_times(
    bandwidths: Bandwidths,
    *,
    save_s: float | None,
    restore_s: float | None,
    held_bytes: int,
    mtbf_s: float | None,
) -> Times:
    """All times of a plan. `held_bytes` are those on the devices of the fullest host."""
    blocked_s = None if bandwidths.device is None else held_bytes / bandwidths.device
    if mtbf_s is None or save_s is None:
        return Times(save_s, blocked_s, restore_s)
    restoring_s = restore_s or 0.0
    times = Times(save_s, blocked_s, restore_s, advise_interval(save_s, 0.0, restoring_s, mtbf_s))
    if blocked_s is None:
        return times
    beside = advise_interval(blocked_s, save_s, restoring_s, mtbf_s)
    return replace(times, save_async_every=beside)


def probe(directory: str) -> Bandwidths:
    """Measure how fast this machine writes to and reads from a directory.

    As in a save and a restore, several threads write a file each, fsync it, drop it from the page
    cache, and read it again. The files are removed. Raises StoreError if that is not allowed.
    """
    threads = USUAL_WRITERS
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
            Path(name).unlink(missing_ok=True)
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
