"""The small files and the items of an Orbax checkpoint, as checked values. No JAX or TensorStore.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from ostraka.common.threads import with_full_stack
from ostraka.errors import CheckpointNotFound, OstrakaError
from ostraka.formats.orbax.names import (
    ARRAY_METADATAS,
    COMMITTED,
    DEFAULT_ITEM,
    MANIFEST,
    METADATA,
    SHARDING,
    STEP_METADATA,
    STRINGS,
    TEMPORARY,
    is_orbax,
    is_step,
)
from ostraka.formats.ostraka.damage import damage_on_loss, damaged
from ostraka.formats.source import names_in
from ostraka.formats.source_files import settled, states_of
from ostraka.storage import A_LINK, Store
from ostraka.tree.json_values import encode_scalar

_ARRAY_METADATA = re.compile(r"process_[0-9]{1,9}")
_SEQUENCE = 1
"""Orbax's number for the keys of lists and tuples. 2 stands for all others."""
_ONLY_ITEM = (DEFAULT_ITEM, "state", "pytree")
"""Orbax's names for the only item of a checkpoint."""
_JSON_FILES = ("metadata", "data.json")
_METRICS = "metrics"
_ARRAY = "checkpoint"
"""The name of the array that `ArraySave` writes."""
_GRAIN_STATE = re.compile(r"process_([0-9]{1,9})-of-([0-9]{1,9})\.json")


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


@dataclass(frozen=True, slots=True)
class OrbaxItem:
    """An item: a tree with arrays, or a JSON value."""

    name: str
    """Its name in a step. Empty for a single item."""
    store: Store
    tree: TreeMetadata | None = None
    encoded: Any = None
    """An item without arrays, encoded for the tree."""
    lost: str | None = None
    """Why it can't be read."""
    is_leaf: bool = False
    """True if the value of the item is the only entry of its tree."""
    is_key: bool = False
    """True for the data of typed PRNG keys. Orbax does not save their implementation."""


