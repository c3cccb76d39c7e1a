"""Processes. The engine coordinates its saves itself; these are for code that asks."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ostraka.compat.orbax._refuse import refuse
from ostraka.manager._together import decide_together

__getattr__ = refuse(__name__)

_utils: Any = multihost_utils


def initialize_runtime_to_distributed_ids() -> None:
    """Nothing to do: the engine knows its processes."""


def initialize_distributed_to_device_ids() -> None:
    """Nothing to do: the engine knows its devices."""


def is_runtime_to_distributed_ids_initialized() -> bool:
    return True


def is_distributed_to_device_ids_initialized() -> bool:
    return True


def runtime_to_distributed_ids() -> list[int]:
    return list(range(jax.process_count()))


def distributed_to_device_ids() -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(jax.process_count())]
    for device in jax.devices():
        found[device.process_index].append(device.id)
    return found


def process_index() -> int:
    return jax.process_index()


def process_count() -> int:
    return jax.process_count()


def is_primary_host(primary_host: int | None) -> bool:
    return primary_host is None or primary_host == jax.process_index()


def sync_global_processes(name: str, **options: Any) -> None:
    """Wait until all processes are here."""
    decide_together(name, lambda: None)


def broadcast_one_to_all(in_tree: Any, is_source: bool | None = None) -> Any:
    """The tree of process 0, on all."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, in_tree)
    return _utils.broadcast_one_to_all(in_tree, is_source)


def reached_preemption(step: int) -> bool:
    """Whether JAX says that the run is being preempted, and this is the step to stop at."""
    return bool(_utils.reached_preemption_sync_point(step)) if _has_service() else False


def _has_service() -> bool:
    if jax.process_count() > 1:
        return True
    is_initialized: Any = getattr(jax.distributed, "is_initialized", None)
    return bool(is_initialized is not None and is_initialized())


def coordination_timeout() -> int:
    return 600


def unique_barrier_key(name: str) -> str:
    return f"{name}.{time.time_ns()}"
