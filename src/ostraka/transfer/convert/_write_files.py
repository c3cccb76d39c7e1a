"""Write files of whole tensors from a source, in bounded memory, and read them back.

In a file system several threads write pieces of all files, in any order. A bucket takes a file from
its first byte to its last, so there several files are written at the same time.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache, partial
from typing import Any

import numpy as np

from ostraka.common.dtypes import numpy_dtype, to_bytes
from ostraka.common.threads import ByteBudget, StopSignal, run_all
from ostraka.errors import Damaged, Problem, store_error
from ostraka.formats.buffers import Scratch
from ostraka.layout import box as _box
from ostraka.layout import shard_file
from ostraka.storage import FileReader, LocalStore, Store
from ostraka.storage.file import LocalWriter
from ostraka.transfer.convert._tensor_files import (
    PlannedFile,
    TensorPlace,
    copy_beside,
    find_in_npz,
    find_in_safetensors,
    plan_npz,
    plan_safetensors,
)
from ostraka.transfer.convert._workplace import (
    NOTES,
    Workplace,
    create_or_keep,
    held_bucket,
    is_written,
    require_directory,
)
from ostraka.transfer.convert.work import Digests, ItemBox, Work, not_as_written

_WRITE_BYTES = 2 << 20
"""Bytes to write at a time. More takes longer on ext4."""
_RUNS = 1024
"""Runs to write between two checks for a stop."""
_HELD_BYTES = 192 << 20
"""Bytes of arrays in memory at one time."""
_THREADS = 4
READ_BYTES = 8 << 20
"""Bytes to read at a time."""


def write_files(work: Work, target: Store, to: str, work_id: str) -> None:
    """Write tensors in the format `to`, and read them back. Files of an earlier call are kept."""
    location = target.location.rstrip("/")
    name = location.rpartition("/")[2]
    is_single = to == "npz" or (to == "safetensors" and name.endswith(".safetensors"))
    last: Mapping[str, bytes] = {}
    if to == "npz":
        if not name.endswith(".npz"):
            raise ValueError(f"the target is {location}; a file for numpy.load must end in .npz")
        files = [plan_npz(name, work.items, {})]
    else:
        single = name if is_single else None
        files, last = plan_safetensors(work.items, for_hugging_face=to == "hf", single=single)
    names = [file.name for file in files]
    notes = f"{NOTES}{work_id}"
    if is_single:
        target = require_directory(target, "npz" if to == "npz" else "a single .safetensors file")
    if isinstance(target, LocalStore):
        held = Workplace(target.location, work_id, name if is_single else "").held(last)
    else:
        held = held_bucket(target, notes, names, last)
    with held as store:
        if isinstance(store, LocalStore):
            digests = _write_in_directory(work, files, store)
        else:
            digests = _write_in_order(work, files, store, notes)
        if to == "npz":
            crcs = _check_files(work, digests, store, find_in_npz(store, name))
            # Its headers have checksums, so they are written again after the reading.
            _write_headers(plan_npz(name, work.items, crcs), store)
        else:
            _check_files(work, digests, store, find_in_safetensors(store, names))
        if to == "hf":
            copy_beside(work.source, store)


# In a file system


@contextmanager
def _writing_to(store: Store, files: Sequence[PlannedFile]) -> Generator[Mapping[str, LocalWriter]]:
    """Open files for writing. They keep their bytes.

    At the end, their headers are written, and they are durable.
    """
    writers: dict[str, LocalWriter] = {}
    try:
        for file in files:
            path = os.path.join(store.location, file.name)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                opened = os.open(path, flags, 0o666)
            except OSError as error:
                raise store_error("create", path, error) from error
            writers[file.name] = LocalWriter(opened, path, file.size)
        yield writers
        for file in files:
            for start, data in file.fixed:
                writers[file.name].write(start, [data])
        run_all(LocalWriter.finish, list(writers.values()), threads=_THREADS, stop=StopSignal())
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise


def _write_in_directory(work: Work, files: Sequence[PlannedFile], store: LocalStore) -> Digests:
    """Write all files. Boxes that an interrupted conversion has written are kept.

    Returns the digests of the source. The files are durable, but their names are not.
    """
    file_of = {piece: file for file in files for at in file.places for piece in work.slabs_of(at)}
    there = {info.name for info in store.files("")}
    digests: dict[ItemBox, str] = {}
    budget, stop, opened = ByteBudget(_HELD_BYTES), StopSignal(), ExitStack()

    @cache
    def reader_of(name: str) -> FileReader:
        return opened.enter_context(closing(store.open(name)))

    def write(writers: Mapping[str, LocalWriter], group: list[ItemBox]) -> None:
        with budget.hold(work.nbytes_of(group), stop.check):
            for piece, array in work.read(group):
                stop.check()
                file, data = file_of[piece], to_bytes(array)
                starts, run_bytes = _runs_of(work, piece, file, len(data))
                if file.name in there and all(
                    is_written(reader_of(file.name), start, data[at * run_bytes :][:run_bytes])
                    for at, start in enumerate(starts)
                ):
                    work.kept.add(len(data))
                else:
                    _write_runs(writers[file.name], starts, data, run_bytes, stop)
                digests[piece] = shard_file.block_digest([data])
                work.progress.add(len(data))

    order = {number: at for at, number in enumerate(work.source.order())}
    pieces = sorted(file_of, key=lambda piece: (order[work.items[piece.item].number], piece))
    with opened, _writing_to(store, files) as writers:
        groups = work.together(pieces)
        run_all(partial(write, writers), groups, threads=_THREADS, stop=stop)
    store.sync("")
    return {piece: digests[piece] for piece in file_of}


def _runs_of(
    work: Work, piece: ItemBox, file: PlannedFile, nbytes: int
) -> tuple[Sequence[int], int]:
    """The offsets of the runs of a box in its file, and the bytes of each run."""
    spec, start = work.items[piece.item].spec, file.places[piece.item]
    if work.is_contiguous(piece):
        start += work.offset_of(piece)
        return range(start, start + nbytes, _WRITE_BYTES), _WRITE_BYTES
    run, offsets = _box.runs(piece.box, spec.shape)
    itemsize = numpy_dtype(spec.dtype).itemsize
    return [start + offset * itemsize for offset in offsets], run * itemsize


def _write_runs(
    writer: LocalWriter, starts: Sequence[int], data: Any, run_bytes: int, stop: StopSignal
) -> None:
    if run_bytes == _WRITE_BYTES:
        for number, start in enumerate(starts):
            stop.check()
            writer.write(start, [data[number * run_bytes :][:run_bytes]])
        return
    for at in range(0, len(starts), _RUNS):
        stop.check()
        writer.write_runs(starts[at : at + _RUNS], data[at * run_bytes :], run_bytes)


def _write_headers(file: PlannedFile, store: Store) -> None:
    """Write the headers of a file again, and read them back. Raises Damaged."""
    with _writing_to(store, [file]):
        pass
    with closing(store.open(file.name)) as reader:
        if not all(is_written(reader, start, data) for start, data in file.fixed):
            raise not_as_written(store.location, file.name)


# In a bucket


def _write_in_order(work: Work, files: Sequence[PlannedFile], store: Store, notes: str) -> Digests:
    """Write all files, each from its first byte to its last. Finished ones are kept.

    `notes` is the directory in the store for the size and the identity of each finished file.
    """
    stop, budget = StopSignal(), ByteBudget(_HELD_BYTES)
    threads = store.traits.at_once
    digests: dict[ItemBox, str] = {}

    def write(file: PlannedFile) -> None:
        writer = create_or_keep(
            store, file.name, file.size, beside=min(threads, len(files)), on_kept=work.kept.add
        )
        try:
            for start, data in file.fixed:
                writer.write(start, [data])
            pieces = [piece for at in file.places for piece in work.bands_of(at)]
            for group in work.together(pieces):
                with budget.hold(work.nbytes_of(group), stop.check):
                    found = dict(work.read(group))
                    for piece in group:
                        data = to_bytes(found.pop(piece))
                        digests[piece] = shard_file.block_digest([data])
                        start = file.places[piece.item] + work.offset_of(piece)
                        for at in range(0, len(data), READ_BYTES):
                            writer.write(start + at, [data[at : at + READ_BYTES]])
                        work.progress.add(len(data))
        except BaseException:
            writer.abandon()
            raise
        note = json.dumps([file.size, writer.finish() or ""])
        store.put(f"{notes}/{file.name}.json", note.encode())

    run_all(write, files, threads=threads, stop=stop)
    return digests


# Reading back. Each byte is read once.


def _check_files(
    work: Work, digests: Digests, store: Store, places: Mapping[str, TensorPlace]
) -> dict[int, int]:
    """Compare all tensors with the digests of the source. Raises Damaged.

    Returns the CRC-32 of each item with its header, if the files have checksums.
    """
    problems = _differences(work, store, places)
    if problems:
        raise Damaged(store.location, problems)
    groups: list[list[ItemBox]] = []
    """Boxes to check together: those that share rows, or a checksum."""
    of_items: dict[int, list[ItemBox]] = {}
    for piece in digests:
        has_checksum = places[work.items[piece.item].name].crc is not None
        if not has_checksum and work.is_contiguous(piece):
            groups.append([piece])
        else:
            of_items.setdefault(piece.item, []).append(piece)
    groups += of_items.values()
    scratch, stop, opened = Scratch(work.memory), StopSignal(), ExitStack()

    @cache
    def reader_of(name: str) -> FileReader:
        return opened.enter_context(closing(store.open(name)))

    def check(group: Sequence[ItemBox]) -> tuple[int, int]:
        number = group[0].item
        item = work.items[number]
        place, dtype, whole = (
            places[item.name],
            numpy_dtype(item.spec.dtype),
            _box.full(item.spec.shape),
        )
        crc = place.crc
        # Boxes that share rows are digested together, others one after the other.
        is_by_rows = not work.is_contiguous(group[0])
        for together in [group] if is_by_rows else [[piece] for piece in group]:
            states = [shard_file.new_block_digest() for _ in together]
            area = whole if is_by_rows else together[0].box
            for band in _box.bands(area, whole, READ_BYTES // dtype.itemsize):
                stop.check()
                first, last = _box.flat_span(band, whole)
                memory: Any = scratch.take((last - first) * dtype.itemsize)
                start = place.start + first * dtype.itemsize
                if reader_of(place.file).read_into(start, [memory]) != memory.size:
                    raise not_as_written(store.location, place.file, item.path)
                crc = None if crc is None else zlib.crc32(memory, crc)
                rows = memory.reshape(*_box.shape_of(band), dtype.itemsize)
                for state, piece in zip(states, together, strict=True):
                    part = _box.intersect(band, piece.box)
                    if part is not None:
                        of_piece: Any = np.ascontiguousarray(rows[_box.slices(part, band)])
                        state.update(of_piece)
            if [state.hexdigest() for state in states] != [digests[piece] for piece in together]:
                raise not_as_written(store.location, place.file, item.path)
        work.progress.add(work.nbytes_of(group))
        return number, crc or 0

    with opened:
        return dict(run_all(check, groups, threads=_THREADS, stop=stop))


def _differences(work: Work, store: Store, places: Mapping[str, TensorPlace]) -> list[Problem]:
    problems: list[Problem] = []
    wanted = {item.name: item.spec for item in work.items}
    for path in wanted.keys() ^ places.keys():
        what = "is not in it" if path in wanted else "is in it, and was not converted"
        problems.append(Problem(store.location, f"the tensor {path!r} {what}"))
    for path in wanted.keys() & places.keys():
        place, spec = places[path], wanted[path]
        if (place.dtype, place.shape) != (spec.dtype, spec.shape):
            found = f"it is {place.dtype} {place.shape}, not {spec.dtype} {spec.shape}"
            problems.append(Problem(place.file, found, (path,)))
    return problems
