"""Write a checkpoint that Orbax restores. TensorStore writes its database; Orbax is not needed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from threading import Lock, local
from typing import Any

import numpy as np

from ostraka import _box
from ostraka._nodes import ArrayNumber, leaves_of
from ostraka._parallel import ByteBudget, Stopped, StopSignal, run_all
from ostraka._spec import numpy_dtype
from ostraka._step_names import step_of
from ostraka.errors import Damaged, Problem, StoreError, UnsupportedFormat
from ostraka.formats import open_source
from ostraka.formats._orbax_files import COMMITTED, STEP_METADATA
from ostraka.formats._ostraka import ORBAX_KEY
from ostraka.interop._orbax_plan import OrbaxArray, OrbaxPlan
from ostraka.interop._read_back import check_source
from ostraka.interop._work import Array, Digests, Piece, Tally, Work, digest_of
from ostraka.interop._workplace import Workplace
from ostraka.storage import LocalStore

ITEM = "default"
"""The item of a step, as CheckpointManager calls the only one that there is."""
_HANDLERS = "orbax.checkpoint._src.handlers"
_OF_TREE = f"{_HANDLERS}.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_OF_ITEM = f"{_HANDLERS}.standard_checkpoint_handler.StandardCheckpointHandler"
_HELD_BYTES = 64 << 20
"""How much of arrays is on its way at one time; TensorStore has copies of it."""
_TOGETHER_BYTES = 8 << 20
_THREADS = 2


def is_step(target: str) -> bool:
    """Whether a path is that of a step of Orbax's CheckpointManager, by its name."""
    return step_of(os.path.basename(target.rstrip("/"))) is not None


def write_orbax(
    work: Work, plan: OrbaxPlan, place: Workplace, *, as_step: bool, tally: Tally
) -> Digests:
    """Write all of a checkpoint; chunks that an earlier conversion has written stay."""
    item = os.path.join(place.files.location, ITEM) if as_step else place.files.location
    os.makedirs(os.path.join(item, "array_metadatas"), exist_ok=True)
    database = _Database(item)
    chunks = [
        (array, key, Piece(array.item, box)) for array in plan.arrays for key, box in array.chunks()
    ]
    notes = _find_written(database, chunks, place)
    tally.add(sum(_nbytes(chunks[number]) for number in notes), kept=True)
    missing = [number for number in range(len(chunks)) if number not in notes]
    budget, stop, encoder = ByteBudget(_HELD_BYTES), StopSignal(), _Encoder()

    def write(numbers: Sequence[int]) -> None:
        with budget.hold(sum(_nbytes(chunks[number]) for number in numbers), stop.check):
            number_of = {chunks[number][2]: number for number in numbers}
            under_way: list[tuple[int, str, Any]] = []
            for piece, array in work.read(list(number_of)):
                stop.check()
                number = number_of[piece]
                data = encoder.encode(array, chunks[number][0].chunk)
                under_way.append(
                    (number, digest_of(array), database.write(chunks[number][1], data))
                )
            for number, digest, writing in under_way:
                database.wait(writing)
                notes[number] = digest
                place.journal.note(number, digest)
                tally.add(_nbytes(chunks[number]))

    values = {f"{array.name}/.zarray": array.zarray for array in plan.arrays} | {**plan.values}
    try:
        run_all(write, _groups(chunks, missing), threads=_THREADS, stop=stop)
        for writing in [database.write(key, data) for key, data in values.items()]:
            database.wait(writing)
    finally:
        database.close()
    _write_small_files(place.files, item, plan, as_step, work)
    return {chunks[number][2]: digest for number, digest in notes.items()}


_Chunk = tuple[OrbaxArray, str, Piece]


def _nbytes(chunk: _Chunk) -> int:
    return _box.count(chunk[2].box) * numpy_dtype(chunk[0].spec.dtype).itemsize


def _groups(chunks: Sequence[_Chunk], numbers: Sequence[int]) -> Iterator[list[int]]:
    """Chunks that are read and written together: small ones, which share blocks and commits."""
    group: list[int] = []
    nbytes = 0
    for number in numbers:
        if group and nbytes + _nbytes(chunks[number]) > _TOGETHER_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(number)
        nbytes += _nbytes(chunks[number])
    if group:
        yield group


