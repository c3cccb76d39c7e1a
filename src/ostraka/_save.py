"""`ostraka.save` and `ostraka.save_async`: the stages of a save, and what ends it if one fails.

    capture → agree → plan → write → commit

Each stage is a function in a module of its name, from immutable values to the next one. The caller
captures; it does the rest as well, or leaves it to a thread in the background. Nothing is visible
before `_METADATA` appears, which is one atomic event of the store. Until then all bytes go into a
directory that is named after this save's random id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from ostraka import _format
from ostraka._agree import agree
from ostraka._capture import Captured, DtypeRule, capture, check_dtype_rule, hold
from ostraka._codec import CompressRule, check_compress, codecs_of
from ostraka._commit import SavePlace, commit
from ostraka._coordinate import Operation, ProcessFailed
from ostraka._handle import SaveHandle, one_at_a_time, run_in_background, wait_for_background
from ostraka._lifetime import paused_gc
from ostraka._plan_parity import check_parity, plan_parity
from ostraka._plan_write import MAX_FILE_BYTES, plan_write
from ostraka._record import OnRecord, Record, Stopwatch, call_safely, report
from ostraka._units import size_bytes
from ostraka._write_parity import write_parity
from ostraka._write_shards import Journal, Progress, write_shards
from ostraka.errors import Damaged, InvalidTree, SaveFailed, describe
from ostraka.storage import PathLike, open_store

_LEAST_FILE_BYTES = 2 * _format.PAGE_BYTES


def save(
    path: PathLike,
    tree: Any,
    *,
    dtype: DtypeRule = None,
    compress: CompressRule = None,
    parity: int = 0,
    metadata: Mapping[str, Any] | None = None,
    max_file_bytes: int | str = MAX_FILE_BYTES,
    on_record: OnRecord | None = None,
) -> None:
    """Write a tree as a checkpoint: blocking, atomic, durable.

    `tree` is any pytree of JAX arrays (sharded in any way), PRNG keys, numpy arrays, numbers,
    strings, bytes and None, with Flax NNX modules, optimizers and states anywhere in it, and
    objects that have `get_state` and `set_state`, such as data iterators. Every process of a run
    calls this; each writes its own shards, all at the same time. When it returns the checkpoint is
    complete and on disk, on every process; when it raises, what was at `path` before is still
    there, unchanged, unless the error says that the new checkpoint is in place (its directory could
    not be synced) or may be (a bucket did not answer).

    `dtype` writes floating-point arrays as another dtype: `"bfloat16"` for all, or by path,
    `{"model/**": "bfloat16"}`. Integers, keys and scalars stay as they are.

    `compress="zstd"` makes the files smaller, without loss: normal weights to 0.67 of their size as
    bfloat16, to 0.84 as float32. `("zstd", level)` asks for a level of zstd's own, from 1 to 22,
    and `{"optimizer/**": "zstd"}` says it by path. Shards below 64 KiB stay as they are.

    `parity=1` adds files from which any one shard file that is lost or damaged is found again, or
    all files of any one host (on one host: of any one process); `parity=2` does so for any two. It
    takes about an eighth (a quarter) more bytes, or more where there are few hosts: `ostraka.plan`
    tells. A restore that needs a lost file then works all the same, with a warning.

    `metadata` is kept in the checkpoint, JSON as it is. No file grows past `max_file_bytes`, a
    number or a text such as "1GB", unless a single element or its name needs more. `on_record` is
    called with what was done and how long it took, which is also logged.

    Waits for a `save_async` that is under way, and raises its error if nobody has seen it yet.
    Raises SaveFailed on every process if any of them failed.

    >>> ostraka.save("runs/7", {"params": params, "step": 100})
    """
    saving = Save(path, dtype, compress, parity, metadata, max_file_bytes, on_record)
    saving.run(partial(capture, tree))


def save_async(
    path: PathLike,
    tree: Any,
    *,
    dtype: DtypeRule = None,
    compress: CompressRule = None,
    parity: int = 0,
    metadata: Mapping[str, Any] | None = None,
    max_file_bytes: int | str = MAX_FILE_BYTES,
    if_busy: Literal["wait", "refuse"] = "wait",
    on_commit: Callable[[], None] | None = None,
    on_record: OnRecord | None = None,
) -> SaveHandle:
    """Begin a save and return as soon as its values are safe; the rest goes on in the background.

    Whatever happens to the tree afterwards (training steps, donated arrays, numpy arrays written
    to, a data iterator that moves on) does not reach the checkpoint: it has the values at the call.
    One thing may: memory that a JAX array on the CPU shares with others, as after
    `jax.device_put` of an aligned numpy array, and that is written to before the save has ended.
    Otherwise it is as `save` does it: nothing shows before all of it is there.

    An error is raised by `wait()` of the handle; if nobody asks, by the next save, or when the
    program ends, which then has the exit code 120. The program does not end before the save has; a
    second Ctrl-C gives it up. One save is under way at a time: the next one waits for it, or with
    `if_busy="refuse"` raises Busy.

    `on_commit` is called in the background, on process 0, once the checkpoint is there. The rest of
    the arguments are those of `save`.

    >>> handle = ostraka.save_async("runs/8", {"model": model, "optimizer": optimizer})
    >>> handle.wait()
    """
    saving = Save(path, dtype, compress, parity, metadata, max_file_bytes, on_record, on_commit)
    return saving.begin(tree, if_busy=if_busy)


@dataclass
class Save:
    """One save, on one of its processes.

    `check_place` is called on process 0 before anything is written, and may refuse.
    """

    path: PathLike
    dtype: DtypeRule
    compress: CompressRule
    parity: int
    metadata: Mapping[str, Any] | None
    max_file_bytes: int | str
    on_record: OnRecord | None
    on_commit: Callable[[], None] | None = None
    check_place: Callable[[], None] | None = None
    journal: Journal | None = None
    """Of a save that can go on after it was killed: this process alone does it, from values that
    are not in host memory; if it fails its files stay, unless what it saves is damaged."""
    grids: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """How leaves on no mesh, by number, are cut in any case; only with a journal."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    """The caller's, if it has waited before."""
    _progress: Progress = field(init=False, default_factory=Progress)
    _operation: Operation = field(init=False)
    _place: SavePlace | None = field(init=False, default=None)
    _save_id: str = field(init=False, default="")
    """Known once the processes have agreed; from then on there may be files."""
    _values: list[list[Any]] = field(init=False, default_factory=list[list[Any]])
    """What the stages have handed on as values, to be let go of."""

    def run(self, capture_tree: Callable[[], Captured]) -> None:
        """Run all stages, after a save in the background that is under way."""
        wait_for_background()
        self.enter()
        try:
            with paused_gc():
                self.finish(self.capture(capture_tree))
        except BaseException as error:
            raise self.end(error)  # noqa: B904 - it has the right cause

    def begin(
        self, tree: Any, *, if_busy: Literal["wait", "refuse"] = "wait", is_waited_for: bool = False
    ) -> SaveHandle:
        """Capture the tree, and leave the other stages to a thread."""
        with one_at_a_time(if_busy):
            self.enter()
            handle = SaveHandle(str(self.path), self._progress, self._give_up)
            try:
                with paused_gc():
                    captured = self.capture(partial(capture, tree))
                    hold(captured.values)
                self.watch.lap("capture")
                if not is_waited_for:
                    self.watch.blocked_s = self.watch.total_s
                run_in_background(handle, lambda: self._finish_or_end(captured))
            except BaseException as error:
                if handle.give_back():
                    # Nobody works on it, and the other processes would wait for ever.
                    raise self.end(error)  # noqa: B904 - it has the right cause
                raise
            return handle

    def enter(self) -> None:
        """Come to the save, after all earlier ones: all processes number them alike."""
        self.watch.lap("wait")
        self._operation = Operation(f"save to {self.path}", alone=self.journal is not None)

    def capture(self, capture_tree: Callable[[], Captured]) -> Captured:
        """The first stage: check the arguments and take the tree apart."""
        self._operation.__enter__()
        self._limit = limit = size_bytes("max_file_bytes", self.max_file_bytes)
        if limit < _LEAST_FILE_BYTES:
            raise ValueError(
                f"max_file_bytes is {limit:,}; it must be at least {_LEAST_FILE_BYTES:,}"
            )
        self._place = SavePlace(open_store(self.path))
        captured = capture_tree()
        self._values.append(captured.values)
        self._user = _json_only(self.metadata) if self.metadata else {}
        if self.dtype is not None:
            check_dtype_rule(self.dtype, captured.leaves)
        if self.compress is not None:
            check_compress(self.compress, captured.leaves)
        if self.parity != 0:
            check_parity(self.parity)
        self.watch.lap("capture")
        return captured

    def finish(self, captured: Captured) -> Record:
        """The other stages: agree, plan, write, commit."""
        operation, place, watch = self._operation, self._place, self.watch
        assert place is not None
        agreed = agree(
            operation,
            captured,
            location=place.store.location,
            dtype=self.dtype,
            compress=self.compress,
            parity=self.parity,
            user=self._user,
            take_place=self._take_place,
            save_id=None if self.journal is None else self.journal.save_id,
        )
        self._save_id = agreed.save_id
        self._values.append(agreed.values)
        watch.lap("agree")
        with paused_gc():
            codecs = {} if self.compress is None else codecs_of(self.compress, agreed.leaves)
            plan = plan_write(
                agreed.leaves,
                agreed.meshes,
                agreed.process_of,
                max_file_bytes=self._limit,
                compressed=codecs,
                grids=self.grids,
            )
            parity = None
            if self.parity:
                files, processes = plan.files, plan.process_of
                parity = plan_parity(files, processes, agreed.hosts, count=self.parity)
        watch.lap("plan")
        store, save_id = place.store, agreed.save_id
        written = write_shards(
            operation,
            store,
            save_id,
            plan,
            agreed.values,
            codecs,
            self._progress,
            parity,
            self.journal,
        )
        watch.lap("write")
        self._let_go_of_values()
        if parity is not None:
            index, sizes, done = written.index, written.sizes, written.parity
            done = write_parity(operation, store, save_id, plan, parity, index, sizes, done)
            written = replace(written, parity=done)
            watch.lap("parity")
        summary = commit(operation, place, agreed, plan, written, watch, parity)
        if operation.process == 0:
            place.remove_replaced()
        watch.lap("commit")
        operation.__exit__(None, None, None)
        place.release()
        self._place = None  # Nothing can fail any more, and nothing is to be cleaned up.
        if self.on_commit is not None and operation.process == 0:
            call_safely(self.on_commit)
        return report("save", str(self.path), watch, summary, self.on_record)

    def _finish_or_end(self, captured: Captured) -> Record:
        """As `finish`, for a thread in the background, which has nobody above it."""
        try:
            return self.finish(captured)
        except BaseException as error:
            raise self.end(error)  # noqa: B904 - it has the right cause

    def _give_up(self) -> None:
        """From another thread: have it fail, unless it is being committed."""
        self._operation.give_up("it was interrupted, and gave the save up")

    def end(self, error: BaseException) -> BaseException:
        """Have the save fail on every process and remove what it wrote; returns what to raise."""
        try:
            self._operation.__exit__(type(error), error, error.__traceback__)
        except BaseException as failure:
            error = failure
        # The error may be kept for long, and would keep the values with it.
        self._let_go_of_values()
        if self._place is not None:
            keeps = self.journal is not None and not isinstance(error, Damaged)
            self._clean_up(self._place, "" if keeps else self._save_id)
        if isinstance(error, ProcessFailed):
            failed = SaveFailed(str(self.path), error.process, error.reason)
            failed.__cause__ = error.__cause__
        elif isinstance(error, OSError) and self._save_id:
            failed = SaveFailed(str(self.path), None, describe(error))
            failed.__cause__ = error
        else:
            return error
        return failed

    def _clean_up(self, place: SavePlace, save_id: str) -> None:
        """On process 0, once the others have stopped, remove what a failed save wrote."""
        try:
            with suppress(OSError):
                if self._operation.process == 0:
                    if self._save_id:
                        self._operation.wait_until_left()
                    place.clean_up(save_id)
        finally:
            place.release()

    def _take_place(self) -> None:
        """On process 0, once the trees are known to be alike."""
        if self.check_place is not None:
            self.check_place()
        assert self._place is not None
        journal = self.journal
        unfinished = None if journal is None else _format.shards_directory(journal.save_id)
        self._place.take(unfinished=unfinished)

    def _let_go_of_values(self) -> None:
        for values in self._values:
            values.clear()


def _json_only(user: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        kept = json.loads(json.dumps(user, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidTree(f"metadata must be JSON: {error}") from error
    if kept != user:
        raise InvalidTree(
            "metadata must be JSON as it is: tuples, and keys that are not text, would come back "
            "as something else"
        )
    return kept
