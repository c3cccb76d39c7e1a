"""Save and restore sharded JAX state."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ostraka import errors
from ostraka._version import __version__

if TYPE_CHECKING:
    from ostraka import data, exercises, metrics, sharding
    from ostraka.common.record import Record
    from ostraka.integrity import RepairReport, VerifyReport, repair, verify
    from ostraka.manager import Best, Manager, latest
    from ostraka.manager.annotate import annotate
    from ostraka.planner import Plan, plan
    from ostraka.reading.lazy import Checkpoint, LazyArray
    from ostraka.reading.lazy import open_checkpoint as open
    from ostraka.restoring.restore import restore
    from ostraka.saving.background import SaveHandle
    from ostraka.saving.save import save, save_async
    from ostraka.transfer import CopyReport, copy
    from ostraka.transfer.convert import ConvertReport, MergeReport, convert, merge

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
    "SaveHandle",
    "VerifyReport",
    "__version__",
    "annotate",
    "convert",
    "copy",
    "data",
    "errors",
    "exercises",
    "latest",
    "merge",
    "metrics",
    "open",
    "plan",
    "repair",
    "restore",
    "save",
    "save_async",
    "sharding",
    "verify",
]

# Imported when first used: the command must not wait for JAX, nor JAX users for all modules.
_HOMES = {
    "ostraka.common.record": ("Record",),
    "ostraka.integrity": ("RepairReport", "VerifyReport", "repair", "verify"),
    "ostraka.manager": ("Best", "Manager", "latest"),
    "ostraka.manager.annotate": ("annotate",),
    "ostraka.planner": ("Plan", "plan"),
    "ostraka.reading.lazy": ("Checkpoint", "LazyArray", "open"),
    "ostraka.restoring.restore": ("restore",),
    "ostraka.saving.background": ("SaveHandle",),
    "ostraka.saving.save": ("save", "save_async"),
    "ostraka.transfer": ("CopyReport", "copy"),
    "ostraka.transfer.convert": ("ConvertReport", "MergeReport", "convert", "merge"),
}


def __getattr__(name: str) -> Any:
    if name in ("data", "exercises", "metrics", "sharding"):
        return import_module(f"ostraka.{name}")
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'ostraka' has no attribute {name!r}")
    attribute = "open_checkpoint" if name == "open" else name
    value = globals()[name] = getattr(import_module(home), attribute)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
