"""The requests that files in a bucket take, for the planner too."""

from __future__ import annotations

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
