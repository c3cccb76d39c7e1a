"""The manager of a run's steps: it saves, keeps and restores them."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, Self, SupportsIndex, Unpack, overload

import jax
from jax.sharding import Mesh

from ostraka.common import keywords
from ostraka.common.keywords import answering
from ostraka.common.record import OnRecord, Record, RunStats, Stopwatch
from ostraka.common.record import logger as log
from ostraka.errors import CheckpointNotFound, OstrakaError, Preempted, StoreError, warn_caller
from ostraka.layout.casts import DtypeRule
from ostraka.layout.codec import CompressRule, check_compress
from ostraka.layout.file_names import name_of
from ostraka.layout.plan_parity import check_parity
from ostraka.layout.plan_write import MAX_FILE_BYTES
from ostraka.manager._advice import Advice, CostMeter
from ostraka.manager._arguments import (
    check_count,
    check_function,
    check_number,
    check_on_interrupt,
    check_on_preemption,
    check_seconds,
    check_share,
    check_step,
)
from ostraka.manager._audit import Audit, OnDivergence, check_audit
from ostraka.manager._html import draw_run
from ostraka.manager._keep import Best, check_best, check_keep
from ostraka.manager._losses import Losses
from ostraka.manager._mirror import Mirror, open_mirror
from ostraka.manager._pending import PendingSave
from ostraka.manager._preempt import Interrupt, Preemption
from ostraka.manager._recover import Places, Recovery
from ostraka.manager._when import Schedule
from ostraka.manager.leases import RootLock
from ostraka.manager.retain import Retention, remove_step
from ostraka.manager.run_file import RunFileWriter, RunRules, read_run_file
from ostraka.manager.steps import Root, Step, refuse_emptied, with_metrics
from ostraka.manager.watch import BACKLOG, Watch
from ostraka.processes.decide import agree, check_alike, decide_together
from ostraka.reading.names.given import NamesLike
from ostraka.restoring.in_place import InPlace
from ostraka.restoring.restore import RestoreOptions, Tree, restore
from ostraka.restoring.share import ShareReads
from ostraka.saving.agree import SaveHooks
from ostraka.saving.capture import capture
from ostraka.saving.limit import check_host_bytes
from ostraka.saving.save import SaveOptions, begin_save
from ostraka.storage import PathLike, Store
from ostraka.tree.patterns import Patterns

_NOT_GIVEN: Any = object()


class Manager:
    """Saves the steps of a run in one directory, keeps some, and restores the newest.

    The conditions to save (`every`, `every_s`, `at`, `when`) are ORed. Without any, each call of
    `save` saves. Preemption always saves. The conditions to keep a step (`keep…`) are ORed, too.
    Without any, all steps stay. The newest step and pinned steps always stay.

    Every process of a run makes its manager and calls the same methods in the same order. Only
    `steps`, `metrics` and `path` may be called by one process alone. Only one manager writes to a
    directory at a time. Steps that Orbax wrote to the directory are read like any other, and never
    deleted or replaced.

    On preemption (SIGTERM, or JAX's preemption notice) the next `save` writes its step. When the
    step is on disk on all processes, `save` raises `errors.Preempted`, a SystemExit: the program
    ends with exit code 143. A second SIGTERM ends the program wherever it is.

    The mirror gets copies in the background, the newest first. Saves do not wait for it. `wait` and
    `close` do, and raise StoreError if a copy fails. The manager deletes nothing in the mirror.
    `latest` and `restore` use it for steps that the directory has lost.

    Args:
        root: The directory of the run, as a path, a URL or a store.
        every: Save at multiples of this number of steps. With `"auto"` the manager measures what a
            save costs the loop, and chooses the interval: within `overhead`, or Daly's optimum if
            you pass `mtbf_s`. It logs its choice, and `advice` has it.
        overhead: For `every="auto"` without `mtbf_s`, the share of the time that saves may cost. A
            save that costs more than expected delays the next one, by 30 minutes or two intervals
            at most.
        every_s: Save when this many seconds have passed since the last save.
        at: Save at these steps.
        when: Save if this function of the step returns True. Process 0 calls it.
        on_preemption: `"exit"` (or True) raises Preempted after the step is saved. `"continue"`
            returns instead, and the loop asks `reached_preemption`. False leaves SIGTERM alone.
        on_interrupt: `"raise"` leaves Ctrl-C alone: it raises KeyboardInterrupt at once. With
            `"save"` the next `save` writes its step first, and then raises it. A second Ctrl-C does
            not wait.
        keep: Keep the last steps, this many.
        keep_every: Keep multiples of this number of steps.
        keep_every_s: Keep one step for each interval of this many seconds.
        keep_best: Keep the best steps by a metric: a `Best`, or a name that says what is good, such
            as `"loss"` (low) or `"accuracy"` (high).
        keep_if: Keep a step if this function returns True.
        mirror: Another directory or bucket, which gets a copy of every committed step.
        mirror_every: Copy only steps that are multiples of this number.
        asynchronous: Save in the background. The next call raises the error of a failed save.
        compress: The compression of saves, as in `ostraka.save`.
        parity: The parity files of saves, as in `ostraka.save`.
        if_running: When a step is due while the save of an earlier one still runs, `"wait"` for
            that, `"skip"` this step, or `"cancel"` the earlier save. A save that took the place of
            a cancelled one is not cancelled itself, so that some step is always committed. A forced
            step, and the last one on preemption, always wait.
        check_replicas: Compare all replicas before each commit, as in `ostraka.save`.
        max_host_bytes: The most host memory for copies of a save in the background, as in
            `ostraka.save_async`.
        audit_every: At multiples of this number of steps, `save` notes a fingerprint of every leaf
            in a journal in the directory, whether or not the step is saved. After a resume it
            compares the steps that the journal knows.
        on_divergence: If such a step differs, `"raise"` raises ResumeDiverged, `"warn"` warns, and
            a function is called with that error, on all processes.
        audit_rtol: Compare norms and random projections of floats with this relative tolerance,
            and not bits. Another mesh or platform changes the arithmetic.
        read_only: Never write, except for the lease of `watch`.
        if_busy: While another manager writes to the directory, `"wait"` waits for it and says so in
            the log, and `"raise"` raises Busy.
        mtbf_s: The mean time between failures in seconds. `advice` then says how often to save.
        on_record: Called with a record of each save, restore, copy to the mirror and audit.

    Raises:
        Busy: Another manager writes to the directory, and `if_busy` is `"raise"`.
        PathInTheWay: `root` is a checkpoint or a file. With `read_only`: CheckpointNotFound.
        OstrakaError: The processes of a run pass different arguments.

    Example:
        >>> with ostraka.Manager("runs/a", every=100, keep=3) as manager:
        ...     for step in range(manager.resume(state) + 1, 10_000):
        ...         state["params"], loss = train(state["params"])
        ...         manager.save(step, state, metrics={"loss": loss})
    """

    @answering(keywords.MANAGER)
    def __init__(
        self,
        root: PathLike,
        *,
        every: int | Literal["auto"] | None = None,
        overhead: float = 0.01,
        every_s: float | None = None,
        at: Iterable[int] = (),
        when: Callable[[int], bool] | None = None,
        on_preemption: Literal["exit", "continue"] | bool = "exit",
        on_interrupt: Literal["raise", "save"] = "raise",
        keep: int | None = None,
        keep_every: int | None = None,
        keep_every_s: float | None = None,
        keep_best: Best | str | None = None,
        keep_if: Callable[[Step], bool] | None = None,
        mirror: PathLike | None = None,
        mirror_every: int | None = None,
        asynchronous: bool = True,
        compress: CompressRule = None,
        parity: int = 0,
        if_running: Literal["wait", "skip", "cancel"] = "wait",
        check_replicas: bool = False,
        max_host_bytes: int | str | None = None,
        audit_every: int | None = None,
        on_divergence: OnDivergence = "raise",
        audit_rtol: float | None = None,
        read_only: bool = False,
        if_busy: Literal["wait", "raise"] = "wait",
        mtbf_s: float | None = None,
        on_record: Callable[[Record], None] | None = None,
    ):
        if if_busy not in ("wait", "raise"):
            raise ValueError(f'if_busy is {if_busy!r}; it must be "wait" or "raise"')
        if if_running not in ("wait", "skip", "cancel"):
            raise ValueError(f'if_running is {if_running!r}; it must be "wait", "skip" or "cancel"')
        self._on_preemption = check_on_preemption(on_preemption)
        saves_on_interrupt = check_on_interrupt(on_interrupt, self._on_preemption)
        self._root = Root(root)
        share = check_share("overhead", overhead) if every == "auto" else None
        self._meter = CostMeter(check_seconds("mtbf_s", mtbf_s), overhead=share)
        self._losses = Losses(self._meter)
        self._on_record = self._losses.complete(check_function("on_record", on_record))
        self._pending = PendingSave()
        # Not a method of the manager, which would keep itself alive.
        left_s = partial(_left_s, self._meter, self._pending)
        self._schedule = Schedule(every, every_s, at, when, left_s)
        self._if_running = if_running
        self._has_cancelled = False
        """True if the running save took the place of a cancelled one."""
        self._keep = check_keep(keep, keep_every, keep_every_s, keep_best, keep_if)
        self._mirror_every = check_count("mirror_every", mirror_every)
        copies = open_mirror(self._root, mirror, self._mirror_every)
        self._places = Places(self._root, copies)
        self._asynchronous = asynchronous
        check_compress(compress)
        self._compress = compress
        check_parity(parity)
        self._parity = parity
        self._check_replicas = check_replicas
        self._max_host_bytes = None if max_host_bytes is None else check_host_bytes(max_host_bytes)
        self._audit_every = check_count("audit_every", audit_every)
        self._audit: Audit | None = None
        check_audit(on_divergence, audit_rtol)
        if self._audit_every is not None and not read_only:
            self._audit = Audit(
                self._root.store, self._audit_every, on_divergence, audit_rtol, self._on_record
            )
        self._read_only = read_only
        self._mirror: Mirror | None = None
        if copies is not None and not read_only:
            self._mirror = Mirror(
                self._root, copies, every=self._mirror_every, on_record=self._on_record
            )
        self._begun: int | None = None
        """The step of the running save, or of the last one."""
        self._lock = RootLock(self._root.store)
        # A manager that is garbage-collected unclosed lets go at once, whoever else has its lock.
        weakref.finalize(self, self._lock.release).atexit = False
        held = None if self._mirror is None else self._mirror.held
        self._retention = Retention(self._root, self._keep, self._lock.check_place, held)
        self._renamed: set[int] = set()
        """Steps that had other names than `step_00000100` when the manager was opened."""
        self._links: set[int] = set()
        """Steps that were links then. All processes know both."""
        self._newest: int | None = None
        self._is_foreign = False
        """True if another library wrote the newest step."""
        self._closed = False
        self._process = os.getpid()
        self._run_file: RunFileWriter | None = None
        """On the process that writes it."""
        self._preemption: Preemption | None = None
        self._interrupt: Interrupt | None = None
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self.restored: int | None = None
        """The step of the last restore."""
        if read_only:
            for place in filter(None, (self._root, copies)):
                place.refuse_checkpoint(CheckpointNotFound)
        else:
            self._open(wait=if_busy == "wait")
            if self._on_preemption is not None:
                self._preemption = Preemption()
                # Stop catching SIGTERM when the manager is garbage-collected.
                weakref.finalize(self, self._preemption.stop).atexit = False
            if saves_on_interrupt and self._preemption is not None:
                self._interrupt = Interrupt(self._preemption)
                weakref.finalize(self, self._interrupt.stop).atexit = False

    @property
    def root(self) -> str:
        """The directory, as an absolute path."""
        return self._root.location

    @property
    def advice(self) -> Advice | None:
        """The cost of a save and how often to save. None before the first save."""
        return self._meter.advise()

    @property
    def stats(self) -> RunStats:
        """The time that checkpoints have cost the run so far, and its share of the run."""
        return self._losses.stats()

    # Saving

    def should_save(self, step: SupportsIndex) -> bool:
        """Return True if `save` would save this step.

        Args:
            step: The number of the step.

        Returns:
            The answer, the same on all processes. It does not change for a step.
        """
        number = check_step(step)
        # Asked in any case: the schedule counts from the last step that it was asked about.
        is_due = self._schedule.is_due(number)
        return self._is_last_call(number) or is_due

    def reached_preemption(self, step: SupportsIndex) -> bool:
        """Return True if the run is being preempted and this is the step to stop at, or later.

        You need this with `on_preemption="continue"`. Otherwise `save` ends the program. Ask, or
        call `save`, at every step.

        Args:
            step: The number of the step.

        Returns:
            The answer, the same on all processes.
        """
        return self._preemption is not None and self._preemption.reached(check_step(step))

    @answering(keywords.MANAGER_SAVE)
    def save(
        self,
        step: SupportsIndex,
        tree: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
        audit: Mapping[str, Any] | None = None,
        asynchronous: bool | None = None,
        dtype: DtypeRule = None,
        compress: CompressRule = _NOT_GIVEN,
        parity: int | None = None,
        max_file_bytes: int | str = MAX_FILE_BYTES,
    ) -> bool:
        """Save a step if it is time to.

        When this returns, you may change `tree`: a background save has its own copy. The next call
        raises the error of a background save. An existing step is replaced atomically.

        On preemption the first call saves its step in any case, waits until it is on disk and in
        the mirror, and raises Preempted, which ends the program. With `on_preemption="continue"`
        it returns, and later calls follow the schedule again.

        Args:
            step: The number of the step.
            tree: The state to save, as in `ostraka.save`.
            metrics: Numbers by name, the same on all processes. They are stored in the checkpoint.
            metadata: JSON values to store in the checkpoint.
            force: Save in any case: also a step that is not due, is lower than the latest, or has
                no arrays.
            audit: Values to audit beside the state, such as `{"batch": batch, "loss": loss}`: any
                pytrees. They are not saved.
            asynchronous: Save in the background. Default: as the manager. With False the step is on
                disk when this returns.
            dtype: Cast leaves, as in `ostraka.save`.
            compress: Compression, as in `ostraka.save`. Default: that of the manager.
            parity: Parity files, as in `ostraka.save`. Default: as the manager.
            max_file_bytes: The largest shard file, as in `ostraka.save`.

        Returns:
            True if the step is saved, or is being saved in the background.

        Raises:
            Preempted: The run is being preempted, and the step is saved.
            ResumeDiverged: With `audit_every`, this step or the audited step before it differs from
                that of the run that was resumed. This step is not saved.
            ReplicasDiffer: With `check_replicas`, replicas differ.
            InvalidTree: The step has no arrays while the step before it has some. Retention would
                delete that one in its favour.
            PathInTheWay: The step is a link, or the directory is no longer the one it was.
            ValueError: The step is lower than the latest, which a restart would resume from.
        """
        self._check_writable()
        number = check_step(step, "; the step comes first, as in save(100, tree)")
        self._losses.enter(number)
        is_last_call = self._is_last_call(number)
        if self._audit is not None:
            self._audit.note(number, tree, audit)
            self._losses.reached = self._audit.reached
            if is_last_call:
                self._audit.finish()
        due = self._schedule.is_due(number) or is_last_call or force
        if due and self._if_running != "wait" and not (is_last_call or force):
            due = self._make_way(number)
        if due:
            options = SaveOptions(
                metadata=with_metrics(metadata, metrics, number),
                dtype=dtype,
                compress=self._compress if compress is _NOT_GIVEN else compress,
                parity=self._parity if parity is None else parity,
                max_file_bytes=max_file_bytes,
                check_replicas=self._check_replicas,
            )
            background = self._asynchronous if asynchronous is None else asynchronous
            self._begin(number, tree, options, force, background and not is_last_call)
        else:
            self._pending.raise_if_failed()
        self._losses.leave(number, began=due, saving=self._pending.is_running())
        if self._meter.has_news and jax.process_index() == 0:
            self._meter.log_changes()
            if self._run_file is not None:
                self._run_file.note_advice(self._meter.advise())
        if is_last_call:
            self._answer_preemption(number)
        return due

    def wait(self) -> None:
        """Wait for the running save, the mirror and retention.

        Raises:
            SaveFailed: The background save failed.
            StoreError: A copy to the mirror failed.
        """
        with self._losses.timing("waiting"):
            self._pending.wait()
            if self._audit is not None and not self._closed:
                self._audit.finish()
            self._retention.wait()
            try:
                self._wait_for_mirror()
            finally:
                self._retention.wait()  # A step may have been kept until it was copied.

    # Which steps exist

    def steps(self) -> list[int]:
        """Return the steps that are on disk now.

        Returns:
            The numbers of readable steps, ascending, as this process sees them.
        """
        return [step.step for step in self._root.steps()]

    def latest(self) -> int | None:
        """Return the highest step on disk.

        Returns:
            Its number, the same on all processes. None if there is no step. If the directory has no
            step at all, it is that of the mirror.

        Raises:
            Damaged: There are steps, but none of them can be read.
            UnsupportedFormat: A newer version of Ostraka wrote the highest step.
        """
        return self._places.latest()

    def best(self, by: Best | str | None = None) -> int | None:
        """Return the best step by a metric.

        Args:
            by: The metric, and what is good, as for `keep_best`. Default: that of the manager.

        Returns:
            The number of the step, the same on all processes. None if no step has that metric.

        Raises:
            ValueError: Neither `by` nor `keep_best` is given.
        """
        best = check_best("by", by) or self._keep.best
        if best is None:
            raise ValueError(
                "best() needs a metric: pass by=Best('loss', 'min'), or give the manager keep_best="
            )
        return decide_together(
            f"look at {self.root}",
            lambda: next((step.step for step in best.ranked(self._root.steps())), None),
        )

    def metrics(self, step: SupportsIndex) -> dict[str, float]:
        """Return the metrics that were saved with a step.

        Args:
            step: The number of the step.

        Returns:
            The metrics by name, as this process sees them.

        Raises:
            CheckpointNotFound: There is no such step.
        """
        return dict(self._places.find(check_step(step))[1].metrics)

    def path(self, step: SupportsIndex) -> str:
        """Return the path of a step, for `ostraka.open` and other functions.

        Args:
            step: The number of the step.

        Returns:
            Its path in the directory, or else in the mirror, as this process sees it.

        Raises:
            CheckpointNotFound: There is no such step.
        """
        root, found = self._places.find(check_step(step))
        return root.path(found.names[0])

    @overload
    def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        like: Tree,
        fallback: bool = False,
        **options: Unpack[RestoreOptions],
    ) -> Tree: ...

    @overload
    def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        into: Tree,
        fallback: bool = False,
        **options: Unpack[RestoreOptions],
    ) -> Tree: ...

    @overload
    def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        fallback: bool = False,
        **options: Unpack[RestoreOptions],
    ) -> Any: ...

    @answering(keywords.MANAGER_RESTORE)
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
        progress: bool = False,
        on_record: OnRecord | None = None,
    ) -> Any:
        """Restore a step, or else the newest.

        Every byte is verified as it is read. For steps that the directory lacks, this reads the
        mirror. For damaged steps it does so with a warning. Afterwards `restored` is the number of
        the step.

        Args:
            step: The number of the step. Default: the newest.
            fallback: If the step is damaged, warn and restore the step before it, and so on.
            like: A template of the state, as in `ostraka.restore`.
            into: A tree to update in place, as in `ostraka.restore`.
            mesh: A mesh to place arrays on, as in `ostraka.restore`.
            specs: Partition specs, as in `ostraka.restore`.
            strict: Raise if template and checkpoint differ, as in `ostraka.restore`.
            only: Patterns of the leaves to restore, as in `ostraka.restore`.
            rename: New names of leaves, as in `ostraka.restore`.
            names: Names of another layout of the model, as in `ostraka.restore`.
            dtype: Cast leaves, as in `ostraka.restore`.
            as_state: Return NNX states instead of dicts, as in `ostraka.restore`.
            share_reads: Share reads among processes, as in `ostraka.restore`.
            progress: Show how far it has come, as in `ostraka.restore`.
            on_record: Called with a record of the restore. Default: that of the manager.

        Returns:
            The restored tree, as `ostraka.restore` returns it.

        Raises:
            CheckpointNotFound: There is no step to restore.
            Damaged: The step is damaged. The message names the step before it.
            UnsupportedFormat: A newer version of Ostraka wrote the step.
        """
        began_s = time.perf_counter()
        hint = "; leave it out for the newest, and give a tree as like= or into="
        wanted = None if step is None else check_step(step, hint)
        # Values of a damaged step must not stay in `into=` beside those of an older one.
        mixes = into is not _NOT_GIVEN and not strict
        trees = {"like": like, "into": into}
        restore_from = partial(
            restore,
            **{name: tree for name, tree in trees.items() if tree is not _NOT_GIVEN},
            mesh=mesh,
            specs=specs,
            strict=strict,
            only=only,
            rename=rename,
            names=names,
            dtype=dtype,
            as_state=as_state,
            share_reads=share_reads,
            progress=progress,
            on_record=self._losses.complete(on_record) or self._on_record,
        )
        found, value = self._recover(restore_from, wanted, fallback=fallback, mixes=mixes)
        duration_s = time.perf_counter() - began_s
        log.info("restored step %d of %s in %.3f s", found, self.root, duration_s)
        return value

    def resume(
        self,
        state: Any,
        *,
        mesh: Mesh | Mapping[str, int] | None = None,
        specs: Any = None,
        strict: bool = True,
        only: Patterns | None = None,
        rename: Mapping[str, str] | None = None,
        dtype: DtypeRule = None,
    ) -> int:
        """Restore the newest intact step into `state`, or leave it alone if the run is new.

        This works like `restore(into=state, fallback=True)` if there is a step in the directory or
        in the mirror. Afterwards `restored` is its number. A log line says where the run goes on.

        Args:
            state: The tree to update in place, as `into` of `ostraka.restore`.
            mesh: A mesh to place arrays on, as in `ostraka.restore`.
            specs: Partition specs, as in `ostraka.restore`.
            strict: Raise if `state` and checkpoint differ, as in `ostraka.restore`.
            only: Patterns of the leaves to restore, as in `ostraka.restore`.
            rename: New names of leaves, as in `ostraka.restore`.
            dtype: Cast leaves, as in `ostraka.restore`.

        Returns:
            The number of the step, the same on all processes. 0 if there is no step yet.

        Raises:
            InvalidTree: `state` can't be updated in place. A new run raises this, too.
            Damaged: There are steps, but none of them is intact.
            Mismatch: `state` does not fit the checkpoint.
            UnsupportedFormat: A newer version of Ostraka wrote the newest step.

        Example:
            >>> for step in range(manager.resume(state) + 1, 10_000):
            ...     state["params"] = train(state["params"])
            ...     manager.save(step, state)
        """
        self._check_open()
        InPlace(state, only)
        restore_from = partial(
            restore,
            into=state,
            mesh=mesh,
            specs=specs,
            strict=strict,
            only=only,
            rename=rename,
            dtype=dtype,
            on_record=self._on_record,
        )
        self._pending.wait()
        step, said = 0, f"no step in {self._places}: starting from scratch"
        if self.latest() is not None:
            step, _ = self._recover(restore_from, None, fallback=True, mixes=not strict)
            said = f"resumed from step {step} of {self.root}"
        if jax.process_index() == 0:
            log.info("%s", said)
        return step

    def watch(
        self,
        *,
        after: SupportsIndex | None = None,
        newest_only: bool = False,
        backlog: SupportsIndex = BACKLOG,
        timeout_s: float | None = None,
    ) -> Generator[int]:
        """Yield each step as it is committed, for programs that evaluate while another one trains.

        Existing steps come first, then new ones, in ascending order, none twice. On several
        processes all get the same steps. Process 0 waits for them.

        The run's retention does not delete the step that was yielded last until you ask for the
        next one, close the generator, or the program ends. Up to `backlog` later steps are
        protected as well, so a reader that temporarily falls behind still sees every step. The run
        logs the steps that it deletes before a reader came to them. This needs a small file in the
        directory, renewed every few seconds. If it can't be written there is a warning, and steps
        may be deleted while they are read.

        Args:
            after: Yield only steps after this one.
            newest_only: If there are several new steps, yield only the newest.
            backlog: How many steps are protected that have yet to be yielded. With 0, or with
                `newest_only`, only the next one is protected while the reader waits for it.
            timeout_s: Stop after this many seconds without a new step. 0: do not wait. None: wait
                forever.

        Yields:
            The numbers of steps.

        Raises:
            UnsupportedFormat: A newer version of Ostraka wrote the next step.

        Example:
            >>> manager = ostraka.Manager("runs/a", read_only=True)
            >>> for step in manager.watch(timeout_s=3600):
            ...     evaluate(manager.restore(step, like=state))
        """
        self._check_open()
        watch = Watch(
            self._root,
            after=None if after is None else check_step(after),
            newest_only=newest_only,
            backlog=check_number("backlog", backlog, least=0, kind="a whole number of steps"),
            timeout_s=0.0 if timeout_s == 0 else check_seconds("timeout_s", timeout_s),
            warn=lambda text: warn_caller(UserWarning(text)),
        )
        self._watches.add(watch)
        return self._watch(watch)

    # Changes

    def delete(self, step: SupportsIndex) -> None:
        """Delete a step, even if it is pinned or the newest.

        Args:
            step: The number of the step.

        Raises:
            Busy: A `watch` reads the step.
            CheckpointNotFound: There is no such step.
            PathInTheWay: Orbax wrote the step.
        """
        self._change("deletion", lambda number: remove_step(self._root, number), step)

    def pin(self, step: SupportsIndex) -> None:
        """Exempt a step from retention, in later runs too.

        Args:
            step: The number of the step.

        Raises:
            CheckpointNotFound: There is no such step.
            PathInTheWay: Orbax wrote the step. It is never deleted anyway.
        """
        self._change("pinning", self._root.pin, step)

    def unpin(self, step: SupportsIndex) -> None:
        """Make a pinned step subject to retention again.

        Args:
            step: The number of the step.

        Raises:
            CheckpointNotFound: There is no such step.
            PathInTheWay: Orbax wrote the step.
        """
        self._change("unpinning", self._root.unpin, step)

    def close(self) -> None:
        """Wait like `wait`, then release the lock of the directory.

        Raises:
            Preempted: SIGTERM came, and neither `save` nor `reached_preemption` was called since,
                unless the program has a handler of its own.
            OstrakaError: Any error of `wait`. The lock is released all the same.
        """
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._leave(alone=False)
        unanswered = None if self._preemption is None else self._preemption.unanswered()
        if unanswered is not None and self._is_interrupted():
            raise KeyboardInterrupt
        if unanswered is not None:
            log.warning("%s; the program ends with exit code %d", unanswered, Preempted.code)
            raise unanswered

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        # The error may be on this process alone: waiting for the others could be a deadlock.
        try:
            if isinstance(error, Preempted) and self._pending.is_running():
                log.warning("%s; waiting for the save of step %d", error, self._begun)
            self._pending.finish_alone()
            self._retention.wait()
        finally:
            self._leave(alone=True)

    def __repr__(self) -> str:
        return f"<Manager of {self.root}, {self._state}>"

    def _repr_html_(self) -> str:
        return draw_run(self.root, self._state, self._root.scan_files()[0])

    @property
    def _state(self) -> str:
        return "closed" if self._closed else "read-only" if self._read_only else "open"

    # Opening and closing

    def _open(self, *, wait: bool) -> None:
        copies = self._places.mirror

        def prepare(described: list[dict[str, str]]) -> dict[str, Any]:
            check_alike(described)
            self._root.prepare()
            self._lock.acquire(wait=wait)
            self._root.clean()
            if copies is not None:
                copies.prepare()
            newest, is_foreign = self._places.newest()
            if newest is None and not self._root.scan(lambda _: True):
                self._root.warn_if_begun_elsewhere()
            self._places.warn_if_ahead(newest)
            if self._schedule.is_auto:
                before = read_run_file(self._root.store)[0]
                if before is not None and before.advice is not None:
                    self._meter.expect(before.advice.cost_s)
            return {
                **self._root.unusual_names(),
                "newest": newest,
                "is_foreign": is_foreign,
                "mirror": f"mirror-{os.urandom(8).hex()}",
            }

        schedule, keep = self._schedule, self._keep
        alike = {
            "root": self.root,
            "asynchronous": self._asynchronous,
            "compress": repr(self._compress),
            "parity": self._parity,
            "check_replicas": self._check_replicas,
            "audit_every": self._audit_every,
            "mirror": None if copies is None else copies.location,
            "mirror_every": self._mirror_every,
            "on_preemption": repr(self._on_preemption),
            "every": "auto" if schedule.is_auto else schedule.every,
            "if_running": self._if_running,
            "every_s": schedule.every_s,
            "at": sorted(schedule.at),
            "when": None if schedule.when is None else "a function",
            "keep": keep.last,
            "keep_every": keep.every,
            "keep_every_s": keep.interval_s,
            "keep_best": keep.best,
            "keep_if": None if keep.condition is None else "a function",
        }
        described = {name: str(value) for name, value in alike.items()}
        try:
            found = agree(f"opening of {self.root}", described, prepare)
        except BaseException:
            self._lock.release()
            raise
        self._renamed = set(found["renamed"])
        self._links = set(found["links"])
        self._newest, self._is_foreign = found["newest"], found["is_foreign"]
        if jax.process_index() == 0:
            check = self._lock.check_place
            self._run_file = RunFileWriter(self._root.store, self._rules(), check)
            self._run_file.begin()
        if self._mirror is not None:
            self._mirror.run_file = self._run_file
            # Weakly: the thread must not keep a manager alive that nobody has any more.
            self._mirror.start(found["mirror"], weakref.WeakMethod(self._retention.begin_again))
            weakref.finalize(self, self._mirror.stop, alone=True).atexit = False

    def _rules(self) -> RunRules:
        schedule, keep, mirror = self._schedule, self._keep, self._places.mirror
        return RunRules(
            "auto" if schedule.is_auto else schedule.every,
            schedule.every_s,
            tuple(sorted(schedule.at)),
            schedule.when is not None,
            keep.last,
            keep.every,
            keep.interval_s,
            keep.best,
            keep.condition is not None,
            None if mirror is None else mirror.location,
            self._mirror_every,
        )

    def _leave(self, *, alone: bool) -> None:
        # Ctrl-C may interrupt this at any line; a second `close` then does the rest.
        try:
            if self._audit is not None:
                self._audit.stop(alone=alone)
            self._retention.stop()
            if self._interrupt is not None:
                self._interrupt.stop()
            if self._preemption is not None:
                self._preemption.stop()
            if self._mirror is not None:
                self._mirror.stop(alone=alone)
        finally:
            for watch in list(self._watches):
                watch.close()
            if self._run_file is not None:
                self._run_file.end()
            self._lock.release()
            self._closed = True

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

    # One save

    def _make_way(self, step: int) -> bool:
        """Return False if a step is skipped for a running save. Otherwise none runs any more."""
        if not self._pending.is_running_anywhere():
            self._has_cancelled = False
            return True
        if self._if_running == "skip":
            log.info("step %d is skipped: the save of step %s still runs", step, self._begun)
            return False
        if not self._has_cancelled:
            log.info("the save of step %s is cancelled in favour of step %d", self._begun, step)
            self._pending.cancel()
        self._has_cancelled = not self._has_cancelled
        return True

    def _is_last_call(self, step: int) -> bool:
        """Return True if the run is being preempted, and no step was saved because of it yet."""
        return self._preemption is not None and self._preemption.is_due(step)

    def _begin(
        self, step: int, tree: Any, options: SaveOptions, force: bool, background: bool
    ) -> None:
        watch = Stopwatch()  # started here, to include the wait for the save before
        try:
            self._pending.wait()
        except Exception:
            # It is in the log. There may be no other call that could save this step.
            if not self._is_last_call(step):
                raise
        if not force:
            self._check_order(step)
        name = name_of(step)
        if step in self._renamed:
            name = decide_together(f"look at step {step}", lambda: self._root.own_name(step))
        check_place = partial(self._check_place, step, name)
        if jax.process_count() == 1 or step in self._links:
            decide_together(f"look at step {step}", check_place)
        self._schedule.note_save()
        self._newest = max(step, step if self._newest is None else self._newest)
        self._begun = step
        hooks = SaveHooks(
            on_record=self._on_record,
            check_no_arrays=None if force else partial(refuse_emptied, self._root, step),
            on_commit=lambda: self._note_commit(step, name, background=background),
            check_place=check_place,
        )
        begin = partial(begin_save, self._root.at(name), partial(capture, tree), options, hooks)
        start = partial(
            begin,
            max_host_bytes=self._max_host_bytes,
            watch=watch,
            is_waited_for=not background,
        )
        self._pending.begin(start, background=background)

    def _check_order(self, step: int) -> None:
        """Raise ValueError for a step lower than the latest, or one that Orbax wrote."""
        newest = self._newest
        if newest is None or step > newest or (step == newest and not self._is_foreign):
            return
        self._newest, self._is_foreign = decide_together(
            f"look at {self.root}", lambda: self._places.newest(self._retention.damaged)
        )
        if step == self._newest and self._is_foreign:
            raise ValueError(
                f"step {step} in {self.root} was written by Orbax, and is not replaced; go on with "
                f"step {step + 1}, or pass force=True to save beside it: then yours is read"
            )
        if self._newest is not None and step < self._newest:
            raise ValueError(
                f"step {step} is lower than {self._newest}, the latest step in {self._places}, "
                "which a restart would go on from; delete the later steps first, or pass force=True"
            )

    def _check_place(self, step: int, name: str) -> None:
        """On process 0: check that the root is still the same, and the step is no link."""
        try:
            self._lock.check_place()
        except FileNotFoundError:
            self._root.prepare()
            self._lock.release()
            self._lock.acquire(wait=False)
            if self._run_file is not None:
                self._run_file.begin()
        self._root.refuse_link(name)
        self._retention.prepare_to_save(step)

    def _note_commit(self, step: int, name: str, *, background: bool) -> None:
        """On process 0: after a commit, copy the step and delete superfluous ones."""
        self._retention.damaged.discard(step)
        self._root.forget(name)
        if self._mirror is not None:
            self._mirror.note_commit(step)
        self._retention.begin(step)
        if not background:
            self._retention.wait()

    def _answer_preemption(self, step: int) -> None:
        """On all processes: after the last step is on disk, end the program or say so."""
        assert self._preemption is not None
        self._preemption.note_save()
        exits = self._on_preemption == "exit"
        if self._is_interrupted():
            log.warning("interrupted: step %d is saved in %s", step, self.root)
        elif jax.process_index() == 0:
            log.warning(
                "the run is being preempted (SIGTERM): step %d is saved in %s, and %s",
                step,
                self.root,
                f"the program ends with exit code {Preempted.code}; to end it yourself, give the "
                'Manager on_preemption="continue" and ask reached_preemption(step)'
                if exits
                else f"reached_preemption({step}) is true: end the loop",
            )
        if exits:
            try:
                self._wait_for_mirror()
            except OstrakaError as error:
                log.error("%s", error)
            end = self._preemption.end(f"the run is being preempted; step {step} is saved")
            raise KeyboardInterrupt if self._is_interrupted() else end

    def _is_interrupted(self) -> bool:
        """Return True if Ctrl-C to this process is the reason to end."""
        return self._interrupt is not None and self._interrupt.came

    # Other calls

    def _recover(
        self, restore_from: Callable[[Store], Any], step: int | None, *, fallback: bool, mixes: bool
    ) -> tuple[int, Any]:
        """Restore a step, or the newest. Returns its number and the value.

        With `mixes`, values of a damaged step could stay beside those of an older one.
        """
        with self._losses.timing("restoring"):
            self._pending.wait()
            self._retention.wait()
            self._check_open()
            verify_first = fallback and mixes
            recovery = Recovery(self._places, step, fallback=fallback, verify_first=verify_first)
            try:
                self.restored, value = recovery.run(restore_from)
            finally:
                self._retention.damaged |= recovery.damaged
            self._schedule.note_restore(self.restored)
            if self._audit is not None:
                self._audit.note_restore(self.restored)
        self._losses.note_restore(self.restored, is_audited=self._audit is not None)
        return self.restored, value

    def _wait_for_mirror(self) -> None:
        if self._mirror is not None:
            decide_together(f"wait for the mirror of {self.root}", self._mirror.wait)

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

    def _change(self, what: str, change: Callable[[int], None], step: SupportsIndex) -> None:
        self._check_writable()
        number = check_step(step)
        self._pending.wait()
        self._retention.wait()

        def change_in_place() -> None:
            with suppress(FileNotFoundError):
                self._lock.check_place()
            change(number)

        decide_together(f"{what} of step {number}", change_in_place)


def _left_s(meter: CostMeter, pending: PendingSave) -> float:
    return meter.left_s(saving=pending.is_running())
