"""Safetensors files and Hugging Face directories as a source. No JAX.

The tree is a flat dict of tensors, under their names in the files. `reading.view.renamed` turns it
into a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import xxhash

from ostraka.common.threads import StopSignal, run_all
from ostraka.formats.safetensors.files import NAMES, Tensor, TensorFile, TensorListing, find_files
from ostraka.formats.source import CONFIG, OnBytes, Saved, StoredBox, StoredFile
from ostraka.formats.source_files import Sampling, digest_of_states, refuse_changed, sample
from ostraka.layout.box import full
from ostraka.layout.spec import LeafSpec, Target
from ostraka.storage import Store
from ostraka.tree.nodes import ArrayNumber, Node, UnreadableLeaf, escape, flat_tree, natural_order

if TYPE_CHECKING:
    import numpy as np


class SafetensorsSource:
    """A safetensors file, or a directory of them."""

    def __init__(self, store: Store, found: TensorListing):
        self.store = store
        self.location = found.location
        self.reads_whole_rows = store.traits.is_remote
        self.found = found
        self._tensors: list[tuple[TensorFile, Tensor]] = []
        """The tensors, by number, each with its file."""
        names: list[str] = []
        leaves: list[LeafSpec] = []
        values: dict[str, tuple[str, Any]] = {}
        for name in sorted(found.file_of, key=natural_order):
            file = found.files[found.file_of[name]]
            tensor = file.tensors[name]
            path, dtype = escape(name), NAMES.get(tensor.code)
            if dtype is None:
                why = f"it is of the dtype {tensor.code}, which Ostraka does not know"
                values[path] = name, UnreadableLeaf(why, tensor.shape)
                continue
            values[path] = name, ArrayNumber(len(leaves))
            names.append(name)
            self._tensors.append((file, tensor))
            leaves.append(LeafSpec(path, "jax", dtype, tensor.shape, uncommitted=True))
        self.tree = flat_tree(values)
        version = (found.config or {}).get("transformers_version")
        library = "a program that writes safetensors"
        if isinstance(version, str):
            library = f"transformers {version[:40]}"
        self.saved = Saved(
            id=_id_of(found),
            tree={"dict": names, "items": [*range(len(names))]},
            leaves=tuple(leaves),
            user={} if found.config is None else {CONFIG: found.config},
            writer={"library": library},
        )

    @property
    def header_bytes(self) -> int:
        """The bytes of all headers, without the index and config.json."""
        return sum(file.header_bytes for file in self.found.files)

    def tree_for(self, like: Node) -> Node:
        return self.tree

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        from ostraka.formats.safetensors._read import TensorReader  # with numpy

        reader = TensorReader(self.store, self._tensors, self.saved.leaves, targets)
        return reader.run(on_bytes or (lambda nbytes: None))

    def order(self) -> list[int]:
        places = [(file.name, tensor.start) for file, tensor in self._tensors]
        return sorted(range(len(places)), key=lambda number: (places[number], number))

    def grid_of(self, leaf: int) -> tuple[int, ...]:
        return (1,) * len(self.saved.leaves[leaf].shape)

    def files_of(self, leaf: int) -> list[str]:
        return [self._tensors[leaf][0].name]

    def boxes_of(self, leaf: int) -> list[StoredBox]:
        file, tensor = self._tensors[leaf]
        box = full(self.saved.leaves[leaf].shape)
        return [StoredBox(box, file.name, 0, tensor.start, tensor.nbytes, tensor.nbytes)]

    def files(self) -> list[StoredFile]:
        return [StoredFile(file.name, file.size) for file in self.found.files]

    def is_current(self) -> bool:
        with suppress(OSError, ValueError):
            found = find_files(self.store)
            return found is not None and _states(found) == _states(self.found)
        return False

    @property
    def version(self) -> str:
        return digest_of_states(_states(self.found))

    def samples(self, how: Sampling = "by version") -> list[tuple[str, str]]:
        def look(file: TensorFile) -> tuple[str, str]:
            parts = [(tensor.start, tensor.nbytes) for tensor in file.tensors.values()]
            found = sample(file.opened, file.size, parts, how)
            return file.name, f"{file.size} {file.header_digest} {found}"

        threads = self.store.traits.reads_at_once
        found = run_all(look, self.found.files, threads=threads, stop=StopSignal())
        refuse_changed(file.opened for file in self.found.files)
        return found


def _states(found: TensorListing) -> list[tuple[str, Any]]:
    states = [(f.name, (f.size, f.opened.state, f.header_digest)) for f in found.files]
    return [*states, *((name, file.state) for name, file in found.beside.items())]


def _id_of(found: TensorListing) -> str:
    """An id that is equal for copies of the same files, so that each host may download its own."""
    described = [(file.name, file.size, file.header_digest) for file in found.files]
    return xxhash.xxh3_128_hexdigest(repr(described).encode())


def open_safetensors(store: Store) -> SafetensorsSource | None:
    """Open the safetensors files at a path. Returns None if there are none.

    Raises Damaged or UnsupportedFormat.
    """
    found = find_files(store)
    return None if found is None else SafetensorsSource(store, found)
