"""The location of a checkpoint: its lock, its commit, and the files of interrupted saves.

A save deletes shards of interrupted saves only where `_METADATA` names others, or does not exist.
They stay if `_METADATA` is unreadable: a corrupt one, or one of a newer version, may need any.

A save that others consider expired may resume just before its commit, or just before it deletes
something. Both fail then (see `storage._claim`), but for one case: a bucket has no fence for
commits. There, a save deletes files of interrupted saves only after its own commit. Any commit
of theirs fails after that. `collect_garbage` commits nothing, so it leaves files that are
younger than `GONE_AFTER_S`. Not every bucket refuses requests that come too late. So
`delete_metadata` looks afterwards whether it still holds the lock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from ostraka.common.record import logger as log
from ostraka.errors import (
    Busy,
    InvalidTree,
    NotACheckpoint,
    NotDurable,
    OutcomeUnknown,
    PathInTheWay,
    StoreError,
    Unreadable,
)
from ostraka.formats.unknown import looks_like_ours
from ostraka.layout import metadata as _metadata
from ostraka.layout import shard_file
from ostraka.layout.shard_file import METADATA_NAME
from ostraka.storage import MOST_BYTES, Claim, Store, claimed, is_claim, is_fence, refuse_claimed

UNKNOWN = "unknown"
STOOD_STILL_S = 20.0
"""A commit in a bucket that takes longer looks at its files again."""
GONE_AFTER_S = 300.0
"""Far longer than a request lasts, with all its retries."""

_HEAD = re.compile(
    rb'\{"format":"ostraka","version":[%d-%d],"id":"(%b)"[,}]'
    % (shard_file.VERSIONS[0], shard_file.VERSIONS[-1], shard_file.ID_PATTERN.pattern.encode())
)
"""The beginning of an Ostraka `_METADATA`: it gives the id without decoding the rest."""


_REPAIRED = re.compile(r".*\.(safetensors|json)\.[0-9a-f]{8,32}\.tmp")
"""The temporary file of a repair."""


@dataclass(frozen=True, slots=True)
class PlaceListing:
    """The files in a place at the time its lock was acquired."""

    names: tuple[str, ...]
    kept: str | None
    """The shards of the committed checkpoint, as `committed_directory` returns them."""
    version: Any
    """The version of its `_METADATA`, or None without one."""

    @property
    def leftovers(self) -> list[str]:
        """The files of interrupted saves. Empty if `kept` is UNKNOWN."""
        if self.kept == UNKNOWN:
            return []
        return [name for name in self.names if is_of_a_save(name) and name != self.kept]


def take_over(store: Store, names: Sequence[str]) -> PlaceListing:
    """Look at a place with these `names`. The caller holds its lock.

    Raises PathInTheWay if another program wrote its `_METADATA`.
    """
    there = store.look(shard_file.METADATA_NAME)
    kept = committed_directory(store, names)
    return PlaceListing(tuple(names), kept, None if there is None else there.version)


def find_leftovers(store: Store) -> list[str]:
    """The files of interrupted saves and repairs.

    Empty if it is unknown which shards `_METADATA` needs. Raises PathInTheWay if another program
    wrote it.
    """
    names = store.list()
    if not any(map(is_of_a_save, names)):
        return []
    seen = take_over(store, names)
    left = [*seen.leftovers, *find_temporaries(store, seen.kept)]
    if not left or not store.traits.is_remote:
        return left
    # Some stores list a directory for a while after its last object was deleted.
    files = [f"{file.name}/" for file in store.files("")]
    return [name for name in left if any(file.startswith(f"{name}/") for file in files)]


def may_have_lost_metadata(store: Store, leftovers: Sequence[str]) -> bool:
    """True if leftovers without a `_METADATA` may be a checkpoint that has lost it.

    A save writes the copy among the shards just before the commit, after all other files. A
    deletion removes it first.
    """
    for directory in filter(shard_file.is_shards_directory, leftovers):
        with suppress(OSError):
            data = store.get(f"{directory}/{shard_file.METADATA_COPY}")
            found = id_in(data)
            is_own = found is not None and shard_file.shards_directory(found) == directory
            if is_own and _metadata.metadata_is_intact(data):
                return True
    return False


def find_temporaries(store: Store, directory: str | None) -> list[str]:
    """The temporary files of interrupted repairs in a shards directory."""
    if directory is None or directory == UNKNOWN:
        return []
    return [file.name for file in store.files(f"{directory}/") if _REPAIRED.fullmatch(file.name)]


def collect_garbage(store: Store, *, remove: bool = True) -> tuple[list[str], bool]:
    """Remove the files of interrupted saves from a place, and the place itself if it is then empty.

    A committed checkpoint stays. Returns the names, and True if there is such a checkpoint. Without
    `remove` this only lists the names. Raises Busy while a save may be under way there,
    PathInTheWay if another program wrote the `_METADATA`.
    """
    names = store.list()
    if not remove:
        refuse_claimed(store)
        seen = take_over(store, names)
        temporaries = find_temporaries(store, seen.kept)
        return [*seen.leftovers, *temporaries], seen.kept is not None
    with claimed(store) as claim:
        seen = take_over(store, claim.names)
        leftovers = [name for name in seen.leftovers if _is_gone(store, claim, name)]
        leftovers += find_temporaries(store, seen.kept)
        if leftovers:
            _delete_all(store, claim, leftovers)
            store.sync("")
        if claim.found_dead:
            # Not all credentials may do it; then a rule of the bucket must.
            with suppress(StoreError):
                claim.check()
                store.discard_uploads()
    if seen.kept is None:
        store.remove_if_empty()  # other people's files stay
    return [*filter(is_claim, names), *leftovers], seen.kept is not None


def _is_gone(store: Store, claim: Claim, name: str) -> bool:
    """True if the writer of a leftover can't resume and commit it."""
    if store.traits.deletes_fence:
        return True
    now_s = claim.now_s()
    return all(now_s - file.changed_s > GONE_AFTER_S for file in store.files(name))


