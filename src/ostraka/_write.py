"""A save: capture, agree, plan, write, digest, commit.

Nothing is visible before `_METADATA` appears, which is one atomic event of the store. Until then
all bytes go into a directory that is named after this save's random id.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np

from ostraka import _format
from ostraka._capture import (
    Captured,
    DtypeRule,
    Value,
    capture,
    check_dtype_rule,
    host_digests,
    make_common,
    make_per_process,
)
from ostraka._coordinate import Operation, ProcessFailed
from ostraka._document import encode, fill_in_states
from ostraka._format import IndexEntry, Metadata
from ostraka._parallel import StopSignal, paused_gc, run_all
from ostraka._plan import MAX_FILE_BYTES, WritePlan, plan_write
from ostraka._shards import Progress, write_shards
from ostraka._version import __version__
from ostraka.errors import InvalidTree, NotACheckpoint, PathInTheWay, SaveFailed, describe
from ostraka.storage import MemoryStore, PathLike, Store, open_store

Array = np.ndarray[Any, Any]

_WRITERS = max(4, min(os.cpu_count() or 1, 16))
_LEAST_FILE_BYTES = 2 * _format.PAGE_BYTES
_STAGING_BYTES = 1 << 30
"""How much of what is on accelerators may lie in host memory at one time."""
_COPY_BYTES = 16 << 20
"""How much of a box that is not contiguous in memory is copied at a time."""


def save(
    path: PathLike,
    tree: Any,
    *,
    dtype: DtypeRule = None,
    metadata: Mapping[str, Any] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
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

    `metadata` is kept in the checkpoint, JSON as it is. No file grows past `max_file_bytes`,
    unless a single element or its name needs more.

    Raises SaveFailed on every process if any of them failed.

    >>> ostraka.save("runs/7", {"params": params, "step": 100})
    """
    with ExitStack() as held:
        held.enter_context(paused_gc())
        operation = Operation(f"save to {path}")
        saving = _Save(operation, held)
        try:
            with operation:
                saving.run(path, tree, dtype, metadata or {}, max_file_bytes)
        except BaseException as error:
            # By now every process knows that this save has failed.
            saving.clean_up()
            if isinstance(error, ProcessFailed):
                cause = error.__cause__
                raise SaveFailed(str(path), error.process, error.reason) from cause
            if isinstance(error, OSError) and saving.has_begun:
                raise SaveFailed(str(path), None, describe(error)) from error
            raise


class _Save:
    """One save, on one of its processes."""

    def __init__(self, operation: Operation, held: ExitStack):
        self._operation = operation
        self._held = held
        self._store: Store = _NOWHERE
        self._save_id = ""
        self._states: dict[str, list[Any]] = {}
        """On process 0, the states of stateful objects on all processes."""

    @property
    def has_begun(self) -> bool:
        """Whether there may be anything of it on disk."""
        return bool(self._save_id)

    def run(
        self,
        path: PathLike,
        tree: Any,
        dtype: DtypeRule,
        user: Mapping[str, Any],
        max_file_bytes: int,
    ) -> None:
        if max_file_bytes < _LEAST_FILE_BYTES:
            raise ValueError(
                f"max_file_bytes is {max_file_bytes:,}; it must be at least {_LEAST_FILE_BYTES:,}"
            )
        self._store = open_store(path)
        captured = capture(tree)
        numbers = {leaf.path: number for number, leaf in enumerate(captured.leaves)}
        encoded = encode(captured.tree, numbers)
        user = _json_only(user)
        check_dtype_rule(dtype)
        self._save_id = self._begin(captured, encoded, (user, repr(dtype)))
        captured.save_as(dtype)
        if self._operation.process == 0:
            fill_in_states(encoded, self._states)
        plan = plan_write(
            captured.leaves, captured.meshes, captured.process_of, max_file_bytes=max_file_bytes
        )
        index = self._write(plan, captured.values, self._save_id)
        self._commit(plan, encoded, user, self._save_id, index)
        if self._operation.process == 0:
            _remove_other_shards(self._store, self._save_id)

    def clean_up(self) -> None:
        """Remove what a failed save wrote, unless it is what `_METADATA` names.

        Done by process 0 once the others have stopped. What stays all the same, because it can't
        be told or deleted now, is recognised and removed by the next save.
        """
        if not self.has_begun or self._operation.process != 0:
            return
        self._operation.wait_until_left()
        directory = _format.shards_directory(self._save_id)
        with suppress(OSError):
            if _committed_directory(self._store) not in (directory, _UNKNOWN):
                self._store.delete(directory)

    def _begin(self, captured: Captured, encoded: Any, rest: Any) -> str:
        """Agree on the tree and the id; sort out leaves that live on one process alone."""
        several = self._operation.count > 1
        payload = {
            "path": self._store.location,
            "tree": _fingerprint(captured, encoded, rest) if several else "",
            "paths": [captured.leaves[n].path for n in captured.sole_process],
            "sole": list(captured.sole_process.items()),
            "states": captured.states,
            "digests": list(host_digests(captured, self._operation.process).items()),
        }
        answer = self._operation.exchange("begin", payload, self._decide_begin)
        make_common(captured, answer["common"])
        make_per_process(captured, answer["per_process"], self._operation.count)
        captured.number_meshes()
        return answer["id"]

    def _decide_begin(self, payloads: list[Any]) -> dict[str, Any]:
        for process, payload in enumerate(payloads):
            for subject in ("path", "tree"):
                if payload[subject] != payloads[0][subject]:
                    raise ProcessFailed(process, _disagreement(subject, payload, payloads[0]))
        common, per_process = _sort_out_sole(payloads)
        self._states = {
            path: [payload["states"][path] for payload in payloads]
            for path in payloads[0]["states"]
        }
        self._store.prepare()
        self._held.enter_context(self._store.exclusive())
        _remove_leftovers(self._store)
        return {"id": secrets.token_hex(8), "common": common, "per_process": per_process}

    def _write(self, plan: WritePlan, values: Sequence[Value], save_id: str) -> IndexEntry | None:
        """Write this process's shards and its index; None if it has none to write."""
        process = self._operation.process
        if not plan.files_of(process):
            return None
        named = write_shards(
            self._store,
            save_id,
            plan,
            process,
            values,
            check=self._operation.check,
            progress=Progress(),
        )
        index = _format.encode_index(save_id, process, named)
        self._store.put(f"{_format.shards_directory(save_id)}/{_format.index_name(process)}", index)
        return IndexEntry(len(index), _format.digest(index))

    def _commit(
        self,
        plan: WritePlan,
        encoded: Any,
        user: Mapping[str, Any],
        save_id: str,
        index: IndexEntry | None,
    ) -> None:
        """Report, and commit if every process has reported well."""

        def commit(reports: list[Any]) -> None:
            indexes = {p: IndexEntry(*entry) for p, entry in enumerate(reports) if entry}
            self._check_visible(indexes, save_id)
            metadata = Metadata(
                id=save_id,
                writer=_describe_writer(),
                process_of=plan.process_of,
                tree=encoded,
                meshes=plan.meshes,
                layouts=plan.layouts,
                leaves=plan.leaves,
                files=plan.files,
                indexes=indexes,
                user=user,
            )
            data = _format.encode_metadata(metadata)
            # The shards must not be lost to a crash that keeps the commit.
            self._store.settle("")
            self._store.put(_format.METADATA_NAME, data)

        report = None if index is None else [index.size, index.digest]
        self._operation.exchange("commit", report, commit)

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
            run_all(look, others, threads=_WRITERS, stop=StopSignal())


