"""The place that a save writes to, as process 0 handles it: take it, commit to it, clean it up."""

from __future__ import annotations

from collections.abc import Mapping

from ostraka import _format
from ostraka._leftovers import UNKNOWN, Seen, committed_directory, look_at, remove_leftovers
from ostraka.errors import Busy
from ostraka.storage import Claim, Store


class SavePlace:
    """The place of one save. Only process 0 of a run has one."""

    def __init__(self, store: Store):
        self._store = store
        self._claim = Claim(store)
        self._seen: Seen | None = None
        self._is_new = False
        """Whether there was nothing at the path, not even an empty directory."""

    def take(self) -> None:
        """Make the place exist, claim it for this save, and clear what dead saves left in it.

        Raises Busy while another save writes there, PathInTheWay for what is not ours.
        """
        self._is_new = self._store.prepare()
        self._claim.take(wait=True)
        self._seen = look_at(self._store, self._claim.names)
        if self._seen.names:
            remove_leftovers(self._store, self._seen)

    def commit(self, metadata: bytes, save_id: str, sizes: Mapping[str, int]) -> None:
        """Write `_METADATA`: from now on the checkpoint is there.

        `sizes` are those of all files in the save's directory. Raises Busy if another save has
        taken this one for dead, removed any of them, or replaced the `_METADATA` that was there.
        """
        assert self._seen is not None
        directory = _format.shards_directory(save_id)

        def check() -> None:
            self._claim.check()
            self._check_files(directory, sizes)

        # The shards must not be lost to a crash that keeps the commit.
        self._store.sync("")
        self._store.put(_format.METADATA_NAME, metadata, replaces=self._seen.version, check=check)

    def _check_files(self, directory: str, sizes: Mapping[str, int]) -> None:
        if not sizes:
            return
        there = {file.name: file.size for file in self._store.files(f"{directory}/")}
        for name, size in sizes.items():
            path = f"{directory}/{name}"
            if there.get(path) == size:
                continue
            found = self._size_of(path)
            if found != size:
                what = "is gone" if found is None else f"has {found:,} of its {size:,} bytes"
                raise Busy(
                    f"{self._store.location}/{path}, which this save has written, {what}: another "
                    "save or program has changed it; save again"
                )

    def _size_of(self, path: str) -> int | None:
        """Asked of the file itself: a list may be that of a moment ago, on network file systems."""
        try:
            reader = self._store.open(path)
        except FileNotFoundError:
            return None
        reader.close()
        return reader.size

    def remove_replaced(self) -> None:
        """After the commit: delete the shards of what was there before.

        The new checkpoint is good: what can't be deleted now, the next save tries again.
        """
        assert self._seen is not None
        # Only what was seen before: what has come since then is another save's, and alive.
        try:
            for name in self._seen.names:
                if _format.is_shards_directory(name):
                    self._store.delete(name)
        except OSError:
            pass

    def clean_up(self, save_id: str) -> None:
        """Remove what a failed save wrote, unless it is what `_METADATA` names.

        Raises OSError for what can't be told or deleted now; the next save removes it.
        """
        if save_id:
            directory = _format.shards_directory(save_id)
            if committed_directory(self._store) not in (directory, UNKNOWN):
                self._store.delete(directory)
        # The claim's own file would keep the place from being empty.
        self._claim.release()
        if self._is_new:
            self._store.remove_if_empty()

    def release(self) -> None:
        """Let others have the place."""
        self._claim.release()
