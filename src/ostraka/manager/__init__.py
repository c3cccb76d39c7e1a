"""The steps of a run: when to save, which to keep, where to resume."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostraka.manager._advice import Advice
    from ostraka.manager._keep import Best
    from ostraka.manager._latest import latest
    from ostraka.manager._losses import RunStats
    from ostraka.manager._manager import Manager
    from ostraka.manager.steps import Step

__all__ = ["Advice", "Best", "Manager", "RunStats", "Step", "latest"]

_HOMES = {
    "Advice": "_advice",
    "Best": "_keep",
    "Manager": "_manager",
    "RunStats": "_losses",
    "Step": "steps",
    "latest": "_latest",
}


def __getattr__(name: str) -> Any:
    # The command lists steps without importing JAX, which only the manager itself needs.
    if name not in _HOMES:
        raise AttributeError(f"module 'ostraka.manager' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"ostraka.manager.{_HOMES[name]}"), name)
    return value
