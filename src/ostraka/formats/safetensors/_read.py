"""Read boxes of tensors, and only their ranges of the files. No JAX.

A box with whole rows is one range of its file. A box with parts of rows is a range for each row.
These ranges are read one by one, unless they cover nearly all of the rows or are shorter than
`shortest_range_bytes`. Then the gaps between them are read as well. Adjacent boxes of one process
are read as one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from ostraka.common import memory as _recycle
from ostraka.common.dtypes import DTYPES, from_bytes, numpy_dtype
from ostraka.common.threads import StopSignal, run_as_completed
from ostraka.formats.buffers import Array, CountedBuffers, Scratch, map_pages
from ostraka.formats.ostraka.damage import damage_on_loss, damaged
from ostraka.formats.safetensors.files import Tensor, TensorFile
from ostraka.formats.source import OnBytes, shortest_range_bytes
from ostraka.formats.source_files import refuse_changed
from ostraka.layout import box as _box
from ostraka.layout.box import Box
from ostraka.layout.spec import LeafSpec, Target
from ostraka.storage import FileReader, Store

_CHUNK_BYTES = 8 << 20
"""Most bytes read at a time, gaps between ranges included."""
_NEARLY_ALL = 16 / 17
"""From this share of a row on, the whole row is read."""


class _Band(NamedTuple):
    """A box of a tensor for one read, and the targets with elements in it."""

    leaf: int
    box: Box
    wanted: tuple[int, ...]


class TensorReader:
    """Reads boxes of tensors."""

    def __init__(
        self,
        store: Store,
        tensors: Sequence[tuple[TensorFile, Tensor]],
        leaves: Sequence[LeafSpec],
        targets: Sequence[Target],
    ):
        self._store = store
        self._tensors = tensors
        self._leaves = leaves
        self._targets = targets
        self._buffers = CountedBuffers(targets, leaves)
        self._scratch = Scratch(_recycle.current())
        self._rows = Scratch(_recycle.current())
        """Memory for whole rows, if only a part is wanted."""
        self._files = _OpenFiles(store)
        self._short_bytes = shortest_range_bytes(store)

    def run(self, on_bytes: OnBytes) -> Iterator[tuple[int, Array]]:
        """Yield the number and the elements of each target, as soon as it is complete."""
        yield from self._buffers.take_empty()
        try:
            for _, (band, nbytes) in run_as_completed(
                self._execute,
                self._bands(),
                threads=self._store.traits.reads_at_once,
                stop=StopSignal(),
            ):
                on_bytes(nbytes)
                yield from self._buffers.take_complete(band.box, band.wanted)
        finally:
            self._files.close()
        refuse_changed(self._tensors[target.leaf][0].opened for target in self._targets)

    # What to read

    def _bands(self) -> Iterator[_Band]:
        """The bands in the order of files and offsets. Allocates the memory of each in turn."""
        by_leaf = self._buffers.by_leaf
        by_file: dict[str, list[tuple[int, int]]] = {}
        for leaf in by_leaf:
            file, tensor = self._tensors[leaf]
            by_file.setdefault(file.name, []).append((tensor.start, leaf))
        for name in sorted(by_file):
            file = self._tensors[by_file[name][0][1]][0]
            self._files.hold(file)  # until all of its bands are known
            for _, leaf in sorted(by_file[name]):
                spec = self._leaves[leaf]
                whole, itemsize = _box.full(spec.shape), numpy_dtype(spec.dtype).itemsize
                is_packed = DTYPES[spec.dtype].packed
                most = _box.count(whole) if is_packed else _CHUNK_BYTES // itemsize
                for area, numbers in self._areas(leaf, by_leaf[leaf]):
                    self._buffers.allocate(numbers)
                    for box in _box.bands(area, whole, most):
                        boxes = ((n, self._targets[n].box) for n in numbers)
                        wanted = [n for n, other in boxes if _box.intersect(box, other) is not None]
                        self._files.hold(file)
                        yield _Band(leaf, box, tuple(wanted))
            self._files.release(file)

    def _areas(self, leaf: int, numbers: Sequence[int]) -> list[tuple[Box, list[int]]]:
        """Boxes that cover the targets of a leaf, each with the targets that overlap it."""
        if DTYPES[self._leaves[leaf].dtype].packed:
            return [(_box.full(self._leaves[leaf].shape), list(numbers))]
        areas = [(self._targets[number].box, [number]) for number in numbers]
        for dimension in reversed(range(len(self._leaves[leaf].shape))):
            areas = _joined(areas, dimension)
        return sorted(areas, key=lambda area: area[0])

    # Reading

    def _execute(self, band: _Band) -> tuple[_Band, int]:
        """Read a band. Returns it, and the number of bytes read from the file."""
        file, tensor = self._tensors[band.leaf]
        spec, target = self._leaves[band.leaf], self._targets[band.wanted[0]]
        with self._files.opened(file) as reader:

            def fill(start: int, memory: Array) -> None:
                """Read bytes of the tensor, from `start` on."""
                with damage_on_loss(lambda found: damaged(self._store, file.name, found, leaves)):
                    found = reader.read_into(tensor.start + start, [memory])
                if found != memory.nbytes:
                    raise damaged(self._store, file.name, "it is shorter than it was", leaves)

            leaves = (spec.path,)
            if DTYPES[spec.dtype].packed:
                memory = self._scratch.take(tensor.nbytes)
                fill(0, memory)
                nbytes = tensor.nbytes
            elif (
                len(band.wanted) == 1
                and target.dtype is None
                and _box.is_contiguous(band.box, target.box)
            ):
                itemsize = numpy_dtype(spec.dtype).itemsize
                start, stop = _box.flat_span(band.box, target.box)
                whole = self._buffers.array(band.wanted[0]).reshape(-1).view("u1")
                memory = whole[start * itemsize : stop * itemsize]
                map_pages(memory)
                return band, self._read_box(fill, band.box, spec, memory)
            else:
                memory = self._scratch.take(_box.count(band.box) * numpy_dtype(spec.dtype).itemsize)
                nbytes = self._read_box(fill, band.box, spec, memory)
        elements = from_bytes(memory, spec.dtype, _box.shape_of(band.box))
        self._buffers.copy(elements, band.box, band.wanted)
        return band, nbytes

    def _read_box(
        self, fill: Callable[[int, Array], None], box: Box, spec: LeafSpec, memory: Array
    ) -> int:
        """Fill memory with the elements of a box, in order. Returns the number of bytes read."""
        within = _box.full(spec.shape)
        dtype = numpy_dtype(spec.dtype)
        rows = _box.rows_around(box, within)
        first, last = (dtype.itemsize * at for at in _box.flat_span(rows, within))
        if rows == box:
            fill(first, memory)
            return last - first
        run, offsets = _box.runs(box, spec.shape)
        run_bytes = run * dtype.itemsize
        if run_bytes < self._short_bytes or memory.size >= _NEARLY_ALL * (last - first):
            data = self._rows.take(last - first)
            fill(first, data)
            array = data.view(dtype).reshape(_box.shape_of(rows))
            wanted = memory.view(dtype).reshape(_box.shape_of(box))
            wanted[...] = array[_box.slices(box, rows)]
            return last - first
        for number, offset in enumerate(offsets):
            fill(offset * dtype.itemsize, memory[number * run_bytes : (number + 1) * run_bytes])
        return memory.size


def _joined(areas: Sequence[tuple[Box, list[int]]], dimension: int) -> list[tuple[Box, list[int]]]:
    """Join boxes that differ in one dimension only, and touch or overlap there."""

    def others(box: Box) -> Box:
        return (*box[:dimension], *box[dimension + 1 :])

    joined: list[tuple[Box, list[int]]] = []
    for box, numbers in sorted(areas, key=lambda area: (others(area[0]), area[0][dimension])):
        if joined:
            last, members = joined[-1]
            (start, stop), (low, high) = last[dimension], box[dimension]
            if others(last) == others(box) and low <= stop:
                span = (start, max(stop, high))
                whole = (*last[:dimension], span, *last[dimension + 1 :])
                joined[-1] = (whole, [*members, *numbers])
                continue
        joined.append((box, numbers))
    return joined


class _OpenFiles:
    """Files that stay open while somebody holds them."""

    def __init__(self, store: Store):
        self._store = store
        self._readers: dict[str, FileReader] = {}
        self._holds: Counter[str] = Counter()
        self._lock = threading.Lock()

    def hold(self, file: TensorFile) -> None:
        with self._lock:
            self._holds[file.name] += 1

    def release(self, file: TensorFile) -> None:
        with self._lock:
            self._holds[file.name] -= 1
            if not self._holds[file.name] and file.name in self._readers:
                self._readers.pop(file.name).close()

    @contextmanager
    def opened(self, file: TensorFile) -> Generator[FileReader]:
        """The reader of a file that the caller holds, which is released at the end."""
        try:
            with self._lock:
                if file.name not in self._readers:
                    self._readers[file.name] = self._open(file)
                reader = self._readers[file.name]
            yield reader
        finally:
            self.release(file)

    def _open(self, file: TensorFile) -> FileReader:
        with damage_on_loss(partial(damaged, self._store, file.name)):
            reader = file.opened.store.open(file.opened.stored_as)
        if reader.size == file.size:
            return reader
        reader.close()
        text = f"it has {reader.size:,} bytes, and had {file.size:,} when it was opened"
        raise damaged(self._store, file.name, text)

    def close(self) -> None:
        with self._lock:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()
