"""Directories of steps, as the commands need them."""

from __future__ import annotations

from errno import EACCES, EPERM

from ostraka import _format
from ostraka._step_names import prefixed_steps, steps_among
from ostraka.errors import CheckpointNotFound, Damaged, Problem, UnsupportedFormat
from ostraka.formats import is_finished_orbax, is_orbax, open_source
from ostraka.formats._safetensors_files import has_safetensors
from ostraka.manager._steps import Root, Step, saved_s
from ostraka.storage import Store, open_store


def checkpoints_at(path: str) -> list[str]:
    """The path itself, or those of all steps if it is a directory of steps."""
    if is_checkpoint(path):
        return [path]
    root = Root(path)
    return [root.path(step.names[0]) for step in root.scan()] or [path]


def is_checkpoint(path: str) -> bool:
    """Whether a path is not that of a directory that may have steps in it."""
    store = open_store(path)
    return not store.exists() or _has_checkpoint(store)


def _has_checkpoint(store: Store) -> bool:
    names = store.list()
    if has_safetensors(names):
        return not steps_among(names)  # Beside steps they are something that lies about.
    return _format.METADATA_NAME in names or is_orbax(names)


def open_root(path: str) -> Root:
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


def steps_of_orbax(root: Root) -> list[Step]:
    """The steps in a directory that Orbax has finished. A manager does not know them."""
    found: list[Step] = []
    names = root.store.list()
    for step, of_step in (*steps_among(names).items(), *prefixed_steps(names).items()):
        for name in of_step:
            if is_finished_orbax(root.at(name)):
                found.append(_step_of_orbax(root.at(name), step, name))
    return found


def _step_of_orbax(place: Store, step: int, name: str) -> Step:
    try:
        saved = open_source(place).saved
    except Damaged as error:
        return Step(step, None, {}, False, (name,), error.problems)
    except (OSError, ValueError) as error:
        problem = Problem(name, str(error))
        unsupported = str(error) if isinstance(error, UnsupportedFormat) else None
        return Step(step, None, {}, False, (name,), (problem,), unsupported)
    metrics = saved.user.get("metrics", {})
    numbers = {key: value for key, value in metrics.items() if type(value) in (int, float)}
    return Step(step, saved_s(saved), numbers, False, (name,))


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
