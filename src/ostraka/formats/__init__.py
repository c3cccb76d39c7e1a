"""The formats that can be read, one file each.

A format is a function that opens the checkpoint in a store; it returns None for what is not in this
format, and raises for what is and can't be read. To add one, write it and list it here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ostraka._foreign import names_in, not_a_checkpoint
from ostraka._format import METADATA_NAME, is_shards_directory
from ostraka._source import Source
from ostraka.formats._orbax import open_orbax
from ostraka.formats._orbax_items import is_finished, is_orbax
from ostraka.formats._ostraka import open_ostraka
from ostraka.formats._safetensors import open_safetensors
from ostraka.storage import Store

FORMATS: list[Callable[[Store], Source | None]] = [open_ostraka, open_orbax, open_safetensors]


def open_source(store: Store) -> Source:
    """Open the checkpoint in a store.

    Raises CheckpointNotFound, NotACheckpoint, UnsupportedFormat or Damaged, each a sentence.
    """
    for open_format in FORMATS:
        source = open_format(store)
        if source is not None:
            return source
    raise not_a_checkpoint(store)


def is_checkpoint(names: Sequence[str]) -> bool:
    """Whether a place with these names is a checkpoint of any format; it may be unfinished."""
    return METADATA_NAME in names or any(map(is_shards_directory, names)) or is_orbax(names)


def has_finished_checkpoint(store: Store) -> bool:
    """Whether a save to a place has been finished, in any format."""
    names = names_in(store)
    return is_finished(store, names) if is_orbax(names) else METADATA_NAME in names


def is_finished_orbax(store: Store) -> bool:
    """Whether a place is a checkpoint that Orbax has finished."""
    names = names_in(store)
    return is_orbax(names) and is_finished(store, names)
