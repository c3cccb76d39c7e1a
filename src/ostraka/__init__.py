"""Save and restore sharded JAX state."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ostraka import errors
from ostraka._version import __version__

if TYPE_CHECKING:
    from ostraka import exercises, sharding
    from ostraka._handle import SaveHandle
    from ostraka._lazy import Checkpoint, LazyArray
    from ostraka._lazy import open_checkpoint as open
    from ostraka._read import restore
    from ostraka._record import Record
    from ostraka._save import save, save_async
    from ostraka.integrity import RepairReport, Report, repair, verify
    from ostraka.interop import ConvertReport, MergeReport, convert, merge
    from ostraka.manager import Best, Manager
    from ostraka.planner import Plan, plan
    from ostraka.transfer import CopyReport, copy

__all__ = [
    "Best",
    "Checkpoint",
    "ConvertReport",
    "CopyReport",
    "LazyArray",
    "Manager",
    "MergeReport",
    "Plan",
    "Record",
    "RepairReport",
    "Report",
    "SaveHandle",
    "__version__",
    "convert",
    "copy",
    "errors",
    "exercises",
    "merge",
    "open",
    "plan",
    "repair",
    "restore",
    "save",
    "save_async",
    "sharding",
    "verify",
]

_MODULES = ("exercises", "sharding")

# Looked up when first used: the command must not wait for JAX, nor JAX users for what they don't
# call.
_HOMES = {
    "Best": ("ostraka.manager", "Best"),
    "Checkpoint": ("ostraka._lazy", "Checkpoint"),
    "ConvertReport": ("ostraka.interop", "ConvertReport"),
    "CopyReport": ("ostraka.transfer", "CopyReport"),
    "LazyArray": ("ostraka._lazy", "LazyArray"),
    "Manager": ("ostraka.manager", "Manager"),
    "MergeReport": ("ostraka.interop", "MergeReport"),
    "Plan": ("ostraka.planner", "Plan"),
    "Record": ("ostraka._record", "Record"),
    "RepairReport": ("ostraka.integrity", "RepairReport"),
    "Report": ("ostraka.integrity", "Report"),
    "SaveHandle": ("ostraka._handle", "SaveHandle"),
    "convert": ("ostraka.interop", "convert"),
    "copy": ("ostraka.transfer", "copy"),
    "merge": ("ostraka.interop", "merge"),
    "open": ("ostraka._lazy", "open_checkpoint"),
    "plan": ("ostraka.planner", "plan"),
    "repair": ("ostraka.integrity", "repair"),
    "restore": ("ostraka._read", "restore"),
    "save": ("ostraka._save", "save"),
    "save_async": ("ostraka._save", "save_async"),
    "verify": ("ostraka.integrity", "verify"),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"ostraka.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'ostraka' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
