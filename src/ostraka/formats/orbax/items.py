"""The items of an Orbax directory: a single one or those of a step, finished or not. No JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from ostraka.errors import CheckpointNotFound
from ostraka.formats.orbax.files import (
    Entry,
    Key,
    TreeMetadata,
    as_object,
    malformed,
    read_json,
    read_json_if_there,
    read_shardings,
    read_tree,
)
from ostraka.formats.orbax.names import (
    COMMITTED,
    DEFAULT_ITEM,
    METADATA,
    STEP_METADATA,
    TEMPORARY,
    is_orbax,
    is_step,
)
from ostraka.formats.orbax.tree import encode_json
from ostraka.formats.ostraka.damage import damaged
from ostraka.formats.source import names_in
from ostraka.formats.source_files import settled, states_of
from ostraka.storage import A_LINK, Store

_ONLY_ITEM = (DEFAULT_ITEM, "state", "pytree")
"""Orbax's names for the only item of a checkpoint."""
_JSON_FILES = ("metadata", "data.json")
_METRICS = "metrics"
_ARRAY = "checkpoint"
"""The name of the array that `ArraySave` writes."""
_GRAIN_STATE = re.compile(r"process_([0-9]{1,9})-of-([0-9]{1,9})\.json")


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
            metrics = _object(place, _METRICS)
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


# Finished or not


def _read_about(store: Store, names: Sequence[str]) -> dict[str, Any]:
    return _object(store, STEP_METADATA) if STEP_METADATA in names else {}


def _object(store: Store, name: str) -> dict[str, Any]:
    found = read_json_if_there(store, name)
    with malformed(store, name):
        return as_object({} if found is None else found)


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


# Items


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
            about = _object(store.at(f"{key}_metadata"), "metadata")
            return OrbaxItem(name, below, tree, is_leaf=is_leaf, is_key=about.get("typed") is True)
    for file in _JSON_FILES:
        if file in names:
            document = read_json(store, file)
            with malformed(store, file):
                return OrbaxItem(name, store, encoded=encode_json(document))
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
