"""The steps of a run directory, and their properties. No JAX.

The store is the truth. A step is a directory that is named like one and holds a readable
`_METADATA`, or a finished Orbax checkpoint. Orbax steps are foreign: they are listed and read, but
nothing in them is changed or deleted. Everything else in the directory belongs to others and is not
touched, except for files of interrupted saves and deletions in directories that are named as steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, TypeVar

from ostraka.common.record import logger as log
from ostraka.common.threads import RenewedLock, StopSignal, run_all
from ostraka.errors import (
    Busy,
    CheckpointNotFound,
    Damaged,
    InvalidTree,
    NotACheckpoint,
    OstrakaError,
    PathInTheWay,
    Problem,
    StoreError,
    UnsupportedFormat,
    describe,
)
from ostraka.formats import about_orbax, open_source, version_of_orbax
from ostraka.formats.orbax.names import has_orbax_names
from ostraka.formats.ostraka.source import OstrakaSource, open_ostraka
from ostraka.formats.unknown import likely_steps
from ostraka.layout import shard_file
from ostraka.layout.file_names import (
    ADDED_NAME,
    PIN_NAME,
    RUN_NAME,
    list_steps,
    name_of,
    names_of_step,
    possible_steps,
    prefixed_steps,
    step_of,
    steps_among,
)
from ostraka.manager.leases import remove_expired_leases
from ostraka.reading.metrics import NO_METRICS, RESERVED_KEY, metrics_in, read_added
from ostraka.saving.place import collect_garbage, find_leftovers, may_have_lost_metadata
from ostraka.storage import FileInfo, PathLike, Store, is_temporary, open_store, refuse_claimed

# Metrics of a step, which are stored in the user metadata of its checkpoint.


def with_metrics(
    metadata: Mapping[str, Any] | None, metrics: Mapping[str, Any] | None, step: int
) -> dict[str, Any]:
    """Return the user's metadata with the manager's own data added."""
    given: Any
    for name, given, example in (
        ("metadata", metadata, ""),
        ("metrics", metrics, ", such as {'loss': 0.5}"),
    ):
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"{name} must be a dict{example}, not {given!r}")
    user = dict(metadata or {})
    if RESERVED_KEY in user:
        raise ValueError(
            f"metadata has the key {RESERVED_KEY!r}, which is the manager's own; choose another"
        )
    return {**user, RESERVED_KEY: {"step": step, "metrics": metrics_as_json(metrics or {})}}


def metrics_as_json(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Return metrics as JSON. Raises TypeError or ValueError for one that is not a number."""
    return {name: _encode_metric(name, value) for name, value in metrics.items()}


def _encode_metric(name: Any, value: Any) -> float | str:
    """Return a number as JSON. NaN and infinity, which JSON lacks, become strings."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a metric must be text, not {name!r}")
    # A string that looks like a number is probably a mistake; so is a complex number.
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    try:
        if isinstance(value, str | bytes | bytearray) or kind in ("c", "S", "U"):
            raise TypeError("not a real number")
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"metric {name!r} is too large for a float") from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} must be a number, not {value!r}") from error
    return number if math.isfinite(number) else repr(number)


Result = TypeVar("Result")

OSTRAKA = "ostraka"
ORBAX = "orbax"
"""The formats of steps."""

_RETRIES = 10
"""How often a scan looks again at most, if the listing changes meanwhile."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step on disk: its number, when it was saved, its metrics, whether it is pinned."""

    step: int
    saved_at: float | None
    """Seconds since 1970 by the clock of the machine that saved it. None if unknown."""
    metrics: Mapping[str, float]
    pinned: bool
    names: tuple[str, ...] = ()
    """The directories that hold this step. Restores read the first."""
    problems: tuple[Problem, ...] = field(default=(), repr=False)
    """Why it can't be read. Empty if it can."""
    unsupported: str | None = field(default=None, repr=False)
    """The error message if the step is intact but needs a newer version of Ostraka."""
    format: str = OSTRAKA
    """The library that wrote it: "ostraka" or "orbax"."""
    nbytes: int | None = field(default=None, repr=False)
    """The bytes of its files. None if they were not counted."""
    save_id: str | None = field(default=None, repr=False)
    """The random id of the save that wrote it."""
    versions: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    """The version of `_METADATA` in each of `names` that Ostraka wrote. None if unreadable."""

    @property
    def is_foreign(self) -> bool:
        """True if another library wrote it: it is read, but never deleted."""
        return self.format != OSTRAKA

    @property
    def is_aside(self) -> bool:
        """True if its name has a prefix: it is the newest only if there is no other step."""
        return bool(self.names) and all(step_of(name) is None for name in self.names)

    @property
    def is_good(self) -> bool:
        """True if a run can resume from it, with this version of Ostraka or a newer one."""
        return not self.problems or self.unsupported is not None


