"""Orbax checkpoints as a source. TensorStore reads the arrays, without Orbax. No JAX."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import prod
from typing import TYPE_CHECKING, Any

import xxhash

from ostraka.common.dtypes import DTYPES
from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import name_few
from ostraka.formats.orbax._sharding import Sharding, parse_sharding, place_leaves
from ostraka.formats.orbax.files import (
    Entry,
    OrbaxItem,
    OrbaxListing,
    TreeMetadata,
    as_object,
    as_text,
    count_processes,
    find_parts,
    malformed,
    read_if_there,
    read_key_impls,
    read_shardings,
    read_strings,
)
from ostraka.formats.orbax.names import (
    ARRAY_METADATAS,
    MANIFEST,
    METADATA,
    OCDBT_OF_PROCESS,
    SHARDING,
    SMALL_FILES,
)
from ostraka.formats.orbax.tree import ARRAY_TYPES, EMPTY_TYPES, encode_tree, fit_to, path_of
from ostraka.formats.source import OnBytes, Saved, StoredBox, StoredFile
from ostraka.formats.source_files import (
    OpenedFile,
    Sampling,
    changed,
    digest_of_states,
    refuse_changed,
    sample,
    state_of,
    states_of,
)
from ostraka.layout.box import cell, count
from ostraka.layout.spec import LeafSpec, Target
from ostraka.storage import FileInfo, Store
from ostraka.tree.json_tree import saved_tree
from ostraka.tree.json_values import encode_scalar
from ostraka.tree.nodes import ROOT, Leaf, Node, UnreadableLeaf, escape, join, mapped

if TYPE_CHECKING:
    import numpy as np

    from ostraka.formats.orbax._read import StoredArray

_MOST_CELLS = 1 << 16
"""A leaf with more chunks counts as one part."""
_KEY_WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
"""How many numbers make up a PRNG key, by implementation."""
_MOST_LISTED = 64
"""For more arrays than this, all files of the checkpoint are listed at once."""
_MOST_SAMPLED = 256
_OF_PROCESS = re.compile(r"(?:^|/)ocdbt\.process_([0-9]{1,9})/")


class OrbaxSource:
    """A checkpoint that Orbax wrote: a single tree, or a step with several items."""

    reads_whole_rows = True  # whole chunks

    def __init__(self, store: Store, found: OrbaxListing):
        self.store = store
        self.location = store.location
        self._found = found
        trees: list[Any] = []
        collected = _Collected()
        for part in found.parts:
            above = "" if found.is_single else join("", escape(part.name))
            if part.tree is not None:
                trees.append(_OpenedItem(part, part.tree, above, collected).encoded)
                continue
            trees.append(part.encoded)
            if part.lost is not None:
                collected.lost[above or ROOT] = part.lost
        self._arrays, self._lost = collected.arrays, collected.lost
        leaves, meshes, devices = place_leaves(collected.leaves, collected.shardings)
        processes = min(max(count_processes(part.store) for part in found.parts), devices)
        names = [part.name for part in found.parts]
        self.saved = Saved(
            id=_id_of(found),
            tree=trees[0] if found.is_single else {"dict": names, "items": trees},
            leaves=tuple(leaves),
            meshes=meshes,
            process_of=tuple(device * processes // devices for device in range(devices)),
            user=_user(found),
            writer=_writer(found.about),
        )
        with malformed(self.store, METADATA):
            tree = saved_tree(self.saved.tree, [leaf.path for leaf in leaves])
        self.tree = mapped(tree, self._mark_lost) if self._lost else tree

    def _mark_lost(self, node: Node) -> Node:
        if isinstance(node, Leaf) and node.path in self._lost:
            return Leaf(node.path, UnreadableLeaf(self._lost[node.path]))
        return node

    def tree_for(self, like: Node) -> Node:
        return fit_to(self.tree, like)

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        from ostraka.formats.orbax._read import ArrayReader

        tell = on_bytes or (lambda nbytes: None)
        yield from ArrayReader(self._arrays, self.saved.leaves, targets, tell).run()
        self._refuse_changed({target.leaf for target in targets})

    def _refuse_changed(self, leaves: Collection[int]) -> None:
        """Raise SourceChanged if the files of leaves have changed since the checkpoint was opened.

        The manifest of a database stands for its data files, which have random names and are never
        written again.
        """
        manifests: set[str] = set()
        places: set[str] = set()
        for array in map(self._arrays.__getitem__, leaves):
            above = self._above(array.item.store)
            if array.item.metadata.use_ocdbt:
                manifests.add(above + MANIFEST)
            else:
                places.add(f"{above}{array.name}/".lstrip("/"))
        states = self._found.states
        refuse_changed(OpenedFile(self.store, name, states.get(name)) for name in manifests)
        for place in [""] if len(places) > _MOST_LISTED else places:
            self.refuse_changed_below(place)

    def refuse_changed_below(self, place: str = "") -> None:
        """Raise SourceChanged if a file whose name begins with `place` has changed."""
        now = states_of(self.store.files(place))
        before = {n: state for n, state in self._found.states.items() if n.startswith(place)}
        for name in sorted(now.keys() | before.keys()):
            if now.get(name) != before.get(name):
                raise changed(self.store, name)

    def _above(self, store: Store) -> str:
        """The path of an item in the checkpoint, with a slash at its end."""
        above = store.location.removeprefix(self.location).strip("/")
        return f"{above}/" if above else ""

    def order(self) -> range:
        return range(len(self.saved.leaves))

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
        above = self._above(array.item.store)
        found: list[StoredBox] = []
        for number in range(prod(grid)):
            box = cell(spec.shape, grid, number)
            name = f"{array.name}/{array.zarr.chunk_name(box)}"
            nbytes = DTYPES[spec.dtype].nbytes(count(box))
            there = None if array.item.metadata.use_ocdbt else array.item.store.look(name)
            stored = nbytes if there is None else there.size
            found.append(StoredBox(box, above + name, 0, 0, nbytes, stored))
        return found

    def files(self) -> list[StoredFile]:
        found: list[StoredFile] = []
        for part in self._found.parts:
            for file in part.store.files("") if part.tree is not None else ():
                name = self._above(part.store) + file.name
                is_small = file.name.rpartition("/")[2] in SMALL_FILES
                if not is_small and not file.name.startswith(f"{ARRAY_METADATAS}/"):
                    match = _OF_PROCESS.search(name)
                    found.append(StoredFile(name, file.size, process=int(match[1]) if match else 0))
        return found

    def is_current(self) -> bool:
        with suppress(OSError, ValueError):
            return states_of(self.store.files("")) == self._found.states
        return False

    @property
    def version(self) -> str:
        return digest_of_states(self._found.states.items())

    def samples(self, how: Sampling = "by version") -> list[tuple[str, str]]:
        """Digests of small files, of manifests, and of some files of arrays in directories.

        The manifest of a database stands for its other files.
        """
        databases = tuple(
            self._above(part.store) + name
            for part in self._found.parts
            if part.tree is not None and part.tree.use_ocdbt
            for name in ("d/", OCDBT_OF_PROCESS)
        )
        files = [file for file in self.store.files("") if not file.name.startswith(databases)]
        step = -(-len(files) // _MOST_SAMPLED)

        def look(numbered: tuple[int, FileInfo]) -> tuple[str, str]:
            number, file = numbered
            opened = OpenedFile(self.store, file.name, state_of(file))
            found = "" if number % step else sample(opened, file.size, (), how)
            return file.name, f"{file.size} {found}"

        threads = self.store.traits.reads_at_once
        found = run_all(look, list(enumerate(files)), threads=threads, stop=StopSignal())
        self.refuse_changed_below()
        return found


@dataclass(slots=True)
class _Collected:
    """The leaves of all items, by number."""

    leaves: list[LeafSpec] = field(default_factory=list[LeafSpec])
    arrays: list[StoredArray] = field(default_factory=list["StoredArray"])
    shardings: list[tuple[Store, Sharding | None]] = field(default_factory=list[Any])
    """The sharding of each, and the item that has it."""
    lost: dict[str, str] = field(default_factory=dict[str, str])
    """Reasons why leaves can't be read, by path."""


