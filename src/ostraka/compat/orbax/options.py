"""Options. Those about Orbax's own files and threads have no effect."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable, Container
from dataclasses import dataclass, field, fields
from typing import Any

from ostraka.compat.orbax import checkpoint_managers as policies_lib
from ostraka.compat.orbax.path import NameFormat


@dataclass
class AsyncOptions:
    """`timeout_secs` limits the time that `wait_until_finished` waits."""

    timeout_secs: int = 1200
    barrier_sync_fn: Any = None
    post_finalization_callback: Any = None
    create_directories_asynchronously: bool = True


@dataclass
class MultiprocessingOptions:
    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclass
class FileOptions:
    path_permission_mode: int | None = None
    skip_sync_file_validations: bool = False
    cns2_storage_options: dict[str, Any] = field(default_factory=dict[str, Any])


class AtomicityMode(enum.StrEnum):
    AUTO = "auto"
    COMMIT_FILE = "commit_file"
    ATOMIC_RENAME = "atomic_rename"


@dataclass
class AtomicityOptions:
    mode: AtomicityMode = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False


@dataclass
class MemoryLimitOptions:
    max_transfer_concurrent_gb: int | None = None


@dataclass
class CompositeOptions:
    """Options about Orbax's own files, without effect."""

    multiprocessing_options: Any = None
    temporary_path_class: Any = None
    file_options: Any = None
    atomicity_options: Any = None
    async_options: Any = None


@dataclass
class ArrayFileOptions:
    """How Orbax writes the files of arrays, without effect."""

    use_ocdbt: bool = True
    use_zarr3: bool = True
    use_compression: bool = True
    ocdbt_target_data_file_size: int | None = None
    enable_pinned_host_transfer: bool | None = None
    enable_post_merge_validation: bool = True
    use_replica_parallel: bool | None = None
    min_slice_bytes_for_replica_parallel: int | None = None
    max_replicas_for_replica_parallel: int | None = None
    enable_replica_parallel_separate_folder: bool = False
    enable_write_sharding_file: bool = True
    array_metadata_store: Any = None


@dataclass
class BroadcastOptions:
    """How Orbax reads an array once for all replicas, without effect."""

    replica_axis_index: int | None = 0
    primary_replica_id: int | None = 0
    broadcast_memory_limit_bytes: int | None = None
    broadcast_memory_scaling_factor: float | None = 0.75


def names_of(*options: Any) -> list[str]:
    """Return the names of the options in classes, for calls that take them as keywords."""
    return [known.name for cls in options for known in fields(cls)]


@dataclass
class CheckpointManagerOptions:
    """Options of a manager: when to save, which steps to keep, how to name them."""

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: datetime.timedelta | None = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: Any = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Container[int] | None = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: AsyncOptions | None = None
    multiprocessing_options: Any = field(default_factory=MultiprocessingOptions)
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: Any = field(default_factory=FileOptions)
    # Most of those that follow are about Orbax's own files, without effect.
    atomicity_options: Any = None
    save_root_metadata: bool = True
    temporary_path_class: Any = None
    save_decision_policy: Any = None
    preservation_policy: Any = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False

    def __post_init__(self) -> None:
        if self.best_mode not in ("min", "max"):
            raise ValueError(
                "`CheckpointManagerOptions.best_mode` must be one of None, 'min' or 'max'. Got "
                f"{self.best_mode}."
            )
        if self.max_to_keep is not None and self.max_to_keep < 0:
            raise ValueError("Setting of `max_to_keep` must be None or non-negative.")
        if self.todelete_full_path is not None:
            raise NotImplementedError(
                "CheckpointManagerOptions(todelete_full_path=) is not supported; steps are "
                "deleted, or in a directory moved to todelete_subdir"
            )
        if self.keep_period is not None and self.keep_period <= 0:
            raise ValueError("Setting of `keep_period` must be None or positive.")
        if self.read_only and self.max_to_keep is not None:
            self.max_to_keep = None
        if self.prevent_write_metrics:
            raise NotImplementedError(
                "CheckpointManagerOptions(prevent_write_metrics=True) is not supported: metrics "
                "are a part of the step"
            )

    def naming(self) -> Any:
        return self.step_name_format or NameFormat(self.step_prefix, self.step_format_fixed_length)

    def when(self) -> Any:
        """Return the policy that decides which steps are saved."""
        if self.save_decision_policy is not None:
            return self.save_decision_policy
        policies: list[Any] = [policies_lib.PreemptionCheckpointingPolicy()]
        if self.should_save_fn is not None:
            policies.append(policies_lib.ShouldSaveFnPolicy(self.should_save_fn))
        else:
            policies += [
                policies_lib.FixedIntervalPolicy(self.save_interval_steps),
                policies_lib.SpecificStepsPolicy(self.save_on_steps or ()),
                policies_lib.InitialSavePolicy(),
            ]
        return policies_lib.AnySavePolicy(policies)

    def keep(self) -> Any:
        """Return the policy that decides which steps are kept."""
        limits = (self.max_to_keep, self.keep_period, self.keep_time_interval)
        if self.preservation_policy is not None:
            if any(limits):
                raise ValueError(
                    "`preservation_policy` and max_to_keep, keep_period, keep_time_interval are "
                    "mutually exclusive."
                )
            return self.preservation_policy
        if self.max_to_keep is None:
            return policies_lib.PreserveAll()
        policies: list[Any] = []
        if self.keep_period is not None:
            policies.append(policies_lib.EveryNSteps(self.keep_period))
        if self.keep_time_interval is not None:
            policies.append(policies_lib.EveryNSeconds(self.keep_time_interval.total_seconds()))
        if self.best_fn is None:
            policies.append(policies_lib.LatestN(self.max_to_keep))
        else:
            is_min, others = self.best_mode == "min", self.keep_checkpoints_without_metrics
            policies.append(policies_lib.BestN(self.best_fn, is_min, self.max_to_keep, others))
        return policies_lib.AnyPreservationPolicy(policies)
