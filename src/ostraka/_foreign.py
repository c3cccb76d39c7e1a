"""What is at a path that is no checkpoint of ours, in words that say what to do. No JAX."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ostraka import _format
from ostraka._step_names import list_steps, step_of, steps_among
from ostraka.errors import CheckpointNotFound, NotACheckpoint, UnsupportedFormat, nearest
from ostraka.storage import LocalStore, Store, open_store

_MOST_NAMES = 100
"""So many names of a directory are looked into, so that a sentence does not take a minute."""
_ORBAX_NAMES = frozenset(
    {"_CHECKPOINT_METADATA", "_sharding", "manifest.ocdbt", "array_metadatas", "commit_success.txt"}
)
_SAFETENSORS = ".safetensors"
_MAX_HEADER_BYTES = 100_000_000


def not_a_checkpoint(store: Store) -> CheckpointNotFound | NotACheckpoint:
    """Of a place where no format knows a checkpoint."""
    try:
        store.get(_format.METADATA_NAME)
    except FileNotFoundError:
        return _nothing_there(store)
    return _foreign_metadata(store)


def looks_like_ours(store: Store, data: bytes) -> bool:
    """Whether a `_METADATA` that can't be read was probably written by a save."""
    named = any(_format.is_shards_directory(name) for name in store.list() or [])
    return named or data.startswith(b'{"format":"ostraka"')


def _foreign_metadata(store: Store) -> NotACheckpoint:
    """Of a directory whose `_METADATA` is not ours."""
    names = store.list() or []
    if is_orbax(names):
        return _orbax(store.location, "is an Orbax checkpoint, not an Ostraka checkpoint")
    return NotACheckpoint(
        f"{store.location} is not an Ostraka checkpoint: its {_format.METADATA_NAME} was "
        "written by something else"
    )


def _nothing_there(store: Store) -> CheckpointNotFound | NotACheckpoint:
    """Of a place without `_METADATA`: the likely cause, and what to give instead."""
    names = store.list()
    if not names and not store.exists():
        return _no_directory(store)
    where = store.location
    if any(_format.is_shards_directory(name) for name in names):
        return CheckpointNotFound(
            f"there is no checkpoint at {where}: a save to it never finished, or its "
            f"{_format.METADATA_NAME} is lost"
        )
    return _something_else(store, names) or CheckpointNotFound(
        f"there is no checkpoint at {where}: the directory {_what_is_lacking(names)}"
        f"{_suggest_below(store, names)}"
    )


def is_committed(store: Store) -> bool:
    """Whether a save to a place has been committed, by us or by something else."""
    return _format.METADATA_NAME in names_in(store)


def names_in(store: Store) -> list[str]:
    """The names in a place; none where there is none, or it may not be looked into."""
    try:
        return store.list()
    except OSError:
        return []


def is_orbax(names: Sequence[str]) -> bool:
    """Whether the names in a directory are those that Orbax writes."""
    return any(name in _ORBAX_NAMES or name.startswith("ocdbt.process_") for name in names)


# A directory without `_METADATA`


def _what_is_lacking(names: Sequence[str]) -> str:
    if not names:
        return f"is empty, it has no {_format.METADATA_NAME}"
    return f"has no {_format.METADATA_NAME}, and there are no steps in it"


def _something_else(store: Store, names: Sequence[str]) -> NotACheckpoint | None:
    where = store.location
    if is_orbax(names):
        return _orbax(where, "is a step or an item of an Orbax checkpoint")
    if any(is_orbax(names_in(store.at(name))) for name in names[:_MOST_NAMES]):
        return _orbax(where, "holds Orbax checkpoints, and none of Ostraka")
    if any(name.endswith(_SAFETENSORS) for name in names):
        return NotACheckpoint(
            f"{where} holds safetensors files, as Hugging Face publishes them, and no Ostraka "
            "checkpoint; reading these is to come: load them with the safetensors package, and "
            "write the arrays with ostraka.save"
        )
    return None


def _orbax(where: str, what: str) -> NotACheckpoint:
    return NotACheckpoint(
        f"{where} {what}; reading these is to come: restore it with Orbax, and write the result "
        "with ostraka.save"
    )


def _suggest_below(store: Store, names: Sequence[str]) -> str:
    found = [name for name in names[:_MOST_NAMES] if is_committed(store.at(name))]
    return f"; did you mean {store.location}/{found[-1]}?" if found else ""


# No directory


def _no_directory(store: Store) -> CheckpointNotFound | NotACheckpoint:
    where = store.location
    if isinstance(store, LocalStore) and os.path.exists(where):
        return _file(where)
    hint = _hint_beside(where)
    return CheckpointNotFound(
        f"there is no checkpoint at {where}: there is no such directory{hint}"
    )


def _hint_beside(where: str) -> str:
    """The steps beside a step that is not there, or the name that is most like it."""
    above, _, name = where.rpartition("/")
    if not above or above.endswith(":/"):
        return ""
    try:
        root = open_store(above)
    except UnsupportedFormat:  # The place of a store that was given as such: no path leads there.
        return ""
    names = names_in(root)
    steps = [
        step
        for step, found in steps_among(names).items()
        if any(is_committed(root.at(one)) for one in found)
    ]
    if steps and step_of(name) is not None:
        return f"; the steps in {above} are {list_steps(steps)}"
    return nearest(name, names[:_MOST_NAMES])


def _file(where: str) -> NotACheckpoint:
    above, name = os.path.split(where)
    if _format.is_shards_directory(os.path.basename(above)):
        above, name = os.path.dirname(above), _format.METADATA_NAME
    if name == _format.METADATA_NAME:
        return NotACheckpoint(
            f"{where} is a file, not a checkpoint directory: it is a part of {above}; give that"
        )
    if os.path.isfile(where) and _is_safetensors(where):  # to open a pipe would take for ever
        return NotACheckpoint(
            f"{where} is a safetensors file, not a checkpoint directory; reading these is to come: "
            "load it with the safetensors package, and write the arrays with ostraka.save"
        )
    return NotACheckpoint(
        f"{where} is a file, not a checkpoint directory; give the directory that a save was given"
    )


def _is_safetensors(path: str) -> bool:
    """Whether a file begins with a length and a JSON object, as these do."""
    try:
        with open(path, "rb") as file:
            start = file.read(9)
    except OSError:
        return path.endswith(_SAFETENSORS)
    return start[8:] == b"{" and 1 < int.from_bytes(start[:8], "little") <= _MAX_HEADER_BYTES
