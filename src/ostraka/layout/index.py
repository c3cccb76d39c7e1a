"""Process indexes: the digests of each process's files, to bytes and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from ostraka.errors import printable
from ostraka.layout.runs import count_runs, decode_runs, encode_runs
from ostraka.layout.shard_file import (
    DIGEST_DIGITS,
    FORMAT,
    MOST_COMPRESSED_BYTES,
    VERSION,
    FileDigests,
    cut_digests,
    digest,
    dumps,
)


def encode_index(
    save_id: str,
    process: int,
    files: Mapping[str, FileDigests],
    *,
    version: int = VERSION,
    location: str = "",
) -> bytes:
    """The index of a process. The identities of its files hold for `location` alone.

    Without a location the index has no identities.
    """
    head: dict[str, Any] = {
        "format": f"{FORMAT}-index",
        "version": version,
        "id": save_id,
        "process": process,
    }
    has_identities = location and any(map(attrgetter("identity"), files.values()))
    if has_identities:
        head["place"] = digest(location.encode())
    described: dict[str, dict[str, Any]] = {}
    for name, file in files.items():
        about = described[name] = {
            "size": file.size,
            "blocks": encode_runs(file.lengths),
            "digests": "".join(file.digests),
        }
        if file.results:
            about |= {"data": encode_runs(file.data_lengths), "results": "".join(file.results)}
        if has_identities:
            about["e_tag"] = file.identity
    return dumps({**head, "files": described}).encode()


def decode_index(data: bytes) -> dict[str, FileDigests]:
    """The digests of each file by name. Raises ValueError if the index contradicts itself."""
    try:
        body: dict[str, Any] = json.loads(data)
        place = str(body.get("place", ""))
        described: dict[str, Any] = dict(body["files"])
        return {
            name: _decode_digests(name if name.isprintable() else printable(name), file, place)
            for name, file in described.items()
        }
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"a field is missing or malformed ({error})") from error


def _decode_digests(name: str, file: Mapping[str, Any], place: str) -> FileDigests:
    lengths, digests = _decode_blocks(name, file["blocks"], file["digests"])
    if sum(lengths) != file["size"] or min(lengths, default=1) <= 0:
        raise ValueError(f"the blocks of {name} do not add up to its size")
    about = FileDigests(
        sum(lengths), lengths, digests, identity=str(file.get("e_tag", "")), place=place
    )
    if "data" not in file:
        return about
    data_lengths, _ = _decode_blocks(name, file["data"], file["digests"])
    results = cut_digests(file["results"])
    pairs = list(zip(lengths, data_lengths, strict=True))
    compressed = [length for stored, length in pairs if stored != length]
    fit = all(stored <= length for stored, length in pairs) and data_lengths[:1] == lengths[:1]
    if not fit or len(results) != len(compressed):
        raise ValueError(f"the compressed blocks of {name} do not fit what is stored of them")
    if max(compressed, default=0) > MOST_COMPRESSED_BYTES:
        raise ValueError(f"{name} has a compressed block of {max(compressed):,} bytes")
    return replace(about, data_lengths=data_lengths, results=results)


def _decode_blocks(name: str, runs: Any, digests: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Lengths and digests of blocks. Compares their numbers first, so the memory has a bound."""
    if count_runs(runs) != len(digests) // DIGEST_DIGITS:
        raise ValueError(f"the blocks of {name} do not fit: they are not as many as their digests")
    return decode_runs(runs), cut_digests(digests)
