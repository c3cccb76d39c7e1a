"""What the drop-in lacks is refused by its name, where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PREFIX = "ostraka.compat."


class Unsupported(AttributeError, NotImplementedError):
    """A name of Orbax's that this drop-in does not have."""


def refuse(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module."""
    name_there = module.removeprefix(_PREFIX).replace("orbax", "orbax.checkpoint", 1)

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise Unsupported(
            f"{module} has no {name!r}: if it is {name_there}.{name}, Ostraka's drop-in does not "
            "support it; docs/migrating.md lists what it has and what to use instead"
        )

    return lookup


def refuse_options(what: str, given: dict[str, Any], harmless: tuple[str, ...] = ()) -> None:
    """Raise TypeError for options that nobody knows."""
    unknown = [name for name in given if name not in harmless]
    if unknown:
        raise TypeError(
            f"{what} got {', '.join(map(repr, unknown))}, which Ostraka's drop-in for Orbax does "
            "not know"
        )
