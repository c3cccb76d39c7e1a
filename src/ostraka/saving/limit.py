"""Bounds the host memory of a background save, for `max_host_bytes`.

One half of it is for the threads that write: bands of the values, and their blocks. Three eighths
keep copies of values that the save has not come to yet. The rest is for what the allocator wastes.

If all copies have room, they are made at once, as without a limit. Otherwise the writer reads the
values from where they lie, band by band. Once only as many are left as have room, these are copied.
Then all are safe, and the caller may go on.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from ostraka.common.memory import trim
from ostraka.common.threads import Stopped, StopSignal, run_all
from ostraka.common.units import size_bytes
from ostraka.layout.box import Box
from ostraka.layout.shard_file import Entry
from ostraka.layout.spec import LeafSpec, StoredLeaf
from ostraka.live.values import Array, BandsOnce, CapturedValue, ShardedValue, Value
from ostraka.saving.capture import COPIERS, Captured

LEAST_HOST_BYTES = 64 << 20
"""The smallest limit: one thread that writes, and the blocks of a parity group."""
_THREAD_BYTES = 32 << 20
"""The least for a thread that writes."""
_BLOCKS_BYTES = 16 << 20
"""The part of it for blocks: put together, and compressed."""
_BAND_BYTES = 64 << 20
"""Larger bands are not faster."""

_TRIMS = 32
"""How often freed memory is given back, in a limit's worth of copies: threads leave much of it."""

_Band = tuple[int, int, Box]
"""Leaf, device and box."""


def check_host_bytes(given: int | str) -> int:
    """A limit in bytes. Raises ValueError for one with which nothing can be saved."""
    most_bytes = size_bytes("max_host_bytes", given)
    if most_bytes < LEAST_HOST_BYTES:
        raise ValueError(
            f"max_host_bytes is {most_bytes:,}; it must be at least {LEAST_HOST_BYTES:,} (64MiB), "
            "which a save needs to copy and compress some blocks"
        )
    return most_bytes


