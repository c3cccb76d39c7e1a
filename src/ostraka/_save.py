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
from dataclasses import dataclass, field
from typing import Any, Literal

from ostraka import _format
from ostraka._agree import agree
from ostraka._capture import Captured, DtypeRule, capture, check_dtype_rule, hold
from ostraka._commit import SavePlace, commit
from ostraka._coordinate import Operation, ProcessFailed
from ostraka._handle import SaveHandle, one_at_a_time, run_in_background, wait_for_background
from ostraka._lifetime import paused_gc
from ostraka._plan_write import MAX_FILE_BYTES, plan_write
from ostraka._record import OnRecord, Record, Stopwatch, call_safely, report
from ostraka._units import size_bytes
from ostraka._values import Value
from ostraka._write_shards import Progress, Written, write_shards
from ostraka.errors import InvalidTree, SaveFailed, describe
from ostraka.storage import MemoryStore, PathLike, Store, open_store

_LEAST_FILE_BYTES = 2 * _format.PAGE_BYTES
_NOWHERE: Store = MemoryStore("nowhere")
"""Stands for the store until the path has been understood."""


def save(
    path: PathLike,
    tree: Any,
    *,
    dtype: DtypeRule = None,
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
    there, unchanged.

    `dtype` writes floating-point arrays as another dtype: `"bfloat16"` for all, or by path,
    `{"model/**": "bfloat16"}`. Integers, keys and scalars stay as they are.

    `metadata` is kept in the checkpoint, JSON as it is. No file grows past `max_file_bytes`, a
    number or a text such as "1GB", unless a single element or its name needs more. `on_record` is
    called with what was done and how long it took, which is also logged.

    Waits for a `save_async` that is under way, and raises its error if nobody has seen it yet.
    Raises SaveFailed on every process if any of them failed.

    >>> ostraka.save("runs/7", {"params": params, "step": 100})
    """
    watch = Stopwatch()
    wait_for_background()
    saving = _Save(path, watch, dtype, metadata, max_file_bytes, on_record)
    try:
        with paused_gc():
            saving.finish(saving.capture(tree))
    except BaseException as error:
        raise saving.end(error)  # noqa: B904 - it has the right cause


def save_async(
    path: PathLike,
    tree: Any,
    *,
    dtype: DtypeRule = None,
    metadata: Mapping[str, Any] | None = None,
    max_file_bytes: int | str = MAX_FILE_BYTES,
    if_busy: Literal["wait", "refuse"] = "wait",
    on_commit: Callable[[], None] | None = None,
    on_record: OnRecord | None = None,
) -> SaveHandle:
    """Begin a save and return as soon as its values are safe; the rest goes on in the background.

    Whatever happens to the tree afterwards (training steps, donated arrays, numpy arrays written
    to, a data iterator that moves on) does not reach the checkpoint: it has the values at the call.
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
    return begin_save(
        path,
        tree,
        dtype=dtype,
        metadata=metadata,
        max_file_bytes=max_file_bytes,
        if_busy=if_busy,
        on_commit=on_commit,
        on_record=on_record,
        watch=Stopwatch(),
    )


def begin_save(
    path: PathLike,
    tree: Any,
    *,
    dtype: DtypeRule,
    metadata: Mapping[str, Any] | None,
    max_file_bytes: int | str,
    if_busy: Literal["wait", "refuse"] = "wait",
    on_commit: Callable[[], None] | None,
    on_record: OnRecord | None,
    watch: Stopwatch,
    is_waited_for: bool = False,
    check_place: Callable[[], None] | None = None,
) -> SaveHandle:
    """As `save_async`, for a caller that may have waited before, or will wait for the end.

    `check_place` is called on process 0 before anything is written, and may refuse.
    """
    with one_at_a_time(if_busy):
        saving = _Save(
            path, watch, dtype, metadata, max_file_bytes, on_record, on_commit, check_place
        )
        handle = SaveHandle(str(path), saving.progress, saving.give_up)
        try:
            with paused_gc():
                captured = saving.capture(tree)
                hold(captured.values)
            watch.lap("capture")
            if not is_waited_for:
                watch.blocked_s = watch.total_s
            run_in_background(handle, lambda: saving.finish_or_end(captured))
        except BaseException as error:
            if handle.give_back():
                # Nobody works on it, and the other processes would wait for ever.
                raise saving.end(error)  # noqa: B904 - it has the right cause
            raise
        return handle


@dataclass
class _Save:
    """One save, on one of its processes."""

    path: PathLike
    watch: Stopwatch
    dtype: DtypeRule
    user: Mapping[str, Any] | None
    max_file_bytes: int | str
    on_record: OnRecord | None
    on_commit: Callable[[], None] | None = None
    check_place: Callable[[], None] | None = None
    progress: Progress = field(default_factory=Progress)
    store: Store = _NOWHERE
    place: SavePlace | None = None
    save_id: str = ""
    """Known once the processes have agreed; from then on there may be files."""
    values: list[list[Value]] = field(default_factory=list[list[Value]])
    """What the stages have handed on as values, to be let go of."""

    def __post_init__(self) -> None:
        self.watch.lap("wait")
        self.operation = Operation(f"save to {self.path}")

    def capture(self, tree: Any) -> Captured:
        """The first stage: check the arguments and take the tree apart."""
        self.operation.__enter__()
        self.limit_bytes = limit = size_bytes("max_file_bytes", self.max_file_bytes)
        if limit < _LEAST_FILE_BYTES:
            raise ValueError(
                f"max_file_bytes is {limit:,}; it must be at least {_LEAST_FILE_BYTES:,}"
            )
        self.store = open_store(self.path)
        self.place = SavePlace(self.store)
        captured = capture(tree)
        self.values.append(captured.values)
        self.user = _json_only(self.user) if self.user else {}
        if self.dtype is not None:
            check_dtype_rule(self.dtype, captured.leaves)
        self.watch.lap("capture")
        return captured

    def finish(self, captured: Captured) -> Record:
        """The other stages: agree, plan, write, commit."""
        operation, store, place, watch = self.operation, self.store, self.place, self.watch
        assert place is not None
        agreed = agree(
            operation,
            captured,
            location=store.location,
            dtype=self.dtype,
            user=self.user,
            take_place=self._take_place,
        )
        self.save_id = save_id = agreed.save_id
        self.values.append(agreed.values)
        watch.lap("agree")
        with paused_gc():
            plan = plan_write(
                agreed.leaves, agreed.meshes, agreed.process_of, max_file_bytes=self.limit_bytes
            )
        watch.lap("plan")
        index = write_shards(
            store,
            save_id,
            plan,
            operation.process,
            agreed.values,
            check=operation.check,
            progress=self.progress,
        )
        written = Written(index, self.progress.total, watch.lap("write"))
        self._let_go_of_values()
        summary = commit(
            operation, store, place, agreed, plan, written, user=self.user or {}, watch=watch
        )
        if operation.process == 0:
            place.remove_replaced()
        watch.lap("commit")
        operation.__exit__(None, None, None)
        place.release()
        self.place = None  # Nothing can fail any more, and nothing is to be cleaned up.
        if self.on_commit is not None and operation.process == 0:
            call_safely(self.on_commit)
        return report("save", str(self.path), watch, summary, self.on_record)

    def finish_or_end(self, captured: Captured) -> Record:
        """As `finish`, for a thread in the background, which has nobody above it."""
        try:
            return self.finish(captured)
        except BaseException as error:
            raise self.end(error)  # noqa: B904 - it has the right cause

    def give_up(self) -> None:
        """From another thread: have it fail, unless it is being committed."""
        self.operation.give_up("it was interrupted, and gave the save up")

    def end(self, error: BaseException) -> BaseException:
        """Have the save fail on every process and remove what it wrote; returns what to raise."""
        try:
            self.operation.__exit__(type(error), error, error.__traceback__)
        except BaseException as failure:
            error = failure
        # The error may be kept for long, and would keep the values with it.
        self._let_go_of_values()
        if self.place is not None:
            try:
                self._clean_up(self.place)
            finally:
                self.place.release()
        if isinstance(error, ProcessFailed):
            failed = SaveFailed(str(self.path), error.process, error.reason)
            failed.__cause__ = error.__cause__
        elif isinstance(error, OSError) and self.save_id:
            failed = SaveFailed(str(self.path), None, describe(error))
            failed.__cause__ = error
        else:
            return error
        return failed

    def _clean_up(self, place: SavePlace) -> None:
        """On process 0, once the others have stopped, remove what a failed save wrote."""
        if self.operation.process != 0:
            return
        with suppress(OSError):
            if self.save_id:
                self.operation.wait_until_left()
            place.clean_up(self.save_id)

    def _take_place(self) -> None:
        """On process 0, once the trees are known to be alike."""
        if self.check_place is not None:
            self.check_place()
        assert self.place is not None
        self.place.take()

    def _let_go_of_values(self) -> None:
        for values in self.values:
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
