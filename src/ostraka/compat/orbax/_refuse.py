"""How the drop-in refuses names and options of Orbax that it does not support."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

_PREFIX = "ostraka.compat."


class Unsupported(AttributeError, NotImplementedError):
    """A name of Orbax's that this drop-in does not have."""


def refuse(module: str, *others: ModuleType) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module. It has the names of others too, or raises Unsupported.

    Some modules of Orbax repeat names that others define.
    """
    name_there = module.removeprefix(_PREFIX).replace("orbax", "orbax.checkpoint", 1)

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        for other in others:
            if name in vars(other):
                return vars(other)[name]
        raise Unsupported(
            f"{module} has no {name!r}: if it is {name_there}.{name}, Ostraka's drop-in does not "
            "support it; docs/migrating.md lists what it has and what to use instead"
        )

    return lookup


def absent(name: str, instead: str, base: type = object) -> Any:
    """Return a class that can be imported and used in `isinstance`, but raises when called."""

    def refuse_use(self: Any, *args: Any, **options: Any) -> None:
        raise NotImplementedError(f"{name} is not supported by Ostraka's drop-in; {instead}")

    return type(name.rpartition(".")[2], (base,), {"__init__": refuse_use})


def refuse_options(what: str, given: Collection[str], known: Collection[str] = ()) -> None:
    """Raise TypeError for options that are not known."""
    unknown = [name for name in given if name not in known]
    if unknown:
        raise TypeError(
            f"{what} got {', '.join(map(repr, unknown))}, which Ostraka's drop-in for Orbax does "
            "not know"
        )