def remove_leftovers(store: Store, claim: Claim, seen: PlaceListing) -> None:
    """Delete the files of interrupted saves. Raises PathInTheWay for files of other programs."""
    foreign = [name for name in seen.names if not is_of_a_save(name)]
    if seen.version is None and foreign:
        shown = [name if name.isprintable() else ascii(name) for name in foreign[:3]]
        few = ", ".join(shown) + (", …" if len(foreign) > 3 else "")
        raise PathInTheWay(
            f"{store.location} is a directory with other things in it ({few}); save to a path of "
            "its own"
        )
    if store.traits.deletes_fence and seen.leftovers:
        _delete_all(store, claim, seen.leftovers)


def _delete_all(store: Store, claim: Claim, leftovers: Sequence[str]) -> None:
    # A `_METADATA` that replaced another may not be durable yet: its save was killed, or could not
    # sync. A power failure must not bring the other one back once its shards are gone.
    store.sync("")
    for name in leftovers:
        claim.delete(name)


def delete_metadata(store: Store, claim: Claim, version: Any) -> None:
    """Delete the `_METADATA` of this version from a place. Raises Busy if it has another version.

    In a bucket a process may be suspended between the last look and the request, while another
    takes the lock and commits. If its claim is gone afterwards, this commits the newest complete
    checkpoint again.
    """
    try:
        claim.delete(shard_file.METADATA_NAME, version=version)
    finally:
        if not store.traits.deletes_fence and not claim.is_held():
            put_back(store)
    if not store.traits.deletes_fence:
        claim.check()


def put_back(store: Store) -> None:
    """Commit the newest complete checkpoint again, in a place without `_METADATA`.

    The shards have a copy of `_METADATA`. A save writes it last, and a deletion removes it first.
    This replaces no file.
    """
    if store.look(shard_file.METADATA_NAME) is not None:
        return
    directories = list(filter(shard_file.is_shards_directory, store.list()))
    copies = filter(None, (store.look(f"{d}/{shard_file.METADATA_COPY}") for d in directories))
    for copy in sorted(copies, key=lambda file: file.changed_s, reverse=True):
        with suppress(FileNotFoundError, ValueError):
            data = store.get(copy.name)
            if _is_complete(store, copy.name.partition("/")[0], data):
                with suppress(Busy):  # Then there is one.
                    store.put(shard_file.METADATA_NAME, data, replaces=None)
                log.warning(
                    "this process stood still while it deleted a checkpoint in %s, and another "
                    "saved a newer one there, whose %s was put back",
                    store.location,
                    shard_file.METADATA_NAME,
                )
                return