class HostLimit:
    """The limit of one save: the values that are not safe yet, and how much memory is for what."""

    def __init__(self, max_host_bytes: int | str, on_safe: Callable[[], None]):
        """`on_safe` is called when all values are safe, in the thread that finds out."""
        self._most_bytes = check_host_bytes(max_host_bytes)
        self._kept_bytes = self._most_bytes * 3 // 8
        self._on_safe = on_safe
        self._thread_bytes = _THREAD_BYTES
        self._exposed: dict[int, CapturedValue] = {}
        """By leaf, the values that are not safe."""
        self._bands: dict[int, BandsOnce] = {}
        """The same, to be written."""
        self._changed = threading.Condition()
        """Guards all of the following."""
        self._waiting: dict[_Band, int] = {}
        """The bands that nobody reads yet, with the memory of each."""
        self._kept: dict[_Band, Array] = {}
        self._unread_bytes = 0
        """The memory of all bands that are not copied yet."""
        self._untrimmed_bytes = 0
        """What was read since freed memory was last given back."""
        self._has_failed = False
        self._safe = threading.Event()

    # In the caller's thread

    def choose(self, captured: Captured) -> Sequence[CapturedValue]:
        """The values to copy at once. The others are read as they are written.

        Raises ValueError if one can only be copied in one piece, which is larger than the limit.
        """
        values = captured.values
        room = self._kept_bytes
        if sum(value.copied_bytes for value in values) <= room:
            self._note_safe()
            return values
        at_once: list[CapturedValue] = []
        for number, value in enumerate(values):
            # Processes compare the leaves that each of them has for itself.
            is_own = number in captured.sole_process and isinstance(value, ShardedValue)
            if value.copied_bytes and not is_own:
                self._exposed[number] = value
                if isinstance(value, ShardedValue) and value.band_bytes == 0:
                    self._make_room(captured.leaves[number], value.largest_bytes)
                continue
            room -= value.copied_bytes
            if room < 0:
                raise ValueError(
                    f"max_host_bytes is {self._most_bytes:,}, which is too little for the leaves "
                    "that each process has on its own devices, such as "
                    f"{captured.leaves[number].path!r}: three times their bytes are enough"
                )
            at_once.append(value)
        return at_once

    def _make_room(self, leaf: LeafSpec, nbytes: int) -> None:
        """Give each thread as much as a shard needs that does not come in bands."""
        needed = 2 * nbytes + _BLOCKS_BYTES
        if needed > self._most_bytes // 2:
            raise ValueError(
                f"max_host_bytes is {self._most_bytes:,}; it must be at least {2 * needed:,}, since"
                f" a shard of leaf {leaf.path!r} has {nbytes:,} bytes and comes in one piece"
            )
        self._thread_bytes = max(self._thread_bytes, needed)

    def wait(self) -> None:
        """Wait until all values are safe, or the save has failed."""
        self._safe.wait()

    @property
    def is_safe(self) -> bool:
        """True if the program may change all values, or the save has ended."""
        return self._safe.is_set()

    # In the background

    def threads(self, most: int, each_bytes: int | None = None) -> int:
        """How many threads have room, each with `each_bytes`. Default: threads that write."""
        if each_bytes is not None:
            return max(1, min(most, self._most_bytes // each_bytes))
        return max(1, min(most, self._most_bytes // 2 // self._thread_bytes))

    def take_over(
        self,
        values: Sequence[Value],
        leaves: Sequence[StoredLeaf],
        files: Iterable[tuple[int, Sequence[Entry]]],
        threads: int,
        cut: Callable[[Value, StoredLeaf, Box], Sequence[Box]],
    ) -> Sequence[Value]:
        """The values to write.

        `files` are those that this process writes: the device and the entries of each. `cut`
        returns the bands in which a box is written.
        """
        if not self._exposed:
            return values
        wrapped = list(values)
        thread_bytes = self._most_bytes // 2 // threads
        # Two bands: the next one is read while a block has the end of the one before.
        most_bytes = min((thread_bytes - _BLOCKS_BYTES) // 2, _BAND_BYTES)
        limited = self._bands
        for number in self._exposed:
            spec = leaves[number].spec
            bands = BandsOnce(values[number], spec, most_bytes, partial(self.read, number))
            wrapped[number] = limited[number] = bands
        for device, entries in files:
            for leaf, box, _, nbytes in entries:
                if nbytes and leaf in limited:
                    for band in cut(limited[leaf], leaves[leaf], box):
                        self._waiting[leaf, device, band] = limited[leaf].memory_bytes(band)
        self._unread_bytes = sum(self._waiting.values())
        self._note_read(0)
        return wrapped

    def read(self, leaf: int, device: int, box: Box) -> Array:
        """The elements of a band, for a thread that writes."""
        band = (leaf, device, box)
        with self._changed:
            nbytes = self._waiting.pop(band, None)
            if nbytes is None:  # Another thread copies it.
                while band not in self._kept:
                    if self._has_failed:
                        raise Stopped
                    self._changed.wait()
                kept = self._kept.pop(band)
            else:
                kept = None
        if kept is None:
            array = self._bands[leaf].copy(device, box)
            self._note_read(nbytes or 0)
        else:
            array = kept
        self._trim_now_and_then(array.nbytes)
        return array

    def _trim_now_and_then(self, nbytes: int) -> None:
        with self._changed:
            self._untrimmed_bytes += nbytes
            if self._untrimmed_bytes <= self._most_bytes // _TRIMS:
                return
            self._untrimmed_bytes = 0
        gc.collect(0)  # JAX lets go of what an array had copied at the next collection.
        trim()

    def _note_read(self, nbytes: int) -> None:
        """Note that a band is copied. Copies all that are left as soon as they have room."""
        with self._changed:
            self._unread_bytes -= nbytes
            is_last = self._unread_bytes == 0
            rest: Mapping[_Band, int] = {}
            if self._unread_bytes <= self._kept_bytes:
                rest, self._waiting = self._waiting, {}
        if rest:
            self._keep(rest)
        if is_last:
            # The memory of devices is theirs again.
            for value in self._exposed.values():
                value.let_go()
            self._note_safe()

    def _keep(self, bands: Mapping[_Band, int]) -> None:
        def copy(band: _Band) -> None:
            leaf, device, box = band
            array = self._bands[leaf].copy(device, box)
            with self._changed:
                # A part of an array would keep all of it in memory.
                self._kept[band] = array if array.base is None else array.copy()
                self._changed.notify_all()
            self._note_read(bands[band])

        try:
            run_all(copy, bands, threads=COPIERS, stop=StopSignal())
        except BaseException:
            with self._changed:
                self._has_failed = True
                self._changed.notify_all()
            raise

    def end(self) -> None:
        """Note that the save has ended."""
        if not self.is_safe:
            self._note_safe()

    def _note_safe(self) -> None:
        self._on_safe()
        self._safe.set()
