"""`ostraka du`: the bytes of checkpoints, by group of leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import click

from ostraka.cli._arguments import json_option, path_argument
from ostraka.cli._output import Table, echo_json, echo_lines, human_size
from ostraka.errors import OstrakaError, count_of
from ostraka.formats.source import Source
from ostraka.reading.groups import OPTIMIZER, OTHER, PARAMETERS, groups_of, totals_by_group
from ostraka.reading.locate import open_at
from ostraka.report.steps import checkpoints_at
from ostraka.storage import open_store

_GROUPS = (PARAMETERS, OPTIMIZER, OTHER)


@dataclass(frozen=True, slots=True)
class Usage:
    """The bytes of one checkpoint."""

    path: str
    nbytes: int
    """Those of all files in its directory."""
    groups: Mapping[str, int]
    """The bytes of the arrays of each group, before compression."""
    why: str | None = None
    """Why it can't be read. Then it has no groups."""


@click.command()
@path_argument("path", nargs=-1, required=True)
@json_option()
def du(path: tuple[str, ...], as_json: bool) -> None:
    """Show how many bytes the checkpoints at each PATH take.

    The largest come first. Each has the bytes of all its files, with those of interrupted saves,
    and the bytes of its arrays: of the parameters, of the optimizer, and of all other arrays. The
    files of a compressed checkpoint are smaller than its arrays. If PATH is a directory of steps,
    all steps are shown. No shard is read.

    \b
    Examples:
      ostraka du runs
      ostraka du runs other_runs/7
      ostraka du runs --json | jq '.checkpoints[] | select(.bytes > 1e12) | .path'
    """
    found = [_measure(place) for given in path for place in checkpoints_at(given)]
    found.sort(key=lambda usage: (-usage.nbytes, usage.path))
    total = sum(usage.nbytes for usage in found)
    if as_json:
        documents = [
            {"path": one.path, "bytes": one.nbytes, "groups": one.groups, "problem": one.why}
            for one in found
        ]
        echo_json({"bytes": total, "checkpoints": documents})
        return
    table = Table(("files", *_GROUPS, "checkpoint"), right=("files", *_GROUPS))
    for usage in found:
        sizes = [human_size(usage.groups[group]) if usage.groups else "–" for group in _GROUPS]
        colour = None if usage.why is None else "red"
        table.add(human_size(usage.nbytes), *sizes, usage.path, colour=colour)
    summary = f"{count_of(len(found), 'checkpoint')}, {human_size(total)}"
    echo_lines([*table.lines(), "", summary])


def _measure(path: str) -> Usage:
    source: Source | None = None
    groups: dict[str, int] = {}
    why = None
    try:
        source = open_at(path)
        totals = totals_by_group(source, groups_of(source))
        groups = {name: totals[name].nbytes if name in totals else 0 for name in _GROUPS}
    except (OstrakaError, OSError) as error:
        store = open_store(path)
        if not store.exists():
            raise
        why = str(error)
    store = open_store(path) if source is None else source.store
    return Usage(store.location, sum(file.size for file in store.files("")), groups, why)
