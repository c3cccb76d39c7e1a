"""Directories of steps: their checkpoints, and what is told about a step. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from errno import EACCES, EPERM
from typing import Any

from ostraka.common.text import json_number
from ostraka.errors import CheckpointNotFound, Problem
from ostraka.formats import is_orbax, open_source
from ostraka.formats.ostraka.damage import MISSING, other_size
from ostraka.formats.safetensors.files import has_safetensors
from ostraka.layout import shard_file
from ostraka.layout.file_names import RUN_NAME, possible_steps, step_of
from ostraka.manager.steps import Root, Step
from ostraka.storage import FileInfo, PathLike, Store, open_above, open_store


def checkpoints_at(path: str) -> list[str]:
    """The path itself, or those of all Ostraka steps if it is a directory of steps."""
    store = open_store(path)
    if not store.exists() or _has_checkpoint(store):
        return [path]
    root = Root(path)
    return [root.path(one.names[0]) for one in root.scan() if not one.is_foreign] or [path]


def _has_checkpoint(store: Store) -> bool:
    names = store.list()
    if has_safetensors(names):
        return not possible_steps(names)  # Beside steps, such files belong to nothing.
    return shard_file.METADATA_NAME in names or is_orbax(names)


def is_run(path: PathLike) -> bool:
    """True if a path is a directory of steps, not a checkpoint."""
    store = open_store(path)
    names = store.list()
    if not possible_steps(names) and RUN_NAME not in names:
        return False
    return not _has_checkpoint(store)


def open_root(path: PathLike) -> Root:
    """A directory of steps. Raises CheckpointNotFound, with the remedy, if it is none."""
    store = open_store(path)
    if not store.exists():
        raise CheckpointNotFound(f"there is no directory {store.location}; give one of steps")
    if _has_checkpoint(store):
        raise CheckpointNotFound(
            f"{store.location} is a checkpoint, not a directory of steps; give the directory above "
            "it, or use ostraka show"
        )
    return Root(path)


def await_root(path: PathLike) -> Root:
    """As `open_root`, but the directory need not exist yet. A file is none."""
    store = open_store(path)
    if store.exists():
        return open_root(path)
    if store.look("") is not None:
        raise CheckpointNotFound(f"{store.location} is a file; give a directory of steps")
    return Root(path)


def step_at(path: str) -> tuple[Root, int]:
    """The directory and the number of a step by its path, such as `runs/7`.

    Raises CheckpointNotFound if it is none.
    """
    store = open_store(path)
    name = store.location.rpartition("/")[2]
    number, above = step_of(name), open_above(store)
    if number is None or above is None:
        raise CheckpointNotFound(
            f"{store.location} is no step of a run; give the path of one, such as runs/7"
        )
    root = Root(above)
    root.find(number)
    return root, number


def file_bytes(root: Root, step: Step) -> int | None:
    """The bytes of a step's files, or None if unknown."""
    if step.nbytes is not None:
        return step.nbytes
    try:
        source = open_source(root.at(step.names[0]))
    except (OSError, ValueError):
        return None
    return sum(file.nbytes for file in source.files())


def lost_files(
    root: Root, step: Step, listed: Mapping[str, FileInfo] | None = None
) -> tuple[Problem, ...]:
    """The files of a step that a listing lacks, or has in another size. No shard is read.

    `listed` are the files in its directory, if they were listed already.
    """
    if step.is_foreign or step.problems or step.nbytes is None:
        return ()
    store = root.at(step.names[0])
    try:
        files = store.files("shards-") if listed is None else listed.values()
        if sum(file.size for file in files if is_shard(file.name)) == step.nbytes:
            return ()
        # Shards are lost, or those of another save are beside them.
        source = open_source(store)
        sizes = {file.name: file.size for file in store.files("")}
        lost = [file for file in source.files() if sizes.get(file.name) != file.nbytes]
        if not lost or not source.is_current():
            return ()  # It was replaced or deleted meanwhile.
    except (OSError, ValueError):
        return ()
    return tuple(
        Problem(
            file.name,
            other_size(sizes[file.name], file.nbytes) if file.name in sizes else MISSING,
        )
        for file in lost
    )


def is_shard(name: str) -> bool:
    """True for the name of a file with arrays or parity in a checkpoint."""
    return name.endswith(".safetensors")


def is_forbidden(root: Root, step: Step) -> bool:
    """True if a step may be intact, but this user or this version can't read it."""
    if step.unsupported is not None:
        return True
    try:
        open_source(root.at(step.names[0]))
    except (OSError, ValueError) as error:
        return isinstance(error, OSError) and error.errno in (EACCES, EPERM)
    return False


def describe_step(root: Root, step: Step) -> dict[str, Any]:
    """A step for scripts."""
    return {
        "step": step.step,
        "path": root.path(step.names[0]),
        "saved_at": step.saved_at,
        "bytes": file_bytes(root, step),
        "metrics": {name: json_number(value) for name, value in step.metrics.items()},
    }
