"""Items to one checkpoint of ours, and back.

A checkpoint holds one item, or a dict of several, which so appear together. What kind each item is
stands in its metadata. What Orbax wrote is read by the same functions.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from ostraka._foreign import names_in
from ostraka._handle import SaveHandle
from ostraka._lifetime import paused_gc
from ostraka._nodes import ArrayNumber, Leaf, Lost, Node, SavedStates
from ostraka._read import restore, restore_leaves
from ostraka._save import save, save_async
from ostraka._source import Source
from ostraka.compat.orbax._leaves import Template, Want
from ostraka.compat.orbax._place import as_path, remove, store_at
from ostraka.compat.orbax._tree import Keys, child_of, is_array_number, saved_tree
from ostraka.errors import CheckpointNotFound, NotACheckpoint, PartialRestore
from ostraka.formats import is_checkpoint, open_source
from ostraka.formats._orbax_items import is_orbax
from ostraka.formats._ostraka import ORBAX_KEY
from ostraka.manager._metrics import with_metrics
from ostraka.manager._together import decide_together
from ostraka.storage import Store

_NO_ITEMS = ("_CHECKPOINT_METADATA", "commit_success.txt", "metrics")
_OF_TREES = frozenset({"_METADATA", "manifest.ocdbt", "_sharding", "array_metadatas"})


@dataclass(frozen=True, slots=True)
class Payload:
    """An item, ready for the engine."""

    kind: str
    """pytree, json, array or files"""
    tree: Any
    handler: str
    """The class that made it."""


@dataclass(frozen=True, slots=True)
class About:
    """What is kept of a checkpoint beside its items."""

    custom: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metrics: Any = None
    step: int | None = None


def write(
    path: Any,
    items: Payload | Mapping[str, Payload],
    about: About,
    *,
    force: bool = False,
    background: bool = False,
    max_file_bytes: int | None = None,
    on_commit: Any = None,
) -> SaveHandle | None:
    """Save items at a path. Raises ValueError if something is there, unless `force`."""
    store = store_at(path)
    if decide_together(f"look at {path}", lambda: _make_way(store, force)):
        raise ValueError(f"Destination {path} already exists.")
    single = isinstance(items, Payload)
    listed = {"default": items} if isinstance(items, Payload) else items
    own = {
        "single": single,
        "items": {name: [item.kind, item.handler] for name, item in listed.items()},
        "custom": dict(about.custom),
        "metrics": about.metrics,
    }
    metadata = {ORBAX_KEY: own, **_numbers(about)}
    tree = items.tree if isinstance(items, Payload) else {k: v.tree for k, v in items.items()}
    options: dict[str, Any] = {"metadata": metadata}
    if max_file_bytes:
        options["max_file_bytes"] = max(max_file_bytes, 1 << 20)
    if background:
        return save_async(store, tree, on_commit=on_commit, **options)
    save(store, tree, **options)
    if on_commit is not None and jax.process_index() == 0:
        on_commit()
    return None


def _make_way(store: Store, force: bool) -> bool:
    """On process 0, before a save: whether something is in the way of it."""
    names = names_in(store)
    if names and force and is_orbax(names):
        remove(store)
    return bool(names) and not force


def _numbers(about: About) -> dict[str, Any]:
    """Metrics as Ostraka's own manager keeps them, so that `ostraka ls` shows them."""
    if not isinstance(about.metrics, dict) or about.step is None:
        return {}
    metrics: dict[Any, Any] = about.metrics
    numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
    return with_metrics(None, numbers, about.step)


def as_json(value: Any, what: str) -> Any:
    """A value as it is after a round through JSON. Raises TypeError."""

    def number(other: Any) -> Any:
        if hasattr(other, "tolist"):
            return other.tolist()
        raise TypeError(f"{what} must be JSON, and {other!r} is not")

    return json.loads(json.dumps(value, default=number))


