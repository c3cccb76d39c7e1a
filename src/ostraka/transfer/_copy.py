"""`ostraka.copy`: copy a checkpoint, or all steps of a run directory, to another store."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ostraka.common import html
from ostraka.common.progress import Count, OnBytes, shown
from ostraka.common.threads import StopSignal, run_all
from ostraka.common.units import human_bytes
from ostraka.errors import (
    CheckpointNotFound,
    Damaged,
    NotACheckpoint,
    PathInTheWay,
    Problem,
    SourceChanged,
    UnsupportedFormat,
    count_of,
    store_error,
)
from ostraka.formats import has_finished_checkpoint, is_checkpoint, open_source
from ostraka.formats.buffers import aligned
from ostraka.formats.orbax.names import COMMITTED, METADATA, STEP_METADATA, TEMPORARY
from ostraka.formats.orbax.source import OrbaxSource
from ostraka.formats.ostraka.damage import damage_on_loss, damaged
from ostraka.formats.ostraka.source import OstrakaSource
from ostraka.formats.safetensors.files import INDEX_SUFFIX, SUFFIX, resolve
from ostraka.formats.safetensors.source import SafetensorsSource
from ostraka.formats.source import Source, names_in
from ostraka.formats.source_files import OpenedFile, Sampling, refuse_changed, state_of
from ostraka.layout.file_names import steps_among
from ostraka.layout.shard_file import METADATA_NAME
from ostraka.reading.locate import locate, open_at, read_whole
from ostraka.storage import FileInfo, LocalStore, PathLike, Store, open_store, refuse_overlap
from ostraka.transfer._copy_ostraka import copy_checkpoint, total_bytes

_LAST = {name: order for order, name in enumerate((METADATA, STEP_METADATA, COMMITTED), start=1)}
"""The files that commit an Orbax checkpoint, in the order in which they are written."""
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The result of `copy`.

    Attributes:
        source: The location of the checkpoint or run directory that was copied.
        target: The location of the copy.
        copied: Number of checkpoints that this call copied.
        skipped: Number of checkpoints that the target had already.
        bytes_copied: Bytes that this call wrote.
        bytes_skipped: Bytes that the target had already, of complete checkpoints and of files of an
            interrupted copy.
        duration_s: Duration in seconds.
    """

    source: str
    target: str
    copied: int
    skipped: int
    bytes_copied: int
    bytes_skipped: int
    duration_s: float

    def __str__(self) -> str:
        text = f"{count_of(self.copied, 'checkpoint')}, {human_bytes(self.bytes_copied)}"
        if self.bytes_skipped:
            were = f"{count_of(self.skipped, 'checkpoint')}, " if self.skipped else ""
            text += f"; already there: {were}{human_bytes(self.bytes_skipped)}"
        return f"{self.source} to {self.target}: {text} ({self.duration_s:.2f} s)"

    def _repr_html_(self) -> str:
        entries = {
            "source": self.source,
            "copied": f"{count_of(self.copied, 'checkpoint')}, {html.size(self.bytes_copied)}",
            "already there": f"{count_of(self.skipped, 'checkpoint')}, "
            f"{html.size(self.bytes_skipped)}"
            if self.bytes_skipped
            else None,
            "duration": f"{self.duration_s:.2f} s",
        }
        return html.frame("CopyReport", self.target, html.facts(entries))


def copy(
    source: PathLike,
    target: PathLike,
    *,
    progress: bool = False,
    on_bytes: OnBytes | None = None,
) -> CopyReport:
    """Copy a checkpoint, or all steps of a run directory, to another path or store.

    The copy is the same checkpoint, byte for byte, and appears atomically. Every byte is compared
    with its digest on the way. Run an interrupted copy again to resume it. A checkpoint that the
    target has already is not read again (`verify` does that). Orbax checkpoints and directories of
    safetensors files are copied file by file, since they have no digests. Steps keep the names of
    their directories. Pins are not copied. Call it from one process.

    Args:
        source: A checkpoint, a run directory, or `runs/7` for step 7 of `runs`.
        target: The path of the copy. A run directory is copied into it, step by step.
        progress: Show how far it has come: a bar on a terminal or in a notebook, else a line in the
            log every 30 s.
        on_bytes: Called now and then, from threads, with the bytes done and the bytes in all.

    Returns:
        A report with the number of checkpoints and bytes.

    Raises:
        Damaged: The source is damaged. Other steps of a run directory are copied all the same.
        PathInTheWay: The target has something else, which is not replaced, or lies in the source.
        Busy: Another process writes to the target, or the source changed meanwhile.

    Example:
        >>> print(ostraka.copy("runs", "s3://bucket/runs"))
    """
    begin = time.perf_counter()
    root, place = open_store(source), open_store(target)
    refuse_overlap(root, place, "copied")
    names = _steps_in(root)
    if not names:
        there = names_in(place)
        if METADATA_NAME not in there and steps_among(there):
            own_name = locate(source).location.rpartition("/")[2]
            raise PathInTheWay(
                f"{place.location} is a directory of steps, and one checkpoint is to be copied; "
                f"give a path of its own, as {place.location}/{own_name}"
            )
    with shown(f"copy {root.location}", progress, on_bytes) as tell:
        if names:
            done = _copy_steps(root, place, names, tell)
        else:
            done = [_copy_to(source, place, tell)]
    return CopyReport(
        source=root.location if names else done[0].source,
        target=place.location,
        copied=sum(one.copied for one in done),
        skipped=sum(one.skipped for one in done),
        bytes_copied=sum(one.bytes_copied for one in done),
        bytes_skipped=sum(one.bytes_skipped for one in done),
        duration_s=time.perf_counter() - begin,
    )


