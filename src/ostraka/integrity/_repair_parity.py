"""Parity as an origin of lost bytes, and parity files that are lost themselves. No JAX."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostraka._blocks import ShardFile
from ostraka._parallel import StopSignal, run_all
from ostraka._parity_format import ParityFile
from ostraka._rebuild import Rebuild
from ostraka._shards import Shards
from ostraka.errors import Damaged, Problem
from ostraka.integrity._origins import Absent, Shard
from ostraka.integrity._repair_report import MendedFile, Tally

Array = np.ndarray[Any, Any]

_RANGE_BYTES = 8 << 20
"""What is found again at a time, by a thread."""
_SCRATCH_BYTES = 2 << 20
ORIGIN = "parity"


@dataclass(slots=True)
class _Window:
    """The part of a file that was found again last: its blocks are asked for in order."""

    rebuild: Rebuild
    members: int
    start: int = 0
    stop: int = 0
    data: tuple[Array, ...] = ()


class ParityOrigin:
    """Lost files, from the others of their groups."""

    name = ORIGIN

    def __init__(self, shards: Shards, tally: Tally):
        self._shards = shards
        self._tally = tally
        self._windows: dict[str, _Window] = {}
        self._threads = max(2, shards.store.parts.reads_at_once // 2)

    def read(self, shard: Shard, number: int) -> Any:
        block = shard.blocks[number]
        window = self._open(shard)
        if not window.start <= block.file_start < block.file_stop <= window.stop:
            try:
                self._move(window, shard, number)
            except Damaged as error:
                # The first is about the file itself, the others are why.
                raise Absent("; ".join(map(str, error.problems[1:] or error.problems))) from error
        return _cut(window, block.file_start, block.file_stop)

    def close(self) -> None:
        for window in self._windows.values():
            window.rebuild.close()
        self._windows.clear()

    def _open(self, shard: Shard) -> _Window:
        found = self._windows.get(shard.name)
        if found is None:
            rebuild = self._shards.open_rebuild(shard.entry)
            parities = self._shards.parities
            if rebuild is None or parities is None:
                raise Absent("it does not cover this file")
            members = len(parities.members_of(parities.place_of(shard.entry)[0]))
            found = self._windows[shard.name] = _Window(rebuild, members)
        return found

    def _move(self, window: _Window, shard: Shard, number: int) -> None:
        """Find some ranges of whole blocks again, each by a thread."""
        ranges: list[tuple[int, int]] = []
        start = stop = shard.blocks[number].file_start
        for block in shard.blocks[number:]:
            stop = block.file_stop
            if stop - start >= _RANGE_BYTES:
                ranges.append((start, stop))
                start = stop
            if len(ranges) == self._threads:
                break
        if start < stop and len(ranges) < self._threads:
            ranges.append((start, stop))
        data = run_all(
            lambda one: window.rebuild.read(*one),
            ranges,
            threads=self._threads,
            stop=StopSignal(),
        )
        window.start, window.stop, window.data = ranges[0][0], ranges[-1][1], tuple(data)
        self._tally.add(read=window.members * (window.stop - window.start))


def _cut(window: _Window, start: int, stop: int) -> Array:
    at = window.start
    for piece in window.data:
        if at <= start and stop <= at + len(piece):
            return piece[start - at : stop - at]
        at += len(piece)
    raise AssertionError("a range ends inside a block")


def find_lost_parity(shards: Shards, file: ParityFile, tally: Tally, *, is_summed: bool) -> str:
    """What is wrong with a parity file; empty if it is as it was written.

    If `is_summed`, its parity has just been used and proved, and is not looked at again.
    """
    try:
        parity = ShardFile(shards, file, ())
    except Damaged as error:
        return error.problems[0].found
    parity.reads_left = 1
    scratch = memoryview(bytearray(_SCRATCH_BYTES))
    try:
        with parity.opened():
            assert shards.parities is not None
            known = range(1, 1 + shards.parities.layout_of(file).blocks) if is_summed else ()
            for number, block in enumerate(parity.blocks):
                if number in known:
                    continue
                parity.check(block, scratch)
                tally.add(read=block.file_stop - block.file_start)
    except Damaged as error:
        return error.problems[0].found
    finally:
        with suppress(OSError):
            parity.close()
    return ""


def mend_parity(
    shards: Shards,
    file: ParityFile,
    found: str,
    process: int,
    tally: Tally,
    check: Callable[[], None],
) -> MendedFile | Problem:
    """Make a parity file again, whose group is whole, and replace it in one event."""
    assert shards.parities is not None
    name = shards.name_of(file)
    writer = shards.store.create(name, file.size, replace=True)
    try:
        at = 0
        for piece in shards.parities.rebuild_parity(file):
            check()
            writer.write(at, [piece])
            at += len(piece)
        writer.finish()
    except Damaged as error:
        writer.abandon()
        why = "; ".join(map(str, error.problems))
        return Problem(name, f"{found}, and can't be mended: {why}")
    except BaseException:
        writer.abandon()
        raise
    tally.add(read=sum(f.size for f in shards.parities.members_of(file.group)), written=file.size)
    return MendedFile(name, found, (), ("its group",), file.size, process)
