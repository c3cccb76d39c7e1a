"""The manager of a run's steps: what to save and when, what to keep, what to continue from."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self, SupportsIndex

import jax
from jax.sharding import Mesh

from ostraka._capture import DtypeRule
from ostraka._codec import CompressRule, check_compress
from ostraka._names_given import NamesLike
from ostraka._pattern import Patterns
from ostraka._plan_parity import check_parity
from ostraka._plan_write import MAX_FILE_BYTES
from ostraka._read import restore
from ostraka._record import OnRecord, Record, Stopwatch
from ostraka._record import logger as log
from ostraka._save import Save
from ostraka._share import ShareReads
from ostraka._step_names import name_of
from ostraka.errors import CheckpointNotFound, StoreError, warn_caller
from ostraka.manager._advice import Advice, CostMeter
from ostraka.manager._check import (
    check_backlog,
    check_count,
    check_function,
    check_restored_step,
    check_saved_step,
    check_seconds,
    check_step,
)
from ostraka.manager._keep import Best, check_best, check_keep
from ostraka.manager._lock import RootLock
from ostraka.manager._metrics import with_metrics
from ostraka.manager._mirror import Mirror, newest_step, open_mirror, warn_if_ahead
from ostraka.manager._pending import PendingSave
from ostraka.manager._preempt import Preemption
from ostraka.manager._recover import Recovery, find_step, latest_step, name_both
from ostraka.manager._retain import Retention, remove_unless_read
from ostraka.manager._steps import Root, Step
from ostraka.manager._together import agree, check_alike, decide_together
from ostraka.manager._watch import BACKLOG, Watch
from ostraka.manager._when import Schedule, check_when
from ostraka.storage import PathLike, Store

_NOT_GIVEN: Any = object()


class Manager:
    """The steps of a run in one directory: saves them, keeps some, restores the newest intact one.

    When to save: at multiples of `every` steps, every `every_s` seconds, `at` given steps, `when` a
    callable of the step says so, and, with `on_preemption`, when the run is being preempted
    (SIGTERM, or JAX's preemption notice). These conditions are ORed; with none of the first four,
    each call of `save` saves.

    What to keep: the last `keep` steps, multiples of `keep_every`, one for each `keep_interval_s`
    seconds, the best by a metric (`keep_best`), those for which `keep_if` is true, and pinned ones.
    These conditions are ORed; with none given, everything is kept. The newest step is always kept.

    Saves run in the background unless `asynchronous` is False; `compress` and `parity` are those of
    `ostraka.save`. Errors of a background save are raised by the next call, on every process. Only
    one manager writes to a directory at a time: a second raises Busy, or waits (`if_busy="wait"`).
    With `read_only` nothing is ever written, but for the lease of `watch`.

    `mirror` is another place, which gets a copy of every committed step, or of those that are
    multiples of `mirror_every`, in the background and without making saves wait; the newest first,
    if it falls behind. `wait` and `close` wait for it, and raise StoreError if it can't be done.
    Nothing is ever deleted there. `latest` and `restore` use it for what the root has lost.

    `on_record` is called with a record of each save, restore and copy to the mirror. `mtbf_s`, the
    mean time between failures in seconds, makes `advice` say how often to save.

    Every process of a run makes its manager and calls the same methods in the same order; only
    `steps`, `metrics` and `path` may be called by one alone.

    >>> with ostraka.Manager("runs/a", every=100, keep=3) as manager:
    ...     if manager.latest() is not None:
    ...         state = manager.restore(like=state)
    ...     for step in range(state["step"] + 1, 10_000):
    ...         state = train(state)
    ...         manager.save(step, state, metrics={"loss": state["loss"]})
    ...         if manager.reached_preemption(step):
    ...             break
    """

    def __init__(
        self,
        root: PathLike,
        *,
        every: int | None = None,
        every_s: float | None = None,
        at: Iterable[int] = (),
        when: Callable[[int], bool] | None = None,
        on_preemption: bool = True,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_interval_s: float | None = None,
        keep_best: Best | None = None,
        keep_if: Callable[[Step], bool] | None = None,
        mirror: PathLike | None = None,
        mirror_every: int | None = None,
        asynchronous: bool = True,
        compress: CompressRule = None,
        parity: int = 0,
        read_only: bool = False,
        if_busy: Literal["wait", "refuse"] = "refuse",
        mtbf_s: float | None = None,
        on_record: Callable[[Record], None] | None = None,
    ):
        if if_busy not in ("wait", "refuse"):
            raise ValueError(f'if_busy is {if_busy!r}; it must be "wait" or "refuse"')
        self._root = Root(root)
        self._schedule = Schedule(check_when(every, every_s, at, when))
        self._keep = check_keep(keep, keep_every, keep_interval_s, keep_best, keep_if)
        self._mirror_every = check_count("mirror_every", mirror_every)
        self._copies = open_mirror(self._root, root, mirror, self._mirror_every)
        """The place of the mirror."""
        self._asynchronous = asynchronous
        check_compress(compress)
        self._compress = compress
        check_parity(parity)
        self._parity = parity
        self._read_only = read_only
        self._on_record = check_function("on_record", on_record)
        self._meter = CostMeter(check_seconds("mtbf_s", mtbf_s))
        self._mirror: Mirror | None = None
        if self._copies is not None and not read_only:
            self._mirror = Mirror(
                self._root, self._copies, every=self._mirror_every, on_record=self._on_record
            )
        self._pending = PendingSave()
        self._begun: int | None = None
        """The step that is being saved, or was saved last."""
        self._retention = Retention(self._root, self._keep)
        self._retaining = threading.Lock()
        self._damaged: set[int] = set()
        self._names: dict[int, str] = {}
        self._links: set[int] = set()
        """Steps that were links when the manager was opened, known to all processes."""
        self._newest: int | None = None
        self._closed = False
        self._process = os.getpid()
        self._lock = RootLock(self._root.store)
        self._preemption: Preemption | None = None
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self.restored: int | None = None
        """The step that was restored last."""
        if read_only:
            self._root.refuse_checkpoint(CheckpointNotFound)
            if self._copies is not None:
                self._copies.refuse_checkpoint(CheckpointNotFound)
        else:
            self._open(wait=if_busy == "wait")
            if on_preemption:
                self._preemption = Preemption()
                # Stop catching SIGTERM when the manager is garbage-collected.
                weakref.finalize(self, self._preemption.stop).atexit = False

    @property
    def root(self) -> str:
        """The directory, as an absolute path."""
        return self._root.location

    @property
    def advice(self) -> Advice | None:
        """What saving costs the loop and how often to save; None before the first save."""
        return self._meter.advise()

    # Saving

    def should_save(self, step: SupportsIndex) -> bool:
        """Whether `save` would save this step."""
        number = check_step(step)
        return self.reached_preemption(number) or self._schedule.is_due(number)

    def reached_preemption(self, step: SupportsIndex) -> bool:
        """Whether the run is being preempted and this is the step to stop at.

        All processes get the same answer; ask, or call `save`, at every step.
        """
        return self._preemption is not None and self._preemption.reached(check_step(step))

    def save(
        self,
        step: SupportsIndex,
        tree: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
        asynchronous: bool | None = None,
        dtype: DtypeRule = None,
        compress: CompressRule = _NOT_GIVEN,
        parity: int | None = None,
        max_file_bytes: int | str = MAX_FILE_BYTES,
    ) -> bool:
        """Save a step if it is time to, or in any case with `force`; returns whether it is saved.

        `tree`, `dtype`, `compress`, `parity`, `metadata` and `max_file_bytes` are those of
        `ostraka.save`; without `compress` or `parity`, it is that of the manager. `metrics` are
        numbers, the same on all processes; they are kept in the checkpoint. When it returns, `tree`
        may be changed. The save goes on in the background, and its error is raised by the next
        call; with `asynchronous=False`, and when the run is being preempted, the step is on disk
        when this returns.

        A step that is there already is replaced, in one atomic event; one that is a link, or a root
        that is no longer the directory it was, raises PathInTheWay. A step lower than the latest
        raises ValueError: a restart would continue from the later one. `force` saves it anyway.
        """
        self._check_writable()
        number = check_saved_step(step)
        self._meter.enter(number)
        due = self.should_save(number) or force
        if due:
            self._begin(
                number,
                tree,
                metadata=with_metrics(metadata, metrics, number),
                dtype=dtype,
                compress=self._compress if compress is _NOT_GIVEN else compress,
                parity=self._parity if parity is None else parity,
                max_file_bytes=max_file_bytes,
                force=force,
                background=self._asynchronous if asynchronous is None else asynchronous,
            )
        else:
            self._pending.raise_if_failed()
        self._meter.leave(number, began=due, saving=self._pending.is_running())
        if due and jax.process_index() == 0:
            self._meter.log_changes()
        return due

    def wait(self) -> None:
        """Wait for the running save, if any, and for the mirror; raises their errors."""
        self._pending.wait()
        self._wait_for_mirror()

    # What is there

    def steps(self) -> list[int]:
        """The steps that are on disk now, ascending, as this process sees them."""
        return [step.step for step in self._root.steps()]

    def latest(self) -> int | None:
        """The highest step on disk, the same on all processes; None if there is none.

        Of a root that has no step at all, it is that of the mirror. Raises Damaged if there are
        steps, and not one of them can be read; UnsupportedFormat if a newer version of Ostraka
        wrote the highest.
        """
        return latest_step(self._root, self._copies)

    def best(self, by: Best | None = None) -> int | None:
        """The best step `by` a metric, or else by `keep_best`; the same on all processes.

        None if no step has that metric.
        """
        best = check_best("by", by) or self._keep.best
        if best is None:
            raise ValueError("best by what? Give by=Best(metric, mode), or the manager keep_best=")
        ranked = decide_together(
            f"look at {self.root}",
            lambda: [step.step for step in best.ranked(self._root.steps())[:1]],
        )
        return ranked[0] if ranked else None

    def metrics(self, step: SupportsIndex) -> dict[str, float]:
        """The metrics that were saved with a step."""
        return dict(find_step(self._root, self._copies, check_step(step))[1].metrics)

    def path(self, step: SupportsIndex) -> str:
        """The path of a step that is there, for `ostraka.open` and its like."""
        root, found = find_step(self._root, self._copies, check_step(step))
        return root.path(found.names[0])

    def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        fallback: bool = False,
        like: Any = _NOT_GIVEN,
        into: Any = _NOT_GIVEN,
        mesh: Mesh | Mapping[str, int] | None = None,
        specs: Any = None,
        strict: bool = True,
        only: Patterns | None = None,
        rename: Mapping[str, str] | None = None,
        names: NamesLike | None = None,
        dtype: DtypeRule = None,
        as_state: bool = False,
        share_reads: ShareReads = "auto",
        on_record: OnRecord | None = None,
    ) -> Any:
        """Restore a step, or else the newest; returns what `ostraka.restore` returns.

        What the root lacks, or has damaged, is read from the mirror, if that has it; the latter
        with a warning.

        The arguments from `like` on are those of `ostraka.restore`; without `on_record`, that of
        the manager is called. Every byte that is read is verified. If a step is damaged, this is
        logged and Damaged is raised, which names the step before it; with `fallback` there is a
        warning instead, and the step before it is restored, and so on. `restored` is the step that
        was restored. Raises CheckpointNotFound if there is nothing to restore, UnsupportedFormat if
        the step was written by a newer version of Ostraka.
        """
        self._pending.wait()
        self._check_open()
        began_s = time.perf_counter()
        # Values of a damaged step must not stay in `into=` beside those of an older one.
        mixes = into is not _NOT_GIVEN and not strict
        wanted = check_restored_step(step)
        recovery = Recovery(
            self._root,
            self._copies,
            wanted,
            fallback=fallback,
            verify_first=fallback and mixes,
        )

        trees = {"like": like, "into": into}
        trees = {name: tree for name, tree in trees.items() if tree is not _NOT_GIVEN}

        def restore_from(place: Store) -> Any:
            return restore(
                place,
                **trees,
                mesh=mesh,
                specs=specs,
                strict=strict,
                only=only,
                rename=rename,
                names=names,
                dtype=dtype,
                as_state=as_state,
                share_reads=share_reads,
                on_record=self._on_record if on_record is None else on_record,
            )

        try:
            self.restored, value = recovery.run(restore_from)
        finally:
            self._damaged |= recovery.damaged
        self._schedule.note_restore(self.restored)
        time_s = time.perf_counter() - began_s
        log.info("restored step %d of %s in %.3f s", self.restored, self.root, time_s)
        return value

    def watch(
        self,
        *,
        after: SupportsIndex | None = None,
        newest_only: bool = False,
        backlog: SupportsIndex = BACKLOG,
        timeout_s: float | None = None,
    ) -> Generator[int]:
        """Each step as it is committed, for programs that evaluate while another one trains.

        Yields the numbers of all steps after the step `after`, or of all: first of those that are
        there, then of new ones, in ascending order, none twice. With `newest_only` only the newest
        is yielded, if there are several. Ends after `timeout_s` without a new step; 0 waits for
        none.

        The step that was yielded last is not deleted by the run's retention until the next one is
        asked for, the generator is closed or the program ends. Nor are those after it that are to
        be yielded, up to `backlog` of them: so a reader that is slower than the run for a while
        sees every step, and one that keeps up costs the run no more than one step. What is missed
        because a reader is further behind is logged. With `backlog=0` or `newest_only` only the
        next one is kept, while it is waited for. This needs a file in the root, renewed every few
        seconds; where it can't be written there is a warning, and steps may be deleted while they
        are read.

        On several processes all get the same steps; process 0 waits for them.

        >>> manager = ostraka.Manager("runs/a", read_only=True)
        >>> for step in manager.watch(timeout_s=3600):
        ...     evaluate(manager.restore(step, like=state))
        """
        self._check_open()
        watch = Watch(
            self._root,
            after=None if after is None else check_step(after),
            newest_only=newest_only,
            backlog=check_backlog(backlog),
            timeout_s=0.0 if timeout_s == 0 else check_seconds("timeout_s", timeout_s),
            warn=lambda text: warn_caller(UserWarning(text)),
        )
        self._watches.add(watch)
        return self._watch(watch)

    # Changing what is there

    def delete(self, step: SupportsIndex) -> None:
        """Delete a step, even if it is pinned or the newest; Busy while a `watch` reads it."""
        self._change("deletion", lambda number: remove_unless_read(self._root, number), step)

    def pin(self, step: SupportsIndex) -> None:
        """Exempt a step from retention, in later runs too."""
        self._change("pinning", self._root.pin, step)

    def unpin(self, step: SupportsIndex) -> None:
        """Make a pinned step subject to retention again."""
        self._change("unpinning", self._root.unpin, step)

    def close(self) -> None:
        """Wait for the running save and the mirror, release the lock; raises their errors."""
        if self._closed:
            return
        try:
            self._pending.wait()
            self._wait_for_mirror()
        finally:
            self._leave(alone=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # The error may be on this process alone: waiting for the others could be a deadlock.
        try:
            self._pending.finish_alone()
        finally:
            self._leave(alone=True)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "read-only" if self._read_only else "open"
        return f"<Manager of {self.root}, {state}>"

    # Inside

    def _open(self, *, wait: bool) -> None:
        def prepare(described: list[dict[str, str]]) -> dict[str, Any]:
            check_alike(described)
            self._root.prepare()
            self._lock.acquire(wait=wait)
            self._root.clean()
            steps = self._root.scan()
            if self._copies is not None:
                self._copies.prepare()
            newest = newest_step(steps, self._copies)
            if self._copies is not None and steps:
                warn_if_ahead(newest, self._copies)
            return {
                "names": [[s.step, s.names[0]] for s in steps],
                "links": [s.step for s in steps if self._root.is_link(s.names[0])],
                "newest": newest,
                "mirror": f"mirror-{os.urandom(8).hex()}",
            }

        try:
            found = agree(f"opening of {self.root}", self._described(), prepare)
        except BaseException:
            self._lock.release()
            raise
        self._names = dict(found["names"])
        self._links = set(found["links"])
        self._newest = found["newest"]
        if self._mirror is not None:
            # Weakly: the thread must not keep a manager alive that nobody has any more.
            self._mirror.start(found["mirror"], weakref.WeakMethod(self._retain_again))
            weakref.finalize(self, self._mirror.stop, alone=True).atexit = False

    def _described(self) -> dict[str, str]:
        """The arguments that must be the same on all processes, by name."""
        return {
            "root": self.root,
            "asynchronous": str(self._asynchronous),
            "compress": repr(self._compress),
            "parity": str(self._parity),
            "mirror": "None" if self._copies is None else self._copies.location,
            "mirror_every": str(self._mirror_every),
            **self._schedule.when.described(),
            **self._keep.described(),
        }

    def _begin(
        self, step: int, tree: Any, *, force: bool, background: bool, **options: Any
    ) -> None:
        watch = Stopwatch()  # started here, to include the wait for the save before
        self._pending.wait()
        if not force:
            self._check_order(step)
        name = self._names.get(step, name_of(step))
        if jax.process_count() == 1 or step in self._links:
            decide_together(f"look at step {step}", lambda: self._check_place(name))
        self._schedule.note_save()
        place = self._root.at(name)
        self._newest = max(step, step if self._newest is None else self._newest)
        self._begun = step
        background = background and not self.reached_preemption(step)
        saving = Save(
            place,
            on_record=self._on_record,
            on_commit=lambda: self._retain(step),
            check_place=lambda: self._check_place(name),
            watch=watch,
            **options,
        )
        self._pending.begin(
            lambda: saving.begin(tree, is_waited_for=not background), background=background
        )

    def _watch(self, watch: Watch) -> Generator[int]:
        def wait() -> int | None:
            found = watch.wait()
            return None if found is None else found.step

        try:
            while True:
                self._check_open()
                step = decide_together(f"watch of {self.root}", wait)
                if step is None:
                    return
                yield step
        finally:
            watch.close()

    def _check_place(self, name: str) -> None:
        """On process 0: check that the root is the one that was opened, and the step is no link."""
        try:
            self._lock.check_place()
        except FileNotFoundError:
            self._root.prepare()
            self._lock.release()
            self._lock.acquire(wait=False)
        self._root.refuse_link(name)

    def _check_order(self, step: int) -> None:
        """Refuse a step lower than the latest that is still there."""
        if self._newest is None or step >= self._newest:
            return
        self._newest = decide_together(
            f"look at {self.root}",
            lambda: newest_step(self._root.scan(), self._copies, self._damaged),
        )
        if self._newest is not None and step < self._newest:
            raise ValueError(
                f"step {step} is lower than {self._newest}, the latest step in "
                f"{name_both(self._root, self._copies)}, which a restart would go on from; delete "
                "the later steps first, or pass force=True"
            )

    def _retain(self, just_saved: int) -> None:
        """On process 0, in the background, after a commit."""
        self._damaged.discard(just_saved)
        if self._mirror is not None:
            self._mirror.note_commit(just_saved)
        self._delete_superfluous(just_saved)

    def _retain_again(self) -> None:
        """On process 0, in the background, after a copy: the step was perhaps kept for it alone."""
        if self._begun is not None:
            self._delete_superfluous(self._begun)

    def _delete_superfluous(self, just_saved: int) -> None:
        held = _none_held if self._mirror is None else self._mirror.held
        with self._retaining:
            self._retention.run(just_saved=just_saved, ignore=self._damaged, held=held)

    def _wait_for_mirror(self) -> None:
        if self._mirror is not None:
            decide_together(f"wait for the mirror of {self.root}", self._mirror.wait)

    def _change(self, what: str, change: Callable[[int], None], step: SupportsIndex) -> None:
        self._check_writable()
        number = check_step(step)
        self._pending.wait()

        def change_in_place() -> None:
            with suppress(FileNotFoundError):
                self._lock.check_place()
            change(number)

        decide_together(f"{what} of step {number}", change_in_place)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the manager of {self.root} is closed")

    def _check_writable(self) -> None:
        self._check_open()
        if self._read_only:
            raise StoreError(
                f"the manager of {self.root} was opened with read_only=True, and writes nothing",
                filename=self.root,
            )
        if os.getpid() != self._process:
            raise StoreError(
                f"the manager of {self.root} writes in process {self._process} alone, and this is "
                f"{os.getpid()}, forked from it; open one with read_only=True here, or save there",
                filename=self.root,
            )

    def _leave(self, *, alone: bool) -> None:
        # Ctrl-C may interrupt this at any line; a second `close` then does the rest.
        try:
            if self._preemption is not None:
                self._preemption.stop()
            if self._mirror is not None:
                self._mirror.stop(alone=alone)
        finally:
            for watch in list(self._watches):
                watch.close()
            self._lock.release()
            self._closed = True


def _none_held(steps: Sequence[int]) -> Sequence[int]:
    return ()
