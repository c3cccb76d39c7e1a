"""Read arrays with TensorStore: only the wanted chunks, many at once. No JAX."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ostraka.common.dtypes import numpy_dtype
from ostraka.errors import OstrakaError, StoreError, Unreadable, UnsupportedFormat
from ostraka.formats.buffers import Array, CountedBuffers, map_pages
from ostraka.formats.orbax._zarr import ZARR2, ZARR3, ZarrArray, parse_zarr2, parse_zarr3
from ostraka.formats.orbax.files import TreeMetadata, decode_json, malformed
from ostraka.formats.orbax.names import MANIFEST, METADATA
from ostraka.formats.ostraka.damage import MISSING, damaged
from ostraka.formats.source import OnBytes
from ostraka.layout import box as _box
from ostraka.layout.box import Box
from ostraka.layout.spec import LeafSpec, Target
from ostraka.storage import LocalStore, Store
from ostraka.storage.file import refuse_other_kinds_below

_AT_ONCE_BYTES = 128 << 20
"""Most bytes being read at one time. TensorStore needs about twice that for chunks in flight."""
_AT_ONCE = 512
_PIECE_BYTES = 32 << 20
_SMALL_BYTES = 1 << 20
_PIECE_CHUNKS = 4096
"""Most chunks of one read. TensorStore begins all of them at once."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of an item, with its location."""

    item: Item
    name: str
    zarr: ZarrArray


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of one read, and the targets with elements in it."""

    leaf: int
    box: Box
    wanted: tuple[int, ...]
    nbytes: int


def read_values(arrays: Sequence[StoredArray], paths: Sequence[str]) -> list[Any]:
    """The values of arrays without dimensions, as Python numbers."""
    leaves = [
        LeafSpec(path, "numpy", array.zarr.dtype, array.zarr.shape)
        for path, array in zip(paths, arrays, strict=True)
    ]
    targets = [Target(number, ()) for number in range(len(arrays))]
    found = dict(ArrayReader(arrays, leaves, targets, lambda nbytes: None).run())
    return [found[number].item() for number in range(len(arrays))]


class ArrayReader:
    """Reads boxes of arrays. This thread starts the reads, TensorStore's threads do the work."""

    def __init__(
        self,
        arrays: Sequence[StoredArray],
        leaves: Sequence[LeafSpec],
        targets: Sequence[Target],
        on_bytes: OnBytes,
    ):
        self._arrays = arrays
        self._leaves = leaves
        self._targets = targets
        self._on_bytes = on_bytes
        self._buffers = CountedBuffers(targets, leaves)
        self._done: SimpleQueue[tuple[_Piece, Array | None, Any]] = SimpleQueue()
        self._under_way: dict[_Piece, Any] = {}
        self._held_bytes = 0

    def run(self) -> Iterator[tuple[int, Array]]:
        """Yield the number and the elements of each target, as soon as it is complete."""
        try:
            yield from self._buffers.take_empty()
            for piece in self._pieces():
                while len(self._under_way) >= _AT_ONCE or (
                    self._under_way and self._held_bytes + piece.nbytes > _AT_ONCE_BYTES
                ):
                    yield from self._finish(*self._done.get())
                self._begin(piece)
                while not self._done.empty():
                    yield from self._finish(*self._done.get())
            while self._under_way:
                yield from self._finish(*self._done.get())
        finally:
            for future in self._under_way.values():
                future.cancel()

    def _begin(self, piece: _Piece) -> None:
        import tensorstore as ts

        leaf = self._leaves[piece.leaf]
        array = self._arrays[piece.leaf]
        done = self._done
        self._buffers.allocate(piece.wanted)
        shared = None
        if len(piece.wanted) == 1 and self._targets[piece.wanted[0]].dtype is None:
            number = piece.wanted[0]
            within = _box.slices(piece.box, self._targets[number].box)
            memory = self._buffers.array(number)[(*within, ...)]  # a view, also if 0-d
        else:
            memory = shared = np.empty(_box.shape_of(piece.box), numpy_dtype(leaf.dtype))
        if memory.flags.c_contiguous:
            map_pages(memory)
        try:
            opened = array.item.open_array(array)
            source = opened[tuple(slice(start, stop) for start, stop in piece.box)]
            future = ts.array(memory, copy=False).write(source).commit
        except Exception as error:
            raise self._explained(piece, error) from error
        self._held_bytes += piece.nbytes
        self._under_way[piece] = future
        # Without `self`, which would not be let go of before TensorStore lets go of the callback.
        future.add_done_callback(lambda future: done.put((piece, shared, future)))

    def _finish(
        self, piece: _Piece, shared: Array | None, future: Any
    ) -> Iterator[tuple[int, Array]]:
        del self._under_way[piece]
        self._held_bytes -= piece.nbytes
        try:
            future.result()
        except Exception as error:
            raise self._explained(piece, error) from error
        self._on_bytes(piece.nbytes)
        if shared is not None:
            self._buffers.copy(shared, piece.box, piece.wanted)
        yield from self._buffers.take_complete(piece.box, piece.wanted)

    # What to read

    def _pieces(self) -> Iterator[_Piece]:
        for leaf, numbers in self._buffers.by_leaf.items():
            for together in self._clusters(leaf, numbers):
                box = _around([self._targets[number].box for number in together])
                yield from self._cut(leaf, box, together)

    def _clusters(self, leaf: int, numbers: Sequence[int]) -> list[list[int]]:
        """Groups of targets with elements in the same chunks, so that each chunk is read once.

        All targets of a small leaf are one group: a read costs more than copying its result.
        """
        elements = sum(_box.count(self._targets[number].box) for number in numbers)
        if elements * numpy_dtype(self._leaves[leaf].dtype).itemsize <= _SMALL_BYTES:
            return [list(numbers)]
        chunk = self._arrays[leaf].zarr.read_chunk
        clusters: list[tuple[Box, list[int]]] = []
        for number in numbers:
            chunks = _chunks_under(self._targets[number].box, chunk)
            members = [number]
            apart: list[tuple[Box, list[int]]] = []
            for box, others in clusters:
                if _box.intersect(box, chunks) is None:
                    apart.append((box, others))
                else:
                    chunks = _around([box, chunks])
                    members = others + members
            clusters = [*apart, (chunks, members)]
        return [members for _, members in clusters]

    def _cut(self, leaf: int, box: Box, numbers: Sequence[int]) -> Iterator[_Piece]:
        """Split a box where chunks end, until each piece is small and wholly wanted."""
        parts = [
            (number, part)
            for number in numbers
            for part in [_box.intersect(box, self._targets[number].box)]
            if part is not None
        ]
        if not parts:
            return
        box = _around([part for _, part in parts])
        nbytes = _box.count(box) * numpy_dtype(self._leaves[leaf].dtype).itemsize
        chunks = _chunks_under(box, self._arrays[leaf].zarr.read_chunk)
        count = _box.count(chunks)
        is_small = nbytes <= _PIECE_BYTES and count <= _PIECE_CHUNKS
        is_wanted = sum(_box.count(part) for _, part in parts) >= _box.count(box)
        if count == 1 or (is_small and is_wanted):
            yield _Piece(leaf, box, tuple(number for number, _ in parts), nbytes)
            return
        for half in _halves(box, chunks, self._arrays[leaf].zarr.read_chunk):
            yield from self._cut(leaf, half, [number for number, _ in parts])

    def _explained(self, piece: _Piece, error: Exception) -> OstrakaError:
        array = self._arrays[piece.leaf]
        return array.item.explained(error, array.name, (self._leaves[piece.leaf].path,))


