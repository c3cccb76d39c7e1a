"""What is at a path before and after a save: leftovers of dead saves, and what is not ours."""

from __future__ import annotations

from contextlib import suppress

from ostraka import _format
from ostraka.errors import NotACheckpoint, PathInTheWay
from ostraka.storage import Store

UNKNOWN = "unknown"


def remove_leftovers(store: Store) -> None:
    """Clear what dead saves left behind; raise PathInTheWay for what is not ours."""
    names = store.list() or []
    ours = [name for name in names if is_of_a_save(name)]
    if _format.METADATA_NAME not in names:
        foreign = [name for name in names if name not in ours]
        if foreign:
            raise PathInTheWay(
                f"{store.location} is a directory with other things in it "
                f"({', '.join(foreign[:3])}{', …' if len(foreign) > 3 else ''}); save to a path of "
                "its own"
            )
    kept = committed_directory(store)
    for name in ours:
        if not (_format.is_shards_directory(name) and kept in (UNKNOWN, name)):
            store.delete(name)


def committed_directory(store: Store) -> str | None:
    """The shards directory of the checkpoint that is there now, or None."""
    try:
        data = store.get(_format.METADATA_NAME)
    except FileNotFoundError:
        return None
    try:
        return _format.shards_directory(_format.decode_metadata(data).id)
    except NotACheckpoint as error:
        if any(_format.is_shards_directory(name) for name in store.list() or []):
            return UNKNOWN  # damaged; what its shards hold stays until there is a better one
        raise PathInTheWay(
            f"{store.location} holds something that Ostraka did not write ({error}); save to a "
            "path of its own"
        ) from error
    except ValueError:
        return UNKNOWN


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
