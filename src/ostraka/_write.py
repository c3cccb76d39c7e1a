"""A save: capture, agree, plan, write, digest, commit.

Nothing is visible before `_METADATA` appears, which is one atomic event of the store. Until then
all bytes go into a directory that is named after this save's random id.
"""

from __future__ import annotations

import json
import platform
import secrets
import socket
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Literal

import jax

from ostraka import _format, _metadata
from ostraka._alike import compare_trees, describe_tree
from ostraka._capture import (
    Captured,
    DtypeRule,
    capture,
    check_dtype_rule,
    make_common,
    make_per_process,
)
from ostraka._commit import SavePlace
from ostraka._coordinate import Operation, ProcessFailed
from ostraka._document import fill_in_states
from ostraka._handle import SaveHandle, settle, settled, start_in_background
from ostraka._metadata import IndexEntry, Metadata
from ostraka._parallel import StopSignal, paused_gc, run_all
from ostraka._plan_write import MAX_FILE_BYTES, WritePlan, plan_write
from ostraka._record import (
    OnRecord,
    Record,
    Stopwatch,
    call_safely,
    report,
    summarize,
    timeline,
)
from ostraka._shards import Progress, write_shards
from ostraka._units import size_bytes
from ostraka._values import Value
from ostraka._version import __version__
from ostraka.errors import InvalidTree, SaveFailed, describe
from ostraka.storage import MemoryStore, PathLike, Store, open_store

_LEAST_FILE_BYTES = 2 * _format.PAGE_BYTES
_LOOKERS = 16
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
    settle()
    with paused_gc():
        saving = _Save(path, watch, on_record)
        with saving.not_forgotten():
            saving.prepare(tree, dtype, metadata or {}, max_file_bytes, hold=False)
            saving.finish()


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
    with settled(if_busy):
        saving = _Save(path, watch, on_record, on_commit, check_place)
        with saving.not_forgotten():
            with paused_gc():
                saving.prepare(tree, dtype, metadata or {}, max_file_bytes, hold=True)
            if not is_waited_for:
                watch.blocked_s = watch.total_s
            return start_in_background(str(path), saving.progress, saving.finish, saving.give_up)


