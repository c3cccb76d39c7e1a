"""Planned files of whole tensors, written from a source, in bounded memory.

In a file system pieces of all files are written by several threads, in any order, and each is noted
in a journal. A bucket wants a file from its first byte to its last; there several files are written
at the same time, and what is noted is a file that is finished.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ostraka import _box, _format
from ostraka._memory import Scratch
from ostraka._parallel import ByteBudget, StopSignal, run_all
from ostraka._spec import DTYPES
from ostraka.errors import store_error
from ostraka.interop._crc import join_crcs
from ostraka.interop._tensor_files import PlannedFile
from ostraka.interop._work import Digests, Piece, Tally, Work, bands_of, bytes_of, read_together
from ostraka.interop._workplace import Note, Workplace
from ostraka.storage import FileReader, LocalStore, Store
from ostraka.storage._file import LocalWriter

READ_BYTES = 8 << 20
_WRITE_BYTES = 2 << 20
"""What is written at a time: more at a time takes longer on ext4."""
_HELD_BYTES = 256 << 20
"""How much of arrays is in memory at one time."""
_THREADS = 4


def piece_bytes(work: Work, piece: Piece) -> int:
    return DTYPES[work.items[piece.item].spec.dtype].nbytes(_box.count(piece.box))


def offset_of(work: Work, piece: Piece) -> int:
    """Where a piece begins in the bytes of its item."""
    spec = work.items[piece.item].spec
    if not _box.count(piece.box):
        return 0
    start, _ = _box.flat_span(piece.box, _box.full(spec.shape))
    return start * DTYPES[spec.dtype].bits // 8


def pieces_of(work: Work, file: PlannedFile) -> list[Piece]:
    """The pieces of a file, in its order."""
    return [piece for at in file.places for piece in bands_of(work, at)]


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

    Returns the digests of what was read from the source. All is durable but for the names.
    """
    pieces = [(file, piece) for file in files for piece in pieces_of(work, file)]
    numbers = {piece: number for number, (_, piece) in enumerate(pieces)}
    notes = _find_written(work, pieces, place)
    tally.add(sum(piece_bytes(work, pieces[number][1]) for number in notes), kept=True)
    missing = [piece for number, (_, piece) in enumerate(pieces) if number not in notes]
    file_of = {piece: file for file, piece in pieces}
    opened, budget, stop = _OpenFiles(place.files), ByteBudget(_HELD_BYTES), StopSignal()

    def write(group: list[Piece]) -> None:
        nbytes = sum(piece_bytes(work, piece) for piece in group)
        with budget.hold(nbytes, stop.check):
            for piece, array in work.read(group):
                file, data = file_of[piece], bytes_of(array)
                writer, start = opened.writer(file), file.places[piece.item]
                start += offset_of(work, piece)
                for at in range(0, len(data), _WRITE_BYTES):
                    stop.check()
                    writer.write(start + at, [data[at : at + _WRITE_BYTES]])
                crc = _crc32(data) if file.finish is not None else 0
                note = notes[numbers[piece]] = Note(_format.block_digest([data]), crc)
                place.journal.note(numbers[piece], note)
                tally.add(len(data))

    try:
        order = {number: at for at, number in enumerate(work.source.order())}
        missing.sort(key=lambda piece: (order[work.items[piece.item].number], piece))
        run_all(write, read_together(work, missing), threads=_THREADS, stop=stop)
        for file in files:
            writer = opened.writer(file)
            patches = () if file.finish is None else file.finish(_crcs(work, file, numbers, notes))
            for start, data in (*file.fixed, *patches):
                writer.write(start, [data])
        opened.finish()
    except BaseException:
        opened.abandon()
        raise
    place.files.sync("")
    return {piece: notes[number].digest for piece, number in numbers.items()}


def _crc32(data: Any) -> int:
    return zlib.crc32(data)


def _crcs(
    work: Work, file: PlannedFile, numbers: Mapping[Piece, int], notes: Mapping[int, Note]
) -> dict[int, int]:
    """The CRC-32 of each item, from those of its pieces."""
    crcs: dict[int, int] = {}
    for piece in pieces_of(work, file):
        note = notes[numbers[piece]]
        before = crcs.get(piece.item, 0)
        crcs[piece.item] = join_crcs(before, note.crc, piece_bytes(work, piece))
    return crcs


def _find_written(
    work: Work, pieces: Sequence[tuple[PlannedFile, Piece]], place: Workplace
) -> dict[int, Note]:
    """What an earlier conversion has noted, by number, where the bytes are as it says."""
    scratch = Scratch()

    def check(found: tuple[int, Note]) -> bool:
        number, note = found
        file, piece = pieces[number]
        start = file.places[piece.item] + offset_of(work, piece)
        with suppress(OSError):
            reader = place.files.open(file.name)
            try:
                digest = digest_range(reader, start, piece_bytes(work, piece), scratch)
                return digest == note.digest
            finally:
                reader.close()
        return False

    notes = [entry for entry in place.journal.read().items() if entry[0] < len(pieces)]
    are_good = run_all(check, notes, threads=_THREADS, stop=StopSignal())
    return {number: note for (number, note), good in zip(notes, are_good, strict=True) if good}


def digest_range(reader: FileReader, start: int, nbytes: int, scratch: Scratch) -> str:
    """The digest of a part of a file; of less, if it ends before."""

    def parts() -> Iterator[Any]:
        for at in range(start, start + nbytes, READ_BYTES):
            part = scratch.take(min(READ_BYTES, start + nbytes - at))
            yield part[: reader.read_into(at, [part])]

    return _format.block_digest(parts())


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
        pieces = pieces_of(work, file)
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
        for group in read_together(work, pieces_of(work, file)):
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
