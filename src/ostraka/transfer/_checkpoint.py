"""One checkpoint, copied as one atomic event: first its files, then `_METADATA`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter

from ostraka import _format
from ostraka._blocks import damage_on_loss, damaged
from ostraka._format import METADATA_NAME
from ostraka._leftovers import remove_leftovers, take_over
from ostraka._metadata import decode_metadata, metadata_is_intact
from ostraka._parallel import StopSignal, run_all
from ostraka.errors import Busy, Damaged, PathInTheWay, Problem
from ostraka.formats._ostraka import OstrakaSource
from ostraka.storage import Claim, Store, claimed
from ostraka.transfer._files import Tally, copy_files


def total_bytes(source: OstrakaSource) -> int:
    """The bytes of all files of a checkpoint."""
    return source.metadata_bytes + sum(_sizes_of(source).values())


def copy_checkpoint(source: OstrakaSource, target: Store, tally: Tally) -> bool:
    """Copy a checkpoint to a place; returns False if all of it was there already.

    Files that an earlier copy left are kept if every byte of them is right. Raises PathInTheWay if
    something else is there, Busy if a save or another copy is under way, Damaged for the source,
    or for the target if files of its committed checkpoint are lost. Nothing is committed then.
    """
    metadata = _read_metadata(source)
    if _is_there(source, target, metadata):
        tally.add(skipped=total_bytes(source))
        return False
    is_new = target.prepare()
    try:
        with claimed(target, wait=True) as claim:
            return _copy_claimed(source, target, metadata, claim, tally)
    except BaseException:
        if is_new:
            with suppress(OSError):
                target.remove_if_empty()
        raise


def _copy_claimed(
    source: OstrakaSource, target: Store, metadata: bytes, claim: Claim, tally: Tally
) -> bool:
    directory = _format.shards_directory(source.metadata.id)
    seen = take_over(target, claim.names)
    if _is_there(source, target, metadata):  # Another copy was faster.
        tally.add(skipped=total_bytes(source))
        return False
    if seen.version is not None:
        raise _in_the_way(target)
    seen = replace(seen, kept=directory)  # What an earlier copy left is used.
    remove_leftovers(target, seen)
    try:
        _copy_shards(source, target, tally)
    except Damaged:
        # It can't become a checkpoint, so nobody should have to clean it up.
        with suppress(OSError):
            if claim.is_held():
                target.delete(directory)
        raise
    _commit(source, target, metadata, claim)
    tally.add(copied=len(metadata))
    # The copy is good. What can't be deleted now, a later save or `ostraka gc` tries again.
    with suppress(OSError):
        for name in seen.leftovers:
            target.delete(name)
        if claim.found_dead:
            target.discard_uploads()
    return True


def _copy_shards(source: OstrakaSource, target: Store, tally: Tally) -> None:
    shards, directory = source.shards, _format.shards_directory(source.metadata.id)
    sizes = _sizes_of(source)
    there = {file.name: file.size for file in target.files(f"{directory}/")}
    for name in there.keys() - sizes.keys():
        target.delete(name)  # Temporary files of a copy that was killed.

    def copy_index(process: int) -> None:
        data = shards.read_index(process)
        target.put(shards.name_of_index(process), data)
        tally.add(copied=len(data))

    copy_files(source, target, there, tally)
    # After the files: with them the directory came, whose names a `put` makes durable.
    indexes = source.metadata.indexes
    run_all(copy_index, indexes, threads=target.parts.at_once, stop=StopSignal())


def _commit(source: OstrakaSource, target: Store, metadata: bytes, claim: Claim) -> None:
    def check() -> None:
        claim.check()
        lost = _lost(source, target)
        if lost:
            raise Busy(
                f"{target.location}/{lost[0].file}, which was just copied, is not as it was: "
                "another save or program has changed it; copy again"
            )

    target.sync("")  # The shards must not be lost to a crash that keeps the commit.
    target.put(METADATA_NAME, metadata, replaces=None, check=check)


def _read_metadata(source: OstrakaSource) -> bytes:
    """`_METADATA` as it was written. Raises Damaged if it is no longer what was opened."""
    with damage_on_loss(partial(damaged, source.store, METADATA_NAME)):
        data = source.store.get(METADATA_NAME)
    wanted = attrgetter("id", "files", "indexes")
    if not metadata_is_intact(data) or wanted(decode_metadata(data)) != wanted(source.metadata):
        raise damaged(source.store, METADATA_NAME, "it has changed while it was being read")
    return data


def _is_there(source: OstrakaSource, target: Store, metadata: bytes) -> bool:
    """Whether the target is the same checkpoint, with all of its files."""
    try:
        found = target.get(METADATA_NAME)
    except FileNotFoundError:
        return False
    if found != metadata:
        raise _in_the_way(target)
    lost = _lost(source, target)
    if lost:
        raise Damaged(target.location, lost)
    return True


def _lost(source: OstrakaSource, target: Store) -> list[Problem]:
    """The files that a target lacks, or has with another size."""
    sizes = _sizes_of(source)
    if not sizes:
        return []
    directory = _format.shards_directory(source.metadata.id)
    there = {file.name: file.size for file in target.files(f"{directory}/")}
    return [
        Problem(name, "it is missing" if name not in there else f"it does not have {size:,} bytes")
        for name, size in sizes.items()
        if there.get(name) != size
    ]


def _sizes_of(source: OstrakaSource) -> dict[str, int]:
    """All files of a checkpoint but `_METADATA`."""
    metadata, shards = source.metadata, source.shards
    sizes = {shards.name_of(file): file.size for file in metadata.files}
    return sizes | {shards.name_of_index(p): index.size for p, index in metadata.indexes.items()}


def _in_the_way(target: Store) -> PathInTheWay:
    return PathInTheWay(
        f"{target.location} has another checkpoint, which a copy does not replace; remove it, or "
        "copy elsewhere"
    )
