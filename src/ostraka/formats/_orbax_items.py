"""What an Orbax directory is: a single item, or a step with several; finished or not. No JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ostraka._damage import damaged
from ostraka._foreign import names_in
from ostraka.errors import CheckpointNotFound
from ostraka.formats._orbax_files import (
    COMMITTED,
    METADATA,
    STEP_METADATA,
    TEMPORARY,
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
from ostraka.formats._orbax_tree import encode_json
from ostraka.storage import A_LINK, Store

_ONLY_ITEM = ("default", "state", "pytree")
"""Names that Orbax itself gives to the item of a checkpoint that has one."""
_JSON_FILES = ("metadata", "data.json")
_METRICS = "metrics"
_ARRAY = "checkpoint"
"""What the handler of `ArraySave` calls its array."""
_GRAIN_STATE = re.compile(r"process_([0-9]{1,9})-of-([0-9]{1,9})\.json")


@dataclass(frozen=True, slots=True)
class Part:
    """An item: a tree with arrays, or something that is JSON as a whole."""

    name: str
    """In a step; empty where the item is all there is."""
    store: Store
    tree: TreeMetadata | None = None
    encoded: Any = None
    """What an item without arrays is in our tree."""
    lost: str | None = None
    """Why it can't be read."""
    is_leaf: bool = False
    """Whether its tree has one entry, and the item is that alone."""
    is_key: bool = False
    """Whether it is the data of typed PRNG keys; Orbax does not say of which implementation."""


@dataclass(frozen=True, slots=True)
class Found:
    """All of a checkpoint but its arrays."""

    parts: tuple[Part, ...]
    is_single: bool
    """Whether the checkpoint is its only part, not a dict of parts."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What `_CHECKPOINT_METADATA` says."""
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])


def find_parts(store: Store) -> Found | None:
    """What Orbax wrote in a place; None if it did not. Raises CheckpointNotFound, Damaged."""
    names = names_in(store)
    tree = read_tree(store, names)
    array = None if METADATA in names else _array_alone(store, names)
    if tree is None and array is None and (METADATA in names or not _is_step(store, names)):
        return None
    about = _read_about(store, names)
    _check_finished(store, names, about)
    handlers: Any = about.get("item_handlers")
    if tree is not None:
        is_leaf = len(tree.entries) == 1 and _is_of_array(handlers)
        return Found((Part("", store, tree, is_leaf=is_leaf),), True, about)
    if array is not None:
        return Found((Part("", store, array, is_leaf=True),), True, about)
    handlers = cast("dict[str, Any]", handlers) if isinstance(handlers, dict) else {}
    parts: list[Part] = []
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
    is_single = len(parts) == 1 and _is_only_item(parts[0].name, handlers)
    return Found(tuple(parts), is_single, about, metrics) if parts else None


def is_orbax(names: Sequence[str]) -> bool:
    """Whether names are those of a checkpoint of Orbax, finished or not; of a step before 0.6,
    which has nothing but the folders of its items, only if its item is the usual one."""
    return STEP_METADATA in names or COMMITTED in names or [*names] == ["default"]


def is_finished(store: Store, names: Sequence[str]) -> bool:
    """Whether a checkpoint of Orbax with these names is finished."""
    try:
        return _is_step(store, names) and _why_unfinished(store, names, None) is None
    except (OSError, ValueError):
        return False


def _is_step(store: Store, names: Sequence[str]) -> bool:
    if STEP_METADATA in names or COMMITTED in names:
        return True
    # Before 0.6 a step had nothing but the folders of its items.
    return "default" in names and METADATA in names_in(store.at("default"))


def _is_only_item(name: str, handlers: Mapping[str, Any]) -> bool:
    """Whether Orbax gives back this item itself; a v0 step may have one of the user's, `state`."""
    is_v1 = ".v1." in str(handlers.get(name, ""))
    return name == "default" or (name in _ONLY_ITEM and is_v1)


# Finished or not