def _steps_in(root: Store) -> list[str]:
    """The names of committed steps, ascending. Empty if `root` is a checkpoint itself."""
    names = names_in(root)
    if is_checkpoint(names):
        return []
    steps = [name for of_step in steps_among(names).values() for name in of_step]
    return [name for name in steps if has_finished_checkpoint(root.at(name))]


def _copy_to(path: PathLike, target: Store, on_bytes: OnBytes | None) -> CopyReport:
    """Copy the checkpoint at a path, even while saves replace it."""
    begin = time.perf_counter()

    def work(sources: Sequence[Source]) -> CopyReport:
        source = sources[0]
        progress = Count(_total_bytes(source), on_bytes)
        if isinstance(source, OrbaxSource | SafetensorsSource):
            is_new = _copy_files(source, target, progress)
        else:
            assert isinstance(source, OstrakaSource)
            is_new = copy_checkpoint(source, target, progress)
        copied, took_s = progress.done - progress.kept, time.perf_counter() - begin
        counts = (int(is_new), int(not is_new), copied, progress.kept)
        return CopyReport(source.location, target.location, *counts, took_s)

    return read_whole([path], work)


def _copy_steps(
    root: Store, target: Store, names: Sequence[str], on_bytes: OnBytes | None
) -> list[CopyReport]:
    if METADATA_NAME in target.list():
        raise PathInTheWay(
            f"{target.location} is a checkpoint, and {root.location} a directory of steps; give a "
            "directory for its steps"
        )
    problems: list[Problem] = []

    def look(name: str) -> int | None:
        try:
            return _total_bytes(open_at(root.at(name)))
        except (CheckpointNotFound, NotACheckpoint):
            return None  # Deleted meanwhile, or another program's.
        except Damaged as error:
            problems.extend(_below(name, error))
            return None

    found = run_all(look, names, threads=root.traits.reads_at_once, stop=StopSignal())
    sizes = {name: size for name, size in zip(names, found, strict=True) if size is not None}
    if not sizes and not problems:
        open_at(root)  # Raises, and says what is there instead.
    total, before = sum(sizes.values()), 0
    done: list[CopyReport] = []

    def tell(start: int, now: int, _: int) -> None:
        if on_bytes is not None:
            on_bytes(start + now, total)

    for name, size in sizes.items():
        try:
            done.append(_copy_to(root.at(name), target.at(name), partial(tell, before)))
        except CheckpointNotFound:
            pass  # Its run has deleted it meanwhile.
        except Damaged as error:
            if error.path != root.at(name).location:
                raise
            problems += _below(name, error)
        before += size
    if problems:
        raise Damaged(root.location, problems)
    return done


def _below(name: str, error: Damaged) -> list[Problem]:
    """The problems of a step, with the names of files below the run directory."""
    return [Problem(f"{name}/{one.file}", one.found, one.leaves) for one in error.problems]


def _total_bytes(source: Source) -> int:
    if isinstance(source, OstrakaSource):
        return total_bytes(source)
    if isinstance(source, OrbaxSource | SafetensorsSource):
        return sum(copied.file.size for copied in _files_of(source))
    raise UnsupportedFormat(
        f"can't copy {source.location}: Ostraka did not write it, and it has no digests to "
        "compare with"
    )


# Orbax checkpoints and safetensors files, copied file by file.
#
# In a directory the copy has a temporary name until it is complete. In a bucket the files that
# commit it come last. Orbax itself does the same.


class _ForeignFile(NamedTuple):
    """A file without digests, the store to read it from, and its name in the copy."""

    store: Store
    file: FileInfo
    name: str

    @property
    def opened(self) -> OpenedFile:
        return OpenedFile(self.store, self.file.name, state_of(self.file))


def _files_of(source: OrbaxSource | SafetensorsSource) -> list[_ForeignFile]:
    """All files of a source. Hidden ones beside safetensors files, such as Git's, are left out."""
    store = source.store
    files = store.files("")
    if isinstance(source, OrbaxSource):
        return [_ForeignFile(store, file, file.name) for file in files]
    if not store.list():  # a single file, or an index that was given as such
        stores = {file.name: file.opened[:2] for file in source.found.files}
    else:
        names = [*store.list(), *(file.name for file in files if "/" in file.name)]
        is_hidden = re.compile(r"(^|/)\.").search
        stores = {name: resolve(store, name) for name in names if not is_hidden(name)}
    found: list[_ForeignFile] = []
    listed = {file.name for file in files}
    for name, (held_by, stored_as) in stores.items():
        is_file = name in listed or held_by is not store
        there = held_by.look(stored_as) if is_file else None
        if there is not None:
            found.append(_ForeignFile(held_by, there, name))
    return found


