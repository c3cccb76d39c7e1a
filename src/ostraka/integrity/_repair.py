"""`ostraka.repair`: find what is lost or damaged in a checkpoint, and rewrite just that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from ostraka._checkpoint import locate
from ostraka._foreign import is_committed, names_in
from ostraka._format import METADATA_NAME
from ostraka._step_names import steps_among
from ostraka.errors import CheckpointNotFound, Damaged
from ostraka.integrity._repair_place import RepairPlace
from ostraka.integrity._repair_report import OnBytes, RepairReport, Tally
from ostraka.integrity._repair_run import Repair
from ostraka.integrity._repair_team import Alone
from ostraka.storage import PathLike, Store, open_store


def repair(
    path: PathLike,
    tree: Any = None,
    *,
    from_: PathLike | Sequence[PathLike] | None = None,
    dry_run: bool = False,
    rebuild_tree: bool = False,
    raises: bool = True,
    on_bytes: OnBytes | None = None,
) -> RepairReport:
    """Find what a checkpoint has lost (bytes, files, indexes, `_METADATA`) and rewrite just that.

    Lost bytes are taken, block by block, from

    - `tree`, the live tree that was saved, or parts of it: every process of a run calls this with
      its tree, and gives what its own devices and memory hold;
    - `from_`, other copies: of this save (a mirror, a copied directory), or any checkpoint with
      some of the same bytes, as an older step is; one of them, or a list. Of a directory of steps,
      the one of the same name comes first.

    Nothing is written that does not have the digest which the save has recorded. So a model that
    has trained on since is refused, and its leaf named. A lost index is made again from the shards,
    a lost `_METADATA` from its copy among them, both bit for bit. If `_METADATA` is gone, it is
    written only if all that it names is there: the path may also be that of a save which died just
    before its commit, and becomes a checkpoint by this.

    If no copy of `_METADATA` is left either, `rebuild_tree=True` makes one from the headers of the
    shards, all of which must be there: a tree of dicts with the paths, dtypes and shapes of all
    arrays. What they don't tell (containers, values that are no arrays, meshes) is lost, and the
    report says so.

    A file is replaced as a whole, in one event, and all others are not touched. Whoever kills a
    repair leaves every file as it was or mended; the next repair does the rest. Raises Busy while a
    save or another repair is under way there. With `dry_run` nothing is written, and the report
    says what would be. Without `tree`, one process calls this.

    Raises Damaged for what can't be mended, saying why; with `raises=False` the report has it. What
    can be mended is mended in either case. `on_bytes` is called now and then, from threads, with
    the bytes read so far and the bytes that there are.

    >>> print(ostraka.repair("runs/7", {"model": model}, from_="s3://bucket/runs"))
    """
    if rebuild_tree and tree is not None:
        raise ValueError("rebuild_tree makes a tree; give it without one, from one process")
    begin = time.perf_counter()
    store = locate(path)
    if not store.exists():
        raise CheckpointNotFound(f"there is no checkpoint at {store.location}")
    copies = _copies(store, from_)
    place = RepairPlace(store, dry_run=dry_run)
    tally = Tally(on_bytes)

    def run(team: Any, make_live: Callable[[Any], Any] | None) -> RepairReport:
        return Repair(store, team, place, copies, make_live, dry_run, rebuild_tree, tally).run()

    try:
        if tree is None:
            report = run(Alone(), None)
        else:
            from ostraka.integrity._repair_together import repair_together  # needs JAX

            report = repair_together(store.location, tree, run)
    finally:
        place.release()
    report = replace(report, time_s=time.perf_counter() - begin)
    if report.problems and raises:
        raise Damaged(report.path, report.problems)
    return report


def _copies(store: Store, given: PathLike | Sequence[PathLike] | None) -> list[Store]:
    """The places to take bytes from, the likeliest first."""
    if given is None:
        return []
    several = isinstance(given, list | tuple)
    paths = cast("Sequence[PathLike]", given) if several else [cast("PathLike", given)]
    own_name = store.location.rstrip("/").rpartition("/")[2]
    found: list[Store] = []
    for path in paths:
        root = open_store(path)
        names = names_in(root)
        steps = [name for of_step in steps_among(names).values() for name in of_step]
        if METADATA_NAME in names or not steps:
            found.append(locate(path))
            continue
        committed = [name for name in reversed(steps) if is_committed(root.at(name))]
        committed.sort(key=lambda name: name != own_name)
        found += [root.at(name) for name in committed]
    for copy in found:
        if not copy.exists():
            raise CheckpointNotFound(f"there is nothing at {copy.location}, given as from_")
    # A store that was given as such may have the same name on another server.
    return [
        copy
        for copy in found
        if copy.location != store.location or not getattr(copy, "is_named", True)
    ]
