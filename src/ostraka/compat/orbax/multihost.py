"""Processes and devices, for programs that ask. The engine coordinates its saves itself."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from ostraka.compat.orbax._names import absent
from ostraka.processes.decide import decide_together

_utils: Any = multihost_utils


def initialize_distributed_to_device_ids() -> None:
    """Do nothing: the engine knows its processes and devices."""


def is_distributed_to_device_ids_initialized() -> bool:
    return True


initialize_runtime_to_distributed_ids = initialize_distributed_to_device_ids
is_runtime_to_distributed_ids_initialized = is_distributed_to_device_ids_initialized


def runtime_to_distributed_ids() -> list[int]:
    return list(range(jax.process_count()))


distributed_to_device_ids = absent("multihost.distributed_to_device_ids", "use jax.devices()")
process_index, process_count = jax.process_index, jax.process_count


def is_primary_host(primary_host: int | None) -> bool:
    return primary_host is None or primary_host == jax.process_index()


def runtime_to_distributed_process_id(pid: int) -> int:
    return pid


def process_index_from_device(device: Any) -> int:
    return device.process_index


def unique_processes_from_devices(device_array: Any) -> set[int]:
    return {device.process_index for device in np.asarray(device_array).flat}


is_jax_distributed_client_initialized = jax.distributed.is_initialized


def get_jax_distributed_client() -> Any:
    """Return the client of JAX's coordination service. Raises ValueError if there is none."""
    from jax._src import distributed

    state: Any = distributed.global_state
    if state.client is None:
        raise ValueError(
            "JAX's coordination service is not running: call jax.distributed.initialize() first"
        )
    return state.client


class BarrierSyncFn(Protocol):
    """Waits until all processes have reached the barrier of a key."""

    def __call__(self, *, key: str, timeout_ms: int) -> None: ...


def should_skip_process_sync(processes: set[int] | None = None) -> bool:
    """True if this process is the only one to wait for."""
    return jax.process_count() == 1 or processes == {jax.process_index()}


def get_barrier_sync_fn(*, processes: set[int] | None = None) -> BarrierSyncFn:
    """Return a function that waits at a barrier, for all processes or some of them."""

    def wait(*, key: str, timeout_ms: int) -> None:
        if not should_skip_process_sync(processes):
            members = None if processes is None else sorted(processes)
            get_jax_distributed_client().wait_at_barrier(key, timeout_ms, members)

    return wait


def sync_global_processes(
    name: str,
    *,
    timeout: int | None = None,
    processes: set[int] | None = None,
    barrier_sync_fn: BarrierSyncFn | None = None,
    **options: Any,
) -> None:
    """Wait until all processes have called this, or those in `processes`."""
    if should_skip_process_sync(processes):
        return
    wait_ms = (timeout or coordination_timeout()) * 1000
    if barrier_sync_fn is not None:
        barrier_sync_fn(key=name, timeout_ms=wait_ms)
    elif processes is None:
        decide_together(name, lambda: None)
    else:
        get_barrier_sync_fn(processes=processes)(key=name, timeout_ms=wait_ms)


def global_max(values: list[int]) -> list[int]:
    """Return the largest value of each number among all processes."""
    if jax.process_count() == 1:
        return [int(value) for value in values]
    found = _utils.process_allgather(np.asarray(values, np.int32))
    return [int(value) for value in np.asarray(found).max(axis=0)]


# Pathways, which the drop-in does not support


def is_pathways_backend() -> bool:
    return False


is_native_pathways_backend = is_proxy_pathways_backend = is_pathways_backend
is_pathways_controller = is_pathways_colocated_runtime_active = is_pathways_backend
is_cloud_pathways_persistence_enabled = use_experimental_distributed_process_id = (
    is_pathways_backend
)


# Values and decisions


def broadcast_one_to_all(in_tree: Any, is_source: bool | None = None) -> Any:
    """Return the tree of process 0 on all processes."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, in_tree)
    return _utils.broadcast_one_to_all(in_tree, is_source)


def reached_preemption(step: int) -> bool:
    """True if JAX reports a preemption of the run, and this is the step to stop at."""
    has_service = jax.process_count() > 1 or is_jax_distributed_client_initialized()
    return has_service and bool(_utils.reached_preemption_sync_point(step))


def coordination_timeout() -> int:
    return 300


def unique_barrier_key(key: str, *, prefix: str | None = None, suffix: str | None = None) -> str:
    before = "" if prefix is None else f"{prefix}_"
    return f"{before}{key}" if suffix is None else f"{before}{key}.{suffix}"
