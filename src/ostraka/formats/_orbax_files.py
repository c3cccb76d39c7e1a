"""The small files of an Orbax checkpoint, as checked values. No JAX, no TensorStore.

An Orbax checkpoint is a directory of items, each in a folder of its own, or a single item. An item
with arrays has `_METADATA`: the keys of every leaf and what it is. Shapes and dtypes are not there:
they are in the arrays' own files (`_orbax_zarr`). Nothing that a file says is used before it has
been checked, since it may come from a stranger.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from ostraka._damage import damage_on_loss, damaged
from ostraka._parallel import with_full_stack
from ostraka.errors import OstrakaError
from ostraka.storage import Store

METADATA = "_METADATA"
STEP_METADATA = "_CHECKPOINT_METADATA"
COMMITTED = "commit_success.txt"
MANIFEST = "manifest.ocdbt"
TEMPORARY = ".orbax-checkpoint-tmp"
SHARDING = "_sharding"
_STRINGS = "_strings.json"
SMALL_FILES = frozenset(
    {METADATA, STEP_METADATA, COMMITTED, SHARDING, _STRINGS, ".zarray", "zarr.json"}
)
"""Files without bytes of arrays."""
_ARRAY_METADATA = re.compile(r"process_[0-9]{1,9}")
_SEQUENCE = 1
"""The number that Orbax gives to the keys of lists and tuples; 2 is for all others."""


@dataclass(frozen=True, slots=True)
class Key:
    """One level of a leaf's path."""

    text: str
    in_sequence: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf of an item, or an empty container."""

    keys: tuple[Key, ...]
    value_type: str
    """Orbax's word for what it is: "jax.Array", "np.ndarray", "scalar", "string", "None", …"""

    @property
    def name(self) -> str:
        """Where Orbax puts its array: two leaves may have the same, and one of them is lost."""
        return ".".join(key.text for key in self.keys)


@dataclass(frozen=True, slots=True)
class TreeMetadata:
    """What `_METADATA` of an item says."""

    entries: tuple[Entry, ...]
    use_ocdbt: bool
    use_zarr3: bool
    has_all_chunks: bool
    """Whether chunks that hold nothing but the fill value were written, too."""
    user: Any
    """What the caller gave as `custom_metadata`."""


def read_json(store: Store, name: str) -> Any:
    """A file as JSON. Raises Damaged if it is not there, or no JSON."""
    with damage_on_loss(partial(damaged, store, name)):
        data = store.get(name)
    return decode_json(store, name, data)


def read_json_if_there(store: Store, name: str) -> Any:
    """A file as JSON; None if it is not there. Raises Damaged if it is no JSON."""
    data = read_if_there(store, name)
    return None if data is None else decode_json(store, name, data)


def read_if_there(store: Store, name: str) -> bytes | None:
    with damage_on_loss(partial(damaged, store, name)):
        try:
            return store.get(name)
        except FileNotFoundError:
            return None


def decode_json(store: Store, name: str, data: bytes) -> Any:
    with malformed(store, name):
        return with_full_stack(lambda: json.loads(data))


@contextmanager
def malformed(store: Store, name: str) -> Generator[None]:
    """Raise Damaged, with the file's name, where what it says can't be."""
    try:
        yield
    except OstrakaError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise damaged(store, name, f"it is not what Orbax writes ({why[:200]})") from error


# The tree


def read_tree(store: Store, names: Sequence[str]) -> TreeMetadata | None:
    """What `_METADATA` says, in a place with these names; None if Orbax did not write it."""
    data = read_if_there(store, METADATA) if METADATA in names else None
    if data is None or b'"tree_metadata"' not in data:
        return None
    document = decode_json(store, METADATA, data)
    with malformed(store, METADATA):
        return _tree_metadata(document, names)


def _tree_metadata(document: Any, names: Sequence[str]) -> TreeMetadata:
    entries: Any = as_object(document)["tree_metadata"]
    return TreeMetadata(
        entries=tuple(_entry(entry) for entry in as_object(entries).values()),
        use_ocdbt=_flag(document, "use_ocdbt", MANIFEST in names),
        use_zarr3=_flag(document, "use_zarr3", False),
        has_all_chunks=_flag(document, "store_array_data_equal_to_fill_value", False),
        user=document.get("custom_metadata"),
    )


def _entry(entry: Any) -> Entry:
    keys: list[Key] = []
    for key in as_list(entry["key_metadata"]):
        text, kind = key["key"], key["key_type"]
        if not isinstance(kind, int):
            raise TypeError(f"the type of a key is {kind!r}")
        if not isinstance(text, str | int):
            raise TypeError(f"a key is {text!r}")
        str(text).encode()  # Raises for surrogates, which are no characters.
        keys.append(Key(str(text), kind == _SEQUENCE))
    value_type = entry["value_metadata"]["value_type"]
    if not isinstance(value_type, str):
        raise TypeError(f"the type of a value is {value_type!r}")
    return Entry(tuple(keys), value_type)


def _flag(document: Mapping[str, Any], name: str, default: bool) -> bool:
    found = document.get(name)
    if found is None:
        return default
    if not isinstance(found, bool):
        raise TypeError(f"{name} is {found!r}")
    return found


# What lies beside it


def read_strings(store: Store) -> dict[str, Any]:
    """The leaves of an item that are texts, by name."""
    found = read_json(store, _STRINGS)
    with malformed(store, _STRINGS):
        return dict(as_object(found))


def read_shardings(store: Store) -> dict[str, Any]:
    """How arrays were sharded, by name, as JSON; empty where nothing was written."""
    found = read_json_if_there(store, SHARDING)
    with malformed(store, SHARDING):
        return {
            _decode_name(name): json.loads(text)
            for name, text in as_object({} if found is None else found).items()
            if text is not None
        }


def _decode_name(name: str) -> str:
    try:
        return base64.b64decode(name, validate=True).decode()
    except binascii.Error as error:
        raise ValueError(f"{name!r} is no name") from error


def read_key_impls(store: Store, wanted: set[str]) -> dict[str, str]:
    """Of those arrays that are the data of PRNG keys: the implementation, by name.

    Every process writes what it knows; files are read until all that is wanted is known.
    """
    names = store.at("array_metadatas").list() if wanted else []
    found: dict[str, str] = {}
    for process in filter(_ARRAY_METADATA.fullmatch, names):
        name = f"array_metadatas/{process}"
        document = read_json(store, name)
        with malformed(store, name):
            for entry in as_list(as_object(document)["array_metadatas"]):
                about = entry["array_metadata"]
                wanted.discard(about["param_name"])
                impl = (about.get("ext_metadata") or {}).get("random_key_impl")
                if impl is not None:
                    found[about["param_name"]] = as_text(impl)
        if not wanted:
            break
    return found


def count_processes(store: Store) -> int:
    """How many processes have written arrays of an item."""
    there = store.at("array_metadatas").list()
    return max(1, sum(1 for name in there if _ARRAY_METADATA.fullmatch(name)))


def as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"a JSON object is expected, not {type(value).__name__}")
    return cast("dict[str, Any]", value)


def as_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a list is expected, not {type(value).__name__}")
    return cast("list[Any]", value)


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text is expected, not {value!r}")
    return value


def as_sizes(value: Any, *, least: int) -> tuple[int, ...]:
    """A list of integers, none less than `least`, such as a shape."""
    sizes = as_list(value)
    if not all(type(size) is int and least <= size < 1 << 62 for size in sizes):
        raise ValueError(f"{value!r:.80} is no list of sizes")
    return tuple(sizes)
