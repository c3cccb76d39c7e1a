"""Options. Those about Orbax's own files and threads are taken, and change nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)


@dataclass
class AsyncOptions:
    """`timeout_secs`: how long `wait_until_finished` waits."""

    timeout_secs: int = 600
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
    cns2_storage_options: dict[str, Any] = field(default_factory=dict[str, Any])
