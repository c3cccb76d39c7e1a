"""Checkpoints that were changed, with right digests, as a writer with a fault would write them."""

import json
from collections.abc import Callable
from typing import Any

import xxhash

from places import Place


def sealed(document: dict[str, Any]) -> bytes:
    """`_METADATA` of these fields, with the digest that it then has."""
    fields = {name: value for name, value in document.items() if name != "digest"}
    text = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    return text + b',"digest":"%b"}\n' % xxhash.xxh3_128_hexdigest(text).encode()


def change_metadata(path: Place, **changes: Any) -> None:
    """Change fields of `_METADATA`, and of its copy."""
    whole = sealed({**json.loads((path / "_METADATA").read_bytes()), **changes})
    for file in (path / "_METADATA", *path.glob("shards-*/metadata.json")):
        file.write_bytes(whole)


def change_index(path: Place, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the only index of a checkpoint in place."""
    (index,) = path.glob("shards-*/process_00000.json")
    body = json.loads(index.read_bytes())
    change(body)
    data = json.dumps(body, separators=(",", ":")).encode()
    index.write_bytes(data)
    change_metadata(path, indexes=[[0, len(data), xxhash.xxh3_128_hexdigest(data)]])
