"""`ostraka gc`: remove leftovers of dead saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import click

from ostraka._leftovers import collect_garbage, find_leftovers
from ostraka._step_names import step_of
from ostraka.cli._arguments import path_argument
from ostraka.cli._text import Table, count_of, echo_json, echo_lines, human_bytes, printable
from ostraka.errors import Busy, CheckpointNotFound, NotACheckpoint, PathInTheWay, StoreError
from ostraka.manager._leases import is_lease, remove_dead_leases
from ostraka.storage import Store, is_claim, open_store


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Leftovers of dead saves in one directory."""

    name: str
    """The directory's name in the root; empty for the root itself."""
    directory: str
    names: tuple[str, ...]
    nbytes: int
    beside: bool
    """Whether there is a checkpoint in that directory, too, which stays."""
    busy: bool = False
    """Whether a save is running there, so that nothing can be called a leftover."""


@click.command()
@path_argument("root")
@click.option("--yes", is_flag=True, help="Remove them. Without it they are only shown.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON, sizes in bytes.")
def gc(root: str, yes: bool, as_json: bool) -> None:
    """Remove the leftovers of dead saves from ROOT.

    ROOT is a directory of steps, or of one checkpoint. A save that died leaves files that no
    checkpoint refers to; a removal that died leaves files without a checkpoint. Nothing of a
    running save is touched, and nothing that Ostraka did not write. Beside a damaged checkpoint
    nothing is removed, since its files may be needed to repair it. The lease of a reader (ostraka
    watch) is removed if the reader is dead. Without --yes nothing is removed at all: what would be
    removed is shown.

    \b
    Examples:
      ostraka gc runs
      ostraka gc runs --yes
    """
    store = _existing(root)
    location = store.location
    found: list[Leftovers] = []
    refusals: list[StoreError] = []
    for name in _places(store):
        try:
            found += _collect(store, name, remove=yes)
        except StoreError as error:  # The other directories can still be cleaned.
            refusals.append(error)
    if yes and (gone := remove_dead_leases(store)):
        found.append(Leftovers("", location, tuple(gone), 0, False))
    leases = list(filter(is_lease, store.list()))
    dead = [left for left in found if not left.busy]
    if as_json:
        document = {
            "root": location,
            "removed": yes,
            "leftovers": [_describe(left) for left in dead],
            "in_use": [left.directory for left in found if left.busy],
            "leases": leases,
            "refused": [str(error) for error in refusals],
        }
        echo_json(document)
    else:
        _print(location, found, dead, leases, removed=yes)
    if refusals:
        raise refusals[0]


def _print(
    location: str,
    found: list[Leftovers],
    dead: list[Leftovers],
    leases: list[str],
    *,
    removed: bool,
) -> None:
    lines = _table(location, dead, removed) if dead else []
    for left in found:
        if left.busy:
            lines.append(f"{printable(left.directory)}: a save is under way; left alone")
    for lease in leases:
        what = "it lives; left alone" if removed else "--yes removes it if the reader is dead"
        lines.append(f"{printable(location)}/{printable(lease)}: the lease of a reader; {what}")
    echo_lines(lines or [f"{printable(location)}: nothing was left behind"])


def _existing(root: str) -> Store:
    store = open_store(root)
    if not store.exists():
        if store.look("") is not None:
            raise NotACheckpoint(f"{store.location} is a file; ostraka gc needs a directory")
        raise CheckpointNotFound(f"there is no directory {store.location}")
    return store


def _places(root: Store) -> Iterator[str]:
    """The names of what saves may have written to: the root itself (""), and its steps."""
    yield ""
    for name in root.list():
        if step_of(name) is not None and not root.is_link(name):  # the target belongs to others
            yield name


def _collect(root: Store, name: str, *, remove: bool) -> list[Leftovers]:
    place = root.at(name) if name else root
    left: list[str] = []
    try:
        left = find_leftovers(place)
        if not left:
            return []
        sizes = {file.name: file.size for file in place.files("")}
        names, beside = collect_garbage(place, remove=remove)
    except Busy:
        if all(map(is_claim, left)):
            return []  # The claim of an open Manager, which is all it has in its root.
        return [Leftovers(name, place.location, (), 0, False, busy=True)]
    except PathInTheWay:
        return []
    nbytes = sum(size for file, size in sizes.items() if {file, file.split("/")[0]} & {*names})
    return [Leftovers(name, place.location, tuple(names), nbytes, beside)] if names else []


def _table(location: str, found: list[Leftovers], removed: bool) -> list[str]:
    table = Table(("directory", "what", "size", "beside"), right=("size",))
    for left in found:
        beside = "a checkpoint, which stays" if left.beside else "nothing"
        what = ", ".join(printable(name) for name in left.names)
        table.add(printable(left.name or "."), what, human_bytes(left.nbytes), beside)
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
