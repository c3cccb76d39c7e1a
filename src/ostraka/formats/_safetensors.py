"""Safetensors files, and the directories that Hugging Face publishes, as a source. No JAX.

The tree is a flat dict of tensors, under the names that the files have; `_view.renamed` makes a
model of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import xxhash

from ostraka._box import full
from ostraka._document import encode
from ostraka._nodes import ArrayNumber, Branch, Leaf, Lost, Node, dict_builder, escape
from ostraka._source import CONFIG, OnBytes, Saved, StoredBox, StoredFile
from ostraka._spec import LeafSpec, Target
from ostraka.formats._safetensors_files import Found, TensorFile, find_files
from ostraka.formats._safetensors_header import NAMES, Tensor
from ostraka.storage import Store

if TYPE_CHECKING:
    import numpy as np


class SafetensorsSource:
    """A safetensors file, or a directory of them."""

    def __init__(self, store: Store, found: Found):
        self.store = store
        self.found = found
        self._numbers: dict[str, int] = {}
        self._tensors: list[tuple[TensorFile, Tensor]] = []
        """By number."""
        self._lost: dict[str, Lost] = {}
        leaves: list[LeafSpec] = []
        for name in sorted(found.file_of, key=_natural):
            file = found.files[found.file_of[name]]
            tensor = file.tensors[name]
            dtype = NAMES.get(tensor.code)
            if dtype is None:
                why = f"it is of the dtype {tensor.code}, which Ostraka does not know"
                self._lost[name] = Lost(why, tensor.shape)
                continue
            self._numbers[name] = len(leaves)
            self._tensors.append((file, tensor))
            leaves.append(LeafSpec(escape(name), "jax", dtype, tensor.shape, uncommitted=True))
        numbers = {leaf.path: number for number, leaf in enumerate(leaves)}
        self.saved = Saved(
            id=_id_of(found),
            tree=encode(self._arrays_alone(), numbers, {}),
            leaves=tuple(leaves),
            user={} if found.config is None else {CONFIG: found.config},
            writer={"library": _library(found)},
        )

    @property
    def location(self) -> str:
        return self.found.location

    @property
    def header_bytes(self) -> int:
        """What was read to open it, but for its index and config.json."""
        return sum(file.header_bytes for file in self.found.files)

    @property
    def tree(self) -> Node:
        return self._tree

    @cached_property
    def _tree(self) -> Branch:
        names = sorted(self.found.file_of, key=_natural)
        children = tuple(
            Leaf(
                escape(name),
                self._lost[name] if name in self._lost else ArrayNumber(self._numbers[name]),
            )
            for name in names
        )
        return Branch("dict", "", children, dict_builder(names), names)

    def _arrays_alone(self) -> Branch:
        names = list(self._numbers)
        children = tuple(Leaf(escape(name), ArrayNumber(n)) for name, n in self._numbers.items())
        return Branch("dict", "", children, dict_builder(names), names)

    def tree_for(self, like: Node) -> Node:
        return self._tree

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        from ostraka.formats._safetensors_read import read_tensors  # with numpy

        return read_tensors(self.store, self._tensors, self.saved.leaves, targets, on_bytes)

    def order(self) -> list[int]:
        places = [(file.name, tensor.start) for file, tensor in self._tensors]
        return sorted(range(len(places)), key=lambda number: (places[number], number))

    @property
    def reads_whole_rows(self) -> bool:
        return self.store.parts.is_remote

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
        try:
            found = find_files(self.store)
        except (OSError, ValueError):
            return False
        return found is not None and _versions(found) == _versions(self.found)


def _versions(found: Found) -> list[Any]:
    return [(file.name, file.size, file.version, file.header_digest) for file in found.files]


def _id_of(found: Found) -> str:
    """The same for copies on several hosts, each of which may have downloaded its own."""
    described = [(file.name, file.size, file.header_digest) for file in found.files]
    return xxhash.xxh3_128_hexdigest(repr(described).encode())


def _library(found: Found) -> str:
    version = (found.config or {}).get("transformers_version")
    if isinstance(version, str):
        return f"transformers {version[:40]}"
    return "a program that writes safetensors"


_NUMBER = re.compile(r"([0-9]{1,9})")


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Numbers in names by their value: layer 2 before layer 10."""
    parts = _NUMBER.split(name)
    return [(0, int(part), "") if n % 2 else (1, 0, part) for n, part in enumerate(parts)]


def open_safetensors(store: Store) -> SafetensorsSource | None:
    """Open the safetensors files at a place; None if there are none.

    Raises Damaged or UnsupportedFormat.
    """
    found = find_files(store)
    return None if found is None else SafetensorsSource(store, found)
