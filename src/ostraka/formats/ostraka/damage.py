"""The sentences about damage, which is bytes that are lost or corrupt. No JAX.

Each sentence completes "FILE: …". `Problem.found` and the text of `BytesLost` are such sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

from ostraka.common.dtypes import DTYPES
from ostraka.errors import Damaged, LostBox, OstrakaError, Problem, StoreError, UnsupportedFormat
from ostraka.layout import box as _box
from ostraka.layout import shard_file
from ostraka.layout.metadata import Metadata
from ostraka.layout.shard_file import METADATA_NAME, Block, Entry
from ostraka.layout.spec import StoredLeaf
from ostraka.storage import Store

MISSING = "it is missing"
NOT_AS_WRITTEN = "its digest is not the one that was written"
NOT_THE_COPY = f"it is not the copy of {METADATA_NAME} that was written"


def other_size(found: int, written: int) -> str:
    return f"it has {found:,} bytes where {written:,} were written"


def ends_at(byte: int) -> str:
    return f"it ends at byte {byte:,}"


def block_bytes(block: Block) -> str:
    """The bytes of a block in words, for a sentence about them."""
    return f"bytes {block.file_start:,} to {block.file_stop:,}"


def not_as_written(block: Block) -> str:
    if block.file_start == 0:
        return "its header is not as it was written"
    return f"{block_bytes(block)} are not as they were written"


def loss_of(error: OSError) -> str | None:
    """The sentence for a file or bytes that the store has lost, or None for other errors."""
    if isinstance(error, FileNotFoundError):
        return MISSING
    return error.loss if isinstance(error, StoreError) else None


class BytesLost(Exception):
    """Bytes of a file can't be read, or don't match their digests. The text says why."""


def damaged(store: Store, name: str, found: str, leaves: tuple[str, ...] = ()) -> Damaged:
    """The error for one file of the checkpoint in a store."""
    return Damaged(store.location, [Problem(name, found, leaves)])


@contextmanager
def damage_on_loss(error_for: Callable[[str], Exception]) -> Generator[None]:
    """Raise `error_for(sentence)` for bytes that the store has lost."""
    try:
        yield
    except OSError as error:
        loss = loss_of(error)
        if loss is None:
            raise
        raise error_for(loss) from error


@contextmanager
def damage_on_contradiction(store: Store) -> Generator[None]:
    """Raise Damaged where `_METADATA` contradicts itself, and name the checkpoint in any error."""
    try:
        yield
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"can't read {store.location}: {error}") from error
    except OstrakaError:
        raise
    except ValueError as error:
        raise damaged(store, METADATA_NAME, f"it contradicts itself: {error}") from error


def check_metadata_copy(store: Store, metadata: Metadata) -> None:
    """Raise Damaged if the second copy of `_METADATA` has other bytes.

    A missing copy is no damage, since older checkpoints have none. Nor is one that ends early,
    perhaps in zeros: the copy is not synced, so a crash may truncate it. Only `repair` reads it.
    """
    name = f"{shard_file.shards_directory(metadata.id)}/{shard_file.METADATA_COPY}"
    with damage_on_loss(lambda found: damaged(store, name, found)):
        try:
            found = store.get(name).rstrip(b"\0")
        except FileNotFoundError:
            return
    if not store.get(METADATA_NAME).startswith(found):
        raise damaged(store, name, NOT_THE_COPY)


def boxes_between(
    leaves: Sequence[StoredLeaf], entries: Iterable[Entry], start: int, stop: int
) -> tuple[LostBox, ...]:
    """The part of each leaf in `[start, stop)` of a file's data."""
    found: list[LostBox] = []
    for leaf, box, offset, nbytes in entries:
        first, last = max(start, offset) - offset, min(stop, offset + nbytes) - offset
        if first >= last:
            continue
        spec = leaves[leaf].spec
        bits = DTYPES[spec.dtype].bits
        last_element = min(-(-last * 8 // bits), _box.count(box))
        lost = _box.around_span(first * 8 // bits, last_element, box)
        found.append(LostBox(spec.path, lost, spec.shape))
    return tuple(found)
