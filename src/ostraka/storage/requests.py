"""The requests that files in a bucket take, for the planner too, and a bucket's client."""

from __future__ import annotations

from typing import Any

from ostraka.storage._refusals import is_transient, never_connected

PART_BYTES = 8 << 20
"""The size of a part of a multipart upload. A file up to this size is one request."""
AHEAD_BYTES = 256 << 10
"""The least that the request to open a file brings: mostly its header."""
_MAX_PARTS = 9_000
"""The most parts of a multipart upload. Stores allow 10,000."""

COMMIT_REQUESTS = 9
"""Process 0 in a save to a new place: claim it, look at it, check, commit, give it back."""
JOIN_REQUESTS = 1
"""Each other process of a save: see that it is the same place."""
OPEN_REQUESTS = 2
"""Each process that opens a checkpoint: list the place, read `_METADATA`."""


def opening_bytes(header_bytes: int, first_start: int, first_stop: int) -> int:
    """How much of a file comes with the request that opens it.

    `first_start` and `first_stop` are the range that is read first beyond the header. It is read by
    the same request, unless it begins far behind: a request takes longer than some bytes.
    """
    reach = max(header_bytes, AHEAD_BYTES)
    return max(reach, first_stop) if first_start <= reach else reach


def part_bytes_of(size: int) -> int:
    """The size of the parts of an upload."""
    return max(PART_BYTES, -(-size // _MAX_PARTS))


def upload_requests(size: int) -> int:
    """Return the number of requests to write a file: begin, each part, complete, or just one."""
    return 1 if size <= PART_BYTES else 2 + -(-size // part_bytes_of(size))


# The client of a bucket, and a less patient one for the first contact.


class Contact:
    """Two clients: `lasting` retries for long, `first` gives up soon and may be None."""

    def __init__(self, lasting: Any, first: Any = None):
        self.lasting = lasting
        self._first = first
        self.can_sign = not dict(getattr(lasting, "config", None) or {}).get("skip_signature")
        """True if URLs can be signed, as far as is known."""

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