class _Encoder(local):
    """Chunks as zarr stores them, in memory of each thread: TensorStore takes a copy at once."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def encode(self, array: Array, chunk: Sequence[int]) -> bytearray:
        """A chunk; those at the end of an array are filled up. Good until the next one."""
        nbytes = prod(chunk) * array.dtype.itemsize
        if len(self._memory) != nbytes:
            self._memory = bytearray(nbytes)
        whole = np.frombuffer(self._memory, np.uint8).view(array.dtype).reshape(chunk)
        if array.shape != tuple(chunk):
            whole[...] = np.zeros((), array.dtype)
        whole[tuple(slice(0, size) for size in array.shape)] = array
        return self._memory


def _find_written(
    database: _Database, chunks: Sequence[_Chunk], place: Workplace
) -> dict[int, str]:
    """What an earlier conversion has noted, by number, where the database has the same."""

    def check(found: tuple[int, str]) -> bool:
        number, digest = found
        array, key, piece = chunks[number]
        data = database.read(key)
        dtype = numpy_dtype(array.spec.dtype)
        if data is None or len(data) != np.prod(array.chunk, dtype=int) * dtype.itemsize:
            return False
        whole = np.frombuffer(data, dtype).reshape(array.chunk)
        part = whole[tuple(slice(0, stop - start) for start, stop in piece.box)]
        return digest_of(part) == digest

    notes = [entry for entry in place.journal.read().items() if entry[0] < len(chunks)]
    if notes and not database.is_readable():
        database.remove()
        return {}
    are_good = run_all(check, notes, threads=_THREADS, stop=StopSignal())
    return {number: digest for (number, digest), good in zip(notes, are_good, strict=True) if good}


class _Database:
    """The OCDBT database of an item. What has been written is durable once it was waited for."""

    def __init__(self, directory: str):
        self._directory = directory
        self._opened: Any = None
        self._lock = Lock()
        self._is_closed = False
        self._callers = 0
        """Threads that are in a call of TensorStore's."""
        self._under_way: dict[int, Any] = {}

    def _store(self) -> Any:
        if self._opened is None:
            ts = import_tensorstore()
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
        """Take no more, and wait until no thread is in a call, however often Ctrl-C is pressed.

        A program that ends while a thread is in a call of TensorStore's is aborted.
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

    def read(self, key: str) -> bytes | None:
        try:
            found = self._store().read(key).result()
        except Exception:
            return None
        return found.value if found.state == "value" else None

    def is_readable(self) -> bool:
        try:
            self._store().list().result()
        except Exception:
            return False
        return True

    def remove(self) -> None:
        self._opened = None
        shutil.rmtree(os.path.join(self._directory, "d"), ignore_errors=True)
        LocalStore(self._directory).delete("manifest.ocdbt")


def import_tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise UnsupportedFormat(
            "writing an Orbax checkpoint needs TensorStore, which is not installed; "
            "pip install 'ostraka[orbax]'"
        ) from error
    return tensorstore


def _write_small_files(
    store: LocalStore, item: str, plan: OrbaxPlan, as_step: bool, work: Work
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
        LocalStore(item).put(name, data)
    if as_step:
        LocalStore(item).put(COMMITTED, b"Converted by Ostraka")
    store.put(STEP_METADATA, json.dumps(about).encode())
    store.put(COMMITTED, b"Converted by Ostraka")


def check_orbax(
    work: Work, plan: OrbaxPlan, place: Workplace, digests: Digests, tally: Tally
) -> None:
    """Read the result as any checkpoint of Orbax, and compare it. Raises Damaged."""
    found = open_source(place.files)
    leaves = {leaf.path: leaf.value for leaf in leaves_of(found.tree)}
    numbers: Mapping[int, Any] = {array.item: leaves.get(array.path) for array in plan.arrays}
    lost = [array for array in plan.arrays if not isinstance(leaves.get(array.path), ArrayNumber)]
    lost = [array for array in lost if array.spec.kind != "scalar"]
    if lost:
        problem = Problem("_METADATA", "an array was not found again", (lost[0].path,))
        raise Damaged(place.files.location, [problem])
    of_arrays = {
        piece: digest
        for piece, digest in digests.items()
        if isinstance(numbers[piece.item], ArrayNumber)
    }
    check_source(work, of_arrays, found, lambda piece: numbers[piece.item].number, tally)
