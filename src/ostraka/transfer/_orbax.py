"""One checkpoint of Orbax, copied file by file; it has no digests to compare with.

In a directory the copy has the name of an unfinished save until all of it is there, in a bucket the
files that make it a checkpoint come last. Orbax itself does the same.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial

from ostraka._damage import damage_on_loss, damaged
from ostraka._memory import aligned
from ostraka._parallel import StopSignal, run_all
from ostraka._source import Source
from ostraka.errors import Busy, PathInTheWay, store_error
from ostraka.formats import open_source
from ostraka.formats._orbax import OrbaxSource
from ostraka.formats._orbax_files import COMMITTED, METADATA, STEP_METADATA, TEMPORARY
from ostraka.storage import FileInfo, LocalStore, Store
from ostraka.transfer._files import Tally

_LAST = {name: order for order, name in enumerate((METADATA, STEP_METADATA, COMMITTED), start=1)}
"""The files that make a directory a checkpoint, in the order in which they are written."""
_PIECE_BYTES = 8 << 20


def total_bytes_of_orbax(source: OrbaxSource) -> int:
    return sum(file.size for file in source.store.files(""))


def copy_orbax(source: OrbaxSource, target: Store, tally: Tally) -> bool:
    """Copy a checkpoint to a place; returns False if it was there already.

    Raises PathInTheWay if something else is there, Busy if the source changes meanwhile.
    """
    files = source.store.files("")
    if target.list():
        check_same(source, target)
        tally.add(skipped=sum(file.size for file in files))
        return False
    if not isinstance(target, LocalStore):
        _copy_files(source.store, target, files, tally)
        if not any(file.name == COMMITTED for file in files):
            target.put(COMMITTED, b"")  # which only buckets had before Orbax 0.12.3
        check_current(source)
        return True
    # Of its own, not to take the files of another copy; Orbax removes what a killed one has left.
    name = f"{target.location.rstrip('/')}{TEMPORARY}-{secrets.token_hex(8)}"
    copy_under(name, source, target, lambda place: _copy_files(source.store, place, files, tally))
    return True


def copy_under(name: str, source: Source, target: Store, copy: Callable[[Store], None]) -> None:
    """Copy to a directory of another name, which gets that of the target when all is there."""
    try:
        copy(LocalStore(name))
        check_current(source)
        _give_name(name, target.location)
    except BaseException:
        shutil.rmtree(name, ignore_errors=True)
        raise
    LocalStore(os.path.dirname(target.location)).sync("")


def _give_name(name: str, final: str) -> None:
    try:
        os.rename(name, final)
    except OSError as error:
        raise store_error("give its name to the copy", final, error) from error


def check_same(source: Source, target: Store) -> None:
    found = None
    with suppress(OSError, ValueError):  # Something that is not the same, whatever it is.
        found = open_source(target)
    if found is None or found.saved.id != source.saved.id:
        raise PathInTheWay(
            f"{target.location} has something else in it, which a copy does not replace; remove "
            "it, or copy elsewhere"
        )


def check_current(source: Source) -> None:
    if not source.is_current():
        raise Busy(f"{source.location} was replaced or removed while it was copied; copy again")


def _copy_files(source: Store, target: Store, files: list[FileInfo], tally: Tally) -> None:
    """Copy files, those that make a checkpoint last."""
    target.prepare()
    last = [file for file in files if file.name.rpartition("/")[2] in _LAST]
    last.sort(key=lambda file: (-file.name.count("/"), _LAST[file.name.rpartition("/")[2]]))
    others = [file for file in files if file not in last]
    copy = partial(copy_file, source, target, tally)
    run_all(copy, others, threads=target.parts.at_once, stop=StopSignal())
    for file in last:
        copy(file)


def copy_file(
    source: Store, target: Store, tally: Tally, file: FileInfo, name: str | None = None
) -> None:
    """Copy one file, under another name if one is given."""
    with damage_on_loss(partial(damaged, source, file.name)):
        reader = source.open(file.name)
    writer = target.create(name or file.name, file.size)
    try:
        with closing(reader):
            for start in range(0, file.size, _PIECE_BYTES):
                # Fresh memory: a store that wants files in order may keep it until the end.
                piece = aligned(min(_PIECE_BYTES, file.size - start))
                if reader.read_into(start, [piece]) != piece.size:
                    raise damaged(source, file.name, "it has become shorter")
                writer.write(start, [piece])
                tally.add(copied=piece.size)
    except BaseException:
        writer.abandon()
        raise
    writer.finish()
