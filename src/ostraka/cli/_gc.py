"""`ostraka gc`: remove the files of interrupted saves."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import click

from ostraka.cli._arguments import json_option, path_argument
from ostraka.cli._confirm import Consent, consent_options
from ostraka.cli._output import Table, echo, echo_json, echo_lines, human_size
from ostraka.cli._steps import removal_lines
from ostraka.errors import (
    Busy,
    CheckpointNotFound,
    NotACheckpoint,
    PathInTheWay,
    StoreError,
    count_of,
    printable,
)
from ostraka.layout.file_names import step_of
from ostraka.manager.leases import is_lease, remove_expired_leases
from ostraka.saving.place import collect_garbage, find_leftovers
from ostraka.storage import Store, is_claim, open_store


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Files of interrupted saves in one directory."""

    directory: str
    names: tuple[str, ...]
    bytes: int
    beside_a_checkpoint: bool
    """True if the directory also has a checkpoint, which stays."""


@dataclass(frozen=True, slots=True)
class Findings:
    """All that is in the way, or in use, at a directory of steps."""

    leftovers: list[Leftovers]
    busy: list[str]
    """Locations where a save is running."""
    refusals: list[StoreError]
    """Why some directories could not be looked at."""


@click.command()
@path_argument("root")
@consent_options
@json_option()
def gc(root: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove the files of interrupted saves from ROOT.

    ROOT is a directory of steps, or of one checkpoint. An interrupted save leaves files that no
    checkpoint refers to, an interrupted removal leaves files without a checkpoint. The command
    touches no file of a running save, and no file that Ostraka did not write. Beside a damaged
    checkpoint it removes nothing, since a repair may need those files. It removes the lease of a
    reader (ostraka watch) once it has expired.

    The command asks before it removes anything. --yes answers for you, --dry-run only shows what
    would be removed. Where nobody can be asked, it removes nothing without --yes.

    \b
    Examples:
      ostraka gc runs
      ostraka gc runs --dry-run
      ostraka gc runs --yes
    """
    consent = Consent(dry_run, yes)
    store = open_store(root)
    location = store.location
    if not store.exists():
        if store.look("") is not None:
            raise NotACheckpoint(f"{location} is a file; ostraka gc needs a directory")
        raise CheckpointNotFound(f"there is no directory {location}")
    findings = _look_around(store, remove=yes)
    removed = yes
    if not yes and findings.leftovers:
        what = count_of(sum(len(left.names) for left in findings.leftovers), "leftover")
        lines = _lines(location, findings, [], removed=False)
        removed = consent.ask(f"remove {what} from {location}", lines)
        if removed:
            findings = _look_around(store, remove=True)
    leases = list(filter(is_lease, store.list()))
    if as_json:
        document = {
            "root": location,
            "removed": removed,
            "leftovers": [asdict(left) for left in findings.leftovers],
            "in_use": findings.busy,
            "leases": leases,
            "refused": [str(error) for error in findings.refusals],
        }
        echo_json(document)
    else:
        if removed or dry_run or not findings.leftovers:  # Else they stand above the question.
            echo_lines(_lines(location, findings, leases, removed=removed))
        if findings.leftovers and not removed:
            echo("nothing was removed")
    if findings.refusals:
        raise findings.refusals[0]


def _look_around(store: Store, *, remove: bool) -> Findings:
    """The leftovers in a directory and in its steps, which `remove` removes."""
    found = Findings([], [], [])
    # The target of a link belongs to others.
    steps = [n for n in store.list() if step_of(n) is not None and not store.is_link(n)]
    for name in ("", *steps):
        place = store.at(name) if name else store
        try:
            found.leftovers.extend(_collect(place, remove=remove))
        except Busy:
            found.busy.append(place.location)
        except StoreError as error:  # The other directories can still be cleaned.
            found.refusals.append(error)
    if remove and (gone := remove_expired_leases(store, wait=True)):
        found.leftovers.append(Leftovers(store.location, tuple(gone), 0, False))
    return found


def _lines(location: str, findings: Findings, leases: list[str], *, removed: bool) -> list[str]:
    lines: list[str] = []
    if found := findings.leftovers:
        table = Table(("directory", "what", "size", "beside"), right=("size",))
        for left in found:
            beside = "a checkpoint, which stays" if left.beside_a_checkpoint else "nothing"
            name = left.directory.removeprefix(location).strip("/") or "."
            table.add(name, ", ".join(left.names), human_size(left.bytes), beside)
        what = count_of(sum(len(left.names) for left in found), "leftover")
        nbytes = sum(left.bytes for left in found)
        lines += removal_lines(location, table, what, nbytes, removed=removed)
    lines += [
        f"{printable(directory)}: a save is under way; left alone" for directory in findings.busy
    ]
    for lease in leases:
        what = "it is active; left alone" if removed else "--yes removes it if it has expired"
        lines.append(f"{printable(location)}/{printable(lease)}: the lease of a reader; {what}")
    return lines or [f"{printable(location)}: nothing was left behind"]


def _collect(place: Store, *, remove: bool) -> list[Leftovers]:
    """The leftovers of one directory. Raises Busy if a save is running there."""
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
        raise
    except PathInTheWay:
        return []
    nbytes = sum(size for file, size in sizes.items() if {file, file.split("/")[0]} & {*names})
    return [Leftovers(place.location, tuple(names), nbytes, beside)] if names else []
