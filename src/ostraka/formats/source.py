"""The protocol of an opened checkpoint of any format. No JAX.

`open`, `restore`, `show`, `diff`, `plan` and all other readers of arrays use only this protocol.
Each format implements it in a folder of `formats/`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ostraka.formats.source_files import Sampling
from ostraka.layout.box import Box
from ostraka.layout.spec import LeafSpec, MeshSpec, Target
from ostraka.storage import Store
from ostraka.tree.nodes import Branch, Leaf

if TYPE_CHECKING:
    import numpy as np

OnBytes = Callable[[int], None]
"""Called with the number of bytes read since the last call."""

CONFIG = "config"
"""Key in `Saved.user` of Hugging Face files: the model's config.json."""


_NO_ANSWER = (errno.EHOSTUNREACH, errno.EAGAIN, errno.EPROTO)
"""Errors of a store that did not answer, or was in trouble."""


def names_in(store: Store) -> list[str]:
    """The names in a directory. Empty if it does not exist or can't be listed.

    Raises StoreError if a store did not answer.
    """
    try:
        return store.list()
    except OSError as error:
        if error.errno in _NO_ANSWER:
            raise
        return []


def shortest_range_bytes(store: Store) -> int:
    """Shorter ranges are read together with the gaps between them: in buckets each is a request."""
    return 1 << 20 if store.traits.is_remote else 256


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved tree: everything but the location of its bytes."""

    id: str
    """Differs between any two saves."""
    tree: Any
    """The tree as JSON, as docs/reference/format.md describes."""
    leaves: tuple[LeafSpec, ...]
    """The arrays. The tree refers to them by number."""
    meshes: tuple[MeshSpec, ...] = ()
    process_of: tuple[int, ...] = (0,)
    """The process of each device of the run that saved."""
    user: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The caller's `metadata`."""
    writer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The library and versions that wrote it, and the time."""
    seen: Saved | None = None
    """The contents of the files, if this is a view of them."""

    @property
    def process_count(self) -> int:
        return max(self.process_of, default=0) + 1

    @property
    def in_files(self) -> Saved:
        """The contents of the files, without any views."""
        return self if self.seen is None else self.seen.in_files


class StoredFile(NamedTuple):
    """A file that holds bytes of arrays, or parity of such files."""

    name: str
    nbytes: int
    device: int | None = 0
    """The number of the device whose shards it holds, or None for parity."""
    process: int = 0


class StoredBox(NamedTuple):
    """The location of a box of a leaf."""

    box: Box
    file: str
    process: int
    offset: int
    nbytes: int
    stored_bytes: int
    """Fewer than `nbytes` if it is compressed."""


class Source(Protocol):
    """An opened checkpoint."""

    store: Store
    location: str
    """Its name in messages."""
    saved: Saved
    reads_whole_rows: bool
    """True if reading a part of each row costs as much as reading whole rows."""

    @property
    def tree(self) -> Branch | Leaf:
        """The tree that was saved, decoded. Array leaves hold their number."""
        ...

    def tree_for(self, like: Branch | Leaf) -> Branch | Leaf:
        """The same tree with the paths of a parsed template.

        Formats that save all of a tree return `tree` itself.
        """
        ...

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Yield the number and the elements of each target, as soon as it is complete.

        A target with a `dtype` is cast to it as its bytes arrive, so memory holds only a few chunks
        in the saved dtype. A source whose boxes are small may leave the cast to its caller.

        Arrays are fresh memory, aligned to 64 bytes, and the source never writes to them again.
        Small arrays may share one piece of memory. Raises Damaged, naming the file and the leaves,
        for missing or corrupt bytes.

        A format without checksums compares the versions of its files after the last target, and
        may raise SourceChanged. So use arrays only once the iterator has ended.
        """
        ...

    def order(self) -> Sequence[int]:
        """The numbers of all leaves, in the order of reading.

        All processes of a run get the same order.
        """
        ...

    def grid_of(self, leaf: int) -> tuple[int, ...]:
        """The number of parts along each dimension of a leaf. A part lies in one file."""
        ...

    def files_of(self, leaf: int) -> Sequence[Any]:
        """The file of each part of `grid_of`, in row-major order.

        Files are sortable values of any kind, equal for parts in the same file.
        """
        ...

    def boxes_of(self, leaf: int) -> Sequence[StoredBox]:
        """The locations of the boxes of a leaf, in the order of the boxes."""
        ...

    def files(self) -> Sequence[StoredFile]:
        """The files that hold arrays."""
        ...

    def is_current(self) -> bool:
        """True if the checkpoint at this path is still the opened one."""
        ...

    @property
    def version(self) -> str:
        """A text that differs between two states of the files. Empty if the id does so already.

        Two hosts, or two copies, may have different versions of the same bytes.
        """
        ...

    def samples(self, how: Sampling = "by version") -> Sequence[tuple[str, str]]:
        """The name of each file and a digest of some of its bytes, the same on all hosts.

        Empty if the id identifies the bytes.
        """
        ...
