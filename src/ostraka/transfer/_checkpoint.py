"""One checkpoint, copied as one atomic event: first its files, then `_METADATA`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter

from ostraka import _format
from ostraka._damage import damage_on_loss, damaged
from ostraka._format import METADATA_NAME
from ostraka._leftovers import Seen, is_of_a_save, remove_leftovers, take_over
from ostraka._metadata import decode_metadata, metadata_is_intact
from ostraka._parallel import StopSignal, run_all
from ostraka.errors import Busy, Damaged, PathInTheWay, Problem
from ostraka.formats._ostraka import OstrakaSource
from ostraka.storage import Claim, Store
from ostraka.transfer._files import Tally, copy_files


def total_bytes(source: OstrakaSource) -> int:
    """The bytes of all files of a checkpoint."""
    sizes = _sizes_of(source)
    return source.metadata_bytes * (2 if sizes else 1) + sum(sizes.values())


def copy_checkpoint(source: OstrakaSource, target: Store, tally: Tally) -> bool:
    """Copy a checkpoint to a place; returns False if all of it was there already.

    Files that an earlier copy left are kept if every byte of them is right. Raises PathInTheWay if
    something else is there, Busy if a save or another copy is under way, Damaged for the source,
    or for the target if files of its committed checkpoint are lost. Nothing is committed then.
    """
    place = CopyPlace(source, target, may_replace=False)
    if not place.take():
        tally.add(skipped=total_bytes(source))
        return False
    try:
        copy_shards(source, target, tally, process=0, count=1)
        tally.add(copied=place.commit())
    except Damaged:
        place.discard()
        raise
    finally:
        place.release()
    return True


class CopyPlace:
    """The place of one copy. Of several processes that copy together, one has it.

    With `may_replace` another checkpoint that is there is replaced, in one event, and one that has
    lost files is made whole; else both are refused.
    """

    def __init__(self, source: OstrakaSource, target: Store, *, may_replace: bool):
        self._source = source
        self._target = target
        self._may_replace = may_replace
        self._metadata = b""
        self._claim = Claim(target)
        self._seen = Seen((), None, None)
        self._directory = _format.shards_directory(source.metadata.id)
        self._is_unused = False
        """Whether nothing was at the path, and nothing is committed there."""

    def take(self) -> bool:
        """Claim the place and clear it; False, and nothing is done, if all is there already."""
        self._metadata = _read_metadata(self._source)
        if self._is_there():
            return False
        self._is_unused = self._target.prepare()
        try:
            self._claim.take(wait=True)
            seen = take_over(self._target, self._claim.names)
            # What an earlier copy left is used.
            names = tuple(name for name in seen.names if name != self._directory)
            self._seen = replace(seen, names=names)
            if self._is_there():  # Another copy was faster.
                self.release()
                return False
            remove_leftovers(self._target, self._seen)
            sizes = _sizes_of(self._source)
            for file in self._target.files(f"{self._directory}/"):
                if file.name not in sizes:
                    self._target.delete(file.name)  # Temporary files of a copy that was killed.
        except BaseException:
            self.release()
            raise
        return True

    def commit(self) -> int:
        """Put `_METADATA`, once all files are there; returns what that took. Raises Busy."""

        def check() -> None:
            self._claim.check()
            lost = find_lost(self._source, self._target)
            if lost:
                raise Busy(
                    f"{self._target.location}/{lost[0].file}, which was just copied, is not as it "
                    "was: another save or program has changed it; copy again"
                )

        nbytes = len(self._metadata)
        if self._source.metadata.files:
            name = f"{self._directory}/{_format.METADATA_COPY}"
            self._target.put(name, self._metadata, durable=False)
            nbytes += len(self._metadata)
        self._target.sync("")  # The shards must not be lost to a crash that keeps the commit.
        replaces = self._seen.version
        self._target.put(METADATA_NAME, self._metadata, replaces=replaces, check=check)
        self._is_unused = False
        # The copy is good. What can't be deleted now, a later save or `ostraka gc` tries again.
        with suppress(OSError):
            for name in filter(is_of_a_save, self._seen.names):
                self._target.delete(name)
            if self._claim.found_dead:
                self._target.discard_uploads()
        return nbytes

    def discard(self) -> None:
        """Delete what was copied: it can't become a checkpoint, so nobody has to clean it up."""
        with suppress(OSError):
            if self._claim.is_held() and self._seen.kept != self._directory:
                self._target.delete(self._directory)

    def release(self) -> None:
        """Let others have the place."""
        self._claim.release()
        if self._is_unused:
            with suppress(OSError):
                self._target.remove_if_empty()

    def _is_there(self) -> bool:
        """Whether the target is the same checkpoint, with all of its files."""
        try:
            found = self._target.get(METADATA_NAME)
        except FileNotFoundError:
            return False
        is_same = found == self._metadata
        lost = find_lost(self._source, self._target) if is_same else []
        if (is_same and not lost) or self._may_replace:
            return is_same and not lost
        if lost:
            raise Damaged(self._target.location, lost)
        raise PathInTheWay(
            f"{self._target.location} has another checkpoint, which a copy does not replace; "
            "remove it, or copy elsewhere"
        )