def _read_about(store: Store, names: Sequence[str]) -> dict[str, Any]:
    if STEP_METADATA not in names:
        return {}
    return _object(store, STEP_METADATA)


def _object(store: Store, name: str) -> dict[str, Any]:
    found = read_json_if_there(store, name)
    with malformed(store, name):
        return as_object({} if found is None else found)


def _check_finished(store: Store, names: Sequence[str], about: Mapping[str, Any]) -> None:
    why = _why_unfinished(store, names, about)
    if why is not None:
        raise CheckpointNotFound(
            f"there is no checkpoint at {store.location}: Orbax never finished it ({why}); give "
            "another step"
        )


def _why_unfinished(
    store: Store, names: Sequence[str], about: Mapping[str, Any] | None
) -> str | None:
    """Why a save of Orbax is not finished; None if it is."""
    if TEMPORARY in store.location:  # also an item of a step
        return "its name is that of an unfinished save"
    if COMMITTED in names or STEP_METADATA not in names:
        # Before 0.12.3 only buckets had the file; in directories an unfinished save had another
        # name. An item in a step has none, either.
        is_item = METADATA in names and STEP_METADATA not in names
        if COMMITTED in names or is_item or not store.parts.is_remote:
            return None
        return f"it has no {COMMITTED}"
    if store.parts.is_remote:
        return f"it has no {COMMITTED}"
    about = _read_about(store, names) if about is None else about
    if about.get("commit_timestamp_nsecs") is None:
        return f"it has no {COMMITTED}, and its {STEP_METADATA} no time of its end"
    return None


# Items


def _part(name: str, store: Store, names: Sequence[str], handler: str) -> Part:
    tree = read_tree(store, names)
    if tree is not None:
        is_leaf = _is_of_array(handler) and len(tree.entries) == 1
        return Part(name, store, tree, is_leaf=is_leaf)
    tree = _array_alone(store, names)
    if tree is not None:
        return Part(name, store, tree, is_leaf=True)
    for key in ("jax_random_key", "np_random_key"):
        below = store.at(key)
        tree = read_tree(below, names_in(below)) if key in names else None
        if tree is not None:
            is_leaf = key == "jax_random_key" and len(tree.entries) == 1
            about = _object(store.at(f"{key}_metadata"), "metadata")
            return Part(name, below, tree, is_leaf=is_leaf, is_key=about.get("typed") is True)
    for file in _JSON_FILES:
        if file in names:
            document = read_json(store, file)
            with malformed(store, file):
                return Part(name, store, encoded=encode_json(document))
    states = [match for match in map(_GRAIN_STATE.fullmatch, names) if match]
    if states and len(states) == int(states[0][2]):
        return Part(name, store, encoded=_grain_states(store, len(states)))
    by = handler.rpartition(".")[2] or "a handler that is not known"
    return Part(name, store, lost=f"it is an item of {by:.80}, which only that can read")


def _is_of_array(handler: object) -> bool:
    """Whether an item was saved as an array of its own, by `ArraySave`."""
    return isinstance(handler, str) and handler.endswith(".ArrayCheckpointHandler")


def _array_alone(store: Store, names: Sequence[str]) -> TreeMetadata | None:
    """The item of `ArraySave` by older versions, as 0.11.6: a zarr array, and no `_METADATA`."""
    below = names_in(store.at(_ARRAY)) if _ARRAY in names else []
    is_zarr3 = "zarr.json" in below
    if not is_zarr3 and ".zarray" not in below:
        return None
    is_jax = _ARRAY in read_shardings(store)
    entry = Entry((Key(_ARRAY, False),), "jax.Array" if is_jax else "scalar")
    return TreeMetadata((entry,), False, is_zarr3, False, None)


def _grain_states(store: Store, count: int) -> Any:
    """The states of a data iterator, one a process."""
    files = [f"process_{process}-of-{count}.json" for process in range(count)]
    return {"states": [{"json": read_json(store, file)} for file in files], "items": []}
