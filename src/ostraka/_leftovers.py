"""What is at a path before and after a save: leftovers of dead saves, and what is not ours.

Shards are deleted as leftovers only where `_METADATA` is known to name others, or is not there.
What can't be told stays: a `_METADATA` that rotted, or that a newer version wrote, may need any of
them.

A save that was taken for dead may wake up just before its commit. In a directory it then fails,
because whoever took over has deleted its temporary file. A bucket has none: there, a save deletes
what others left only after its own commit, which makes any commit of theirs fail; and who commits
nothing (`collect_garbage`) leaves what is younger than `GONE_AFTER_S`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ostraka import _format, _metadata
from ostraka._foreign import looks_like_ours
from ostraka.errors import NotACheckpoint, PathInTheWay, StoreError, Unreadable
from ostraka.storage import Claim, Store, claimed, is_claim, is_temporary, refuse_claimed

UNKNOWN = "unknown"
GONE_AFTER_S = 300.0
"""Far longer than a request lasts, with all its retries."""

_HEAD = re.compile(
    rb'\{"format":"ostraka","version":[%d-%d],"id":"(%b)"[,}]'
    % (_format.VERSIONS[0], _format.VERSIONS[-1], _format.ID_PATTERN.pattern.encode())
)
"""How our `_METADATA` begins, with the id: the rest need not be decoded to know it."""


_REPAIRED = re.compile(r".*\.(safetensors|json)\.[0-9a-f]{8,32}\.tmp")
"""A file of a checkpoint that a repair was writing anew."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was in a place when its claim was taken."""

    names: tuple[str, ...]
    kept: str | None
    """The shards of the checkpoint that is there, as `committed_directory` says."""
    version: Any
    """The version of its `_METADATA`; None if there is none."""

    @property
    def leftovers(self) -> list[str]:
        """What dead saves left, if it can be told what belongs to what."""
        if self.kept == UNKNOWN:
            return []
        return [name for name in self.names if is_of_a_save(name) and name != self.kept]


def take_over(store: Store, names: Sequence[str]) -> Seen:
    """Look at a place that this process holds a claim on; `names` are those in it.

    Raises PathInTheWay if another program wrote the `_METADATA` that is there.
    """
    # Before looking at `_METADATA`: a save that was taken for dead, and is not, can't commit then.
    for name in names:
        if is_temporary(name, _format.METADATA_NAME):
            store.delete(name)
    return _look_at(store, names) if names else Seen((), None, None)


def _look_at(store: Store, names: Sequence[str]) -> Seen:
    there = store.look(_format.METADATA_NAME)
    kept = committed_directory(store, names)
    return Seen(tuple(names), kept, None if there is None else there.version)


def find_leftovers(store: Store) -> list[str]:
    """What dead saves left in this place; nothing if it can't be told what belongs to what.

    Raises PathInTheWay if another program wrote the `_METADATA` that is there.
    """
    names = store.list()
    if not any(map(is_of_a_save, names)):
        return []
    seen = _look_at(store, names)
    left = [*seen.leftovers, *find_temporaries(store, seen.kept)]
    if not left or not store.parts.is_remote:
        return left
    # Some stores list a directory for a while after its last object was deleted.
    files = [f"{file.name}/" for file in store.files("")]
    return [name for name in left if any(file.startswith(f"{name}/") for file in files)]


def may_have_lost_metadata(store: Store, leftovers: Sequence[str]) -> bool:
    """Whether leftovers where no `_METADATA` is may be a checkpoint that has lost it.

    Its copy among the shards is written when all else is there, just before the commit, and is the
    first to go when a checkpoint is deleted.
    """
    for directory in filter(_format.is_shards_directory, leftovers):
        with suppress(OSError):
            data = store.get(f"{directory}/{_format.METADATA_COPY}")
            found = id_in(data)
            is_own = found is not None and _format.shards_directory(found) == directory
            if is_own and _metadata.metadata_is_intact(data):
                return True
    return False


def find_temporaries(store: Store, directory: str | None) -> list[str]:
    """What repairs that died left in a shards directory, beside its files."""
    if directory is None or directory == UNKNOWN:
        return []
    return [file.name for file in store.files(f"{directory}/") if _REPAIRED.fullmatch(file.name)]


