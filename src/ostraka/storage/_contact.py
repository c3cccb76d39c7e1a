"""The client of a bucket, and a less patient one for the first contact.

A store that has answered before is asked for a minute, whatever breaks on the way. One that never
answered may not be there at all: a wrong endpoint, an unknown host, no network. That is told after
a few seconds.
"""

from __future__ import annotations

from typing import Any

from ostraka.storage._refusals import is_transient, never_connected


class Contact:
    """`lasting` asks for long, `first` gives up soon; without it all is asked of `lasting`."""

    def __init__(self, lasting: Any, first: Any = None):
        self.lasting = lasting
        self._first = first

    @property
    def client(self) -> Any:
        """For what may be asked twice."""
        return self.lasting if self._first is None else self._first

    def is_made(self) -> None:
        """The store has answered."""
        self._first = None

    def may_ask_longer(self, error: Exception) -> bool:
        """After an error: whether `client` is now one that asks for longer, and should be asked."""
        if self._first is None or never_connected(error):
            return False
        self._first = None
        return is_transient(error)