def _copy_files(source: OrbaxSource | SafetensorsSource, target: Store, progress: Count) -> bool:
    """Copy files to an empty place. Returns False if the target has them already.

    Raises PathInTheWay if something else is there, Busy if the source changes meanwhile.
    """
    files = _files_of(source)
    if target.list():
        _refuse_other(source, target)
        progress.add(sum(one.file.size for one in files), kept=True)
        return False
    copy = _copy_to_directory if isinstance(target, LocalStore) else _copy_to_bucket
    copy(source, files, target, progress)
    return True


def _copy_to_bucket(
    source: Source, files: Sequence[_ForeignFile], target: Store, progress: Count
) -> None:
    """Copy files to an empty place, those that commit it last.

    If the source has changed meanwhile, the copied files are deleted: they may be of two models.
    """
    is_orbax = isinstance(source, OrbaxSource)
    if is_orbax:
        order = {one: _LAST.get(one.name.rpartition("/")[2]) for one in files}
        last = [one for one in files if order[one]]
        last.sort(key=lambda one: (-one.name.count("/"), order[one]))
    else:
        last = [one for one in files if one.name.endswith(INDEX_SUFFIX)]
        last = last or [one for one in files if one.name.endswith(SUFFIX)][-1:]
    try:
        _copy_all([one for one in files if one not in last], target, progress)
        _refuse_changed(source, files)
        for one in last:
            _copy_file(one, target, progress)
        _refuse_changed(source, files)
    except SourceChanged:
        for one in files:
            with suppress(OSError):
                target.delete(one.name)
        raise
    if is_orbax and not any(one.name == COMMITTED for one in files):
        target.put(COMMITTED, b"")  # which only buckets had before Orbax 0.12.3


def _copy_to_directory(
    source: Source, files: Sequence[_ForeignFile], target: Store, progress: Count
) -> None:
    """Copy to a directory of another name, and rename it to the target's when it is complete."""
    # A name of its own, so as not to take the files of another copy. Orbax removes what a killed
    # one has left.
    begin, end = (TEMPORARY, "") if isinstance(source, OrbaxSource) else (".copy", ".tmp")
    name = f"{target.location.rstrip('/')}{begin}-{secrets.token_hex(8)}{end}"
    try:
        _copy_all(files, LocalStore(name), progress)
        _refuse_changed(source, files)
        try:
            os.rename(name, target.location)
        except OSError as error:
            raise store_error("give its name to the copy", target.location, error) from error
    except BaseException:
        shutil.rmtree(name, ignore_errors=True)
        raise
    LocalStore(os.path.dirname(target.location)).sync("")


def _refuse_other(source: Source, target: Store) -> None:
    """Raise PathInTheWay unless the target is a copy of the source, by samples of its bytes."""
    found = None
    with suppress(OSError, ValueError):  # Something that is not the same, whatever it is.
        found = open_source(target)
    how: Sampling = "blocks"
    if source.store.traits.is_remote or target.traits.is_remote:
        how = "few blocks"
    is_same = found is not None and found.saved.id == source.saved.id
    if found is None or not is_same or [*found.samples(how)] != [*source.samples(how)]:
        raise PathInTheWay(
            f"{target.location} has something else in it, which a copy does not replace; remove "
            "it, or copy elsewhere"
        )


def _refuse_changed(source: Source, files: Sequence[_ForeignFile]) -> None:
    """Raise SourceChanged if the copied files may not be of one checkpoint."""
    refuse_changed(one.opened for one in files)
    if not source.is_current():
        raise SourceChanged(
            f"{source.location} was replaced or removed while it was copied; wait until that has "
            "ended, and copy again"
        )


def _copy_all(files: Sequence[_ForeignFile], target: Store, progress: Count) -> None:
    target.prepare()
    copy = partial(_copy_file, target=target, progress=progress)
    run_all(copy, files, threads=target.traits.at_once, stop=StopSignal())


def _copy_file(copied: _ForeignFile, target: Store, progress: Count) -> None:
    source, file = copied.store, copied.file
    with damage_on_loss(partial(damaged, source, file.name)):
        reader = source.open(file.name)
    writer = target.create(copied.name, file.size)
    try:
        with closing(reader):
            for start in range(0, file.size, _PIECE_BYTES):
                # Fresh memory: a store that wants files in order may keep it until the end.
                piece = aligned(min(_PIECE_BYTES, file.size - start))
                if reader.read_into(start, [piece]) != piece.size:
                    raise damaged(source, file.name, "it has become shorter")
                writer.write(start, [piece])
                progress.add(piece.size)
        refuse_changed([copied.opened])  # before it appears
    except BaseException:
        writer.abandon()
        raise
    writer.finish()
