"""Save arrays that are computed from other checkpoints during the save.

This is a save like any other, atomic and durable, with the shards and shardings of a source. Only a
few bands of the arrays are in memory at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from ostraka.formats.source import Saved, Source
from ostraka.layout import box as _box
from ostraka.layout.box import Box
from ostraka.layout.spec import LeafSpec, Target
from ostraka.reading.locate import unless_replaced
from ostraka.saving.capture import Captured
from ostraka.saving.save import SaveOptions, run_save
from ostraka.storage import PathLike

Array = np.ndarray[Any, Any]
NumberedBox = tuple[int, Box]

_SMALL_BYTES = 1 << 20
_AHEAD_BYTES = 64 << 20
"""Bytes of small arrays to read together, since they share blocks."""


@dataclass(slots=True)
class StreamedValue:
    """A leaf whose boxes are computed on request."""

    in_host_memory: ClassVar[bool] = False
    may_change: ClassVar[bool] = False
    shape: tuple[int, ...]
    compute: Callable[[Box], Array]
    band_bytes: int = 16 << 20

    def read(self, device: int, box: Box) -> Array:
        return self.compute(box)

    def whole(self) -> Array:
        return self.compute(_box.full(self.shape))

    def hold(self) -> Sequence[tuple[Array, Array]]:
        return ()


class BoxReader:
    """Reads boxes of numbered arrays. Small arrays are read once, all together.

    `read_all` reads several boxes at once.
    """

    def __init__(
        self,
        read_all: Callable[[Sequence[NumberedBox]], Mapping[NumberedBox, Array]],
        specs: Mapping[int, LeafSpec],
    ):
        self._read_all = read_all
        small = {n: spec for n, spec in specs.items() if spec.nbytes < _SMALL_BYTES}
        sums = accumulate(spec.nbytes for spec in small.values())
        self._small = {
            number: _box.full(spec.shape)
            for (number, spec), total in zip(small.items(), sums, strict=True)
            if total <= _AHEAD_BYTES
        }
        self._ahead: Mapping[NumberedBox, Array] | None = None
        self._lock = threading.Lock()

    def read(self, number: int, box: Box) -> Array:
        whole = self._small.get(number)
        if whole is None:
            return self._read_all([(number, box)])[number, box]
        with self._lock:
            if self._ahead is None:
                self._ahead = self._read_all(list(self._small.items()))
        return self._ahead[number, whole][_box.slices(box, whole)]


def source_reader(source: Source, numbers: Sequence[int]) -> BoxReader:
    """A reader of some leaves of a checkpoint."""

    def read_all(boxes: Sequence[NumberedBox]) -> dict[NumberedBox, Array]:
        with unless_replaced(source):
            found = source.read([Target(*numbered) for numbered in boxes])
            return {boxes[at]: array for at, array in found}

    return BoxReader(read_all, {number: source.saved.leaves[number] for number in numbers})


def save_streamed(
    path: PathLike, saved: Saved, values: Sequence[StreamedValue], options: SaveOptions
) -> None:
    """Save the tree of a source with other values. One process writes the shards of all devices."""
    process_of = (0,) * len(saved.process_of)
    of_tree: list[Any] = [*values]
    captured = Captured(saved.tree, saved.leaves, of_tree, saved.meshes, process_of, {}, {})
    run_save(path, lambda: captured, options)
