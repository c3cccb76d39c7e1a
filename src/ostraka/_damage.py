"""What is said of damage: bytes that are lost, or not as they were written. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from ostraka import _format
from ostraka._format import METADATA_NAME
from ostraka._metadata import Metadata
from ostraka.errors import Damaged, OstrakaError, Problem, StoreError, UnsupportedFormat
from ostraka.storage import Store

NOT_AS_WRITTEN = "its digest is not the one that was written"


@contextmanager
def damage_on_loss(damaged: Callable[[str], Damaged]) -> Generator[None]:
    """Raise Damaged for bytes that the store can't give any more."""
    try:
        yield
    except FileNotFoundError as error:
        raise damaged("it is missing") from error
    except StoreError as error:
        if error.loss is None:
            raise
        raise damaged(error.loss) from error


@contextmanager
def damage_on_contradiction(store: Store) -> Generator[None]:
    """Raise Damaged where `_METADATA` contradicts itself, and say where the checkpoint is."""
    try:
        yield
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"can't read {store.location}: {error}") from error
    except OstrakaError:
        raise
    except ValueError as error:
        raise damaged(store, METADATA_NAME, f"it contradicts itself: {error}") from error


def damaged(store: Store, name: str, found: str, leaves: tuple[str, ...] = ()) -> Damaged:
    return Damaged(store.location, [Problem(name, found, leaves)])


def check_metadata_copy(store: Store, metadata: Metadata) -> None:
    """Raise Damaged if the second copy of `_METADATA` has something else in it.

    That it is missing or ends early, perhaps in zeros, is no damage: older checkpoints have none,
    and it is not synced, so that a crash of the machine may take it. Nothing but `repair` reads it.
    """
    name = f"{_format.shards_directory(metadata.id)}/{_format.METADATA_COPY}"
    try:
        found = store.get(name).rstrip(b"\0")
    except FileNotFoundError:
        return
    except StoreError as error:
        if error.loss is None:
            raise
        raise damaged(store, name, error.loss) from error
    if not store.get(METADATA_NAME).startswith(found):
        raise damaged(store, name, f"it is not the copy of {METADATA_NAME} that was written")


def other_size(found: int, written: int) -> str:
    return f"it has {found:,} bytes where {written:,} were written"
