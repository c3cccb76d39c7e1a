"""What is at a path before and after a save: leftovers of dead saves, and what is not ours.

Shards are deleted as leftovers only where `_METADATA` is known to name others, or is not there.
What can't be told stays: a `_METADATA` that rotted, or that a newer version wrote, may need any of
them.
"""

from __future__ import annotations

from contextlib import suppress

from ostraka import _format, _metadata
from ostraka._foreign import looks_like_ours
from ostraka.errors import NotACheckpoint, PathInTheWay, StoreError
from ostraka.storage import Store

UNKNOWN = "unknown"


def find_leftovers(store: Store) -> list[str]:
    """What dead saves left in this place; nothing if it can't be told what belongs to what.

    Raises PathInTheWay if another program wrote the `_METADATA` that is there.
    """
    ours = [name for name in store.list() or [] if is_of_a_save(name)]
    kept = committed_directory(store) if ours else None
    return [] if kept == UNKNOWN else [name for name in ours if name != kept]


def remove_leftovers(store: Store) -> None:
    """Clear what dead saves left behind; raise PathInTheWay for what is not ours."""
    names = store.list() or []
    if _format.METADATA_NAME in names:
        committed_directory(store)  # raises if another program wrote it
    elif foreign := [name for name in names if not is_of_a_save(name)]:
        raise PathInTheWay(
            f"{store.location} is a directory with other things in it "
            f"({', '.join(foreign[:3])}{', …' if len(foreign) > 3 else ''}); save to a path of "
            "its own"
        )
    for name in find_leftovers(store):
        store.delete(name)


def committed_directory(store: Store) -> str | None:
    """The shards directory of the checkpoint that is there now; None if there is no checkpoint.

    UNKNOWN if there may be one, and which shards it needs can't be told: its `_METADATA` is damaged
    or of a newer version, a link that leads nowhere, or names shards that are not there.
    """
    try:
        data = store.get(_format.METADATA_NAME)
    except FileNotFoundError:
        # A link that leads nowhere, perhaps to a disk that is not mounted now, has that name, too.
        return UNKNOWN if _format.METADATA_NAME in (store.list() or []) else None
    except StoreError as error:
        if error.loss is None:
            raise
        return UNKNOWN
    if not _metadata.metadata_is_intact(data):
        if looks_like_ours(store, data):
            return UNKNOWN
        raise _not_ours(store, f"its {_format.METADATA_NAME} was not written by Ostraka")
    try:
        metadata = _metadata.decode_metadata(data)
    except NotACheckpoint as error:
        raise _not_ours(store, str(error)) from error
    except ValueError:
        return UNKNOWN
    directory = _format.shards_directory(metadata.id)
    is_there = not metadata.files or directory in (store.list() or [])
    return directory if is_there else UNKNOWN


def _not_ours(store: Store, why: str) -> PathInTheWay:
    return PathInTheWay(
        f"{store.location} holds something that Ostraka did not write ({why}); save to a path of "
        "its own"
    )


def is_of_a_save(name: str) -> bool:
    """What a save puts into its directory, but for `_METADATA` itself."""
    is_temporary = name.startswith(f"{_format.METADATA_NAME}.") and name.endswith(".tmp")
    return is_temporary or _format.is_shards_directory(name)


def remove_other_shards(store: Store, save_id: str) -> None:
    """After the commit: what was there before is no longer needed.

    The new checkpoint is good: what can't be deleted now, the next save tries again.
    """
    with suppress(OSError):
        for name in store.list() or []:
            if _format.is_shards_directory(name) and name != _format.shards_directory(save_id):
                store.delete(name)