def copy_shards(
    source: OstrakaSource, target: Store, tally: Tally, *, process: int, count: int
) -> None:
    """Copy all files but `_METADATA`; of `count` processes, those of one.

    Each has the files that it wrote, or those of others if as many did not write them. Raises
    Damaged, about the source alone.
    """
    metadata, shards = source.metadata, source.shards
    devices = {device for device, of in enumerate(metadata.process_of) if of % count == process}

    def copy_index(of: int) -> None:
        data = shards.find_index(of)
        target.put(shards.name_of_index(of), data)
        tally.add(copied=len(data))

    known = () if metadata.parity is None else metadata.parity.files
    parity = [file for file in known if file.process % count == process]
    copy_files(source, target, devices, parity, tally)
    # After the files: with them the directory came, whose names a `put` makes durable.
    indexes = [of for of in metadata.indexes if of % count == process]
    run_all(copy_index, indexes, threads=target.parts.at_once, stop=StopSignal())


def _read_metadata(source: OstrakaSource) -> bytes:
    """`_METADATA` as it was written. Raises Damaged if it is no longer what was opened."""
    with damage_on_loss(partial(damaged, source.store, METADATA_NAME)):
        data = source.store.get(METADATA_NAME)
    wanted = attrgetter("id", "files", "indexes")
    if not metadata_is_intact(data) or wanted(decode_metadata(data)) != wanted(source.metadata):
        raise damaged(source.store, METADATA_NAME, "it has changed while it was being read")
    return data


def find_lost(source: OstrakaSource, target: Store) -> list[Problem]:
    """The files that a target lacks, or has with another size."""
    sizes = _sizes_of(source)
    if not sizes:
        return []
    directory = _format.shards_directory(source.metadata.id)
    there = {file.name: file.size for file in target.files(f"{directory}/")}
    problems: list[Problem] = []
    for name, size in sizes.items():
        # A list may be that of a moment ago, on network file systems: ask the file itself.
        found = there.get(name)
        if found != size and (file := target.look(name)) is not None:
            found = file.size
        if found != size:
            what = "it is missing" if found is None else f"it does not have {size:,} bytes"
            problems.append(Problem(name, what))
    return problems


def _sizes_of(source: OstrakaSource) -> dict[str, int]:
    """All files of a checkpoint but `_METADATA`."""
    metadata, shards = source.metadata, source.shards
    parity = () if metadata.parity is None else metadata.parity.files
    sizes = {shards.name_of(file): file.size for file in (*metadata.files, *parity)}
    return sizes | {shards.name_of_index(p): index.size for p, index in metadata.indexes.items()}