def _around(boxes: Sequence[Box]) -> Box:
    """The smallest box around all boxes."""
    return tuple(
        (min(start for start, _ in spans), max(stop for _, stop in spans))
        for spans in zip(*boxes, strict=True)
    )


def _chunks_under(box: Box, chunk: Sequence[int]) -> Box:
    """The numbers of the chunks under a box."""
    spans = zip(box, chunk, strict=True)
    return tuple((start // size, (stop - 1) // size + 1) for (start, stop), size in spans)


def _halves(box: Box, chunks: Box, chunk: Sequence[int]) -> tuple[Box, Box]:
    """A box, split between chunks along the first dimension with the most chunks."""
    counts = [stop - start for start, stop in chunks]
    dimension = counts.index(max(counts))
    first, last = chunks[dimension]
    middle = (first + last) // 2 * chunk[dimension]
    start, stop = box[dimension]
    before, after = box[:dimension], box[dimension + 1 :]
    return (*before, (start, middle), *after), (*before, (middle, stop), *after)


_REFUSALS: Mapping[str, int] = {
    "PERMISSION_DENIED": errno.EACCES,
    "UNAUTHENTICATED": errno.EACCES,
    "UNAVAILABLE": errno.EAGAIN,
    "DEADLINE_EXCEEDED": errno.ETIMEDOUT,
    "RESOURCE_EXHAUSTED": errno.ENOMEM,
}


# An item's arrays as TensorStore opens them: in plain directories, or in an OCDBT database.


_NODE_CACHE_BYTES = 64 << 20
"""Cache for the nodes of OCDBT's tree, which arrays share."""
_FILES_AT_ONCE = 32


class Item:
    """The location of one item with arrays."""

    def __init__(self, store: Store, metadata: TreeMetadata):
        self.store = store
        self.metadata = metadata
        self._opened: dict[str, Any] = {}

    @cached_property
    def _context(self) -> Any:
        # Chunks are read once, so none are kept. A context of its own: another checkpoint may come
        # to lie at the same place.
        settings = {
            "cache_pool": {"total_bytes_limit": 0},
            "cache_pool#nodes": {"total_bytes_limit": _NODE_CACHE_BYTES},
            "file_io_concurrency": {"limit": _FILES_AT_ONCE},
            "data_copy_concurrency": {"limit": "shared"},
        }
        return import_tensorstore().Context(settings)

    @cached_property
    def _kvstore(self) -> dict[str, Any]:
        base = _base_of(self.store)
        if not self.metadata.use_ocdbt:
            return base
        return {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#nodes"}

    def find_arrays(self, names: Collection[str]) -> dict[str, StoredArray]:
        """The arrays by these names. Reads their metadata together. Raises Damaged."""
        with malformed(self.store, METADATA):
            for name in names if not self.metadata.use_ocdbt else ():
                parts = name.split("/") if name else []
                if any(part in ("", ".", "..") or "\0" in part for part in parts):
                    raise ValueError(f"the name {name!r:.80} can't be that of a directory")
        if isinstance(self.store, LocalStore):
            # TensorStore would follow links, and wait for pipes for ever.
            try:
                refuse_other_kinds_below(self.store.location)
            except Unreadable as error:
                name = os.path.relpath(str(error.filename), self.store.location)
                raise damaged(self.store, name, error.found) from error
        file, parse = (ZARR3, parse_zarr3) if self.metadata.use_zarr3 else (ZARR2, parse_zarr2)
        try:
            kvstore = import_tensorstore().KvStore.open(self._kvstore, context=self._context)
            opened = kvstore.result()
            reads = {name: opened.read(_join(name, file)) for name in names}
        except Exception as error:
            name = MANIFEST if self.metadata.use_ocdbt else file
            raise self.explained(error, name, ()) from error
        found: dict[str, StoredArray] = {}
        for name, read in reads.items():
            where = _join(name, file)
            try:
                result = read.result()
                if result.state != "value":
                    raise ValueError("NOT_FOUND")
            except Exception as error:
                raise self.explained(error, where, (name,)) from error
            with malformed(self.store, where):
                zarr = parse(decode_json(self.store, where, result.value))
            found[name] = StoredArray(self, name, zarr)
        return found

    def open_array(self, array: StoredArray) -> Any:
        """A TensorStore to read an array from, opened without reading anything."""
        opened = self._opened.get(array.name)
        if opened is None:
            above = "" if self.metadata.use_ocdbt else self._kvstore["path"]
            path = above + (f"{array.name}/" if array.name else "")
            spec = {
                "driver": array.zarr.driver,
                "kvstore": {**self._kvstore, "path": path},
                "metadata": array.zarr.metadata,
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
                "fill_missing_data_reads": not self.metadata.has_all_chunks,
            }
            future = import_tensorstore().open(
                spec, context=self._context, read=True, open=True, assume_metadata=True
            )
            opened = self._opened[array.name] = future.result()
        return opened

    def explained(self, error: Exception, name: str, leaves: tuple[str, ...]) -> OstrakaError:
        """TensorStore's error as one of Ostraka's."""
        if isinstance(error, OstrakaError):
            return error
        text = " ".join(str(error).split())
        refused = next((number for word, number in _REFUSALS.items() if word in text), None)
        if refused is not None:
            where = f"{self.store.location}/{name}"
            message = f"can't read {where}: {os.strerror(refused)}"
            return StoreError(message, errno=refused, filename=where)
        found = MISSING if "NOT_FOUND" in text else f"it can't be read ({text[:200]})"
        return damaged(self.store, name, found, leaves)


def _join(name: str, file: str) -> str:
    return f"{name}/{file}" if name else file


@cache
def import_tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise UnsupportedFormat(
            "reading an Orbax checkpoint needs TensorStore, which is not installed; "
            "pip install tensorstore"
        ) from error
    return tensorstore


def _base_of(store: Store) -> dict[str, Any]:
    """The location of a store, for TensorStore."""
    if isinstance(store, LocalStore):
        return {"driver": "file", "path": f"{store.location.rstrip('/')}/"}
    url = urlsplit(store.location)
    is_named = getattr(store, "is_named", True)  # Else it may be on another server.
    if url.scheme not in ("s3", "gs") or not url.netloc or not is_named:
        raise UnsupportedFormat(
            f"can't read the Orbax checkpoint {store.location}: TensorStore reads directories, "
            "s3:// and gs:// only; copy it to one of those"
        )
    path = f"{url.path.strip('/')}/"
    if url.scheme == "gs":
        return {"driver": "gcs", "bucket": url.netloc, "path": path}
    base: dict[str, Any] = {"driver": "s3", "bucket": url.netloc, "path": path}
    for key, names in (
        ("endpoint", ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")),
        ("aws_region", ("AWS_REGION", "AWS_DEFAULT_REGION")),
    ):
        found = next(filter(None, map(os.environ.get, names)), None)
        if found is not None:
            base[key] = found
    return base
