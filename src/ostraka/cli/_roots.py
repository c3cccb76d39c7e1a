"""Directories of steps, as the commands need them."""

from __future__ import annotations

from errno import EACCES, EPERM

from ostraka import _format
from ostraka.errors import CheckpointNotFound
from ostraka.formats import open_source
from ostraka.manager._steps import Root, Step
from ostraka.storage import open_store


def checkpoints_at(path: str) -> list[str]:
    """The path itself, or those of all steps if it is a directory of steps."""
    if is_checkpoint(path):
        return [path]
    root = Root(path)
    return [root.path(step.names[0]) for step in root.scan()] or [path]


def is_checkpoint(path: str) -> bool:
    """Whether a path is not that of a directory that may have steps in it."""
    store = open_store(path)
    return not store.exists() or _format.METADATA_NAME in store.list()


def open_root(path: str) -> Root:
    """A directory of steps. Raises CheckpointNotFound, with the remedy, if it is none."""
    store = open_store(path)
    if not store.exists():
        raise CheckpointNotFound(f"there is no directory {store.location}; give one of steps")
    if _format.METADATA_NAME in store.list():
        raise CheckpointNotFound(
            f"{store.location} is a checkpoint, not a directory of steps; give the directory above "
            "it, or use ostraka show"
        )
    return Root(path)


def file_bytes(root: Root, step: Step) -> int | None:
    """The bytes of a step's files; None if unknown."""
    try:
        source = open_source(root.at(step.names[0]))
    except (OSError, ValueError):
        return None
    return sum(file.nbytes for file in source.files())


def is_forbidden(root: Root, step: Step) -> bool:
    """Whether a step may be intact, and only this user or this version can't read it."""
    if step.unsupported is not None:
        return True
    try:
        open_source(root.at(step.names[0]))
    except OSError as error:
        return error.errno in (EACCES, EPERM)
    except ValueError:
        return False
    return False


def newest_good(steps: list[Step]) -> int | None:
    return max((step.step for step in steps if step.is_good), default=None)
