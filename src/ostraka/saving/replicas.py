"""Compare all replicas of all shards before the commit, for saves with `check_replicas`.

The fingerprints are of the captured values. In host memory they are XXH3 digests of the bytes,
elsewhere the device computes them. A thread works on them while the shards are written.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ostraka.common.dtypes import to_bytes
from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import LostBox, Replica, ReplicaDifference, ReplicasDiffer
from ostraka.layout.box import Box
from ostraka.live.fingerprint import Pending, begin_fingerprints
from ostraka.live.values import Array, ShardedValue
from ostraka.processes.operation import Operation
from ostraka.saving.capture import Captured

_HASHERS = max(2, min(os.cpu_count() or 1, 16))
_MOST_DIFFERENCES = 50


class _Entry(NamedTuple):
    """One replica on one device of this process."""

    leaf: int
    device: int
    """Its number in the run."""
    id: int
    """JAX's id of the device."""


class ReplicaCheck:
    """The replicas on this process's devices. Make it before the values are held."""

    def __init__(self, captured: Captured):
        self._leaves = [(leaf.path, leaf.shape) for leaf in captured.leaves]
        self._process_of = captured.process_of
        self._sole = captured.sole_process
        self._boxes: dict[int, Any] = {}
        self._entries: list[_Entry] = []
        self._views: list[Array | None] = []
        on_devices: list[Any] = []
        for leaf, value in enumerate(captured.values):
            if not isinstance(value, ShardedValue) or not value.is_replicated:
                continue
            self._boxes[leaf] = value.boxes
            for device, data, is_view in value.replicas():
                self._entries.append(_Entry(leaf, device, data.device.id))
                self._views.append(np.asarray(data) if is_view else None)
                if not is_view:
                    on_devices.append(data)
        self._pending: Pending = begin_fingerprints(on_devices)
        self._digests: list[str] = []
        self._error: Exception | None = None
        self._thread: Thread | None = None

    def begin(self) -> None:
        """Compute the fingerprints in a thread."""
        self._thread = Thread(target=self._digest, name="ostraka_replicas", daemon=True)
        self._thread.start()

    def compare(self, operation: Operation, path: str) -> None:
        """Wait for all fingerprints. Raises ReplicasDiffer on every process if any differ."""
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error
        mine = [
            [*entry, digest] for entry, digest in zip(self._entries, self._digests, strict=True)
        ]
        found = operation.exchange("replicas", mine, self._decide)
        if found:
            raise ReplicasDiffer(path, [_from_json(one) for one in found])

    def _digest(self) -> None:
        try:
            views = [view for view in self._views if view is not None]
            in_memory = iter(run_all(_hash, views, threads=_HASHERS, stop=StopSignal()))
            parts = iter(self._pending.collect())
            self._digests = [
                _show(next(parts)) if view is None else next(in_memory) for view in self._views
            ]
        except Exception as error:
            self._error = error
        finally:
            self._views = []  # They keep the memory of the captured arrays.

    def _decide(self, found: Sequence[Any]) -> list[Any]:
        """On process 0: the differences, as JSON."""
        by_box: dict[tuple[int, Box, int | None], list[tuple[int, int, str]]] = {}
        for process, mine in enumerate(found):
            for leaf, device, number, digest in mine:
                # A leaf that each process holds for itself may differ between them.
                owner = process if leaf in self._sole else None
                box = self._boxes[leaf][device] if owner in (None, 0) else ()
                by_box.setdefault((leaf, box, owner), []).append((number, process, digest))
        differences: list[Any] = []
        for (leaf, box, _), replicas in by_box.items():
            counts = Counter(digest for _, _, digest in replicas)
            if len(counts) > 1:
                groups = [
                    [(number, process) for number, process, digest in replicas if digest == one]
                    for one, _ in counts.most_common()
                ]
                path, shape = self._leaves[leaf]
                differences.append([path, box, shape, groups])
        return differences[:_MOST_DIFFERENCES]


def _hash(view: Array) -> str:
    stored: Any = to_bytes(view)
    return xxhash.xxh3_128_hexdigest(stored)


def _show(parts: Sequence[Any]) -> str:
    return " ".join(f"{lane:08x}" for part in parts for lane in part.sums.lanes)


def _from_json(found: Any) -> ReplicaDifference:
    path, box, shape, groups = found
    replicas = tuple(tuple(Replica(*one) for one in group) for group in groups)
    return ReplicaDifference(
        LostBox(path, tuple((start, stop) for start, stop in box), tuple(shape)), replicas
    )
