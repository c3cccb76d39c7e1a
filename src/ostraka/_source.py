"""What a checkpoint of any format gives its readers: what was saved, and its bytes. No JAX.

`open`, `restore`, `show`, `diff`, `plan` and all that reads arrays know a checkpoint only by this
protocol. Each format implements it in a file of `formats/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ostraka._box import Box
from ostraka._nodes import Branch, Leaf
from ostraka._spec import LeafSpec, MeshSpec, Target
from ostraka.storage import Store

if TYPE_CHECKING:
    import numpy as np

OnBytes = Callable[[int], None]
"""Told how many bytes have been read since it was last called."""

CONFIG = "config"
"""In `Saved.user` of what Hugging Face's files hold: the model's config.json."""


_SHORT_BYTES = 256
_SHORT_REMOTE_BYTES = 1 << 20


def shortest_range_bytes(store: Store) -> int:
    """Ranges that are shorter are read with what lies between; in buckets each costs a request."""
    return _SHORT_REMOTE_BYTES if store.parts.is_remote else _SHORT_BYTES


@dataclass(frozen=True, slots=True)
class Saved:
    """What was saved: everything but where the bytes lie."""

    id: str
    """Differs between any two saves."""
    tree: Any
    """The tree as JSON; docs/format.md says how."""
    leaves: tuple[LeafSpec, ...]
    """The arrays; the tree has their numbers."""
    meshes: tuple[MeshSpec, ...] = ()
    process_of: tuple[int, ...] = (0,)
    """The process of each device of the run that saved."""
    user: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the caller gave as `metadata`."""
    writer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What wrote it, and when."""

    @property
    def process_count(self) -> int:
        return max(self.process_of, default=0) + 1


class StoredFile(NamedTuple):
    """A file that holds bytes of arrays, or parity of such files."""

    name: str
    nbytes: int
    device: int | None = 0
    """The number of the device whose shards it holds; None for parity."""
    process: int = 0


class StoredBox(NamedTuple):
    """Where a box of a leaf lies."""

    box: Box
    file: str
    process: int
    offset: int
    nbytes: int
    stored_bytes: int
    """Fewer than `nbytes` if it is compressed."""


class Source(Protocol):
    """An opened checkpoint."""

    @property
    def store(self) -> Store: ...

    @property
    def location(self) -> str:
        """What to call it in messages."""
        ...

    @property
    def saved(self) -> Saved: ...

    @property
    def tree(self) -> Branch | Leaf:
        """The tree that was saved, decoded; array leaves hold their number."""
        ...

    def tree_for(self, like: Branch | Leaf) -> Branch | Leaf:
        """The same tree with its paths as a parsed template has them.

        That is `tree` itself for a format that keeps all of a tree.
        """
        ...

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """The number and the elements of each target, as soon as all of it is there.

        A target with a `dtype` is cast to it as its bytes arrive, so that no more of it is in
        memory as it was saved than is just being read. A source whose boxes are small may leave
        that to its caller.

        Arrays are fresh memory, aligned to 64 bytes, and written to by nobody once they are handed
        out; small ones may be parts of one larger piece of memory. Raises Damaged, naming the file
        and the leaves, for bytes that are missing or not as written.
        """
        ...

    def order(self) -> Sequence[int]:
        """The numbers of all leaves, in the order in which `read` comes to them.

        The same for all processes of a run.
        """
        ...

    def grid_of(self, leaf: int) -> tuple[int, ...]:
        """Into how many parts each dimension of a leaf is cut; a part lies in one file."""
        ...

    @property
    def reads_whole_rows(self) -> bool:
        """Whether it reads as much for a part of each row as for all of the rows."""
        ...

    def files_of(self, leaf: int) -> Sequence[Any]:
        """For each of these parts, in row-major order, the file that it lies in.

        Values of any kind that can be sorted, equal for parts that lie in the same file.
        """
        ...

    def boxes_of(self, leaf: int) -> Sequence[StoredBox]:
        """Where the boxes of a leaf lie, in the order of the boxes."""
        ...

    def files(self) -> Sequence[StoredFile]:
        """The files that hold arrays."""
        ...

    def is_current(self) -> bool:
        """Whether the checkpoint at this place is still the one that was opened."""
        ...
