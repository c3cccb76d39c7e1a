"""Planned files of whole tensors, written from a source, in bounded memory.

In a file system pieces of all files are written by several threads, in any order, and each is noted
in a journal. A bucket wants a file from its first byte to its last; there several files are written
at the same time, and what is noted is a file that is finished.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

from ostraka import _box, _format
from ostraka._memory import Scratch
from ostraka._parallel import ByteBudget, StopSignal, run_all
from ostraka._spec import numpy_dtype
from ostraka.errors import store_error
from ostraka.interop._cut import (
    bands_of,
    is_contiguous,
    offset_of,
    piece_bytes,
    read_together,
    slabs_of,
)
from ostraka.interop._digest_files import READ_BYTES, Readers, digest_pieces, pieces_by_run
from ostraka.interop._tensor_files import PlannedFile
from ostraka.interop._work import Digests, Piece, Tally, Work, bytes_of
from ostraka.interop._workplace import Workplace
from ostraka.storage import LocalStore, Store
from ostraka.storage._file import LocalWriter

_WRITE_BYTES = 2 << 20
"""What is written at a time: more at a time takes longer on ext4."""
_RUNS = 1024
"""So many runs are written before it is asked whether to go on."""
_HELD_BYTES = 192 << 20
"""How much of arrays is in memory at one time."""
_THREADS = 4


# In a file system


class _OpenFiles:
    """Files that are being written, each opened when it is first needed and kept as it is."""

    def __init__(self, store: LocalStore):
        self._store = store
        self._writers: dict[str, LocalWriter] = {}
        self._lock = threading.Lock()

    def writer(self, file: PlannedFile) -> LocalWriter:
        with self._lock:
            found = self._writers.get(file.name)
            if found is None:
                path = os.path.join(self._store.location, file.name)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                try:
                    found = LocalWriter(os.open(path, flags, 0o666), path, file.size)
                except OSError as error:
                    raise store_error("create", path, error) from error
                self._writers[file.name] = found
            return found

    def finish(self) -> None:
        run_all(LocalWriter.finish, self._take(), threads=_THREADS, stop=StopSignal())

    def abandon(self) -> None:
        for writer in self._take():
            writer.abandon()

    def _take(self) -> list[LocalWriter]:
        with self._lock:
            writers, self._writers = list(self._writers.values()), {}
        return writers


def write_in_directory(
    work: Work, files: Sequence[PlannedFile], place: Workplace, tally: Tally
) -> Digests:
    """Write all files; what an earlier conversion has written, and is as it was, stays.

    Returns the digests of what was read from the source. All is durable but for the names, and for
    what depends on checksums: `finish_files` writes that.
    """
    file_of = {piece: file for file in files for at in file.places for piece in slabs_of(work, at)}
    numbers = {piece: number for number, piece in enumerate(file_of)}
    notes = _find_written(work, file_of, place)
    tally.add(sum(piece_bytes(work, piece) for piece in notes), kept=True)
    missing = [piece for piece in file_of if piece not in notes]
    opened, budget, stop = _OpenFiles(place.files), ByteBudget(_HELD_BYTES), StopSignal()

    def write(group: list[Piece]) -> None:
        nbytes = sum(piece_bytes(work, piece) for piece in group)
        with budget.hold(nbytes, stop.check):
            for piece, array in work.read(group):
                data = bytes_of(array)
                _write_piece(work, piece, data, file_of[piece], opened, stop)
                notes[piece] = _format.block_digest([data])
                place.journal.note(numbers[piece], notes[piece])
                tally.add(len(data))

    try:
        order = {number: at for at, number in enumerate(work.source.order())}
        missing.sort(key=lambda piece: (order[work.items[piece.item].number], piece))
        run_all(write, read_together(work, missing), threads=_THREADS, stop=stop)
        for file in files:
            writer = opened.writer(file)
            for start, data in file.fixed:
                writer.write(start, [data])
        opened.finish()
    except BaseException:
        opened.abandon()
        raise
    place.files.sync("")
    return {piece: notes[piece] for piece in file_of}


def _write_piece(
    work: Work,
    piece: Piece,
    data: Any,
    file: PlannedFile,
    opened: _OpenFiles,
    stop: StopSignal,
) -> None:
    writer, start = opened.writer(file), file.places[piece.item]
    if is_contiguous(work, piece):
        start += offset_of(work, piece)
        for at in range(0, len(data), _WRITE_BYTES):
            stop.check()
            writer.write(start + at, [data[at : at + _WRITE_BYTES]])
        return
    spec = work.items[piece.item].spec
    run, offsets = _box.runs(piece.box, spec.shape)
    itemsize = numpy_dtype(spec.dtype).itemsize
    for at in range(0, len(offsets), _RUNS):
        stop.check()
        starts = [start + offset * itemsize for offset in offsets[at : at + _RUNS]]
        writer.write_runs(starts, data[at * run * itemsize :], run * itemsize)


def finish_files(files: Sequence[PlannedFile], place: Workplace, crcs: Mapping[int, int]) -> None:
    """Write what depends on the CRC-32 of each item, durably."""
    opened = _OpenFiles(place.files)
    try:
        for file in files:
            for start, data in () if file.finish is None else file.finish(crcs):
                opened.writer(file).write(start, [data])
        opened.finish()
    except BaseException:
        opened.abandon()
        raise


def _find_written(
    work: Work, file_of: Mapping[Piece, PlannedFile], place: Workplace
) -> dict[Piece, str]:
    """The digests that an earlier conversion has noted, where the bytes are as they say."""
    pieces = list(file_of)
    noted: dict[Piece, str] = {
        pieces[number]: digest
        for number, digest in place.journal.read().items()
        if number < len(pieces)
    }
    scratch, stop = Scratch(work.memory), StopSignal()
    readers = Readers(place.files)

    def check(group: Sequence[Piece]) -> list[Piece]:
        file = file_of[group[0]]
        with suppress(OSError):
            reader, start = readers.reader(file.name), file.places[group[0].item]
            found = digest_pieces(work, group, start, reader, scratch, stop).digests
            return [
                piece for piece, digest in zip(group, found, strict=True) if noted[piece] == digest
            ]
        return []

    with closing(readers):
        good = run_all(check, pieces_by_run(work, sorted(noted)), threads=_THREADS, stop=stop)
    return {piece: noted[piece] for found in good for piece in found}


# In a bucket


def write_in_order(
    work: Work, files: Sequence[PlannedFile], store: Store, notes: str, tally: Tally
) -> Digests:
    """Write all files, each from its first byte to its last.

    `notes` is the place, in the store, of what is noted of finished files.
    """
    known = {info.name: info for info in store.files("")}
    digests: dict[Piece, str] = {}
    missing: list[PlannedFile] = []
    for file in files:
        pieces = [piece for at in file.places for piece in bands_of(work, at)]
        found = _read_note(store, f"{notes}/{file.name}.json")
        info = known.get(file.name)
        if info is None or found != [info.size, info.identity, *found[2:]]:
            missing.append(file)
            continue
        digests |= zip(pieces, found[2:], strict=True)
        tally.add(sum(piece_bytes(work, piece) for piece in pieces), kept=True)
    stop = StopSignal()
    threads = store.parts.at_once
    budget, beside = ByteBudget(_HELD_BYTES), min(threads, len(files))
    write = partial(_write_whole, work, store, notes, tally, stop, budget, beside)
    for found in run_all(write, missing, threads=threads, stop=stop):
        digests |= found
    return digests


def _read_note(store: Store, name: str) -> list[Any]:
    with suppress(OSError, ValueError):
        found = json.loads(store.get(name))
        if isinstance(found, list):
            return found
    return []


def _write_whole(
    work: Work,
    store: Store,
    notes: str,
    tally: Tally,
    stop: StopSignal,
    budget: ByteBudget,
    beside: int,
    file: PlannedFile,
) -> dict[Piece, str]:
    digests: dict[Piece, str] = {}
    writer = store.create(file.name, file.size, beside=beside, replace=True)
    try:
        for start, data in file.fixed:
            writer.write(start, [data])
        pieces = [piece for at in file.places for piece in bands_of(work, at)]
        for group in read_together(work, pieces):
            nbytes = sum(piece_bytes(work, piece) for piece in group)
            with budget.hold(nbytes, stop.check):
                found = dict(work.read(group))
                for piece in group:
                    data = bytes_of(found.pop(piece))
                    digests[piece] = _format.block_digest([data])
                    start = file.places[piece.item] + offset_of(work, piece)
                    for at in range(0, len(data), READ_BYTES):
                        writer.write(start + at, [data[at : at + READ_BYTES]])
                    tally.add(len(data))
    except BaseException:
        writer.abandon()
        raise
    identity = writer.finish() or ""
    note = json.dumps([file.size, identity, *digests.values()])
    store.put(f"{notes}/{file.name}.json", note.encode())
    return digests
