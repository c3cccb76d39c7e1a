"""Paths: as pathlib's or, where etils is installed, epath's; and the stores they name."""

from __future__ import annotations

import os
import pathlib
import shutil
from typing import Any

from ostraka._foreign import names_in
from ostraka.formats import has_finished_checkpoint, is_checkpoint
from ostraka.formats._orbax_items import is_orbax
from ostraka.manager._steps import remove_checkpoint
from ostraka.storage import Store, open_store


def as_path(path: Any) -> Any:
    """A path as Orbax hands it out: an `epath.Path` if etils is installed, else a pathlib one."""
    text = os.fspath(path)
    try:
        from etils import epath
    except ImportError:
        return pathlib.Path(text)
    made: Any = epath.Path(text)
    return made


def store_at(path: Any) -> Store:
    return open_store(os.fspath(path))


def is_finished(store: Store) -> bool:
    return is_checkpoint(names_in(store)) and has_finished_checkpoint(store)


def remove(store: Store) -> None:
    """Delete a checkpoint, of ours or of Orbax's."""
    if not is_orbax(names_in(store)):
        remove_checkpoint(store)
    elif "://" in store.location:
        raise NotImplementedError(
            f"{store.location} was written by Orbax, and deleting that in a bucket is not "
            "supported; delete it with the bucket's own tools"
        )
    else:
        # Out of the way at once: half a deleted step must not look like one.
        path = pathlib.Path(store.location)
        gone = path.with_name(f".{path.name}.deleted-{os.urandom(4).hex()}")
        path.rename(gone)
        shutil.rmtree(gone)
