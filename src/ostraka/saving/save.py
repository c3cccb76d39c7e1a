"""`ostraka.save` and `ostraka.save_async`: the stages of a save, and its end if one fails.

    capture → agree → plan → write → commit

Each stage is a function in the module of its name. It takes immutable values and returns the next.
The caller captures, and either runs the other stages or leaves them to a background thread.
The store puts `_METADATA` in place atomically, and that commits the checkpoint. Until then all
bytes go into a directory with this save's random id in its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax

from ostraka.common import keywords
from ostraka.common.keywords import answering
from ostraka.common.progress import Count, shown
from ostraka.common.record import OnRecord, Record, Stopwatch, call_safely, report
from ostraka.common.threads import paused_gc
from ostraka.common.units import size_bytes
from ostraka.errors import (
    Damaged,
    InvalidTree,
    ReplicasDiffer,
    SaveCancelled,
    SaveFailed,
    SourceChanged,
    describe,
)
from ostraka.layout.casts import DtypeRule, check_dtype_rule
from ostraka.layout.codec import CompressRule, check_compress
from ostraka.layout.plan_parity import check_parity
from ostraka.layout.plan_write import MAX_FILE_BYTES, check_file_bytes, plan_write
from ostraka.processes.operation import Operation, ProcessFailed
from ostraka.saving._commit import commit
from ostraka.saving._write import write_shards
from ostraka.saving._write_parity import ParityCompanion
from ostraka.saving.agree import RunningSave, SaveHooks, agree
from ostraka.saving.background import (
    CANCELLED,
    SaveHandle,
    give_back,
    give_up,
    one_at_a_time,
    run_in_background,
    slot,
)
from ostraka.saving.capture import Captured, capture, hold
from ostraka.saving.limit import HostLimit
from ostraka.saving.place import Place
from ostraka.storage import LocalStore, PathLike, open_store, refuse_swapped

_SOURCE_ERRORS = (Damaged, SourceChanged)
"""Errors of the checkpoints that a conversion or a merge reads, not of the save."""
_NO_HOOKS = SaveHooks()


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """The options of a save that are the same on all processes."""

    dtype: DtypeRule = None
    compress: CompressRule = None
    parity: int = 0
    metadata: Mapping[str, Any] | None = None
    max_file_bytes: int | str = MAX_FILE_BYTES
    save_id: str | None = None
    """The id, if this process saves alone, or None for a random id of all processes."""
    grids: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """By number, the grid of a leaf on no mesh."""
    check_replicas: bool = False


@answering(keywords.SAVE)
def save(
    path: PathLike,
    tree: Any,
    *,
    dtype: DtypeRule = None,
    compress: CompressRule = None,
    parity: int = 0,
    metadata: Mapping[str, Any] | None = None,
    max_file_bytes: int | str = MAX_FILE_BYTES,
    check_replicas: bool = False,
    progress: bool = False,
    on_record: OnRecord | None = None,
) -> None:
    """Write a tree as a checkpoint: blocking, atomic, durable.

    Every process of a run calls this, and each writes its own shards. When it returns, the
    checkpoint is committed and on disk. When it raises, the files at `path` are unchanged, with
    two exceptions, which the error names: the new checkpoint is in place but its directory could
    not be synced, or it may be in place because a bucket did not answer.

    This first waits for a `save_async` that is under way.

    Args:
        path: A directory, a `s3://`, `gs://` or `az://` URL, or a store.
        tree: Any pytree of JAX arrays (sharded in any way), PRNG keys, numpy arrays, numbers,
            strings, bytes and None. It may contain Flax NNX modules, optimizers and states, and
            objects whose class has `get_state` and `set_state`, such as data iterators.
        dtype: Write floating-point arrays as this dtype: `"bfloat16"` for all, or by path,
            `{"model/**": "bfloat16"}`. Integers, keys and scalars keep their dtype.
        compress: `"zstd"` makes the files smaller, without loss: normal weights to 0.67 of their
            size as bfloat16, to 0.84 as float32. `("zstd", level)` sets a zstd level from 1 to 22,
            and `{"optimizer/**": "zstd"}` selects by path. Shards below 64 KiB stay uncompressed.
        parity: With 1, write parity files that can reconstruct any one lost or damaged shard file,
            or all files of any one host (with a single host: of any one process). With 2, any
            two. They take about an eighth (a quarter) more bytes, or more where there are few
            hosts: `ostraka.plan` tells. A restore that needs a lost file then works, with a
            warning.
        metadata: A JSON object to keep in the checkpoint.
        max_file_bytes: The largest size of a file, a number or a string such as `"1GB"`. A file is
            larger only if a single element or its name needs more.
        check_replicas: Compare all replicas of all shards before the commit, on all processes.
        progress: Show how far this process has come: a bar on a terminal or in a notebook, else a
            line in the log every 30 s. With several processes, process 0 shows it.
        on_record: Called with a `Record` of what was done and how long it took, which is also
            logged.

    Raises:
        SaveFailed: On every process, if any of them failed.
        ReplicasDiffer: On every process, with `check_replicas`, if replicas of a shard differ.
        InvalidTree: If the tree has no value, or one that can't be saved, such as a function
            outside of a module.
        Exception: The error of an earlier `save_async`, if nobody has seen it yet.

    Example:
        >>> ostraka.save("runs/7", {"params": params, "step": 100})
    """
    refuse_swapped("save(path, tree)", path, tree)
    options = SaveOptions(
        dtype, compress, parity, metadata, max_file_bytes, check_replicas=check_replicas
    )
    if not progress:
        run_save(path, partial(capture, tree), options, SaveHooks(on_record=on_record))
        return
    with shown(f"save {path}", progress and jax.process_index() == 0) as on_bytes:
        hooks = SaveHooks(on_record=on_record, on_bytes=on_bytes)
        run_save(path, partial(capture, tree), options, hooks)


@answering(keywords.SAVE)
def save_async(
    path: PathLike,
    tree: Any,
    *,
    dtype: DtypeRule = None,
    compress: CompressRule = None,
    parity: int = 0,
    metadata: Mapping[str, Any] | None = None,
    max_file_bytes: int | str = MAX_FILE_BYTES,
    check_replicas: bool = False,
    max_host_bytes: int | str | None = None,
    if_busy: Literal["wait", "raise"] = "wait",
    on_commit: Callable[[], None] | None = None,
    on_record: OnRecord | None = None,
) -> SaveHandle:
    """Begin a save, return once its values are safe, and write in the background.

    The checkpoint has the values at the call. Later changes of the tree (training steps, donated
    arrays, numpy arrays written to, a data iterator that moves on) do not reach it. There is one
    exception: a JAX array on the CPU may share its memory, as after `jax.device_put` of an aligned
    numpy array. Do not write to such memory before the save has ended.

    Only one save is under way at a time. The program does not end before the save has. A second
    Ctrl-C gives it up.

    Args:
        path: As for `save`.
        tree: As for `save`.
        dtype: As for `save`.
        compress: As for `save`.
        parity: As for `save`.
        metadata: As for `save`.
        max_file_bytes: As for `save`.
        check_replicas: As for `save`. The captured values are compared, in the background.
        max_host_bytes: The most host memory that the save takes on this process for copies (from
            accelerators, of numpy arrays, to cast and to compress), a number or a string such as
            `"4GiB"`. What has no room is written before this returns. Default: no limit.
        if_busy: What to do while an earlier save is under way: `"wait"` for it, or `"raise"`,
            which raises Busy.
        on_commit: Called in the background, on process 0, once the checkpoint is committed. If it
            raises, even SystemExit, this is logged, and the save has succeeded all the same.
        on_record: As for `save`.

    Returns:
        A handle to wait for the save. Its `wait()` raises the save's error. If nobody asks for
        the error, the next save raises it, or the program prints it when it ends, with the exit
        code 120.

    Raises:
        Busy: If a save is under way and `if_busy` is `"raise"`.
        InvalidTree: As for `save`.
        ValueError: If `max_host_bytes` is too little. The message says how much is needed.

    Example:
        >>> handle = ostraka.save_async("runs/8", {"model": model, "optimizer": optimizer})
        >>> handle.wait()
    """
    refuse_swapped("save_async(path, tree)", path, tree)
    options = SaveOptions(
        dtype, compress, parity, metadata, max_file_bytes, check_replicas=check_replicas
    )
    hooks = SaveHooks(on_record=on_record, on_commit=on_commit)
    return begin_save(
        path,
        partial(capture, tree),
        options,
        hooks,
        max_host_bytes=max_host_bytes,
        if_busy=if_busy,
    )


def run_save(
    path: PathLike,
    take_apart: Callable[[], Captured],
    options: SaveOptions,
    hooks: SaveHooks = _NO_HOOKS,
) -> None:
    """Run all stages in this thread, after a background save that is under way.

    `take_apart` returns the tree as data. It runs once the other processes would hear of an error.
    """
    watch = Stopwatch()
    # As `wait_for_background`, but most saves have none to wait for.
    if slot.current is not None:
        slot.refuse_own_thread()
    with slot.turn:  # Another thread may be beginning one.
        if slot.current is not None:
            slot.wait_for_current()
    with paused_gc(), _entered(path, options, hooks, watch) as running:
        summary = _write_and_commit(running, _capture(running, take_apart))
    _report(running, summary, in_background=False)


def begin_save(
    path: PathLike,
    take_apart: Callable[[], Captured],
    options: SaveOptions,
    hooks: SaveHooks,
    *,
    max_host_bytes: int | str | None = None,
    if_busy: Literal["wait", "raise"] = "wait",
    watch: Stopwatch | None = None,
    is_waited_for: bool = False,
) -> SaveHandle:
    """Capture the tree, and leave the other stages to a thread.

    `watch` is the caller's, if it has waited before.
    """
    watch = watch or Stopwatch()

    def note_blocked() -> None:
        if not is_waited_for:
            watch.blocked_s = watch.total_s

    with one_at_a_time(if_busy):
        ending, handle, limit = ExitStack(), None, None
        try:
            entered = _entered(path, options, hooks, watch, direct=not is_waited_for)
            running = ending.enter_context(entered)
            if max_host_bytes is not None:
                limit = HostLimit(max_host_bytes, on_safe=note_blocked)
                running = replace(running, limit=limit)
            handle = SaveHandle(str(path), running.progress, running.operation.give_up)
            with paused_gc():
                captured = _capture(running, take_apart)
                # An error may be kept for long, and would keep the values with it.
                ending.callback(captured.values.clear)
                is_alone = running.operation.count == 1  # Several processes agree first.
                if is_alone and hooks.check_no_arrays is not None and not captured.leaves:
                    hooks.check_no_arrays()
                hold(captured.values if limit is None else limit.choose(captured))
            watch.lap("capture")
            note_blocked()
            run_in_background(handle, partial(_finish, running, captured, ending))
            if limit is not None:
                limit.wait()
        except BaseException:
            if handle is None or give_back(handle):
                # Nobody works on it, and the other processes would wait for ever.
                with ending:
                    raise
            if limit is not None and not limit.is_safe:
                give_up(handle)
            raise
        return handle


@contextmanager
def _entered(
    path: PathLike,
    options: SaveOptions,
    hooks: SaveHooks,
    watch: Stopwatch,
    *,
    direct: bool = False,
) -> Generator[RunningSave]:
    """Enter a save after all earlier ones: all processes number them alike.

    A `direct` save leaves more of the cores to the steps beside it, and takes longer.
    If it fails, it fails on every process, and process 0 removes its files.
    """
    watch.lap("wait")
    operation = Operation(f"save to {path}", alone=options.save_id is not None)
    place = None
    try:
        with operation:
            options = _check_options(options, hooks)
            store = open_store(path)
            if direct and isinstance(store, LocalStore):
                store = store.direct()
            place = Place(store)
            count = Count(on_bytes=hooks.on_bytes)
            yield RunningSave(path, options, hooks, operation, place, watch, count)
    except BaseException as error:
        is_begun = place is not None and place.is_ready
        if place is not None and is_begun:
            operation.wait_until_left()
            place.discard()
        if isinstance(error, ProcessFailed):
            if isinstance(error.__cause__, ReplicasDiffer):  # Every process has raised it.
                raise error.__cause__ from None
            kind = SaveCancelled if error.reason == CANCELLED else SaveFailed
            raise kind(str(path), error.process, error.reason) from error.__cause__
        if isinstance(error, OSError) and is_begun and not isinstance(error, _SOURCE_ERRORS):
            raise SaveFailed(str(path), None, describe(error)) from error
        raise
    finally:
        if place is not None:
            place.release()


def _check_options(options: SaveOptions, hooks: SaveHooks) -> SaveOptions:
    limit = options.max_file_bytes
    if type(limit) is not int:
        limit = size_bytes("max_file_bytes", limit)
    check_file_bytes(limit)
    for name, function in (("on_record", hooks.on_record), ("on_commit", hooks.on_commit)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, not {function!r:.80}")
    if options.parity != 0:
        check_parity(options.parity)
    user = options.metadata or {}
    if user:
        try:
            kept = json.loads(json.dumps(user, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InvalidTree(f"metadata must be JSON: {error}") from error
        if kept != user:
            raise InvalidTree(
                "metadata must be JSON as it is: tuples, and keys that are not text, would come "
                "back as something else"
            )
        user = kept  # The caller may change its own.
    return replace(options, max_file_bytes=limit, metadata=user)


def _capture(running: RunningSave, take_apart: Callable[[], Captured]) -> Captured:
    captured = take_apart()
    if running.options.dtype is not None:
        check_dtype_rule(running.options.dtype, captured.leaves)
    if running.options.compress is not None:
        check_compress(running.options.compress, captured.leaves)
    if running.options.check_replicas:
        from ostraka.saving.replicas import ReplicaCheck  # Most saves do without.

        captured = replace(captured, replicas=ReplicaCheck(captured))
    running.watch.lap("capture")
    return captured


def _write_and_commit(running: RunningSave, captured: Captured) -> Sequence[float]:
    """Run the stages after the first. Returns a summary of bytes and seconds."""
    options, watch = running.options, running.watch
    agreed = agree(running, captured)
    watch.lap("agree")
    try:
        with paused_gc():
            plan = plan_write(
                agreed.leaves,
                agreed.meshes,
                agreed.process_of,
                max_file_bytes=int(options.max_file_bytes),
                compress=options.compress,
                grids=options.grids,
            )
            parity = options.parity
            companions = (
                [ParityCompanion(parity, plan, agreed.hosts, running.limit)] if parity else []
            )
        watch.lap("plan")
        if captured.replicas is not None:
            captured.replicas.begin()
        written = write_shards(running, agreed, plan, companions)
        watch.lap("write")
        if captured.replicas is not None:
            captured.replicas.compare(running.operation, str(running.path))
            watch.lap("check_replicas")
    finally:
        captured.values.clear()
        agreed.values.clear()
    summary = commit(running, agreed, plan, written, companions)
    if running.operation.process == 0:
        running.place.clear()
    watch.lap("commit")
    return summary


def _finish(running: RunningSave, captured: Captured, ending: ExitStack) -> Record:
    """In the background thread: the other stages, and the end of the save."""
    try:
        with ending:
            summary = _write_and_commit(running, captured)
    finally:
        if running.limit is not None:
            running.limit.end()
    return _report(running, summary, in_background=True)


def _report(running: RunningSave, summary: Sequence[float], *, in_background: bool) -> Record:
    hooks, path, watch = running.hooks, str(running.path), running.watch
    if hooks.on_commit is not None and running.operation.process == 0:
        call_safely(hooks.on_commit, in_background=in_background)
    return report("save", path, watch, summary, hooks.on_record, in_background=in_background)