class Opened:
    """A checkpoint that is there, of ours or of Orbax's."""

    @paused_gc()
    def __init__(self, path: Any):
        self.path = as_path(path)
        self._within: str | None = None
        store = store_at(path)
        try:
            self.source: Source = _open(store)
        except (CheckpointNotFound, NotACheckpoint):
            # `step/item`: a directory for Orbax, a part of the step's one checkpoint for us.
            above = _step_above(path)
            if above is None:
                raise FileNotFoundError(f"Checkpoint at {path} not found.") from None
            self.source, self._within = above, self.path.name

    @property
    def about(self) -> Mapping[str, Any]:
        found: Any = self.source.saved.user.get(ORBAX_KEY)
        return found if isinstance(found, dict) else {}

    @cached_property
    def is_orbax(self) -> bool:
        return is_orbax(names_in(self.source.store))

    @property
    def custom(self) -> dict[str, Any]:
        if self.about:
            return dict(self.about.get("custom") or {})
        user = dict(self.source.saved.user)
        return {k: v for k, v in user.items() if not self.is_orbax or k != "metrics"}

    @property
    def metrics(self) -> Any:
        if self.about:
            return self.about.get("metrics")
        user = self.source.saved.user
        return user.get("metrics") if self.is_orbax else None

    @property
    def is_single(self) -> bool:
        """Whether it holds one item that has no name of its own."""
        if self._within is not None:
            return True
        if self.about:
            return bool(self.about["single"])
        return not self._orbax_items

    @cached_property
    def _orbax_items(self) -> dict[str, Store]:
        """The items of a step that Orbax wrote."""
        if not self.is_orbax or self._within is not None:
            return {}
        store = self.source.store
        found = {n: store.at(n) for n in names_in(store) if n not in _NO_ITEMS}
        if not _OF_TREES.isdisjoint(found):
            return {}  # one tree, and no step
        return {n: at for n, at in found.items() if names_in(at)}

    def items(self) -> dict[str, str]:
        """The names of the items, each with its kind."""
        if self.about:
            return {name: kind for name, (kind, _) in self.about["items"].items()}
        if self._orbax_items:
            return {n: self._orbax_kind(n, at) for n, at in self._orbax_items.items()}
        return {"default": "pytree"}

    def handlers(self) -> dict[str, str]:
        return {name: by for name, (_, by) in self.about.get("items", {}).items()}

    def item(self, name: str | None) -> Item:
        """One item; None for that of a checkpoint which has only one. Raises KeyError."""
        there = self.items()
        if self._within is not None:
            return Item(self.source, self._within, self.path, there.get(self._within, "pytree"))
        if name is None or (self.is_single and name == "default"):
            kind = there.get("default", "pytree")
            if self._orbax_items:
                return self._orbax_item("default", kind)
            return Item(self.source, None if self.is_single else "default", self.path, kind)
        if name not in there:
            raise KeyError(
                f'Item "{name}" was not found in the checkpoint. Available items: {list(there)}'
            )
        if self._orbax_items:
            return self._orbax_item(name, there[name])
        return Item(self.source, name, self.path / name, there[name])

    def _orbax_kind(self, name: str, store: Store) -> str:
        names = names_in(store)
        found = child_of(self.source.tree, name)
        has_array = not {"checkpoint", "array_metadatas"}.isdisjoint(names)
        is_array = isinstance(found, Leaf) and (has_array or is_array_number(found.value))
        if is_array and "_METADATA" not in names:
            return "array"  # with some files of a tree all the same
        if not _OF_TREES.isdisjoint(names):
            return "pytree"
        return "json" if "metadata" in names else "files"

    def _orbax_item(self, name: str, kind: str) -> Item:
        store = self._orbax_items[name]
        if kind == "files":
            return Item(self.source, None, self.path / name, kind, directory=store.location)
        if kind == "pytree":
            return Item(open_source(store), None, self.path / name, kind)
        # JSON and its like: the step's tree has it under its name, unless it is the only one.
        is_whole = list(self._orbax_items) == [name] == ["default"]
        return Item(self.source, None if is_whole else name, self.path / name, kind)


def _open(store: Store) -> Source:
    if not is_checkpoint(names_in(store)):
        raise CheckpointNotFound(f"Checkpoint at {store.location} not found.")
    return open_source(store)


def _step_above(path: Any) -> Source | None:
    item = as_path(path)
    try:
        source = _open(store_at(item.parent))
    except (CheckpointNotFound, NotACheckpoint):
        return None
    own: Any = source.saved.user.get(ORBAX_KEY)
    known = isinstance(own, dict) and not own["single"] and item.name in own["items"]
    return source if known else None