def _is_complete(store: Store, directory: str, data: bytes) -> bool:
    """True if a copy of `_METADATA` is intact and all files that it names exist."""
    if not _metadata.metadata_is_intact(data):
        return False
    metadata = _metadata.decode_metadata(data)
    is_own = shard_file.shards_directory(metadata.id) == directory
    return is_own and not any(find_misfits(store, metadata.file_sizes()))


def committed_directory(store: Store, names: Sequence[str] | None = None) -> str | None:
    """The shards directory of the committed checkpoint, or None without one.

    UNKNOWN if there may be one that needs any of the shards: its `_METADATA` is damaged or of a
    newer version, or names missing shards. Raises StoreError if reading `_METADATA` fails, or if it
    is no file.
    """
    names = store.list() if names is None else names
    try:
        data = store.get(shard_file.METADATA_NAME)
    except FileNotFoundError:
        # It may have come, or gone, since they were listed.
        return UNKNOWN if shard_file.METADATA_NAME in names else None
    except Unreadable as error:
        # No save wrote it: somebody has to see to it first.
        remedy = f"{error.found}; nothing is saved or deleted here before it is removed"
        raise Unreadable(f"{store.location}/{shard_file.METADATA_NAME}", remedy) from error
    except StoreError as error:
        if error.loss is None:
            raise
        return UNKNOWN
    try:
        if not _metadata.metadata_is_intact(data):
            if looks_like_ours(store, data):
                return UNKNOWN
            raise NotACheckpoint(f"its {shard_file.METADATA_NAME} was not written by Ostraka")
        save_id = id_in(data)
        if save_id is not None and shard_file.shards_directory(save_id) in names:
            return shard_file.shards_directory(save_id)
        metadata = _metadata.decode_metadata(data)
    except NotACheckpoint as error:
        raise PathInTheWay(
            f"{store.location} holds something that Ostraka did not write ({error}); save to a "
            "path of its own"
        ) from error
    except ValueError:
        return UNKNOWN
    directory = shard_file.shards_directory(metadata.id)
    return directory if not metadata.files or directory in names else UNKNOWN


def id_in(data: bytes) -> str | None:
    """The id at the beginning of an Ostraka `_METADATA`, even of a damaged one. Else None."""
    head = _HEAD.match(data)
    return None if head is None else head[1].decode()


def is_of_a_save(name: str) -> bool:
    """True for the names that a save puts into its directory, except `_METADATA`."""
    return is_fence(name) or shard_file.is_shards_directory(name) or is_claim(name)