# What is at the path already


def _remove_leftovers(store: Store) -> None:
    """Clear what dead saves left behind; raise PathInTheWay for what is not ours."""
    names = store.list() or []
    ours = [name for name in names if _is_ours(name)]
    if _format.METADATA_NAME not in names:
        foreign = [name for name in names if name not in ours]
        if foreign:
            raise PathInTheWay(
                f"{store.location} is a directory with other things in it "
                f"({', '.join(foreign[:3])}{', …' if len(foreign) > 3 else ''}); save to a path of "
                "its own"
            )
    kept = _committed_directory(store)
    for name in ours:
        if _format.is_shards_directory(name) and kept in (_UNKNOWN, name):
            continue
        if name != _format.METADATA_NAME:
            store.delete(name)


_UNKNOWN = "unknown"
_NOWHERE: Store = MemoryStore("nowhere")
"""Stands for the store until the path has been understood."""


def _committed_directory(store: Store) -> str | None:
    """The shards directory of the checkpoint that is there now, or None."""
    try:
        data = store.get(_format.METADATA_NAME)
    except FileNotFoundError:
        return None
    try:
        return _format.shards_directory(_format.decode_metadata(data).id)
    except NotACheckpoint as error:
        if any(_format.is_shards_directory(name) for name in store.list() or []):
            return _UNKNOWN  # damaged; what its shards hold stays until there is a better one
        raise PathInTheWay(
            f"{store.location} holds something that Ostraka did not write ({error}); save to a "
            "path of its own"
        ) from error
    except ValueError:
        return _UNKNOWN


def _is_ours(name: str) -> bool:
    is_temporary = name.startswith(f"{_format.METADATA_NAME}.") and name.endswith(".tmp")
    return name == _format.METADATA_NAME or is_temporary or _format.is_shards_directory(name)


def _remove_other_shards(store: Store, save_id: str) -> None:
    """After the commit: what was there before is no longer needed.

    The new checkpoint is good: what can't be deleted now, the next save tries again.
    """
    with suppress(OSError):
        for name in store.list() or []:
            if _format.is_shards_directory(name) and name != _format.shards_directory(save_id):
                store.delete(name)


# Several processes


def _fingerprint(captured: Captured, encoded: Any, rest: Any) -> str:
    """What must be the same on all processes, as a digest."""
    leaves: list[Any] = []
    for number, leaf in enumerate(captured.leaves):
        leaves.append((leaf.path, leaf.kind, leaf.dtype, leaf.shape, leaf.prng))
        if number not in captured.sole_process:
            leaves.append((captured.meshes[leaf.mesh], leaf.partition))
    return _format.digest(repr((encoded, leaves, rest)).encode())


def _disagreement(subject: str, payload: Any, first: Any) -> str:
    if subject == "path":
        return f"it saves to {payload['path']} while process 0 saves to {first['path']}"
    return (
        "its tree differs from that of process 0: structure, shapes, dtypes, shardings, Python "
        "values and metadata must be the same on all processes"
    )


def _sort_out_sole(payloads: list[Any]) -> tuple[list[int], list[int]]:
    """Of the leaves that live on one process alone: those all have alike, those each has its own.

    The rest lie on the devices of one process that all others know of.
    """
    owners = [dict(payload["sole"]) for payload in payloads]
    digests = [dict(payload["digests"]) for payload in payloads]
    paths = dict(zip(owners[0], payloads[0]["paths"], strict=True))
    common: list[int] = []
    per_process: list[int] = []
    for number in owners[0]:
        named = [owner[number] for owner in owners]
        if named == list(range(len(payloads))):
            alike = len({found[number] for found in digests}) == 1
            (common if alike else per_process).append(number)
        elif len(set(named)) > 1:
            odd = next(p for p, owner in enumerate(named) if owner not in (p, named[0]))
            raise ProcessFailed(
                odd, f"leaf {paths[number]!r} lies on other devices there than on process 0"
            )
    return common, per_process


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
