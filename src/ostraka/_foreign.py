"""What is at a path that is no checkpoint of ours, in words that say what to do. No JAX."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import closing

from ostraka._foreign_files import LIKELY_NAMES, START_BYTES, describe_file
from ostraka._format import METADATA_NAME, is_shards_directory
from ostraka._step_names import list_steps, step_of, steps_among
from ostraka.errors import CheckpointNotFound, NotACheckpoint, nearest
from ostraka.storage import LocalStore, Store, open_above

_MOST_NAMES = 100
"""So many names of a directory are looked into, so that a sentence does not take a minute."""
_NO_ANSWER = (errno.EHOSTUNREACH, errno.EAGAIN, errno.EPROTO)
"""What a refusal of a store has that could not be asked, or was in trouble."""
_ORBAX_NAMES = frozenset(
    {"_CHECKPOINT_METADATA", "_sharding", "manifest.ocdbt", "array_metadatas", "commit_success.txt"}
)
_MAX_HEADER_BYTES = 100_000_000
"""What the safetensors package accepts."""


def not_a_checkpoint(store: Store) -> CheckpointNotFound | NotACheckpoint:
    """Of a place where no format knows a checkpoint: the likely cause, and what to give instead."""
    where = store.location
    names = store.list()
    is_directory = len(names) > 0 or store.exists()
    if is_directory:
        found = _something_else(store, names)
    else:
        start = _start_of_file(store)
        found = None if start is None else _file(where, start)
    if found is not None:
        return NotACheckpoint(f"{where} {found}")
    if not is_directory:
        why = f"there is no such directory{_hint_beside(store)}"
    elif any(map(is_shards_directory, names)):
        why = f"a save to it never finished, or its {METADATA_NAME} is lost"
    elif not names:
        why = f"the directory is empty, it has no {METADATA_NAME}"
    else:
        below = [name for name in names[:_MOST_NAMES] if is_committed(store.at(name))]
        hint = f"; did you mean {where}/{below[-1]}?" if below else ""
        why = f"the directory has no {METADATA_NAME}, and there are no steps in it{hint}"
    return CheckpointNotFound(f"there is no checkpoint at {where}: {why}")


def looks_like_ours(store: Store, data: bytes) -> bool:
    """Whether a `_METADATA` that can't be read was probably written by a save."""
    return any(map(is_shards_directory, store.list())) or data.startswith(b'{"format":"ostraka"')


def is_committed(store: Store) -> bool:
    """Whether a save to a place has been committed, by us or by something else."""
    return METADATA_NAME in names_in(store)


def names_in(store: Store) -> list[str]:
    """The names in a place; none where there is none, or it may not be looked into.

    Raises StoreError if a store did not answer: then nobody knows.
    """
    try:
        return store.list()
    except OSError as error:
        if error.errno in _NO_ANSWER:
            raise
        return []


def _something_else(store: Store, names: Sequence[str]) -> str | None:
    """What a directory is, if it is known and not ours."""
    if any(map(is_shards_directory, names)):
        return None
    if METADATA_NAME in names:
        if has_orbax_names(names):
            return (
                "is an Orbax checkpoint in a form that Ostraka does not know; restore it with "
                "Orbax, and write the result with ostraka.save"
            )
        return f"is not an Ostraka checkpoint: its {METADATA_NAME} was written by something else"
    if has_orbax_names(names):
        return "is a part of an Orbax checkpoint, and has no arrays; give the directory above it"
    foreign = _foreign_file(store, names)
    if foreign is not None:
        return foreign
    orbax = [name for name in names[:_MOST_NAMES] if has_orbax_names(names_in(store.at(name)))]
    if orbax:
        return (
            "holds Orbax checkpoints, none of which is a finished step; give the path of one, "
            f"such as {store.location}/{orbax[-1]}"
        )
    return None


def _foreign_file(store: Store, names: Sequence[str]) -> str | None:
    """What the first file of another program in a directory is; None if there is none."""
    for name in filter(LIKELY_NAMES.fullmatch, names[:_MOST_NAMES]):
        known = describe_file(_start_of_file(store.at(name)) or b"")
        if known is not None:
            return f"holds no checkpoint that Ostraka reads: {name} is {known}"
    return None


def has_orbax_names(names: Sequence[str]) -> bool:
    """Whether some of the names in a directory are those that Orbax writes."""
    return any(name in _ORBAX_NAMES or name.startswith("ocdbt.process_") for name in names)


def _hint_beside(store: Store) -> str:
    """The steps beside a step that is not there, or the name that is most like it."""
    above, _, name = store.location.rpartition("/")
    root = open_above(store)
    if root is None:
        return ""
    names = names_in(root)
    steps = [
        step
        for step, found in steps_among(names).items()
        if any(is_committed(root.at(n)) or has_orbax_names(names_in(root.at(n))) for n in found)
    ]
    if steps and step_of(name) is not None:
        return f"; the steps in {above} are {list_steps(steps)}"
    return nearest(name, names[:_MOST_NAMES])


def _start_of_file(store: Store) -> bytes | None:
    """The first bytes of what lies where a directory was meant; None if there is nothing."""
    where = store.location
    if isinstance(store, LocalStore) and not os.path.isfile(where):
        return b"" if os.path.exists(where) else None  # to open a pipe would take for ever
    above, name = open_above(store), where.rpartition("/")[2]
    start = bytearray(START_BYTES)
    try:
        if above is None or above.look(name) is None:
            return None
        with closing(above.open(name)) as file:
            return bytes(start[: file.read_into(0, [start])])
    except OSError:
        return b""


def _file(where: str, start: bytes) -> str:
    above, name = os.path.split(where)
    if is_shards_directory(os.path.basename(above)):
        above, name = os.path.dirname(above), METADATA_NAME
    if name == METADATA_NAME:
        return f"is a file, not a checkpoint directory: it is a part of {above}; give that"
    # With a length and a JSON object, as these begin.
    if start[8:9] == b"{" and 1 < int.from_bytes(start[:8], "little") <= _MAX_HEADER_BYTES:
        return (
            "looks like a safetensors file, and its name does not end in .safetensors; rename it "
            "to have it opened as one"
        )
    known = describe_file(start)
    if known is not None:
        return f"is {known}"
    return "is a file, not a checkpoint directory; give the directory that a save was given"