def collect_garbage(store: Store, *, remove: bool = True) -> tuple[list[str], bool]:
    """Remove what dead saves left in a place, and the place itself if nothing is left in it.

    Returns the names, and whether a checkpoint is there, which stays. Raises Busy while a save may
    be under way there, PathInTheWay if another program wrote the `_METADATA`. Without `remove`
    nothing is written or removed.
    """
    names = store.list()
    if not remove:
        refuse_claimed(store)
        seen = _look_at(store, names)
        temporaries = find_temporaries(store, seen.kept)
        return [*seen.leftovers, *temporaries], seen.kept is not None
    with claimed(store) as claim:
        seen = take_over(store, claim.names)
        leftovers = [name for name in seen.leftovers if _is_gone(store, claim, name)]
        leftovers += find_temporaries(store, seen.kept)
        if leftovers:
            _delete_all(store, leftovers)
            store.sync("")
        if claim.found_dead:
            # Not all credentials may do it; then a rule of the bucket must.
            with suppress(StoreError):
                store.discard_uploads()
    if seen.kept is None:
        store.remove_if_empty()  # other people's files stay
    return [*filter(is_claim, names), *leftovers], seen.kept is not None


def _is_gone(store: Store, claim: Claim, name: str) -> bool:
    """Whether the writer of a leftover can't come back and commit it."""
    if store.parts.deletes_fence:
        return True
    now_s = claim.now_s()
    return all(now_s - file.changed_s > GONE_AFTER_S for file in store.files(name))


def remove_leftovers(store: Store, seen: Seen) -> None:
    """Clear what dead saves left behind; raise PathInTheWay for what is not ours."""
    foreign = [name for name in seen.names if not is_of_a_save(name)]
    if seen.version is None and foreign:
        few = ", ".join(map(_readable, foreign[:3])) + (", …" if len(foreign) > 3 else "")
        raise PathInTheWay(
            f"{store.location} is a directory with other things in it ({few}); save to a path of "
            "its own"
        )
    if store.parts.deletes_fence and seen.leftovers:
        _delete_all(store, seen.leftovers)


def _readable(name: str) -> str:
    return name if name.isprintable() else ascii(name)


def _delete_all(store: Store, leftovers: Sequence[str]) -> None:
    # A `_METADATA` that replaced another may not be durable yet: its save was killed, or could not
    # sync. A power failure must not bring the other one back once its shards are gone.
    store.sync("")
    for name in leftovers:
        store.delete(name)


def committed_directory(store: Store, names: Sequence[str] | None = None) -> str | None:
    """The shards directory of the checkpoint that is there now; None if there is no checkpoint.

    UNKNOWN if there may be one, and which shards it needs can't be told: its `_METADATA` is damaged
    or of a newer version, or names shards that are not there. Raises StoreError if `_METADATA`
    can't be read, or is no file.
    """
    names = store.list() if names is None else names
    try:
        data = store.get(_format.METADATA_NAME)
    except FileNotFoundError:
        # It may have come, or gone, since they were listed.
        return UNKNOWN if _format.METADATA_NAME in names else None
    except Unreadable as error:
        # No save wrote it: somebody has to see to it first.
        remedy = f"{error.found}; nothing is saved or deleted here before it is removed"
        raise Unreadable(f"{store.location}/{_format.METADATA_NAME}", remedy) from error
    except StoreError as error:
        if error.loss is None:
            raise
        return UNKNOWN
    try:
        if not _metadata.metadata_is_intact(data):
            if looks_like_ours(store, data):
                return UNKNOWN
            raise NotACheckpoint(f"its {_format.METADATA_NAME} was not written by Ostraka")
        head = _HEAD.match(data)
        if head is not None and _format.shards_directory(head[1].decode()) in names:
            return _format.shards_directory(head[1].decode())
        metadata = _metadata.decode_metadata(data)
    except NotACheckpoint as error:
        raise PathInTheWay(
            f"{store.location} holds something that Ostraka did not write ({error}); save to a "
            "path of its own"
        ) from error
    except ValueError:
        return UNKNOWN
    directory = _format.shards_directory(metadata.id)
    return directory if not metadata.files or directory in names else UNKNOWN


def id_in(data: bytes) -> str | None:
    """The id with which a `_METADATA` of ours begins, however the rest of it is."""
    head = _HEAD.match(data)
    return None if head is None else head[1].decode()


def is_of_a_save(name: str) -> bool:
    """What a save puts into its directory, but for `_METADATA` itself."""
    return (
        is_temporary(name, _format.METADATA_NAME)
        or _format.is_shards_directory(name)
        or is_claim(name)
    )