class _OpenedItem:
    """An item with arrays: its tree, and the arrays in it, which go to `to`."""

    def __init__(self, part: OrbaxItem, tree: TreeMetadata, above: str, to: _Collected):
        # Imports numpy and TensorStore.
        from ostraka.formats.orbax._read import Item, read_values

        self._part = part
        self._above = above
        self._to = to
        by_name: dict[str, list[Entry]] = {}
        for entry in tree.entries:
            if entry.value_type not in EMPTY_TYPES:
                by_name.setdefault(entry.name, []).append(entry)
        self._mixed_up = {name: found for name, found in by_name.items() if len(found) > 1}
        """Leaves that Orbax wrote to one path, such as `a.b` and `a/b`. Only one survives."""
        known = (e for e in tree.entries if e.value_type in (*ARRAY_TYPES, "scalar"))
        stored = {entry.name: entry for entry in known if entry.name not in self._mixed_up}
        self._found = Item(part.store, tree).find_arrays(stored)
        scalars = [
            name
            for name, entry in stored.items()
            if entry.value_type == "scalar" and not self._found[name].zarr.shape
        ]
        paths = [self._path(stored[name]) for name in scalars]
        values = read_values([self._found[name] for name in scalars], paths)
        self._scalars = dict(zip(scalars, values, strict=True))
        has_text = any(entry.value_type == "string" for entry in tree.entries)
        self._strings = read_strings(part.store) if has_text else {}
        self._shardings = read_shardings(part.store)
        may_be_keys = {
            name
            for name, array in self._found.items()
            if array.zarr.dtype == "uint32" and array.zarr.shape[-1:] in ((2,), (4,))
        }
        self._impls = read_key_impls(part.store, may_be_keys)
        with malformed(part.store, METADATA):
            if part.is_leaf:
                self.encoded = self._encode(tree.entries[0])
            else:
                self.encoded = encode_tree(tree.entries, self._encode)

    def _path(self, entry: Entry) -> str:
        return self._above or ROOT if self._part.is_leaf else path_of(entry.keys, self._above)

    def _encode(self, entry: Entry) -> Any:
        """A leaf of the tree as JSON. An array is its number."""
        name = entry.name
        if name in self._mixed_up:
            others = [path_of(e.keys) for e in self._mixed_up[name] if e is not entry]
            why = f"Orbax wrote it to the same place as {name_few(others)}, so one of them is gone"
            self._to.lost[self._path(entry)] = why
            return None
        if entry.value_type == "string":
            return encode_scalar(as_text(self._strings[name]))
        if entry.value_type in ("None", "NamedTuple"):
            return None
        if name in self._scalars:
            return encode_scalar(self._scalars[name])
        if name not in self._found:
            why = f"it is of the kind {entry.value_type!r:.40}, which only its own handler can read"
            self._to.lost[self._path(entry)] = why
            return None
        return self._add_array(entry)

    def _add_array(self, entry: Entry) -> int:
        array = self._found[entry.name]
        shape, impl = array.zarr.shape, self._impls.get(entry.name)
        if impl is None and self._part.is_key:
            impl = "threefry2x32" if shape[-1:] == (2,) else "rbg"
        if impl is not None and shape[-1:] != (_KEY_WORDS.get(impl),):
            raise ValueError(f"{entry.name!r} has keys of the kind {impl!r:.40} in {list(shape)}")
        is_jax = entry.value_type == "jax.Array"
        kind = "key" if impl is not None else "jax" if is_jax else "numpy"
        self._to.leaves.append(
            LeafSpec(self._path(entry), kind, array.zarr.dtype, shape, prng=impl)
        )
        self._to.arrays.append(array)
        sharding = self._shardings.get(entry.name) if is_jax else None
        with malformed(self._part.store, SHARDING):
            parsed = None if sharding is None else parse_sharding(sharding)
        self._to.shardings.append((self._part.store, parsed))
        return len(self._to.leaves) - 1


def _id_of(found: OrbaxListing) -> str:
    """A digest of times and of OCDBT's random file names, which differ between saves."""
    digest = xxhash.xxh3_128(repr(sorted(map(str, found.about.items()))).encode())
    for part in found.parts:
        for name in (METADATA, MANIFEST):
            digest.update(read_if_there(part.store, name) or b"")
    return digest.hexdigest()


def _user(found: OrbaxListing) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True)
class About:
    """The metadata of an Orbax checkpoint besides its arrays."""

    writer: Mapping[str, Any]
    metrics: Mapping[str, Any]


def about_orbax(store: Store) -> About | None:
    """The metadata of a finished checkpoint, or None if Orbax wrote none. Needs no TensorStore.

    Raises CheckpointNotFound for an unfinished one, or Damaged.
    """
    found = find_parts(store)
    return None if found is None else About(_writer(found.about), found.metrics)


def open_orbax(store: Store) -> OrbaxSource | None:
    """Open the checkpoint in a store. Returns None if Orbax wrote none there.

    Raises CheckpointNotFound for an unfinished one, UnsupportedFormat, or Damaged.
    """
    found = find_parts(store)
    if found is None:
        return None
    source = OrbaxSource(store, found)
    source.refuse_changed_below()
    return source
