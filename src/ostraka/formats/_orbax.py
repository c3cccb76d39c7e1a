"""Orbax's checkpoints as a source: TensorStore reads the arrays, Orbax is not needed. No JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import xxhash

from ostraka._box import cell, count
from ostraka._document import saved_tree
from ostraka._nodes import ROOT, Branch, Leaf, Lost, Node, escape, join, mapped
from ostraka._plain import encode_scalar
from ostraka._source import OnBytes, Saved, StoredBox, StoredFile
from ostraka._spec import DTYPES, LeafSpec, Target
from ostraka.errors import name_few
from ostraka.formats._orbax_files import (
    MANIFEST,
    METADATA,
    SHARDING,
    SMALL_FILES,
    Entry,
    as_object,
    as_text,
    count_processes,
    malformed,
    read_if_there,
    read_key_impls,
    read_shardings,
    read_strings,
)
from ostraka.formats._orbax_items import Found, Part, find_parts
from ostraka.formats._orbax_sharding import Meshes, Sharding, parse_sharding
from ostraka.formats._orbax_tree import ARRAY_TYPES, EMPTY_TYPES, encode_tree, fit_to, path_of
from ostraka.storage import Store

if TYPE_CHECKING:
    import numpy as np

    from ostraka.formats._orbax_read import StoredArray

_MOST_CELLS = 1 << 16
"""A leaf of more chunks counts as one that is not cut."""
_KEY_WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
"""How many numbers a PRNG key of each implementation is."""
_OF_PROCESS = re.compile(r"(?:^|/)ocdbt\.process_([0-9]{1,9})/")


class OrbaxSource:
    """A checkpoint that Orbax wrote: a single tree, or a step with several items."""

    def __init__(self, store: Store, found: Found):
        self.store = store
        self._found = found
        self._arrays: list[StoredArray] = []
        self._lost: dict[str, str] = {}
        """By path, why a leaf can't be read."""
        leaves: list[LeafSpec] = []
        shardings: list[tuple[Store, Sharding | None]] = []
        trees: list[Any] = []
        for part in found.parts:
            above = "" if found.is_single else join("", escape(part.name))
            if part.tree is None:
                trees.append(part.encoded)
                if part.lost is not None:
                    self._lost[above or ROOT] = part.lost
                continue
            opened = _OpenedPart(part, above, first=len(leaves))
            trees.append(opened.encoded)
            leaves += opened.leaves
            self._arrays += opened.arrays
            self._lost |= opened.lost
            shardings += [(part.store, sharding) for sharding in opened.shardings]
        processes = max(count_processes(part.store) for part in found.parts)
        meshes = Meshes([sharding for _, sharding in shardings], processes)
        for number, (place, sharding) in enumerate(shardings):
            with malformed(place, SHARDING):
                leaves[number] = meshes.place(leaves[number], sharding)
        names = [part.name for part in found.parts]
        self.saved = Saved(
            id=_id_of(found),
            tree=trees[0] if found.is_single else {"dict": names, "items": trees},
            leaves=tuple(leaves),
            meshes=meshes.meshes,
            process_of=meshes.process_of,
            user=_user(found),
            writer=_writer(found.about),
        )

    @property
    def location(self) -> str:
        return self.store.location

    @property
    def tree(self) -> Branch | Leaf:
        return self._tree

    @cached_property
    def _tree(self) -> Branch | Leaf:
        def mark_lost(node: Node) -> Node:
            if isinstance(node, Leaf) and node.path in self._lost:
                return Leaf(node.path, Lost(self._lost[node.path]))
            return node

        with malformed(self.store, METADATA):
            found = saved_tree(self.saved.tree, [leaf.path for leaf in self.saved.leaves])
        return mapped(found, mark_lost) if self._lost else found

    def tree_for(self, like: Node) -> Node:
        return fit_to(self._tree, like)

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        from ostraka.formats._orbax_read import read_arrays

        tell = on_bytes or (lambda nbytes: None)
        return read_arrays(self._arrays, self.saved.leaves, targets, tell)

    def order(self) -> range:
        return range(len(self.saved.leaves))

    @property
    def reads_whole_rows(self) -> bool:
        return True  # whole chunks

    def grid_of(self, leaf: int) -> tuple[int, ...]:
        zarr = self._arrays[leaf].zarr
        sizes = zip(zarr.shape, zarr.file_chunk, strict=True)
        # Ours are cut in equal parts, which chunks are if they divide the shape.
        grid = tuple(1 if extent % chunk else max(extent // chunk, 1) for extent, chunk in sizes)
        return grid if prod(grid) <= _MOST_CELLS else (1,) * len(grid)

    def files_of(self, leaf: int) -> list[tuple[int, int]]:
        return [(leaf, cell) for cell in range(prod(self.grid_of(leaf)))]

    def boxes_of(self, leaf: int) -> list[StoredBox]:
        array, spec, grid = self._arrays[leaf], self.saved.leaves[leaf], self.grid_of(leaf)
        above = array.item.store.location.removeprefix(self.location).strip("/")
        found: list[StoredBox] = []
        for number in range(prod(grid)):
            box = cell(spec.shape, grid, number)
            name = f"{array.name}/{array.zarr.chunk_name(box)}"
            nbytes = DTYPES[spec.dtype].nbytes(count(box))
            there = None if array.item.metadata.use_ocdbt else array.item.store.look(name)
            stored = nbytes if there is None else there.size
            file = f"{above}/{name}" if above else name
            found.append(StoredBox(box, file, 0, 0, nbytes, stored))
        return found

    def files(self) -> list[StoredFile]:
        found: list[StoredFile] = []
        for part in self._found.parts:
            above = part.store.location.removeprefix(self.location).strip("/")
            for file in part.store.files("") if part.tree is not None else ():
                name = f"{above}/{file.name}" if above else file.name
                is_small = file.name.rpartition("/")[2] in SMALL_FILES
                if not is_small and not file.name.startswith("array_metadatas/"):
                    found.append(StoredFile(name, file.size, process=_process_of(name)))
        return found

    def is_current(self) -> bool:
        try:
            found = find_parts(self.store)
            return found is not None and _id_of(found) == self.saved.id
        except (OSError, ValueError):
            return False


class _OpenedPart:
    """An item with arrays: its tree, and the arrays in it."""

    def __init__(self, part: Part, above: str, *, first: int):
        from ostraka.formats._orbax_read import read_values  # with numpy and TensorStore
        from ostraka.formats._orbax_stores import Item

        assert part.tree is not None
        self._store = part.store
        self._first = first
        self._above = above
        self._is_leaf = part.is_leaf
        self._is_key = part.is_key
        self.lost: dict[str, str] = {}
        self.leaves: list[LeafSpec] = []
        self.arrays: list[StoredArray] = []
        self.shardings: list[Sharding | None] = []
        entries = part.tree.entries
        self._mixed_up = _mixed_up(entries)
        stored = [entry for entry in entries if entry.value_type in (*ARRAY_TYPES, "scalar")]
        stored = [entry for entry in stored if entry.name not in self._mixed_up]
        item = Item(part.store, part.tree)
        self._found = {array.name: array for array in item.find_arrays([e.name for e in stored])}
        scalars = [entry for entry in stored if self._is_scalar(entry)]
        values = read_values(
            [self._found[entry.name] for entry in scalars], [self._path(e) for e in scalars]
        )
        self._scalars = {entry.name: value for entry, value in zip(scalars, values, strict=True)}
        has_text = any(entry.value_type == "string" for entry in entries)
        self._strings = read_strings(part.store) if has_text else {}
        self._shardings = read_shardings(part.store)
        self._impls = read_key_impls(part.store, set(filter(self._may_be_key, self._found)))
        with malformed(part.store, METADATA):
            if self._is_leaf:
                self.encoded = self._encode(entries[0])
            else:
                self.encoded = encode_tree(entries, self._encode)

    def _path(self, entry: Entry) -> str:
        return self._above or ROOT if self._is_leaf else path_of(entry.keys, self._above)

    def _is_scalar(self, entry: Entry) -> bool:
        return entry.value_type == "scalar" and not self._found[entry.name].zarr.shape

    def _may_be_key(self, name: str) -> bool:
        zarr = self._found[name].zarr
        return zarr.dtype == "uint32" and zarr.shape[-1:] in ((2,), (4,))

    def _encode(self, entry: Entry) -> Any:
        """A leaf of the tree as JSON; an array as its number."""
        name = entry.name
        if name in self._mixed_up:
            others = [path_of(e.keys) for e in self._mixed_up[name] if e is not entry]
            why = f"Orbax wrote it to the same place as {name_few(others)}, so one of them is gone"
            self.lost[self._path(entry)] = why
            return None
        if entry.value_type == "string":
            return encode_scalar(as_text(self._strings[name]))
        if entry.value_type in ("None", "NamedTuple"):
            return None
        if name in self._scalars:
            return encode_scalar(self._scalars[name])
        if name not in self._found:
            why = f"it is of the kind {entry.value_type!r:.40}, which only its own handler can read"
            self.lost[self._path(entry)] = why
            return None
        return self._add_array(entry)

    def _add_array(self, entry: Entry) -> int:
        array = self._found[entry.name]
        impl = self._impls.get(entry.name)
        if impl is None and self._is_key:
            impl = "threefry2x32" if array.zarr.shape[-1:] == (2,) else "rbg"
        if impl is not None and array.zarr.shape[-1:] != (_KEY_WORDS.get(impl),):
            shape = list(array.zarr.shape)
            raise ValueError(f"{entry.name!r} has keys of the kind {impl!r:.40} in {shape}")
        kind = "jax" if entry.value_type == "jax.Array" else "numpy"
        self.leaves.append(
            LeafSpec(
                self._path(entry),
                kind if impl is None else "key",
                array.zarr.dtype,
                array.zarr.shape,
                prng=impl,
            )
        )
        self.arrays.append(array)
        sharding = self._shardings.get(entry.name) if kind == "jax" else None
        with malformed(self._store, SHARDING):
            self.shardings.append(None if sharding is None else parse_sharding(sharding))
        return self._first + len(self.leaves) - 1


def _mixed_up(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Leaves that Orbax has written to one place, of which one is left: `a.b` beside `a/b`."""
    by_name: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.value_type not in EMPTY_TYPES:
            by_name.setdefault(entry.name, []).append(entry)
    return {name: found for name, found in by_name.items() if len(found) > 1}


def _id_of(found: Found) -> str:
    """What differs between any two saves: times, and the random names of OCDBT's files."""
    digest = xxhash.xxh3_128(repr(sorted(map(str, found.about.items()))).encode())
    for part in found.parts:
        for name in (METADATA, MANIFEST):
            digest.update(read_if_there(part.store, name) or b"")
    return digest.hexdigest()


def _user(found: Found) -> dict[str, Any]:
    given: Any = found.about.get("custom_metadata")
    if not given and found.parts[0].tree is not None:
        given = found.parts[0].tree.user
    user = dict(as_object(given)) if isinstance(given, dict) else {}
    return {**user, "metrics": dict(found.metrics)} if found.metrics else user


def _writer(about: Mapping[str, Any]) -> dict[str, Any]:
    finished = about.get("commit_timestamp_nsecs")
    if type(finished) is not int or not 0 < finished < 1 << 62:
        return {"library": "Orbax"}
    when = datetime.fromtimestamp(finished / 1e9, UTC)
    return {"library": "Orbax", "time": when.isoformat(timespec="milliseconds")}


def _process_of(file: str) -> int:
    match = _OF_PROCESS.search(file)
    return int(match[1]) if match else 0


def open_orbax(store: Store) -> OrbaxSource | None:
    """Open the checkpoint in a store; None if Orbax wrote none there.

    Raises CheckpointNotFound for one that was never finished, UnsupportedFormat, Damaged.
    """
    found = find_parts(store)
    return None if found is None else OrbaxSource(store, found)
