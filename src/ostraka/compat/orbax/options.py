"""Options. Those about Orbax's own files and threads have no effect."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


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