class _Save:
    """One save, on one of its processes: prepared by its caller, finished by whoever has time."""

    def __init__(
        self,
        path: PathLike,
        watch: Stopwatch,
        on_record: OnRecord | None,
        on_commit: Callable[[], None] | None = None,
        check_place: Callable[[], None] | None = None,
    ):
        self._check_place = check_place
        self.progress = Progress()
        self._path = path
        self._on_record = on_record
        self._on_commit = on_commit
        self._watch = watch
        self._watch.lap("wait")
        self._operation = Operation(f"save to {path}")
        self._store: Store = _NOWHERE
        self._place = SavePlace(_NOWHERE)
        self._save_id = ""
        self._values: list[Value] = []
        self._unclaimed = [True]
        """Token: whoever pops it must finish or fail the save."""
        self._states: dict[str, list[Any]] = {}
        """On process 0, the states of stateful objects on all processes."""

    def prepare(
        self,
        tree: Any,
        dtype: DtypeRule,
        user: Mapping[str, Any],
        max_file_bytes: int | str,
        *,
        hold: bool,
    ) -> None:
        """Take the tree apart, and with `hold` make its values safe from what comes after."""
        with self._failing():
            self._operation.__enter__()
            limit_bytes = size_bytes("max_file_bytes", max_file_bytes)
            if limit_bytes < _LEAST_FILE_BYTES:
                raise ValueError(
                    f"max_file_bytes is {limit_bytes:,}; it must be at least {_LEAST_FILE_BYTES:,}"
                )
            self._store = open_store(self._path)
            self._place = SavePlace(self._store)
            captured = capture(tree)
            self._user = _json_only(user)
            check_dtype_rule(dtype, captured.leaves)
            self._dtype = dtype
            self._max_file_bytes = limit_bytes
            if hold:
                captured.hold()
            self._captured = captured
            self._values = captured.values
            self._watch.lap("capture")

    def finish(self) -> Record | None:
        """Agree, plan, write, commit; nothing, if an interrupt of its caller has ended it."""
        with self._failing():
            if not self._claim():
                return None
            captured = self._captured
            self._save_id = self._begin(captured, (self._user, repr(self._dtype)))
            self._watch.lap("agree")
            captured.save_as(self._dtype)
            if self._operation.process == 0:
                fill_in_states(captured.encoded, self._states)
            with paused_gc():
                plan = plan_write(
                    captured.leaves,
                    captured.meshes,
                    captured.process_of,
                    max_file_bytes=self._max_file_bytes,
                )
            self._watch.lap("plan")
            index = self._write(plan, self._save_id)
            written = (self.progress.total, self._watch.lap("write"))
            self._values.clear()
            summary = self._commit(plan, index, written)
            if self._operation.process == 0:
                self._place.remove_replaced()
            self._watch.lap("commit")
            self._operation.__exit__(None, None, None)
        self._place.release()
        if self._on_commit is not None and self._operation.process == 0:
            call_safely(self._on_commit)
        return report("save", str(self._path), self._watch, summary, self._on_record)

    @contextmanager
    def not_forgotten(self) -> Generator[None]:
        """An interrupt before anybody finishes it ends it, or the others would wait for ever."""
        try:
            yield
        except BaseException:
            if self._claim():
                with self._failing():
                    raise
            raise

    def _claim(self) -> bool:
        """Whether this thread is the one that sees it to its end."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def give_up(self) -> None:
        """From another thread: have it fail, unless it is being committed."""
        self._operation.give_up("it was interrupted, and gave the save up")

    @contextmanager
    def _failing(self) -> Generator[None]:
        """Whatever goes wrong inside ends the save, on every process."""
        try:
            try:
                yield
            except BaseException:
                self._operation.__exit__(*sys.exc_info())
                raise
        except BaseException as error:
            # By now every process knows that this save has failed.
            has_begun = bool(self._save_id)
            self._unclaimed.clear()
            # The error may be kept for long, and would keep the values with it.
            self._values.clear()
            try:
                self._clean_up()
            finally:
                self._place.release()
            if isinstance(error, ProcessFailed):
                cause = error.__cause__
                raise SaveFailed(str(self._path), error.process, error.reason) from cause
            if isinstance(error, OSError) and has_begun:
                raise SaveFailed(str(self._path), None, describe(error)) from error
            raise

    def _clean_up(self) -> None:
        """On process 0, once the others have stopped, remove what a failed save wrote."""
        if self._operation.process != 0:
            return
        with suppress(OSError):
            if self._save_id:
                self._operation.wait_until_left()
            self._place.clean_up(self._save_id)

    def _begin(self, captured: Captured, rest: Any) -> str:
        """Agree on the tree and the id; sort out leaves that live on one process alone."""
        operation = self._operation
        mine = describe_tree(
            captured, self._store.location, rest, operation.process, several=operation.count > 1
        )
        answer = operation.exchange("begin", mine, self._decide_begin)
        make_common(captured, answer["common"])
        make_per_process(captured, answer["per_process"], operation.count)
        captured.number_meshes()
        return answer["id"]

    def _decide_begin(self, described: list[Any]) -> dict[str, Any]:
        found = compare_trees(described)
        self._states = found.states
        if self._check_place is not None:
            self._check_place()
        self._place.take()
        return {
            "id": secrets.token_hex(8),
            "common": found.common,
            "per_process": found.per_process,
        }

    def _write(self, plan: WritePlan, save_id: str) -> IndexEntry | None:
        """Write this process's shards and its index; None if it has none to write."""
        process = self._operation.process
        if not plan.files_of(process):
            return None
        named = write_shards(
            self._store,
            save_id,
            plan,
            process,
            self._values,
            check=self._operation.check,
            progress=self.progress,
        )
        index = _format.encode_index(save_id, process, named)
        self._store.put(f"{_format.shards_directory(save_id)}/{_format.index_name(process)}", index)
        return IndexEntry(len(index), _format.digest(index))

    def _commit(
        self, plan: WritePlan, index: IndexEntry | None, written: tuple[int, float]
    ) -> list[float]:
        """Report, and commit if every process has reported well; returns what all have done."""

        def commit(reports: list[Any]) -> list[float]:
            summary = summarize([tuple(report["written"]) for report in reports])
            indexes = {
                process: IndexEntry(*report["index"])
                for process, report in enumerate(reports)
                if report["index"]
            }
            self._check_visible(indexes, self._save_id)
            metadata = Metadata(
                id=self._save_id,
                writer={
                    **_describe_writer(),
                    "hosts": [report["host"] for report in reports],
                    "timeline": timeline(self._watch, summary),
                },
                process_of=plan.process_of,
                tree=self._captured.encoded,
                meshes=plan.meshes,
                layouts=plan.layouts,
                leaves=plan.leaves,
                files=plan.files,
                indexes=indexes,
                user=self._user,
            )
            sizes = {file.name: file.size for file in plan.files}
            sizes |= {_format.index_name(process): i.size for process, i in indexes.items()}
            self._place.commit(_metadata.encode_metadata(metadata), self._save_id, sizes)
            return summary

        entry = None if index is None else [index.size, index.digest]
        payload = {"index": entry, "written": written, "host": socket.gethostname()}
        return self._operation.exchange("commit", payload, commit, is_last=True)

    def _check_visible(self, indexes: Mapping[int, IndexEntry], save_id: str) -> None:
        """Process 0 must see what the others wrote, or the checkpoint would be in pieces."""

        def look(process: int) -> None:
            name = f"{_format.shards_directory(save_id)}/{_format.index_name(process)}"
            try:
                seen = _format.digest(self._store.get(name)) == indexes[process].digest
            except FileNotFoundError:
                seen = False
            if not seen:
                raise ProcessFailed(
                    process,
                    f"process 0 can't see what it wrote ({self._store.location}/{name}): all "
                    "processes must save to one shared file system",
                )

        others = [process for process in indexes if process != self._operation.process]
        if others:
            run_all(look, others, threads=_LOOKERS, stop=StopSignal())


# Small things


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


def _describe_writer() -> dict[str, str]:
    return {
        "ostraka": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