_UNREAD = Step(-1, None, NO_METRICS, False)
"""A directory with a checkpoint, before it is read. `Root._step` gives it its number."""

_Look = Callable[[str], Step | None]
"""Returns the checkpoint in a directory."""
_NO_FILES: Mapping[str, FileInfo] = MappingProxyType({})
FilesBelow = Mapping[str, Mapping[str, FileInfo]]
"""By name in a run directory, the files below it. The name of a file itself is empty."""
_Until = Callable[[Sequence[Step]], bool]
"""Returns True if a scan has found enough."""


class Root:
    """A run directory: a directory with steps in it."""

    def __init__(self, path: PathLike, on_read: Callable[[OstrakaSource], None] | None = None):
        """`on_read` is called with each checkpoint of Ostraka's when its metadata is read."""
        self.store = open_store(path)
        self.location = self.store.location
        self._on_read = on_read
        self._cache: dict[str, tuple[Any, Step]] = {}
        """By name, what each directory holds, and the version of the file that says so.

        Pins are not remembered.
        """
        self._listed: dict[str, tuple[Any, Step | None]] = {}
        """By name, what a directory of another format holds, and the files that it had then."""
        self._added: dict[str, tuple[Any, Mapping[str, float]]] = {}
        """By name, the metrics that were added to a step, and the version of their file."""
        self._has_warned = False
        self._spared: set[str] = set()
        """Directories that a warning named because they may have lost their `_METADATA`."""
        self.changing = RenewedLock()
        """Held while steps are changed: retention runs in the background of the training loop."""

    def prepare(self) -> None:
        self.refuse_checkpoint(PathInTheWay)
        self.store.prepare()

    def refuse_checkpoint(self, kind: type[PathInTheWay | CheckpointNotFound]) -> None:
        """Raise if this directory is a checkpoint itself, or a file."""
        names = self.store.list()
        is_foreign = has_orbax_names(names) and not self.scan(lambda _: True)
        if shard_file.METADATA_NAME in names or is_foreign:
            raise kind(
                f"{self.location} is itself a checkpoint, not a directory of steps; give a Manager "
                "the directory above it, or read this one with ostraka.restore or ostraka.open"
            )
        if not names and not self.store.exists() and self.store.look("") is not None:
            raise kind(f"{self.location} is a file; give a Manager a directory of steps")

    def warn_if_begun_elsewhere(self) -> None:
        """Log once what looks like checkpoints in a directory without steps."""
        found = None if self._has_warned else likely_steps(self.store)
        self._has_warned = True
        if found is not None:
            log.warning(
                "there is no step in %s, so a run begins from scratch there, but %s",
                self.location,
                found,
            )

    def unusual_names(self) -> dict[str, list[int]]:
        """Return the steps with other names than the manager's, and those that are links."""
        named = steps_among(self.store.list())
        return {
            "renamed": [step for step, names in named.items() if names != [name_of(step)]],
            "links": [step for step, names in named.items() if any(map(self.store.is_link, names))],
        }

    def own_name(self, number: int) -> str:
        """Return the name to save a step under: its present one, if Ostraka wrote it."""
        found = self._step(number, names_of_step(number, self.store.list()))
        return next(iter(found.versions if found else ()), name_of(number))

    def at(self, name: str) -> Store:
        """Return the store of a step."""
        return self.store.at(name)

    def path(self, name: str) -> str:
        return self.at(name).location

    def refuse_link(self, name: str) -> None:
        """Raise PathInTheWay if saving would replace the target of a link."""
        if self.store.is_link(name):
            is_step = self._look(name) is not None
            remedy = f"delete step {step_of(name)} first, which removes the link alone"
            raise PathInTheWay(
                f"{self.path(name)} is a link, and saving would replace what it leads to; "
                f"{remedy if is_step else 'remove the link first'}"
            )

    # Which steps exist

    def scan(
        self, until: _Until | None = None, *, up_to: int | None = None, trusting: bool = False
    ) -> list[Step]:
        """Return all steps up to a number, unreadable ones included. The newest is the last.

        They ascend. Only steps aside come first. The scan begins with the newest. After each step
        it calls `until` with the steps found so far, in that order, and ends if that returns True.
        With `trusting`, it does not look again at steps that were readable at the last look, and
        `pinned` is False for all: use `look_again`.
        """
        there = self.store.list()
        found: list[Step] = []
        for _ in range(_RETRIES):
            found, is_settled = self._look_at(there, until, up_to, trusting)
            if is_settled:
                break
            # A run that keeps one step may have saved the next and deleted this one.
            before, there = there, self.store.list()
            if before == there:
                break
        self._forget_all_but(there)
        return found[::-1]

    def scan_files(self) -> tuple[list[Step], FilesBelow]:
        """Return all steps as `scan` does, ascending, and the files in their directories.

        In a bucket this takes one listing of all files. Each checkpoint is read once, and again
        only if it was replaced.
        """
        steps, files, lost = list[Step](), dict[str, Mapping[str, FileInfo]](), set[str]()
        for _ in range(_RETRIES):
            files, before = self._list_files(), lost
            named = possible_steps(files)
            names = [name for names in named.values() for name in names]
            look = dict(zip(names, self._of_each(names, self._look_listed(files)), strict=True))
            found = (self._step(number, names, look.__getitem__) for number, names in named.items())
            steps = ascending(filter(None, found))
            lost = {n for n in names if shard_file.METADATA_NAME in files[n] and look[n] is None}
            if lost == before:
                break  # Else a step was deleted meanwhile, and others may have come.
        self._forget_all_but(list(files))
        return steps, files

    def _list_files(self) -> FilesBelow:
        found: dict[str, Mapping[str, FileInfo]] = {}
        if not self.store.traits.is_remote:
            for name in self.store.list():
                found[name] = {}
                with suppress(StoreError):  # Then it has problems, or it is a file.
                    if step_of(name) is not None or prefixed_steps([name]):
                        found[name] = {file.name: file for file in self.at(name).files("")}
                    elif (file := self.store.look(name)) is not None:
                        found[name] = {"": file}
            return found
        below: dict[str, dict[str, FileInfo]] = {}
        for file in self.store.files(""):
            name, _, rest = file.name.partition("/")
            below.setdefault(name, {})[rest] = file
        return {**below}

    def _look_listed(self, files: FilesBelow) -> _Look:
        def look(name: str) -> Step | None:
            there = files[name].get(shard_file.METADATA_NAME)
            if there is not None and step_of(name) is not None:
                found = self._read(name, there.version, self._read_own)
                if found is not None:
                    return self._with_notes(name, found, files[name].keys(), files[name])
            key = {rest: file.version for rest, file in files[name].items()}
            known = self._listed.get(name)
            if known is None or not key or known[0] != key:
                known = self._listed[name] = (key, self._look_with_notes(name))
            return known[1]

        return look

    def steps(self) -> list[Step]:
        """Return the readable steps in ascending order."""
        return ascending(step for step in self.scan() if not step.problems)

    def forget(self, name: str) -> None:
        """Forget the contents of a directory that was saved to."""
        for known in (self._cache, self._listed, self._added):
            known.pop(name, None)

    def look_again(self, steps: Iterable[Step]) -> list[Step]:
        """Return these steps as they are now, without those that are gone."""
        return list(filter(None, (self._step(step.step, step.names) for step in steps)))

    def steps_after(self, number: int, names: Sequence[str], *, descending: bool) -> Iterator[Step]:
        """Yield the steps above a number, unreadable ones included. `names` are the root's.

        Each is looked at when its turn comes, so that the first one costs no look at the others.
        """
        named = possible_steps(names)
        for step in sorted((step for step in named if step > number), reverse=descending):
            if (found := self._step(step, named[step])) is not None:
                yield found
        self._forget_all_but(names)

    def find(self, number: int) -> Step:
        """Return a step, readable or not. Raises CheckpointNotFound."""
        for _ in range(_RETRIES):
            names = names_of_step(number, self.store.list())
            if (found := self._step(number, names)) is not None:
                return found
            if names == names_of_step(number, self.store.list()):
                break  # Else it was renamed just now.
        raise no_such_step(self.location, number, sorted(step.step for step in self.scan()))

    # Changes to steps

    def own_names(self, step: Step, verb: str) -> Mapping[str, Any]:
        """Return the names of a step that Ostraka wrote, each with its version.

        Raises PathInTheWay if there are none.
        """
        if step.versions:
            return step.versions
        path = self.path(step.names[0])
        remedy = f"delete {path} yourself" if verb == "deletes" else f"no Manager deletes {path}"
        raise PathInTheWay(
            f"step {step.step} of {self.location} was written by Orbax, and Ostraka {verb} only "
            f"its own steps; {remedy}"
        )

    def pin(self, number: int) -> None:
        with self.changing.lock:
            step = self.find(number)
            first = next(iter(self.own_names(step, "pins")))
            if not step.pinned:
                self.at(first).put(PIN_NAME, b"")

    def unpin(self, number: int) -> None:
        with self.changing.lock:
            for name in self.own_names(self.find(number), "unpins"):
                if self.store.is_link(name):
                    continue  # Another run may have pinned its target.
                store = self.at(name)
                store.delete(PIN_NAME)
                store.sync("")

    def clean(self) -> None:
        """Remove files of interrupted saves and deletions, but nothing of a save that runs."""
        with self.changing.lock:
            there = self.store.list()
            names = [name for name in there if step_of(name) is not None]
            for name, is_unusual in zip(names, self._of_each(names, self._is_unusual), strict=True):
                if not is_unusual or self.store.is_link(name):
                    continue
                try:
                    with suppress(Busy, PathInTheWay):
                        self._clean(name)
                except OSError:
                    # Such files do no harm: no reason to stop the training.
                    log.exception("leftovers in %s can't be removed now", self.path(name))
            try:
                for name in there:
                    if is_temporary(name, RUN_NAME):
                        self.store.delete(name)
                remove_expired_leases(self.store)
            except OSError:
                log.exception("leases in %s can't be removed now", self.location)

    def _is_unusual(self, name: str) -> bool:
        """Return True if a directory has more in it than a checkpoint has, or less."""
        try:
            names = [one for one in self.at(name).list() if one not in (PIN_NAME, ADDED_NAME)]
        except StoreError:
            return True
        usual = [one for one in names if shard_file.is_shards_directory(one)]
        return bool(names) and names != [shard_file.METADATA_NAME, *usual[:1]]

    def _clean(self, name: str) -> None:
        place = self.at(name)
        leftovers = find_leftovers(place)
        if not leftovers:
            return
        is_step = place.look(shard_file.METADATA_NAME) is not None
        if is_step or not may_have_lost_metadata(place, leftovers):
            collect_garbage(place)
        elif name not in self._spared:
            refuse_claimed(place)  # A save that is about to commit is no loss.
            self._spared.add(name)
            log.warning(
                "%s has all files of a checkpoint but %s: that was lost, or a save died just "
                "before its commit; `ostraka repair %s` makes it a checkpoint, `ostraka gc` "
                "deletes it",
                place.location,
                shard_file.METADATA_NAME,
                place.location,
            )

    # One directory

    def _of_each(self, names: Sequence[str], work: Callable[[str], Result]) -> list[Result]:
        """Call `work` with each name, in threads if it takes a request."""
        traits = self.store.traits
        if not traits.is_remote or len(names) < 2:
            return [work(name) for name in names]
        return run_all(work, names, threads=traits.reads_at_once, stop=StopSignal())

    def _forget_all_but(self, names: Sequence[str]) -> None:
        known = {*self._cache, *self._listed, *self._added}
        for name in known.difference(names):  # Another thread may add to it meanwhile.
            self.forget(name)

    def _look_at(
        self, there: Sequence[str], until: _Until | None, up_to: int | None, trusting: bool
    ) -> tuple[list[Step], bool]:
        """Return the steps among these names, the newest first, and True if all were steps."""
        possible = possible_steps(there)
        if up_to is not None:
            possible = {step: names for step, names in possible.items() if step <= up_to}
        names = [name for names in possible.values() for name in names]
        look = self._look if trusting else self._look_with_notes
        known: dict[str, Step | None] = {}
        if trusting:
            cached = {name: self._cache.get(name) for name in names}
            known = {n: found[1] for n, found in cached.items() if found and not found[1].problems}
        if until is None and self.store.traits.is_remote:
            unknown = [name for name in names if name not in known]
            known |= dict(zip(unknown, self._of_each(unknown, look), strict=True))
        found: list[Step] = []
        is_settled = True
        for number, names in reversed(possible.items()):
            step = self._step(number, names, lambda one: known[one] if one in known else look(one))
            is_settled = is_settled and step is not None and len(step.names) == len(names)
            if step is None:
                continue
            found.append(step)
            if until is not None and until(found):
                break
        return found, is_settled

    def _step(self, number: int, names: Sequence[str], look: _Look | None = None) -> Step | None:
        """Return the step that directories of these names hold, or None if none of them does."""
        found = filter(None, map(look or self._look_with_notes, names))
        # Neither a damaged directory nor a foreign one hides a good one of the same step.
        held = sorted(found, key=lambda one: (bool(one.problems), one.is_foreign))
        if not held:
            return None
        return replace(
            held[0],
            step=number,
            pinned=any(one.pinned for one in held),
            names=tuple(one.names[0] for one in held),
            versions={name: v for one in held for name, v in one.versions.items()},
        )

    def _look_with_notes(self, name: str) -> Step | None:
        """As `_look`, with the pin and the metrics that were added after the commit."""
        found = self._look(name)
        if found is None or found.is_foreign:
            return found
        place, names = self.at(name), list[str]()
        with suppress(StoreError):  # Then it has problems, and is not deleted anyway.
            names = place.list()
        return self._with_notes(name, found, names)

    def _with_notes(
        self,
        name: str,
        found: Step,
        names: Collection[str],
        files: Mapping[str, FileInfo] = _NO_FILES,
    ) -> Step:
        """Return a step with its pin and its added metrics. `names` are those in its directory.

        With `files`, added metrics are read again only if their file has changed.
        """
        # The target of a link is not the manager's to delete.
        found = replace(found, pinned=PIN_NAME in names or self.store.is_link(name))
        if ADDED_NAME not in names:
            return found
        file, known = files.get(ADDED_NAME), self._added.get(name)
        key = None if file is None else (file.version, found.save_id)
        if known is None or key is None or known[0] != key:
            place = self.at(name)
            try:
                known = (key, read_added(place, found.save_id))
            except OstrakaError as error:
                log.warning("%s: %s is left out, so the step is kept", place.location, error)
                return replace(found, pinned=True)
            self._added[name] = known
        return replace(found, metrics=MappingProxyType({**found.metrics, **known[1]}))

    def _look(self, name: str) -> Step | None:
        """Return the checkpoint in a directory, or None if there is none.

        It is read again only if it was replaced.
        """
        place = self.at(name)
        is_named = step_of(name) is not None
        try:
            there = place.look(shard_file.METADATA_NAME) if is_named else None
            if there is not None:
                found = self._read(name, there.version, self._read_own)
                if found is not None:
                    return found
            version = version_of_orbax(place, is_named=is_named)
            if version is None:
                self.forget(name)
                return None
            return self._read(name, version, _read_foreign)
        except StoreError as error:
            # It may be the newest step: a directory that can't be read must not count as none.
            problem = Problem(shard_file.METADATA_NAME, describe(error.__cause__ or error))
            return self._remember(name, None, replace(_UNREAD, problems=(problem,)))

    def _read_own(self, place: Store) -> Step | None:
        return _read_own(place, self._on_read)

    def _read(self, name: str, version: Any, read: Callable[[Store], Step | None]) -> Step | None:
        known = self._cache.get(name)
        if known is not None and known[0] == version:
            return known[1]
        found = read(self.at(name))
        return None if found is None else self._remember(name, version, found)

    def _remember(self, name: str, version: Any, found: Step) -> Step:
        versions = {} if found.is_foreign else {name: version}
        step = replace(found, names=(name,), versions=versions)
        self._cache[name] = (version, step)
        return step


