"""The place that a save writes to, as process 0 handles it: take it, commit to it, clean it up."""

from __future__ import annotations

from contextlib import ExitStack

from ostraka import _format
from ostraka._leftovers import UNKNOWN, committed_directory, remove_leftovers, remove_other_shards
from ostraka.storage import Store


class SavePlace:
    """The place of one save. Only process 0 of a run has one."""

    def __init__(self, store: Store):
        self._store = store
        self._held = ExitStack()
        self._is_new = False
        """Whether there was nothing at the path, not even an empty directory."""

    def take(self) -> None:
        """Make the place exist, lock it for this save, and clear what dead saves left in it.

        Raises Busy while another save writes there, PathInTheWay for what is not ours.
        """
        self._is_new = self._store.prepare()
        self._held.enter_context(self._store.exclusive())
        remove_leftovers(self._store)

    def commit(self, metadata: bytes) -> None:
        """Write `_METADATA`: from now on the checkpoint is there."""
        # The shards must not be lost to a crash that keeps the commit.
        self._store.settle("")
        self._store.put(_format.METADATA_NAME, metadata)

    def remove_replaced(self, save_id: str) -> None:
        """After the commit of `save_id`: delete the shards of what was there before."""
        remove_other_shards(self._store, save_id)

    def clean_up(self, save_id: str) -> None:
        """Remove what a failed save wrote, unless it is what `_METADATA` names.

        Raises OSError for what can't be told or deleted now; the next save removes it.
        """
        if save_id:
            directory = _format.shards_directory(save_id)
            if committed_directory(self._store) not in (directory, UNKNOWN):
                self._store.delete(directory)
        if self._is_new:
            self._store.remove_if_empty()

    def release(self) -> None:
        """Unlock the place."""
        self._held.close()
