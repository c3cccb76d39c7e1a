"""Read boxes of tensors, and only their ranges of the files. No JAX.

A box with whole rows is one range of its file. A box with parts of rows is a range for each row.
These ranges are read one by one, unless they cover nearly all of the rows or are shorter than
`shortest_range_bytes`. Then the gaps between them are read as well. Adjacent boxes of one process
are read as one.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from ostraka.common import memory as _recycle
from ostraka.common.dtypes import DTYPES, from_bytes, numpy_dtype
from ostraka.common.threads import StopSignal, run_as_completed
from ostraka.errors import StoreError
from ostraka.formats.buffers import Array, Buffers, Scratch, map_pages
from ostraka.formats.ostraka.damage import damage_on_loss, damaged
from ostraka.formats.safetensors._header import Tensor
from ostraka.formats.safetensors.files import TensorFile
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


def read_tensors(
    store: Store,
    tensors: Sequence[tuple[TensorFile, Tensor]],
    leaves: Sequence[LeafSpec],
    targets: Sequence[Target],
    on_bytes: OnBytes | None,
) -> Iterator[tuple[int, Array]]:
    """Yield the number and the elements of each target, as soon as it is complete."""
    return _Reading(store, tensors, leaves, targets).run(on_bytes or (lambda nbytes: None))


class _Reading:
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
        self._buffers = Buffers(targets, leaves)
        self._missing = [_box.count(target.box) for target in targets]
        """For each target, the number of elements yet to come."""
        self._scratch = Scratch(_recycle.current())
        self._rows = Scratch(_recycle.current())
        """Memory for whole rows, if only a part is wanted."""
        self._files = _OpenFiles(store)
        self._short_bytes = shortest_range_bytes(store)

    def run(self, on_bytes: OnBytes) -> Iterator[tuple[int, Array]]:
        empty = [number for number, missing in enumerate(self._missing) if missing == 0]
        for number in empty:
            self._allocate(self._targets[number].leaf, [number])
        yield from ((number, self._buffers.take(number)) for number in empty)
        try:
            for _, (band, nbytes) in run_as_completed(
                self._execute,
                self._bands(),
                threads=self._store.traits.reads_at_once,
                stop=StopSignal(),
            ):
                on_bytes(nbytes)
                for number in band.wanted:
                    shared = _shared(band.box, self._targets[number].box)
                    self._missing[number] -= _box.count(shared)
                    if self._missing[number] == 0:
                        yield number, self._buffers.take(number)
        finally:
            self._files.close()
        read = (self._tensors[target.leaf][0] for target in self._targets)
        files = {file.name: file for file in read}
        refuse_changed(file.opened for file in files.values())

    # What to read

    def _bands(self) -> Iterator[_Band]:
        """The bands in the order of files and offsets. Allocates the memory of each in turn."""
        by_leaf: dict[int, list[int]] = {}
        for number, target in enumerate(self._targets):
            if self._missing[number]:
                by_leaf.setdefault(target.leaf, []).append(number)
        file: TensorFile | None = None
        for leaf in sorted(by_leaf, key=self._place_of):
            if file is not None and file.name != self._tensors[leaf][0].name:
                self._files.end(file)
            file = self._tensors[leaf][0]
            for area, numbers in self._areas(leaf, by_leaf[leaf]):
                self._allocate(leaf, numbers)
                for box in self._cut(leaf, area):
                    targets = ((n, self._targets[n].box) for n in numbers)
                    wanted = [n for n, other in targets if _box.intersect(box, other) is not None]
                    self._files.expect(file)
                    yield _Band(leaf, box, tuple(wanted))

    def _place_of(self, leaf: int) -> tuple[str, int, int]:
        file, tensor = self._tensors[leaf]
        return file.name, tensor.start, leaf

    def _areas(self, leaf: int, numbers: Sequence[int]) -> list[tuple[Box, list[int]]]:
        """Boxes that cover the targets of a leaf, each with the targets that overlap it."""
        if DTYPES[self._leaves[leaf].dtype].packed:
            return [(_box.full(self._leaves[leaf].shape), list(numbers))]
        areas = [(self._targets[number].box, [number]) for number in numbers]
        for dimension in reversed(range(len(self._leaves[leaf].shape))):
            areas = _joined(areas, dimension)
        return sorted(areas, key=lambda area: area[0])

    def _cut(self, leaf: int, area: Box) -> Iterator[Box]:
        spec = self._leaves[leaf]
        if DTYPES[spec.dtype].packed:
            return iter([area])
        most = _CHUNK_BYTES // numpy_dtype(spec.dtype).itemsize
        return _box.bands(area, _box.full(spec.shape), most)

    def _allocate(self, leaf: int, numbers: Sequence[int]) -> None:
        try:
            self._buffers.allocate(numbers)
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            spec = self._leaves[leaf]
            raise StoreError(
                f"leaf {spec.path!r} has {spec.nbytes:,} bytes, for which there is no memory; "
                "restore a part of it",
                errno=errno.ENOMEM,
            ) from error

    # Reading

    def _execute(self, band: _Band) -> tuple[_Band, int]:
        """Read a band. Returns it, and the number of bytes read from the file."""
        file, tensor = self._tensors[band.leaf]
        spec = self._leaves[band.leaf]
        with self._files.opened(file) as reader:
            if DTYPES[spec.dtype].packed:
                data = self._scratch.take(tensor.nbytes)
                self._read(file, reader, tensor.start, data, spec)
                self._give(band, data, spec)
                return band, tensor.nbytes
            if len(band.wanted) == 1 and _box.is_contiguous(
                band.box, self._targets[band.wanted[0]].box
            ):
                target = self._targets[band.wanted[0]].box
                itemsize = numpy_dtype(spec.dtype).itemsize
                start, stop = _box.flat_span(band.box, target)
                whole = self._buffers.array(band.wanted[0]).reshape(-1).view("u1")
                memory = whole[start * itemsize : stop * itemsize]
                map_pages(memory)
                return band, self._read_box(file, reader, tensor, band.box, spec, memory)
            itemsize = numpy_dtype(spec.dtype).itemsize
            memory = self._scratch.take(_box.count(band.box) * itemsize)
            nbytes = self._read_box(file, reader, tensor, band.box, spec, memory)
            self._give(band, memory, spec)
            return band, nbytes

    def _give(self, band: _Band, stored: Array, spec: LeafSpec) -> None:
        """Copy the elements of a band to its targets."""
        box = band.box
        array = from_bytes(stored, spec.dtype, _box.shape_of(box))
        for number in band.wanted:
            target = self._targets[number].box
            shared = _shared(box, target)
            memory = self._buffers.array(number)[(*_box.slices(shared, target), ...)]
            if memory.flags.c_contiguous:
                map_pages(memory)
            memory[...] = array[(*_box.slices(shared, box), ...)]

    def _read_box(
        self,
        file: TensorFile,
        reader: FileReader,
        tensor: Tensor,
        box: Box,
        spec: LeafSpec,
        memory: Array,
    ) -> int:
        """Fill memory with the elements of a box, in order. Returns the number of bytes read."""
        within = _box.full(spec.shape)
        itemsize = numpy_dtype(spec.dtype).itemsize
        rows = _box.rows_around(box, within)
        first, last = _box.flat_span(rows, within)
        start, span = tensor.start + first * itemsize, (last - first) * itemsize
        if rows == box:
            self._read(file, reader, start, memory, spec)
            return span
        run, offsets = _box.runs(box, spec.shape)
        run_bytes = run * itemsize
        if run_bytes < self._short_bytes or memory.size >= _NEARLY_ALL * span:
            data = self._rows.take(span)
            self._read(file, reader, start, data, spec)
            array = data.view(numpy_dtype(spec.dtype)).reshape(_box.shape_of(rows))
            wanted = memory.view(numpy_dtype(spec.dtype)).reshape(_box.shape_of(box))
            wanted[...] = array[_box.slices(box, rows)]
            return span
        for number, offset in enumerate(offsets):
            part = memory[number * run_bytes : (number + 1) * run_bytes]
            self._read(file, reader, tensor.start + offset * itemsize, part, spec)
        return memory.size

    def _read(
        self,
        file: TensorFile,
        reader: FileReader,
        start: int,
        memory: Array,
        spec: LeafSpec,
    ) -> None:
        with damage_on_loss(lambda found: damaged(self._store, file.name, found, (spec.path,))):
            found = reader.read_into(start, [memory])
        if found != memory.nbytes:
            raise damaged(self._store, file.name, "it is shorter than it was", (spec.path,))


def _shared(one: Box, other: Box) -> Box:
    """The box that two overlapping boxes share."""
    found = _box.intersect(one, other)
    assert found is not None
    return found


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
    """Files that stay open until their last read."""

    def __init__(self, store: Store):
        self._store = store
        self._readers: dict[str, FileReader] = {}
        self._reads_left: Counter[str] = Counter()
        self._ended: set[str] = set()
        """Files whose reads are planned."""
        self._lock = threading.Lock()

    def expect(self, file: TensorFile) -> None:
        """Expect one more read of a file."""
        with self._lock:
            self._reads_left[file.name] += 1

    def end(self, file: TensorFile) -> None:
        """Note that all reads of a file are expected by now."""
        with self._lock:
            self._ended.add(file.name)
            self._close_if_done(file.name)

    @contextmanager
    def opened(self, file: TensorFile) -> Generator[FileReader]:
        with self._lock:
            if file.name not in self._readers:
                self._readers[file.name] = self._open(file)
            reader = self._readers[file.name]
        try:
            yield reader
        finally:
            with self._lock:
                self._reads_left[file.name] -= 1
                self._close_if_done(file.name)

    def _open(self, file: TensorFile) -> FileReader:
        with damage_on_loss(partial(damaged, self._store, file.name)):
            reader = file.open()
        if reader.size == file.size:
            return reader
        reader.close()
        text = f"it has {reader.size:,} bytes, and had {file.size:,} when it was opened"
        raise damaged(self._store, file.name, text)

    def _close_if_done(self, name: str) -> None:
        if name in self._ended and not self._reads_left[name] and name in self._readers:
            self._readers.pop(name).close()

    def close(self) -> None:
        with self._lock:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()
