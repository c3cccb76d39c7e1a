"""Write a checkpoint whose arrays are worked out from other checkpoints while it is written.

It is a save as any other, atomic and durable, with the shards and shardings that its first source
had. Of the arrays no more is in memory than a few bands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ostraka import _box
from ostraka._box import Box
from ostraka._capture import Captured, DtypeRule
from ostraka._checkpoint import unless_replaced
from ostraka._codec import CompressRule
from ostraka._plan_write import MAX_FILE_BYTES
from ostraka._save import Save
from ostraka._source import Source
from ostraka._spec import Target
from ostraka.storage import PathLike

Array = np.ndarray[Any, Any]
OnBytes = Callable[[int, int], None]
"""Told of progress: the bytes that have been worked out so far, and those that there are."""

_SMALL_BYTES = 1 << 20
_AHEAD_BYTES = 128 << 20
"""Small arrays share blocks, so they are read together: so much of them at most."""


class StreamedValue:
    """A leaf whose boxes are worked out when they are asked for."""

    in_host_memory = False
    may_change = False
    band_bytes = 16 << 20

    def __init__(self, shape: tuple[int, ...], work_out: Callable[[Box], Array]):
        self._shape = shape
        self._work_out = work_out

    def read(self, device: int, box: Box) -> Array:
        return self._work_out(box)

    def whole(self) -> Array:
        return self._work_out(_box.full(self._shape))

    def hold(self) -> Sequence[tuple[Array, Array]]:
        return ()


class LeafReader:
    """Reads boxes of the leaves of one source; small leaves once, and all together."""

    def __init__(self, source: Source, numbers: Sequence[int]):
        self._source = source
        leaves = source.saved.leaves
        small = [n for n in numbers if leaves[n].nbytes < _SMALL_BYTES]
        sums = accumulate(leaves[number].nbytes for number in small)
        small = [n for n, total in zip(small, sums, strict=True) if total <= _AHEAD_BYTES]
        self._ahead: dict[int, Array] = {}
        if small:
            targets = [Target(number, _box.full(leaves[number].shape)) for number in small]
            with unless_replaced(source):
                self._ahead = {small[at]: array for at, array in source.read(targets)}

    def read(self, number: int, box: Box) -> Array:
        if number in self._ahead:
            shape = self._source.saved.leaves[number].shape
            return self._ahead[number][_box.slices(box, _box.full(shape))]
        with unless_replaced(self._source):
            ((_, array),) = self._source.read([Target(number, box)])
        return array


def save_streamed(
    path: PathLike,
    source: Source,
    work_out: Mapping[int, Callable[[Box], Array]],
    *,
    dtype: DtypeRule,
    compress: CompressRule,
    metadata: Mapping[str, Any] | None,
    on_bytes: OnBytes | None,
) -> None:
    """Save the tree of a source; `work_out` has, by number, how each of its leaves comes about."""
    saved = source.saved
    total = sum(leaf.nbytes for leaf in saved.leaves)
    done = 0

    def counted(work: Callable[[Box], Array]) -> Callable[[Box], Array]:
        def work_out(box: Box) -> Array:
            nonlocal done
            array = work(box)
            done += array.nbytes
            if on_bytes is not None:
                on_bytes(min(done, total), total)
            return array

        return work_out

    values: list[Any] = [
        StreamedValue(leaf.shape, counted(work_out[number]))
        for number, leaf in enumerate(saved.leaves)
    ]
    # One process writes the shards of all devices.
    process_of = (0,) * len(saved.process_of)
    captured = Captured(saved.tree, saved.leaves, values, saved.meshes, process_of, {}, {})
    saving = Save(path, dtype, compress, 0, metadata, MAX_FILE_BYTES, None)
    saving.run(lambda: captured)