class Item:
    """One item of an opened checkpoint."""

    def __init__(
        self, source: Source, within: str | None, path: Any, kind: str, directory: str | None = None
    ):
        self.path = path
        self.kind = kind
        self.directory = directory
        """Of an item that a handler which only the user has wrote by Orbax: its directory."""
        self._source = source
        self._within = within

    @cached_property
    def node(self) -> Node:
        tree = self._source.tree
        found = tree if self._within is None else child_of(tree, self._within)
        if found is None:
            raise KeyError(f'Item "{self._within}" was not found in the checkpoint.')
        return found

    @cached_property
    def tree(self) -> Any:
        return saved_tree(self.node)

    def saved(self, keys: Keys) -> Any:
        """What was saved there: the spec of an array, or the value."""
        value = self.tree.leaves[keys]
        if isinstance(value, Lost):
            raise ValueError(f"leaf {'/'.join(keys)!r} of {self.path} can't be read: {value.why}")
        return self._source.saved.leaves[value.number] if is_array_number(value) else value

    def mesh_of(self, spec: Any) -> Any:
        return self._source.saved.meshes[spec.mesh] if spec.mesh >= 0 else None

    def states(self) -> tuple[Any, ...]:
        node = self.node
        if not isinstance(node, Leaf) or not isinstance(node.value, SavedStates):
            raise ValueError(f"{self.path} was not written by a handler of yours")
        return node.value.states

    def read(self, keys: list[Keys], wants: list[Want | Template]) -> list[Any]:
        """The values of the leaves that are asked for, as they are asked for."""
        asked: list[tuple[Leaf, int]] = []
        is_cast = False
        for key, want in zip(keys, wants, strict=True):
            node = self.tree.nodes.get(key)
            if node is None or not isinstance(node.value, ArrayNumber):
                continue
            template = want
            if isinstance(want, Want):
                template = want.template(node.value)
                is_cast = is_cast or want.is_cast_by_engine
            leaf = node if template is node.value else Leaf(node.path, template)
            asked.append((leaf, node.value.number))
        values = iter(self._read_arrays(asked, keys, wants, "like" if is_cast else None))
        # A template is for an array that needs nothing more.
        return [w.finish_with(values) if isinstance(w, Want) else next(values) for w in wants]

    def _read_arrays(
        self, asked: list[tuple[Leaf, int]], keys: list[Keys], wants: list[Any], dtype: Any
    ) -> list[Any]:
        if not asked:
            return []
        found = restore_leaves(self._source, asked, dtype=dtype)
        if found is not None:
            return found
        arrays = [
            (key, self._template_of(key, want))
            for key, want in zip(keys, wants, strict=True)
            if isinstance(self.tree.leaves[key], ArrayNumber)
        ]
        return self._read_replaced(arrays, dtype)

    def _template_of(self, keys: Keys, want: Want | Template) -> Any:
        """What to ask of a checkpoint whose numbers may be others."""
        if isinstance(want, ArrayNumber):
            want = Want(keys, self.saved(keys))
        if isinstance(want, Want):
            return want.template(None)
        return jax.ShapeDtypeStruct(want.shape, want.dtype, sharding=want.sharding)

    def _read_replaced(self, arrays: list[tuple[Keys, Any]], dtype: Any) -> list[Any]:
        """The same from the checkpoint that another save has put in the place of this one."""
        # Dicts for lists too: of a list not all entries may be asked for, and paths are the same.
        like = _dicts(arrays)
        whole = like if self._within is None else {self._within: like}
        with warnings.catch_warnings():
            # All shapes are known, and what is left out was not asked for.
            warnings.simplefilter("ignore", PartialRestore)
            result = restore(self._source.store, like=whole, strict=False, dtype=dtype)
        found = result if self._within is None else result[self._within]
        return [_follow(found, keys) for keys, _ in arrays]


def _dicts(found: Any) -> Any:
    root: dict[str, Any] = {}
    for keys, template in found:
        if not keys:
            return template
        node = root
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = template
    return root


def _follow(node: Any, keys: Keys) -> Any:
    for key in keys:
        node = node[int(key)] if isinstance(node, list) else node[key]
    return node
