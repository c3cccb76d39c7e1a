"""Safetensors files and what lies beside them, copied file by file; there are no digests.

In a directory the copy has a temporary name until all of it is there; in a bucket the index comes
last, and without it, files that are numbered are no checkpoint until all of them are there.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from ostraka._parallel import StopSignal, run_all
from ostraka.formats._safetensors import SafetensorsSource
from ostraka.formats._safetensors_files import INDEX_SUFFIX, resolve
from ostraka.storage import FileInfo, LocalStore, Store
from ostraka.transfer._files import Tally
from ostraka.transfer._orbax import check_current, check_same, copy_file, copy_under


class _Copied(NamedTuple):
    """A file, where it is read from, and its name in the copy."""

    store: Store
    file: FileInfo
    name: str


def total_bytes_of_safetensors(source: SafetensorsSource) -> int:
    return sum(copied.file.size for copied in _files(source))


def copy_safetensors(source: SafetensorsSource, target: Store, tally: Tally) -> bool:
    """Copy the files of a place to another; returns False if they were there already.

    Of a directory that is all its files, but for hidden ones, such as those of Git. Raises
    PathInTheWay if something else is there, Busy if the source changes meanwhile.
    """
    files = _files(source)
    if target.list():
        check_same(source, target)
        tally.add(skipped=sum(copied.file.size for copied in files))
        return False
    if not isinstance(target, LocalStore):
        _copy_all(files, target, tally)
        check_current(source)
        return True
    name = f"{target.location.rstrip('/')}.copy-{secrets.token_hex(8)}.tmp"
    copy_under(name, source, target, lambda place: _copy_all(files, place, tally))
    return True


def _files(source: SafetensorsSource) -> list[_Copied]:
    if not source.store.list():  # a single file, or an index that was given as such
        stores = {file.name: (file.store, file.stored_as) for file in source.found.files}
    else:
        below = [file.name for file in source.store.files("")]
        names = [*source.store.list(), *(name for name in below if "/" in name)]
        stores = {name: resolve(source.store, name) for name in names if not _is_hidden(name)}
    found: list[_Copied] = []
    listed = {file.name for file in source.store.files("")}
    for name, (store, stored_as) in stores.items():
        is_file = name in listed or store is not source.store
        there = store.look(stored_as) if is_file else None
        if there is not None:
            found.append(_Copied(store, there, name))
    return found


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _copy_all(files: list[_Copied], target: Store, tally: Tally) -> None:
    target.prepare()

    def copy(copied: _Copied) -> None:
        copy_file(copied.store, target, tally, copied.file, copied.name)

    last = [copied for copied in files if copied.name.endswith(INDEX_SUFFIX)]
    others = [copied for copied in files if copied not in last]
    run_all(copy, others, threads=target.parts.at_once, stop=StopSignal())
    for copied in last:
        copy(copied)
