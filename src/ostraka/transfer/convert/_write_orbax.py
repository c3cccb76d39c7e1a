"""Write an Orbax checkpoint. TensorStore writes its database, and Orbax is not needed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from threading import Lock, local
from typing import Any

import numpy as np

from ostraka.common.threads import ByteBudget, Stopped, StopSignal, run_all
from ostraka.errors import Damaged, Problem, StoreError, UnsupportedFormat
from ostraka.formats import open_source
from ostraka.formats.orbax.names import COMMITTED, ORBAX_KEY, STEP_METADATA
from ostraka.layout.file_names import step_of
from ostraka.storage import LocalStore, Store
from ostraka.transfer.convert._plan_orbax import OrbaxPlan, plan_orbax
from ostraka.transfer.convert._workplace import Workplace
from ostraka.transfer.convert.work import Array, Digests, ItemBox, Work, check_source, digest_of
from ostraka.tree.nodes import ArrayNumber, leaves_of

ITEM = "default"
"""The name that a CheckpointManager has for the only item of a step."""
_HANDLERS = "orbax.checkpoint._src.handlers"
_OF_TREE = f"{_HANDLERS}.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_OF_ITEM = f"{_HANDLERS}.standard_checkpoint_handler.StandardCheckpointHandler"
_HELD_BYTES = 64 << 20
"""Bytes of arrays under way at one time. TensorStore has copies of them."""
_TOGETHER_BYTES = 8 << 20
_THREADS = 2


def write_orbax(work: Work, target: LocalStore, work_id: str) -> None:
    """Write a checkpoint and read it back. Chunks of an interrupted conversion are kept.

    It is a step of a CheckpointManager if the target has the name of one.
    """
    _import_tensorstore()
    plan = plan_orbax(work)
    as_step = step_of(os.path.basename(target.location.rstrip("/"))) is not None
    with Workplace(target.location, work_id).held({}) as files:
        item = files.at(ITEM) if as_step else files
        digests = _write_database(work, plan, item.location)
        _write_small_files(files, item, plan, as_step, work)
        _check(work, plan, files, digests)


def _write_database(work: Work, plan: OrbaxPlan, directory: str) -> Digests:
    os.makedirs(os.path.join(directory, "array_metadatas"), exist_ok=True)
    database = _Database(directory)
    chunks = {
        ItemBox(array.item, box): (array, key)
        for array in plan.arrays
        for key, box in array.chunks()
    }
    is_resumed = database.is_resumed()
    digests: dict[ItemBox, str] = {}
    budget, stop, encoder = ByteBudget(_HELD_BYTES), StopSignal(), _Encoder()

    def write(pieces: Sequence[ItemBox]) -> None:
        with budget.hold(work.nbytes_of(pieces), stop.check):
            under_way: list[Any] = []
            for piece, array in work.read(pieces):
                stop.check()
                planned, key = chunks[piece]
                data = encoder.encode(array, planned.chunk)
                digests[piece] = digest_of(array)
                if is_resumed and database.has(key, data):
                    work.kept.add(array.nbytes)
                else:
                    under_way.append(database.write(key, data))
            for writing in under_way:
                database.wait(writing)
            work.progress.add(work.nbytes_of(pieces))

    try:
        groups = work.together(list(chunks), _TOGETHER_BYTES)
        run_all(write, groups, threads=_THREADS, stop=stop)
        for writing in [database.write(key, data) for key, data in plan.values.items()]:
            database.wait(writing)
    finally:
        database.close()
    return digests


class _Encoder(local):
    """Encodes chunks for zarr, in memory of each thread. TensorStore copies them at once."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def encode(self, array: Array, chunk: Sequence[int]) -> bytearray:
        """Encode a chunk, padded at the end of the array. It is valid until the next call."""
        nbytes = prod(chunk) * array.dtype.itemsize
        if len(self._memory) != nbytes:
            self._memory = bytearray(nbytes)
        whole = np.frombuffer(self._memory, np.uint8).view(array.dtype).reshape(chunk)
        if array.shape != tuple(chunk):
            whole[...] = np.zeros((), array.dtype)
        whole[tuple(slice(0, size) for size in array.shape)] = array
        return self._memory


