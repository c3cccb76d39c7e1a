"""Options of v1; those about Orbax's own files and threads are taken, and change nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.options import FileOptions as FileOptions
from ostraka.compat.orbax.options import MultiprocessingOptions as MultiprocessingOptions

__getattr__ = refuse(__name__)


@dataclass
class AsyncOptions:
    timeout_secs: int = 600
    post_finalization_callback: Any = None
    create_directories_asynchronously: bool = True


@dataclass
class _TreeLoading:
    partial_load: bool = False


@dataclass
class PyTreeOptions:
    """`PyTreeOptions(loading=PyTreeOptions.Loading(partial_load=True))`."""

    Loading = _TreeLoading
    loading: _TreeLoading = field(default_factory=_TreeLoading)


@dataclass
class ArrayOptions:
    """About Orbax's files."""

    saving: Any = None
    loading: Any = None
