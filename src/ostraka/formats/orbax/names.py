"""Is this Orbax's? The names of Orbax's files answer it. No JAX."""

from __future__ import annotations

from collections.abc import Sequence

from ostraka.formats.source import names_in
from ostraka.storage import Store

METADATA = "_METADATA"
STEP_METADATA = "_CHECKPOINT_METADATA"
COMMITTED = "commit_success.txt"
MANIFEST = "manifest.ocdbt"
SHARDING = "_sharding"
STRINGS = "_strings.json"
ARRAY_METADATAS = "array_metadatas"
OCDBT_OF_PROCESS = "ocdbt.process_"
TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of the name of an unfinished save."""
DEFAULT_ITEM = "default"
"""Folder of the only item of a step."""

SMALL_FILES = frozenset(
    {METADATA, STEP_METADATA, COMMITTED, SHARDING, STRINGS, ".zarray", "zarr.json"}
)
"""Files without bytes of arrays."""
_OF_A_STEP = frozenset({STEP_METADATA, COMMITTED})
_ORBAX_ALONE = _OF_A_STEP | {SHARDING, MANIFEST, ARRAY_METADATAS}

ORBAX_KEY = "ostraka.orbax"
"""Key in `Saved.user` of a checkpoint that `ostraka.compat.orbax` saved in Ostraka's format."""


def has_orbax_names(names: Sequence[str]) -> bool:
    """True if Orbax wrote a directory with these names: a checkpoint, or an item of one."""
    return any(name in _ORBAX_ALONE or name.startswith(OCDBT_OF_PROCESS) for name in names)


def is_orbax(names: Sequence[str]) -> bool:
    """True if names are those of an Orbax checkpoint, finished or not.

    Steps before Orbax 0.6 have only the folders of their items, and count if the item has the usual
    name. `is_step` also looks into that folder.
    """
    return not _OF_A_STEP.isdisjoint(names) or [*names] == [DEFAULT_ITEM]


def is_step(store: Store, names: Sequence[str]) -> bool:
    """True if a directory with these names is an Orbax checkpoint, finished or not."""
    if not _OF_A_STEP.isdisjoint(names):
        return True
    return DEFAULT_ITEM in names and METADATA in names_in(store.at(DEFAULT_ITEM))