class _Database:
    """The OCDBT database of an item. A write is durable after `wait`."""

    def __init__(self, directory: str):
        self._directory = directory
        self._opened: Any = None
        self._lock = Lock()
        self._is_closed = False
        self._callers = 0
        """Number of threads in a call of TensorStore."""
        self._under_way: dict[int, Any] = {}

    def _store(self) -> Any:
        if self._opened is None:
            ts = _import_tensorstore()
            base = {"driver": "file", "path": f"{self._directory}/"}
            context = ts.Context({"cache_pool": {"total_bytes_limit": 16 << 20}})
            spec = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool"}
            self._opened = ts.KvStore.open(spec, context=context).result()
        return self._opened

    @contextmanager
    def _calling(self) -> Generator[None]:
        with self._lock:
            if self._is_closed:
                raise Stopped
            self._callers += 1
        try:
            yield
        finally:
            with self._lock:
                self._callers -= 1

    def write(self, key: str, data: bytes | bytearray) -> Any:
        with self._calling():
            writing = self._store().write(key, data)
            self._under_way[id(writing)] = writing
            return writing

    def wait(self, writing: Any) -> None:
        with self._calling():
            try:
                writing.result()
            except Exception as error:
                why = " ".join(str(error).split())[:300]
                where = self._directory
                raise StoreError(f"can't write the database in {where}: {why}") from error
            finally:
                self._under_way.pop(id(writing), None)

    def close(self) -> None:
        """Refuse new calls, and wait until no thread is in a call, even if Ctrl-C is pressed.

        TensorStore aborts a program that ends while a thread is in a call.
        """
        with self._lock:
            self._is_closed = True
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                while self._callers:
                    time.sleep(0.005)
                for writing in list(self._under_way.values()):
                    with suppress(Exception):
                        writing.result()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def has(self, key: str, data: bytearray) -> bool:
        with self._calling():
            try:
                return self._store().read(key).result().value == bytes(data)
            except Exception:
                return False  # It can't be read, and is written again.

    def is_resumed(self) -> bool:
        """True if an interrupted conversion left a database. Removes an unreadable one."""
        if not os.path.exists(os.path.join(self._directory, "manifest.ocdbt")):
            return False
        try:
            self._store().list().result()
        except Exception:
            self._opened = None
            shutil.rmtree(os.path.join(self._directory, "d"), ignore_errors=True)
            LocalStore(self._directory).delete("manifest.ocdbt")
            return False
        return True


def _import_tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise UnsupportedFormat(
            "writing an Orbax checkpoint needs TensorStore, which is not installed; "
            "pip install tensorstore"
        ) from error
    return tensorstore


def _write_small_files(
    store: Store, item: Store, plan: OrbaxPlan, as_step: bool, work: Work
) -> None:
    now = time.time_ns()
    user = dict(work.source.saved.user)
    user.pop(ORBAX_KEY, None)
    metrics = user.pop("metrics", {})
    about: dict[str, Any] = {
        "item_handlers": {ITEM: _OF_ITEM} if as_step else _OF_TREE,
        "metrics": metrics,
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": user,
    }
    for name, data in plan.files.items():
        item.put(name, data)
    if as_step:
        item.put(COMMITTED, b"Converted by Ostraka")
    store.put(STEP_METADATA, json.dumps(about).encode())
    store.put(COMMITTED, b"Converted by Ostraka")


def _check(work: Work, plan: OrbaxPlan, store: Store, digests: Digests) -> None:
    """Read the result as an Orbax checkpoint, and compare it. Raises Damaged."""
    found = open_source(store)
    leaves = {leaf.path: leaf.value for leaf in leaves_of(found.tree)}
    numbers = {
        array.item: value.number
        for array in plan.arrays
        if isinstance(value := leaves.get(array.path), ArrayNumber)
    }
    for array in plan.arrays:
        if array.item not in numbers and array.spec.kind != "scalar":
            problem = Problem("_METADATA", "an array was not found again", (array.path,))
            raise Damaged(store.location, [problem])
    of_arrays = {piece: digest for piece, digest in digests.items() if piece.item in numbers}
    check_source(work, of_arrays, found, numbers)
