"""Which checkpoint a path means, and how it is read while saves may replace it. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ostraka._foreign import names_in
from ostraka._names_given import NamesLike
from ostraka._source import Source
from ostraka._step_names import names_of_step, prefixed_steps, steps_among
from ostraka._view import renamed
from ostraka.errors import Busy, CheckpointNotFound, Damaged
from ostraka.formats import (
    has_finished_checkpoint,
    is_checkpoint,
    is_finished_orbax,
    open_source,
)
from ostraka.storage import PathLike, Store, is_text, open_above, open_store

Result = TypeVar("Result")

ATTEMPTS = 10
"""So many times at most, if saves replace what is being read."""


def locate(path: PathLike) -> Store:
    """Where the checkpoint is that a reader means by a path.

    That is the path itself, if there is a checkpoint or any other directory. A directory of steps
    stands for the newest of its committed steps; `runs/7`, where there is nothing of that name, for
    step 7 of `runs`, whatever its directory is called. Never used by a save.
    """
    store = open_store(path)
    names = names_in(store)
    if is_checkpoint(names):
        return store
    if names:
        found = _first_committed(store, reversed(steps_among(names).values()))
        return found or _newest_of_orbax(store, names) or store
    root = open_above(store) if is_text(path) and not store.exists() else None
    if root is None:
        return store
    name = store.location.rpartition("/")[2]
    return _first_committed(root, [names_of_step(name, names_in(root))]) or store


def _first_committed(root: Store, steps: Iterable[Sequence[str]]) -> Store | None:
    stores = (root.at(name) for names in steps for name in names)
    return next((store for store in stores if has_finished_checkpoint(store)), None)


def _newest_of_orbax(root: Store, names: Sequence[str]) -> Store | None:
    """The newest step with a name that only Orbax gives, such as `ckpt_100`."""
    steps = reversed(prefixed_steps(names).values())
    stores = (root.at(name) for of_step in steps for name in of_step)
    return next((store for store in stores if is_finished_orbax(store)), None)


def open_at(path: PathLike, names: NamesLike | None = None) -> Source:
    """Open the checkpoint that a path means, as `locate` says; with `names`, seen under those.

    Raises CheckpointNotFound, NotACheckpoint, UnsupportedFormat or Damaged, each a sentence.
    """
    for _ in range(ATTEMPTS):
        store = locate(path)
        try:
            source = open_source(store)
            return source if names is None else renamed(source, names)
        except CheckpointNotFound:
            # Of a run that keeps few steps, the newest may have been deleted since it was found.
            if locate(path).location == store.location:
                raise
    raise overwritten([open_store(path).location])


def read_whole(
    paths: Sequence[PathLike],
    work: Callable[[Sequence[Source]], Result],
    open_one: Callable[[PathLike], Source] = open_at,
) -> Result:
    """What `work` makes of the checkpoints at some paths, also while saves replace them.

    If the files of one are gone because it was replaced, all are opened again and `work` begins
    again: it must not have shown anything before it has read all. Raises Busy if it never ends.
    """
    for _ in range(ATTEMPTS):
        sources = [open_one(path) for path in paths]
        try:
            return work(sources)
        except Damaged:
            if all(source.is_current() for source in sources):
                raise
    raise overwritten([open_store(path).location for path in paths])


def overwritten(locations: Sequence[str]) -> Busy:
    return Busy(
        f"{' or '.join(dict.fromkeys(locations))} was overwritten {ATTEMPTS} times while it was "
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
