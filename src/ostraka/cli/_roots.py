"""Directories of steps: what the commands ask of them."""

from __future__ import annotations

from errno import EACCES, EPERM

from ostraka import _format
from ostraka.errors import CheckpointNotFound
from ostraka.formats import open_source
from ostraka.manager._steps import Root, Step
from ostraka.storage import LocalStore, open_store


def checkpoints_at(path: str) -> list[str]:
    """The path itself, or those of all steps if it is a directory of steps."""
    if is_checkpoint(path):
        return [path]
    root = Root(path)
    return [root.path(step.names[0]) for step in root.scan()] or [path]


def is_checkpoint(path: str) -> bool:
    """Whether a path is not that of a directory that may have steps in it."""
    store = open_store(path)
    if not isinstance(store, LocalStore):
        return True
    names = store.list()
    return names is None or _format.METADATA_NAME in names


def open_root(path: str) -> Root:
    """A directory of steps. Raises CheckpointNotFound, with the remedy, if it is none."""
    store = open_store(path)
    names = store.list()
    if names is None:
        raise CheckpointNotFound(f"there is no directory {store.location}; give one of steps")
    if _format.METADATA_NAME in names:
        raise CheckpointNotFound(
            f"{store.location} is a checkpoint, not a directory of steps; give the directory above "
            "it, or use ostraka show"
        )
    return Root(path)


def file_bytes(root: Root, step: Step) -> int | None:
    """The bytes of a step's files; None if that can't be told."""
    try:
        source = open_source(open_store(root.path(step.names[0])))
    except (OSError, ValueError):
        return None
    return sum(file.nbytes for file in source.files())


def is_forbidden(root: Root, step: Step) -> bool:
    """Whether a step may be as good as any, and only this user may not read it."""
    try:
        open_source(open_store(root.path(step.names[0])))
    except OSError as error:
        return error.errno in (EACCES, EPERM)
    except ValueError:
        return False
    return False


def newest_good(steps: list[Step]) -> int | None:
    return max((step.step for step in steps if not step.problems), default=None)
