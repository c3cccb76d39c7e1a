"""Orbax's names: module paths without a file here, and how others are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from importlib import import_module
from types import ModuleType
from typing import Any

_ROOT = "ostraka.compat.orbax"
ALIASES = {
    "_src.arrays": "_src",
    "_src.arrays.sharding": "_src",
    "_src.checkpointers.async_checkpointer": "checkpointers",
    "_src.checkpointers.checkpointer": "checkpointers",
    "_src.checkpointers.pytree_checkpointer": "checkpointers",
    "_src.checkpointers.standard_checkpointer": "checkpointers",
    "_src.futures": "future",
    "_src.futures.future": "future",
    "_src.handlers.async_checkpoint_handler": "handlers",
    "_src.handlers.checkpoint_handler": "handlers",
    "_src.handlers.composite_checkpoint_handler": "handlers",
    "_src.handlers.handler_registration": "handlers",
    "_src.handlers.json_checkpoint_handler": "handlers",
    "_src.handlers.pytree_checkpoint_handler": "handlers",
    "_src.handlers.standard_checkpoint_handler": "handlers",
    "_src.metadata.array_metadata_store": "_src",
    "_src.metadata.checkpoint": "metadata",
    "_src.multihost.multihost": "multihost",
    "_src.serialization": "type_handlers",
    "_src.serialization.jax_array_handlers": "type_handlers",
    "_src.serialization.jax_array_restore_args": "type_handlers",
    "_src.serialization.replica_slices": "_src",
    "_src.serialization.type_handler_registry": "type_handlers",
    "_src.serialization.type_handlers": "type_handlers",
    "_src.tree.utils": "tree",
    "abstract_checkpoint_manager": "checkpoint_manager",
    "aggregate_handlers": "_src",
    "arrays": "tree",
    "checkpoint_args": "args",
    "checkpoint_managers.preservation_policy": "checkpoint_managers",
    "checkpoint_managers.save_decision_policy": "checkpoint_managers",
    "experimental": "_src",
    "experimental.emergency": "_src",
    "experimental.emergency.checkpoint_manager": "_src",
    "experimental.emergency.multi_tier_checkpointing": "_src",
    "experimental.emergency.multi_tier_checkpointing.initialization": "_src",
    "experimental.emergency.replicator_checkpoint_manager": "_src",
    "experimental.v1": "v1",
    "logging.step_statistics": "logging",
    "metadata.tree": "metadata",
    "metadata.value": "metadata",
    "msgpack_utils": "_src",
    "path.atomicity": "path",
    "path.step": "path",
    "pathways": "_src",
    "serialization": "type_handlers",
    "step": "path",
    "transform_utils": "tree",
    "v1.arrays": "tree",
    "v1.path": "path",
    "version": "",
}
"""The empty path is the package itself."""
_SRC = ("checkpoint_managers", "checkpointers", "handlers", "metadata", "multihost", "path", "tree")
"""Public modules that are in `_src` too, with those below them."""


class Unsupported(AttributeError, NotImplementedError):
    """A name of Orbax's that this drop-in does not have."""


def refuse(module: str, *others: ModuleType) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module. It has the names of others too, or raises Unsupported.

    Some modules of Orbax repeat names that others define.
    """
    name_there = module.replace(_ROOT, "orbax.checkpoint", 1)

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        for other in others:
            if name in vars(other):
                return vars(other)[name]
        raise Unsupported(
            f"{module} has no {name!r}: if it is {name_there}.{name}, Ostraka's drop-in does not "
            "support it; docs/from/orbax.md lists what is missing and what to use instead"
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


def install() -> None:
    """Make every path importable, and have each module refuse the names that it lacks."""
    both = dict(zip(_SRC, _SRC, strict=True)) | ALIASES
    private = {f"_src.{path}": both[path] for path in both if path.split(".")[0] in _SRC}
    # In this order a module comes before those below it.
    for path, home in sorted((ALIASES | private).items()):
        module = import_module(_full(home))
        sys.modules[_full(path)] = module
        parent, _, name = path.rpartition(".")
        setattr(sys.modules[_full(parent)], name, module)
    for path, module in list(sys.modules.items()):
        if path.startswith(_full("")):
            vars(module).setdefault("__getattr__", refuse(module.__name__))


def _full(path: str) -> str:
    return f"{_ROOT}.{path}" if path else _ROOT