class Place:
    """The location of one checkpoint while one writer has it: a save, a copy or a repair.

    All of them go through the same steps: `take` the place, `make_room`, write files, `commit`,
    `clear` the old shards away, `release` the place. One process of a run does this.

    Messages use `verb` for the work of the writer. With `dry_run` the place stays unchanged.
    """

    def __init__(self, store: Store, verb: str = "save", *, dry_run: bool = False):
        self.store = store
        self.found = PlaceListing((), None, None)
        """The files in the place as `take` found them."""
        self._verb = verb
        self._dry_run = dry_run
        self._claim = Claim(store)
        self._directory = ""
        """The directory of this writer's files, once it may write them."""
        self._is_new = False
        """True if nothing was at the path, not even an empty directory."""
        self._may_be_committed = False

    def take(self) -> None:
        """Make the place exist, lock it and list its files.

        Raises Busy while another writes there, PathInTheWay if another program wrote the
        `_METADATA`.
        """
        if self._dry_run:
            refuse_claimed(self.store)
            return
        self._is_new = self.store.prepare()
        self._claim.take(wait=True)
        if self._claim.names:
            self.found = take_over(self.store, self._claim.names)

    def make_room(self, directory: str) -> None:
        """Delete the files of interrupted saves, but for this writer's own `directory`.

        In a bucket `clear` does this. Raises PathInTheWay for files that Ostraka did not write.
        """
        if self.found.names:
            names = tuple(name for name in self.found.names if name != directory)
            self.found = replace(self.found, names=names)
            remove_leftovers(self.store, self._claim, self.found)
        self._directory = directory

    @property
    def is_ready(self) -> bool:
        """True once the writer may write its files."""
        return self._directory != ""

    def delete(self, name: str) -> None:
        """Delete a file or directory. Raises Busy if another has taken the place."""
        if not self._dry_run:
            self._claim.delete(name)

    def check(self) -> None:
        """Raise Busy if another has taken the place."""
        if not self._dry_run:
            self._claim.check()

    def commit(self, metadata: bytes, sizes: Mapping[str, int], copy: str = "") -> None:
        """Write `_METADATA`: from now on the checkpoint is committed.

        `sizes` has all files that must exist by then. `copy` names a copy of `_METADATA` to write
        first. Raises Busy if another has taken the place, changed any of these files, or replaced
        the `_METADATA` that `take` found.
        """
        if len(metadata) > MOST_BYTES:
            raise InvalidTree(
                f"the description of the tree has {len(metadata):,} bytes, and no more than "
                f"{MOST_BYTES:,} are read again; save parts of it to paths of their own"
            )
        if copy:
            # Not synced: no promise depends on it, and small saves would wait for it.
            self.store.put(copy, metadata, durable=False)
        # The shards must not be lost to a crash that keeps the commit.
        self.store.sync("")

        def check_files() -> None:
            for name, size, found in find_misfits(self.store, sizes):
                what = "is gone" if found is None else f"has {found:,} of its {size:,} bytes"
                raise Busy(
                    f"{self.store.location}/{name}, which this {self._verb} has written, {what}: "
                    f"another save or program has changed it; {self._verb} again"
                )

        def check() -> None:
            self._claim.check()
            check_files()

        began_s = time.monotonic(), time.time()
        try:
            self.store.put(METADATA_NAME, metadata, replaces=self.found.version, check=check)
        except OutcomeUnknown as error:
            self._may_be_committed = True
            what = (
                "the new checkpoint is in place, but may not survive a power failure"
                if isinstance(error, NotDurable)
                else "whether the new checkpoint or what was there before is in place can't be told"
            )
            text = f"{what}: {error}; {self._verb} again"
            raise type(error)(text, errno=error.errno) from error
        self._may_be_committed = True
        # A bucket accepts the request of a process that stood still after its check, although
        # others may have deleted its files meanwhile. A sleeping machine stops one of the clocks.
        took_s = max(time.monotonic() - began_s[0], time.time() - began_s[1])
        if took_s > STOOD_STILL_S and not self.store.traits.deletes_fence:
            check_files()

    def clear(self) -> None:
        """After the commit, delete the shards of the checkpoint before, and of interrupted saves.

        The new checkpoint is committed all the same if this fails. The next save tries again.
        """
        # Only what was found at first: what has come since then belongs to an active save.
        with suppress(OSError):
            for name in filter(shard_file.is_shards_directory, self.found.names):
                self._claim.delete(name)
            if self._claim.found_dead:
                self._claim.check()
                self.store.discard_uploads()

    def discard(self) -> None:
        """Delete the files of a writer that failed, unless `_METADATA` may name them.

        If a deletion fails, the next save tries again. Another writer that has taken the place may
        need any of the files by now, so then they stay as well.
        """
        if self.is_ready and not self._may_be_committed:
            with suppress(OSError):
                if committed_directory(self.store) not in (self._directory, UNKNOWN):
                    self._claim.delete(self._directory)

    def release(self) -> None:
        """Let others have the place. Removes it if it is new and empty."""
        # The claim's own file would keep the place from being empty.
        self._claim.release()
        if self._is_new and not self._may_be_committed:
            with suppress(OSError):
                self.store.remove_if_empty()


def find_misfits(store: Store, sizes: Mapping[str, int]) -> Iterator[tuple[str, int, int | None]]:
    """The files of a directory that are missing or have another size: name, expected, found."""
    directory = next(iter(sizes), "").rpartition("/")[0]
    there = {file.name: file.size for file in store.files(f"{directory}/")} if sizes else {}
    for name, size in sizes.items():
        if (found := there.get(name)) == size:
            continue
        # A list may be that of a moment ago, on network file systems: ask the file itself.
        try:
            with suppress(Unreadable), closing(store.open(name)) as reader:
                found = reader.size
        except FileNotFoundError:
            found = None
        if found != size:
            yield name, size, found
