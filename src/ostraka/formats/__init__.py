"""The formats that Ostraka reads, one folder each.

A format is a function that opens the checkpoint in a store. It returns None for other formats, and
raises if it can't read a checkpoint of its own. To add one, write it and list it here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ostraka.formats.orbax.files import is_finished
from ostraka.formats.orbax.files import version_of_orbax as version_of_orbax
from ostraka.formats.orbax.names import ORBAX_KEY
from ostraka.formats.orbax.names import is_orbax as is_orbax
from ostraka.formats.orbax.source import about_orbax as about_orbax
from ostraka.formats.orbax.source import open_orbax
from ostraka.formats.orbax.tree import fit_to
from ostraka.formats.ostraka.source import open_ostraka
from ostraka.formats.safetensors.source import open_safetensors
from ostraka.formats.source import Source, names_in
from ostraka.formats.unknown import not_a_checkpoint
from ostraka.layout.shard_file import METADATA_NAME, is_shards_directory
from ostraka.storage import Store


def _open_own(store: Store) -> Source | None:
    source = open_ostraka(store)
    if source is not None and ORBAX_KEY in source.saved.user:
        source.fit = fit_to  # Its tree has only the containers that Orbax would have kept.
    return source


FORMATS: list[Callable[[Store], Source | None]] = [_open_own, open_orbax, open_safetensors]


def open_source(store: Store) -> Source:
    """Open the checkpoint in a store.

    Raises CheckpointNotFound, NotACheckpoint, UnsupportedFormat or Damaged.
    """
    for open_format in FORMATS:
        source = open_format(store)
        if source is not None:
            return source
    raise not_a_checkpoint(store)


def is_checkpoint(names: Sequence[str]) -> bool:
    """True if a directory with these names is a checkpoint of any format, finished or not."""
    return METADATA_NAME in names or any(map(is_shards_directory, names)) or is_orbax(names)


def has_finished_checkpoint(store: Store) -> bool:
    """True if the directory has a finished checkpoint of any format."""
    names = names_in(store)
    return is_finished(store, names) if is_orbax(names) else METADATA_NAME in names


def is_finished_orbax(store: Store) -> bool:
    """True if the directory is a finished Orbax checkpoint."""
    names = names_in(store)
    return is_orbax(names) and is_finished(store, names)