@dataclass(frozen=True, slots=True)
class OrbaxListing:
    """All of a checkpoint but its arrays."""

    parts: tuple[OrbaxItem, ...]
    is_single: bool
    """True if the checkpoint is its only part, not a dict of parts."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The document in `_CHECKPOINT_METADATA`."""
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    states: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The state of every file before anything was read, by name."""


# Values


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


def read_json(store: Store, name: str) -> Any:
    """A file as JSON. Raises Damaged if it is missing or malformed."""
    with damage_on_loss(partial(damaged, store, name)):
        return decode_json(store, name, store.get(name))


def read_object(store: Store, name: str) -> dict[str, Any]:
    """A file as a JSON object, empty if it is missing. Raises Damaged if it is malformed."""
    data = read_if_there(store, name)
    found = None if data is None else decode_json(store, name, data)
    with malformed(store, name):
        return as_object({} if found is None else found)


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
    found = read_object(store, SHARDING)
    with malformed(store, SHARDING):
        given = {name: text for name, text in found.items() if text is not None}
        return {_decode_name(name): json.loads(text) for name, text in given.items()}


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


# Items


def find_parts(store: Store) -> OrbaxListing | None:
    """The items that Orbax wrote to a directory, or None. Raises CheckpointNotFound, Damaged."""
    names = names_in(store)
    if METADATA not in names and not is_step(store, names) and not _zarr_of(store, names):
        return None
    states = states_of(settled(store, lambda: store.files("")))
    tree = read_tree(store, names) if METADATA in names else _array_alone(store, names)
    if tree is None and (METADATA in names or not is_step(store, names)):
        return None
    about = _read_about(store, names)
    why = _why_unfinished(store, names, about)
    if why is not None:
        raise CheckpointNotFound(
            f"there is no checkpoint at {store.location}: Orbax never finished it ({why}); give "
            "another step"
        )
    handlers: Any = about.get("item_handlers")
    if tree is not None:
        is_leaf = METADATA not in names or (len(tree.entries) == 1 and _is_of_array(handlers))
        part = OrbaxItem("", store, tree, is_leaf=is_leaf)
        return OrbaxListing((part,), True, about, states=states)
    handlers = cast("dict[str, Any]", handlers) if isinstance(handlers, dict) else {}
    parts: list[OrbaxItem] = []
    metrics: Mapping[str, Any] = {}
    for name in names:
        place = store.at(name)
        below = names_in(place)
        if not below or TEMPORARY in name:
            continue
        if store.is_link(name):
            raise damaged(store, name, f"it is {A_LINK}")
        if name == _METRICS and _METRICS in below:
            metrics = read_object(place, _METRICS)
        else:
            parts.append(_part(name, place, below, str(handlers.get(name, ""))))
    if not parts:
        return None
    # Orbax restores the only item itself. A v0 step may have a user's item `state`.
    name = parts[0].name
    is_v1 = ".v1." in str(handlers.get(name, ""))
    is_single = len(parts) == 1 and (name == DEFAULT_ITEM or (name in _ONLY_ITEM and is_v1))
    return OrbaxListing(tuple(parts), is_single, about, metrics, states)


def is_finished(store: Store, names: Sequence[str]) -> bool:
    """True if an Orbax checkpoint with these names is finished."""
    with suppress(OSError, ValueError):
        return is_step(store, names) and _why_unfinished(store, names, None) is None
    return False


def version_of_orbax(store: Store, *, is_named: bool) -> Any:
    """A version that changes if a finished checkpoint is replaced, or None without one.

    `is_named` is True if the directory has the name of a step. Then a `_METADATA` alone is enough,
    as older versions wrote it.
    """
    names = store.list()
    if is_orbax(names):
        if not is_finished(store, names):
            return None
    elif not is_named or METADATA not in names:
        return None
    files = [file for file in (STEP_METADATA, COMMITTED, METADATA) if file in names]
    looks = map(store.look, files or [f"{DEFAULT_ITEM}/{METADATA}"])
    return tuple(file.version for file in looks if file is not None) or None


def _read_about(store: Store, names: Sequence[str]) -> dict[str, Any]:
    return read_object(store, STEP_METADATA) if STEP_METADATA in names else {}


def _why_unfinished(
    store: Store, names: Sequence[str], about: Mapping[str, Any] | None
) -> str | None:
    """The reason that an Orbax save counts as unfinished, or None."""
    if TEMPORARY in store.location:  # also an item of a step
        return "its name is that of an unfinished save"
    # Before 0.12.3 only buckets had the file; in directories an unfinished save had another name.
    # An item in a step has none, either.
    may_lack = STEP_METADATA not in names and (METADATA in names or not store.traits.is_remote)
    if COMMITTED in names or may_lack:
        return None
    if store.traits.is_remote:
        return f"it has no {COMMITTED}"
    about = _read_about(store, names) if about is None else about
    if about.get("commit_timestamp_nsecs") is None:
        return f"it has no {COMMITTED}, and its {STEP_METADATA} no time of its end"
    return None


def _part(name: str, store: Store, names: Sequence[str], handler: str) -> OrbaxItem:
    tree = read_tree(store, names)
    if tree is not None:
        is_leaf = _is_of_array(handler) and len(tree.entries) == 1
        return OrbaxItem(name, store, tree, is_leaf=is_leaf)
    tree = _array_alone(store, names)
    if tree is not None:
        return OrbaxItem(name, store, tree, is_leaf=True)
    for key in ("jax_random_key", "np_random_key"):
        below = store.at(key)
        tree = read_tree(below, names_in(below)) if key in names else None
        if tree is not None:
            is_leaf = key == "jax_random_key" and len(tree.entries) == 1
            about = read_object(store.at(f"{key}_metadata"), "metadata")
            return OrbaxItem(name, below, tree, is_leaf=is_leaf, is_key=about.get("typed") is True)
    for file in _JSON_FILES:
        if file in names:
            document = read_json(store, file)
            with malformed(store, file):
                return OrbaxItem(name, store, encoded=_encode_json(document))
    states = [match for match in map(_GRAIN_STATE.fullmatch, names) if match]
    if states and len(states) == int(states[0][2]):
        # The states of a data iterator, one per process.
        files = [f"process_{process}-of-{len(states)}.json" for process in range(len(states))]
        encoded = {"states": [{"json": read_json(store, file)} for file in files], "items": []}
        return OrbaxItem(name, store, encoded=encoded)
    by = handler.rpartition(".")[2] or "a handler that is not known"
    return OrbaxItem(name, store, lost=f"it is an item of {by:.80}, which only that can read")


def _is_of_array(handler: object) -> bool:
    """True if `ArraySave` saved an item, as a single array."""
    return isinstance(handler, str) and handler.endswith(".ArrayCheckpointHandler")


def _array_alone(store: Store, names: Sequence[str]) -> TreeMetadata | None:
    """The item of an older `ArraySave` (as in 0.11.6): a zarr array without `_METADATA`."""
    zarr = _zarr_of(store, names)
    if zarr is None:
        return None
    is_jax = _ARRAY in read_shardings(store)
    entry = Entry((Key(_ARRAY, False),), "jax.Array" if is_jax else "scalar")
    return TreeMetadata((entry,), False, zarr == "zarr.json", False, None)


def _zarr_of(store: Store, names: Sequence[str]) -> str | None:
    """The file that describes the array of `ArraySave`, if there is one."""
    below = names_in(store.at(_ARRAY)) if _ARRAY in names else []
    return next((name for name in ("zarr.json", ".zarray") if name in below), None)


def _encode_json(value: Any) -> Any:
    """The value of a JSON item, in the form of Ostraka's `_METADATA`."""
    if isinstance(value, dict):
        entries: dict[str, Any] = value
        items = [_encode_json(item) for item in entries.values()]
        return {"dict": list(entries), "items": items}
    if isinstance(value, list):
        sequence: list[Any] = value
        return {"list": None, "items": [_encode_json(item) for item in sequence]}
    return encode_scalar(value)