def ascending(steps: Iterable[Step]) -> list[Step]:
    return sorted(steps, key=lambda step: step.step)


def no_such_step(root: str, number: int, there: list[int]) -> CheckpointNotFound:
    return CheckpointNotFound(f"there is no step {number} in {root}; it has {list_steps(there)}")


def refuse_emptied(root: Root, number: int) -> None:
    """Raise InvalidTree if the newest step up to a number has arrays. This one has none."""
    named = steps_among(root.store.list())
    for step in sorted((step for step in named if step <= number), reverse=True):
        counts: list[int] = []
        for name in named[step]:
            with suppress(OstrakaError):  # A step that can't be read tells nothing.
                counts.append(len(open_source(root.at(name)).saved.leaves))
        if any(counts):
            raise InvalidTree(
                f"step {number} has no arrays, and step {step} in {root.location} has "
                f"{max(counts):,} (is the model missing from the tree?); pass force=True to save it"
            )
        if counts:
            return


def _read_own(place: Store, on_read: Callable[[OstrakaSource], None] | None) -> Step | None:
    """Return what a `_METADATA` says, or None if Ostraka did not write it."""
    try:
        source = open_ostraka(place)
    except NotACheckpoint:
        return None
    except UnsupportedFormat as error:
        return replace(_UNREAD, problems=_problems(error), unsupported=str(error))
    except (Damaged, OSError) as error:
        return replace(_UNREAD, problems=_problems(error))
    if source is not None:
        nbytes = sum(file.nbytes for file in source.files())
        at, metrics = saved_at(source.saved.writer), metrics_in(source.saved.user)
        save_id = source.saved.id
        if on_read is not None:
            on_read(source)
        return replace(_UNREAD, saved_at=at, metrics=metrics, nbytes=nbytes, save_id=save_id)
    names = place.list()
    if shard_file.METADATA_NAME not in names or not any(map(shard_file.is_shards_directory, names)):
        return None
    lost = Problem(shard_file.METADATA_NAME, "it is a link that leads nowhere")
    return replace(_UNREAD, problems=(lost,))


def _read_foreign(place: Store) -> Step | None:
    """Return what Orbax says of its checkpoint, or None if it has finished none there."""
    unread = replace(_UNREAD, format=ORBAX)
    try:
        about = about_orbax(place)
    except CheckpointNotFound:
        return None
    except (Damaged, OSError) as error:
        return replace(unread, problems=_problems(error))
    if about is None:
        return None
    numbers = {name: v for name, v in about.metrics.items() if type(v) in (int, float)}
    return replace(unread, saved_at=saved_at(about.writer), metrics=numbers)


def _problems(error: Exception) -> tuple[Problem, ...]:
    own = Problem(shard_file.METADATA_NAME, str(error))
    return error.problems if isinstance(error, Damaged) else (own,)


def saved_at(writer: Mapping[str, Any]) -> float | None:
    """Return when a checkpoint was saved, or None if its writer does not say."""
    try:
        return datetime.fromisoformat(writer["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
