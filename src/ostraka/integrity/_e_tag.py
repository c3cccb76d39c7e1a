"""The ETag that most object stores give to what was written there: Amazon's, and its like. Pure.

An index may name the ETags of its files. Of a file that is lost only a guess can be made; whether
it was right, the digest of the index says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from ostraka._format import regroup
from ostraka.storage._requests import PART_BYTES, part_bytes_of


def usual_e_tag(views: Iterator[Any], size: int) -> str:
    """Of a file of `size` bytes that is written as `ObjectStore` does it: at once or by parts."""
    part = size if size <= PART_BYTES else part_bytes_of(size)
    lengths = [min(part, size - start) for start in range(0, size, part)]
    digests: list[bytes] = []
    for pieces in regroup(views, lengths):
        state = hashlib.md5(usedforsecurity=False)
        for piece in pieces:
            state.update(piece)
        digests.append(state.digest())
    if size <= PART_BYTES:
        return digests[0].hex()
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False)
    return f"{whole.hexdigest()}-{len(digests)}"
