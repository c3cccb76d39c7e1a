"""The small files of an Orbax checkpoint, as checked values. No JAX, no TensorStore.

An Orbax checkpoint is a directory of items, each in a folder of its own, or a single item. An item
with arrays has `_METADATA` with the keys and the type of every leaf. Shapes and dtypes are in the
arrays' own files (`_zarr`). Every value is checked before use: the files may be untrusted.
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

from ostraka.common.threads import with_full_stack
from ostraka.errors import OstrakaError
from ostraka.formats.orbax.names import ARRAY_METADATAS, MANIFEST, METADATA, SHARDING, STRINGS
from ostraka.formats.ostraka.damage import damage_on_loss, damaged
from ostraka.storage import Store

_ARRAY_METADATA = re.compile(r"process_[0-9]{1,9}")
_SEQUENCE = 1
"""Orbax's number for the keys of lists and tuples. 2 stands for all others."""


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
    """Orbax's word for its type: "jax.Array", "np.ndarray", "scalar", "string", "None", …"""

    @property
    def name(self) -> str:
        """Orbax's name of its array. If two leaves have the same name, one of them is lost."""
        return ".".join(key.text for key in self.keys)


@dataclass(frozen=True, slots=True)
class TreeMetadata:
    """The `_METADATA` of an item."""

    entries: tuple[Entry, ...]
    use_ocdbt: bool
    use_zarr3: bool
    has_all_chunks: bool
    """True if Orbax also wrote chunks that hold only the fill value."""
    user: Any
    """The caller's `custom_metadata`."""


def read_json(store: Store, name: str) -> Any:
    """A file as JSON. Raises Damaged if it is missing or malformed."""
    with damage_on_loss(partial(damaged, store, name)):
        return decode_json(store, name, store.get(name))


def read_json_if_there(store: Store, name: str) -> Any:
    """A file as JSON, or None if it is missing. Raises Damaged if it is malformed."""
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
    """Raise Damaged, with the file's name, for errors of its contents."""
    try:
        yield
    except OstrakaError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise damaged(store, name, f"it is not what Orbax writes ({why[:200]})") from error


# The tree


def read_tree(store: Store, names: Sequence[str]) -> TreeMetadata | None:
    """The `_METADATA` of a directory with these names, or None if Orbax did not write it."""
    data = read_if_there(store, METADATA) if METADATA in names else None
    if data is None or b'"tree_metadata"' not in data:
        return None
    document = decode_json(store, METADATA, data)
    with malformed(store, METADATA):
        return TreeMetadata(
            entries=tuple(map(_entry, as_object(as_object(document)["tree_metadata"]).values())),
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
    """The string leaves of an item, by name."""
    found = read_json(store, STRINGS)
    with malformed(store, STRINGS):
        return dict(as_object(found))


def read_shardings(store: Store) -> dict[str, Any]:
    """The shardings of arrays, by name, as JSON. Empty if Orbax wrote none."""
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
    """The implementation of each array that holds PRNG keys, by name.

    Every process writes the implementations of its own arrays. Reading stops once all `wanted` are
    known.
    """
    names = store.at(ARRAY_METADATAS).list() if wanted else []
    found: dict[str, str] = {}
    for process in filter(_ARRAY_METADATA.fullmatch, names):
        name = f"{ARRAY_METADATAS}/{process}"
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
    """The number of processes that wrote arrays of an item."""
    there = store.at(ARRAY_METADATAS).list()
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
