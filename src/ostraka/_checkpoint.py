"""Which checkpoint a path means, and how it is read while saves may replace it. No JAX."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ostraka import _format
from ostraka._foreign import is_committed, names_in
from ostraka._source import Source
from ostraka._step_names import names_of_step, steps_among
from ostraka.errors import Busy, CheckpointNotFound, Damaged
from ostraka.formats import open_source
from ostraka.storage import LocalStore, PathLike, Store, open_store

Result = TypeVar("Result")

_ATTEMPTS = 10
"""So many times at most, if saves replace what is being read."""


def locate(path: PathLike) -> Store:
    """Where the checkpoint is that a reader means by a path.

    That is the path itself, if there is a checkpoint or any other directory. A directory of steps
    stands for the newest of its committed steps; `runs/7`, where there is nothing of that name, for
    step 7 of `runs`, whatever its directory is called. Never used by a save.
    """
    store = open_store(path)
    if not isinstance(store, LocalStore):
        return store
    place = store.location
    if not os.path.lexists(place):
        root, name = os.path.split(place)
        return _first_committed(root, [names_of_step(name, names_in(root))]) or store
    if is_committed(place):
        return store
    names = names_in(place)
    if any(map(_format.is_shards_directory, names)):
        return store
    return _first_committed(place, reversed(steps_among(names).values())) or store


def _first_committed(root: str, steps: Iterable[Sequence[str]]) -> LocalStore | None:
    paths = (os.path.join(root, name) for names in steps for name in names)
    return next((LocalStore(path) for path in paths if is_committed(path)), None)


def open_at(path: PathLike) -> Source:
    """Open the checkpoint that a path means, as `locate` says.

    Raises CheckpointNotFound, NotACheckpoint, UnsupportedFormat or Damaged, each a sentence.
    """
    for _ in range(_ATTEMPTS):
        store = locate(path)
        try:
            return open_source(store)
        except CheckpointNotFound:
            # Of a run that keeps few steps, the newest may have been deleted since it was found.
            if locate(path).location == store.location:
                raise
    raise _overwritten([open_store(path).location])


def read_whole(paths: Sequence[PathLike], work: Callable[[Sequence[Source]], Result]) -> Result:
    """What `work` makes of the checkpoints at some paths, also while saves replace them.

    If the files of one are gone because it was replaced, all are opened again and `work` begins
    again: it must not have shown anything before it has read all. Raises Busy if it never ends.
    """
    for _ in range(_ATTEMPTS):
        sources = [open_at(path) for path in paths]
        try:
            return work(sources)
        except Damaged:
            if all(source.is_current() for source in sources):
                raise
    raise _overwritten([open_store(path).location for path in paths])


def _overwritten(locations: Sequence[str]) -> Busy:
    return Busy(
        f"{' or '.join(dict.fromkeys(locations))} was overwritten {_ATTEMPTS} times while it was "
        "being read; wait for the saves to end"
    )


@contextmanager
def unless_replaced(source: Source) -> Generator[None]:
    """Files that are missing because a save has replaced the checkpoint are not damage."""
    try:
        yield
    except Damaged as error:
        if source.is_current():
            raise
        try:
            open_source(source.store)
        except CheckpointNotFound:
            raise CheckpointNotFound(
                f"{source.location} was removed since it was opened; open another"
            ) from error
        raise Busy(
            f"{source.location} was replaced by another save since it was opened; open it again"
        ) from error
