"""Writes items into one Ostraka checkpoint, and reads them from Ostraka and Orbax checkpoints.

A checkpoint holds one item, or a dict of several, which are committed together. Its metadata has
the kind of each item.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax

from ostraka.common.threads import paused_gc
from ostraka.compat.orbax._files import as_path
from ostraka.compat.orbax._leaves import Template, WantedLeaf
from ostraka.compat.orbax.tree import Keys, SavedTree, child_of, saved_tree
from ostraka.errors import CheckpointNotFound, NotACheckpoint
from ostraka.formats import is_checkpoint, open_source
from ostraka.formats.orbax import names as orbax_names
from ostraka.formats.source import Source, names_in
from ostraka.layout.plan_write import MAX_FILE_BYTES
from ostraka.layout.spec import LeafSpec
from ostraka.manager.retain import remove_checkpoint
from ostraka.manager.steps import with_metrics
from ostraka.processes.decide import decide_together
from ostraka.reading.locate import ATTEMPTS, overwritten
from ostraka.restoring.restore import restore_leaves
from ostraka.saving.agree import SaveHooks
from ostraka.saving.background import SaveHandle
from ostraka.saving.capture import capture
from ostraka.saving.save import SaveOptions, begin_save, run_save
from ostraka.storage import Store, open_store
from ostraka.tree.nodes import ArrayNumber, Leaf, Node, SavedStates, UnreadableLeaf

_NO_ITEMS = (orbax_names.STEP_METADATA, orbax_names.COMMITTED, "metrics")
_OF_TREES = frozenset(
    {orbax_names.METADATA, orbax_names.MANIFEST, orbax_names.SHARDING, orbax_names.ARRAY_METADATAS}
)


@dataclass(frozen=True, slots=True)
class Payload:
    """An item, ready for the engine."""

    kind: str
    """pytree, json, array or files"""
    tree: Any
    handler: str
    """The class name of the handler that made it."""


def write(
    path: Any,
    items: Payload | Mapping[str, Payload],
    *,
    custom: Mapping[str, Any] | None = None,
    metrics: Any = None,
    step: int | None = None,
    force: bool = False,
    background: bool = False,
    max_file_bytes: int | None = None,
    on_commit: Any = None,
) -> SaveHandle | None:
    """Save items at a path. Raises ValueError if the path exists, unless `force`.

    Raises TypeError if `custom` metadata or `metrics` are not JSON.
    """
    listed = {"default": items} if isinstance(items, Payload) else items
    own: dict[str, Any] = {
        "single": isinstance(items, Payload),
        "items": {name: [item.kind, item.handler] for name, item in listed.items()},
        "custom": as_json(custom or {}, "custom_metadata"),
        "metrics": as_json(metrics, "metrics"),
    }
    store = open_store(path)
    if decide_together(f"look at {path}", lambda: _make_way(store, force)):
        raise ValueError(f"Destination {path} already exists.")
    metadata: dict[str, Any] = {orbax_names.ORBAX_KEY: own}
    if isinstance(own["metrics"], dict) and step is not None:
        # As Ostraka's own manager keeps them, so that `ostraka ls` shows them.
        numbers = {k: v for k, v in own["metrics"].items() if isinstance(v, int | float)}
        metadata |= with_metrics(None, numbers, step)
    tree = items.tree if isinstance(items, Payload) else {k: v.tree for k, v in items.items()}
    limit = max(max_file_bytes, 1 << 20) if max_file_bytes else MAX_FILE_BYTES
    # Orbax saves trees of None and empty containers, such as the state of a plain SGD.
    take_apart = partial(capture, tree, may_be_empty=True)
    options = SaveOptions(metadata=metadata, max_file_bytes=limit)
    if background:
        return begin_save(store, take_apart, options, SaveHooks(on_commit=on_commit))
    run_save(store, take_apart, options)
    if on_commit is not None and jax.process_index() == 0:
        on_commit()
    return None


def _make_way(store: Store, force: bool) -> bool:
    """Delete what `force` replaces, on process 0. Return True if a checkpoint is in the way."""
    names = names_in(store)
    if names and force and orbax_names.is_orbax(names):
        remove(store)
    return bool(names) and not force


def as_json(value: Any, what: str) -> Any:
    """Return a value as JSON keeps it. Raises TypeError if it is not JSON."""

    def number(other: Any) -> Any:
        if hasattr(other, "tolist"):
            return other.tolist()
        raise TypeError(f"{what} must be JSON, and {other!r} is not")

    return json.loads(json.dumps(value, default=number))


class OpenCheckpoint:
    """A checkpoint that Ostraka or Orbax wrote, open for reading."""

    @paused_gc()
    def __init__(self, path: Any):
        self.path = as_path(path)
        self._within: str | None = None
        source = _open(path)
        if source is None:
            # `step/item` is a directory for Orbax, and a part of the step's checkpoint here.
            source, self._within = _open(self.path.parent), self.path.name
        own: Any = {} if source is None else source.saved.user.get(orbax_names.ORBAX_KEY)
        self.about: dict[str, Any] = own if isinstance(own, dict) else {}
        """The metadata that `write` has saved. Empty if another program wrote the checkpoint."""
        is_part = not self.about.get("single", True) and self._within in self.about.get("items", ())
        if source is None or (self._within is not None and not is_part):
            raise FileNotFoundError(f"Checkpoint at {path} not found.")
        self.source: Source = source

    @cached_property
    def is_orbax(self) -> bool:
        return orbax_names.is_orbax(names_in(self.source.store))

    @property
    def custom(self) -> dict[str, Any]:
        if self.about:
            return dict(self.about.get("custom") or {})
        user = self.source.saved.user
        return {k: v for k, v in user.items() if not self.is_orbax or k != "metrics"}

    @property
    def metrics(self) -> Any:
        if self.about:
            return self.about.get("metrics")
        return self.source.saved.user.get("metrics") if self.is_orbax else None

    @property
    def is_single(self) -> bool:
        """True if the checkpoint holds one item without a name."""
        if self._within is not None:
            return True
        return bool(self.about["single"]) if self.about else not self._orbax_items

    @cached_property
    def _orbax_items(self) -> dict[str, Store]:
        """The items of a step that Orbax wrote. Empty if Orbax wrote one tree."""
        if not self.is_orbax or self._within is not None:
            return {}
        store = self.source.store
        found = {n: store.at(n) for n in names_in(store) if n not in _NO_ITEMS}
        if not _OF_TREES.isdisjoint(found):
            return {}
        return {n: at for n, at in found.items() if names_in(at)}

    def items(self) -> dict[str, str]:
        """Return the names of the items, each with its kind."""
        if self.about:
            return {name: kind for name, (kind, _) in self.about["items"].items()}
        if self._orbax_items:
            return {n: self._orbax_kind(n, at) for n, at in self._orbax_items.items()}
        return {"default": "pytree"}

    def handlers(self) -> dict[str, str]:
        return {name: by for name, (_, by) in self.about.get("items", {}).items()}

    def item(self, name: str | None) -> Item:
        """Return an item. None stands for the only one. Raises KeyError if it does not exist."""
        there = self.items()
        if self._within is not None:
            return Item(self.source, self._within, self.path, there.get(self._within, "pytree"))
        is_whole = name is None or (self.is_single and name == "default")
        name = "default" if name is None else name
        if name not in there and not is_whole:
            raise KeyError(
                f'Item "{name}" was not found in the checkpoint. Available items: {list(there)}'
            )
        kind = there.get(name, "pytree")
        if self._orbax_items:
            return self._orbax_item(name, kind)
        if is_whole:
            return Item(self.source, None if self.is_single else name, self.path, kind)
        return Item(self.source, name, self.path / name, kind)

    def _orbax_kind(self, name: str, store: Store) -> str:
        names = names_in(store)
        found = child_of(self.source.tree, name)
        has_array = not {"checkpoint", orbax_names.ARRAY_METADATAS}.isdisjoint(names)
        is_array = isinstance(found, Leaf) and (has_array or isinstance(found.value, ArrayNumber))
        if is_array and orbax_names.METADATA not in names:
            return "array"  # with some files of a tree all the same
        if not _OF_TREES.isdisjoint(names):
            return "pytree"
        return "json" if "metadata" in names else "files"

    def _orbax_item(self, name: str, kind: str) -> Item:
        store, path = self._orbax_items[name], self.path / name
        if kind == "files":
            return Item(self.source, None, path, kind, directory=store.location)
        if kind == "pytree":
            return Item(open_source(store), None, path, kind)
        # The step's tree has JSON and the like under its name, unless it is the only item.
        is_only = list(self._orbax_items) == [name] == ["default"]
        return Item(self.source, None if is_only else name, path, kind)


def _open(path: Any) -> Source | None:
    """Open a checkpoint. Return None if there is none."""
    store = open_store(path)
    try:
        return open_source(store) if is_checkpoint(names_in(store)) else None
    except (CheckpointNotFound, NotACheckpoint):
        return None


@dataclass
class Item:
    """One item of an open checkpoint."""

    source: Source
    within: str | None
    path: Any
    kind: str
    directory: str | None = None
    """Directory of an item that a custom handler wrote under Orbax."""

    @cached_property
    def node(self) -> Node:
        tree = self.source.tree
        found = tree if self.within is None else child_of(tree, self.within)
        if found is None:
            raise KeyError(f'Item "{self.within}" was not found in the checkpoint.')
        return found

    @cached_property
    def tree(self) -> SavedTree:
        return saved_tree(self.node)

    def saved(self, keys: Keys) -> Any:
        """Return the spec of a saved array, or the value of another leaf."""
        value = self.tree.leaves[keys]
        if isinstance(value, UnreadableLeaf):
            raise ValueError(f"leaf {'/'.join(keys)!r} of {self.path} can't be read: {value.why}")
        return self.source.saved.leaves[value.number] if isinstance(value, ArrayNumber) else value

    def states(self) -> tuple[Any, ...]:
        node = self.node
        if not isinstance(node, Leaf) or not isinstance(node.value, SavedStates):
            raise ValueError(f"{self.path} was not written by a handler of yours")
        return node.value.states

    def read(self, wants: Mapping[Keys, WantedLeaf | Template]) -> dict[Keys, Any]:
        """Restore leaves as they are wanted."""
        is_cast = any(isinstance(w, WantedLeaf) and w.is_cast_by_engine for w in wants.values())
        item = self
        for _ in range(ATTEMPTS):
            asked = item._asked(wants)
            dtype = "like" if is_cast else None
            found = restore_leaves(item.source, asked, dtype=dtype) if asked else []
            if found is not None:
                arrays = iter(found)
                # A template is for an array that needs nothing more.
                return {
                    keys: want.finish(arrays) if isinstance(want, WantedLeaf) else next(arrays)
                    for keys, want in wants.items()
                }
            item = self._reopened(wants)
        raise overwritten([self.source.location])

    def _asked(self, wants: Mapping[Keys, WantedLeaf | Template]) -> list[tuple[Leaf, int]]:
        """Return the arrays among the leaves, each with a template or its number."""
        asked: list[tuple[Leaf, int]] = []
        for keys, want in wants.items():
            node = self.tree.nodes.get(keys)
            if node is None or not isinstance(node.value, ArrayNumber):
                continue
            number = node.value
            template = want.template(number) if isinstance(want, WantedLeaf) else want
            is_number = isinstance(template, ArrayNumber)
            asked.append((node if is_number else Leaf(node.path, template), number.number))
        return asked

    def _reopened(self, leaves: Iterable[Keys]) -> Item:
        """Open the item again after a save has replaced it. Raises ValueError if leaves differ."""
        item = replace(self, source=open_source(self.source.store))
        for keys in leaves:
            there = item.saved(keys) if keys in item.tree.leaves else None
            if _shape_of(there) != _shape_of(self.saved(keys)):
                raise ValueError(
                    f"leaf {'/'.join(keys)!r} of {self.path}: a save has replaced the checkpoint "
                    "by one with another shape or dtype; restore again"
                )
        return item


def _shape_of(saved: Any) -> Any:
    if isinstance(saved, LeafSpec):
        return saved.kind, saved.dtype, saved.prng, tuple(saved.own_shape)
    return None


def remove(store: Store) -> None:
    """Delete a checkpoint, whether Ostraka or Orbax wrote it."""
    if not orbax_names.is_orbax(names_in(store)):
        remove_checkpoint(store)
    elif "://" in store.location:
        raise NotImplementedError(
            f"{store.location} was written by Orbax, and deleting that in a bucket is not "
            "supported; delete it with the bucket's own tools"
        )
    else:
        # Out of the way at once: half a deleted step must not look like one.
        path = pathlib.Path(store.location)
        gone = path.with_name(f".{path.name}.deleted-{os.urandom(4).hex()}")
        path.rename(gone)
        shutil.rmtree(gone)


def put_aside(store: Store, directory: Any) -> None:
    """Move a checkpoint below a directory. In a bucket delete it, as Orbax does.

    Raises FileExistsError if the target exists, because it may be the only copy.
    """
    if "://" in store.location:
        remove(store)
        return
    path = pathlib.Path(store.location)
    target = pathlib.Path(os.fspath(directory)) / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        raise FileExistsError(
            f"{path} can't be moved to {target}, which exists; delete that, or move it away"
        )
    path.rename(target)
