"""The place of a repair, as process 0 handles it: taken, cleared, committed to. No JAX."""

from __future__ import annotations

from ostraka._format import METADATA_NAME
from ostraka._leftovers import Seen, find_temporaries, take_over
from ostraka.storage import Claim, Store, refuse_claimed


class RepairPlace:
    """The place of one repair. With `dry_run` nothing is written there."""

    def __init__(self, store: Store, *, dry_run: bool):
        self._store = store
        self._dry_run = dry_run
        self._claim = Claim(store)
        self._seen = Seen((), None, None)

    def take(self) -> None:
        """Claim it. Raises Busy while a save or another repair writes there."""
        if self._dry_run:
            refuse_claimed(self._store)
            return
        if self._store.exists():
            self._store.prepare()
            self._claim.take(wait=True)
            self._seen = take_over(self._store, self._claim.names)

    def clear(self, directory: str) -> None:
        """Remove what a repair before this one has left, which was killed."""
        if not self._dry_run:
            for name in find_temporaries(self._store, directory):
                self._store.delete(name)

    def check(self) -> None:
        """Raise Busy if another has taken it."""
        if not self._dry_run:
            self._claim.check()

    def put_metadata(self, data: bytes) -> None:
        """Replace what was there at the beginning. Raises Busy if that is something else now."""
        replaces = self._seen.version
        self._store.put(METADATA_NAME, data, replaces=replaces, check=self._claim.check)

    def release(self) -> None:
        self._claim.release()
