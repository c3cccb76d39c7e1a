"""`ostraka gc`: remove what dead saves left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import click

from ostraka._leftovers import committed_directory, find_leftovers
from ostraka._step_names import step_of
from ostraka.cli._arguments import path_argument
from ostraka.cli._text import Table, count_of, echo_lines, human_bytes, printable
from ostraka.errors import (
    Busy,
    CheckpointNotFound,
    NotACheckpoint,
    PathInTheWay,
    StoreError,
    UnsupportedFormat,
)
from ostraka.storage import LocalStore, open_store


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a dead save left in one directory."""

    directory: str
    names: tuple[str, ...]
    nbytes: int
    beside: bool
    """Whether there is a checkpoint in that directory, which stays."""
    busy: bool = False
    """Whether a save is under way there, so that nothing is known to be left behind."""


@click.command()
@path_argument("root")
@click.option("--yes", is_flag=True, help="Remove it; else what would go is only shown.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON, sizes in bytes.")
def gc(root: str, yes: bool, as_json: bool) -> None:
    """Remove what dead saves left behind in ROOT.

    ROOT is a directory of steps, or of one checkpoint. A save that died leaves files that no
    checkpoint refers to; a removal that died leaves files without a checkpoint. Nothing of a save
    that is under way is touched, and nothing that Ostraka did not write. Beside a damaged
    checkpoint nothing is removed, since its files may be all that there is to mend it with. Without
    --yes nothing is removed at all: what would go is shown.

    \b
    Examples:
      ostraka gc runs
      ostraka gc runs --yes
    """
    location = _existing(root)
    found: list[Leftovers] = []
    refusals: list[StoreError] = []
    for place in _places(location):
        try:
            found += _collect(place, remove=yes)
        except StoreError as error:  # The others are none the worse for it.
            refusals.append(error)
    dead = [left for left in found if not left.busy]
    if as_json:
        document = {
            "root": location,
            "removed": yes,
            "leftovers": [_describe(left) for left in dead],
            "in_use": [left.directory for left in found if left.busy],
            "refused": [str(error) for error in refusals],
        }
        click.echo(json.dumps(document, indent=1))
    else:
        _print(location, found, dead, removed=yes)
    if refusals:
        raise refusals[0]


def _print(location: str, found: list[Leftovers], dead: list[Leftovers], *, removed: bool) -> None:
    lines = _table(location, dead, removed) if dead else []
    for left in found:
        if left.busy:
            lines.append(f"{printable(left.directory)}: a save is under way; left alone")
    echo_lines(lines or [f"{printable(location)}: nothing was left behind"])


def _existing(root: str) -> str:
    store = open_store(root)
    if not isinstance(store, LocalStore):
        raise UnsupportedFormat(f"ostraka gc needs a directory, and {store.location} is none")
    if store.list() is None:
        if os.path.exists(store.location):
            raise NotACheckpoint(f"{store.location} is a file; ostraka gc needs a directory")
        raise CheckpointNotFound(f"there is no directory {store.location}")
    return store.location


def _places(root: str) -> Iterator[str]:
    """The directories that saves may have written to: the root itself, and its steps."""
    yield root
    for name in LocalStore(root).list() or []:
        path = os.path.join(root, name)
        # What a link leads to is somebody else's.
        if step_of(name) is not None and os.path.isdir(path) and not os.path.islink(path):
            yield path


def _collect(directory: str, *, remove: bool) -> list[Leftovers]:
    store = LocalStore(directory)
    if not _leftovers(store):
        return []
    try:
        # Looked at again, now that no save can be under way.
        with store.exclusive():
            names = _leftovers(store)
            nbytes = sum(_size(os.path.join(directory, name)) for name in names)
            beside = committed_directory(store) is not None
            if remove:
                for name in names:
                    store.delete(name)
                store.settle("")
                if not beside:
                    with suppress(OSError):  # not empty: other people's files stay
                        os.rmdir(directory)
    except Busy:
        return [Leftovers(directory, (), 0, False, busy=True)]
    except FileNotFoundError:
        return []  # somebody else has removed it
    return [Leftovers(directory, tuple(names), nbytes, beside)] if names else []


def _leftovers(store: LocalStore) -> list[str]:
    try:
        return find_leftovers(store)
    except PathInTheWay:
        return []


def _size(path: str) -> int:
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    if os.path.isfile(path):
        total += os.lstat(path).st_size
    return total


def _table(location: str, found: list[Leftovers], removed: bool) -> list[str]:
    table = Table(("directory", "what", "size", "beside"), right=("size",))
    for left in found:
        shown = os.path.relpath(left.directory, location)
        beside = "a checkpoint, which stays" if left.beside else "nothing"
        what = ", ".join(printable(name) for name in left.names)
        table.add(printable(shown), what, human_bytes(left.nbytes), beside)
    total = human_bytes(sum(left.nbytes for left in found))
    total = f"{count_of(sum(len(left.names) for left in found), 'leftover')}, {total}"
    verb = "removed from" if removed else "would go from"
    return [
        f"{verb} {click.style(printable(location), bold=True)}",
        "",
        *table.lines(),
        "",
        total if removed else f"{total}; nothing is removed without --yes",
    ]


def _describe(left: Leftovers) -> dict[str, object]:
    return {
        "directory": left.directory,
        "names": left.names,
        "bytes": left.nbytes,
        "beside_a_checkpoint": left.beside,
    }
