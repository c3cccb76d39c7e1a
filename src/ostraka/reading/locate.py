"""The checkpoint that a path means, and reading it while saves may replace it. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ostraka.errors import Busy, CheckpointNotFound, Damaged, SourceChanged
from ostraka.formats import (
    has_finished_checkpoint,
    is_checkpoint,
    is_finished_orbax,
    open_source,
)
from ostraka.formats.source import Source, names_in
from ostraka.layout.file_names import names_of_step, possible_steps, prefixed_steps, step_of
from ostraka.reading.names.given import NamesLike
from ostraka.reading.view import renamed
from ostraka.storage import PathLike, Store, is_text, open_above, open_store

Result = TypeVar("Result")

ATTEMPTS = 10
"""How often a read is tried if saves replace the checkpoint."""


def locate(path: PathLike) -> Store:
    """The location of the checkpoint that a reader means by a path.

    That is the path itself, if it is a checkpoint or any other directory. A run directory stands
    for its newest committed step. If `runs/7` does not exist, it stands for step 7 of `runs`,
    whatever its directory is called. A save does not use this.
    """
    store = open_store(path)
    names = names_in(store)
    if is_checkpoint(names):
        return store
    if names:
        return _first_committed(store, reversed(possible_steps(names).values())) or store
    root = open_above(store) if is_text(path) and not store.exists() else None
    if root is None:
        return store
    name = store.location.rpartition("/")[2]
    return _first_committed(root, [names_of_step(name, names_in(root))]) or store


def _first_committed(root: Store, steps: Iterable[Sequence[str]]) -> Store | None:
    for name in (name for names in steps for name in names):
        store = root.at(name)
        # Other prefixes than `step_` are Orbax's alone, such as `ckpt_100`.
        if step_of(name) is not None and has_finished_checkpoint(store):
            return store
        if step_of(name) is None and is_finished_orbax(store):
            refuse_several_series(root)
            return store
    return None


def refuse_several_series(root: Store) -> None:
    """Raise CheckpointNotFound where finished Orbax steps have several prefixes.

    They may belong to two models, and a number does not tell which is meant.
    """
    highest = {
        name.rpartition("_")[0]: name
        for names in prefixed_steps(names_in(root)).values()
        for name in names
    }
    found = [name for name in highest.values() if is_finished_orbax(root.at(name))]
    if len(found) > 1:
        raise CheckpointNotFound(
            f"{root.location} holds several series of Orbax steps ({', '.join(found)}), and it "
            "can't be told which is meant; give the path of one step, or move each series to a "
            "directory of its own"
        )


def open_at(path: PathLike, names: NamesLike | None = None) -> Source:
    """Open the checkpoint that `locate` finds for a path, with `names` if given.

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
        except SourceChanged:
            continue
    raise overwritten([open_store(path).location])


def read_whole(
    paths: Sequence[PathLike],
    work: Callable[[Sequence[Source]], Result],
    open_one: Callable[[PathLike], Source] = open_at,
) -> Result:
    """Call `work` with the checkpoints at some paths, also while saves replace them.

    If one was replaced, all are opened again and `work` is called again. It must not show anything
    before it has read all. Raises Busy after `ATTEMPTS` calls.
    """
    for _ in range(ATTEMPTS):
        sources = [open_one(path) for path in paths]
        try:
            return work(sources)
        except SourceChanged:
            continue
        except Damaged:
            if all(source.is_current() for source in sources):
                raise
    raise overwritten([open_store(path).location for path in paths])


def overwritten(locations: Sequence[str]) -> Busy:
    return Busy(
        f"{' or '.join(dict.fromkeys(locations))} was overwritten {ATTEMPTS} times while it was "
        "being read; wait for the saves or downloads to end"
    )


@contextmanager
def unless_replaced(source: Source) -> Generator[None]:
    """Raise Busy instead of Damaged if a save has replaced the checkpoint."""
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
