"""What files cost in requests, where a place is in a bucket. Arithmetic, for the planner too."""

from __future__ import annotations

PART_BYTES = 8 << 20
"""Of a multipart upload. A file up to this size is one request."""
AHEAD_BYTES = 256 << 10
"""What comes at least with the request that opens a file: its header, mostly."""
_MAX_PARTS = 9_000
"""Of a multipart upload; stores allow 10,000."""

COMMIT_REQUESTS = 9
"""Of process 0, for a save to a new place: claim it, look at it, check, commit, give it back."""
JOIN_REQUESTS = 1
"""Of each other process of a save: whether it sees the same place."""
OPEN_REQUESTS = 2
"""Of each process that opens a checkpoint: what is there, and its `_METADATA`."""


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
    """How many requests it takes to write a file: begin, each part, complete; or all at once."""
    return 1 if size <= PART_BYTES else 2 + -(-size // part_bytes_of(size))
