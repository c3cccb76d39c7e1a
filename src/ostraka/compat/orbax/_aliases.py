"""Module paths of Orbax without a file here, each with the module that stands for it."""

from __future__ import annotations

import sys
from importlib import import_module

from ostraka.compat.orbax._refuse import refuse

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
    "aggregate_handlers": "_absent",
    "arrays": "tree",
    "checkpoint_args": "args",
    "checkpoint_managers.preservation_policy": "checkpoint_managers",
    "checkpoint_managers.save_decision_policy": "checkpoint_managers",
    "experimental": "_absent",
    "experimental.emergency": "_absent",
    "experimental.emergency.checkpoint_manager": "_absent",
    "experimental.emergency.multi_tier_checkpointing": "_absent",
    "experimental.emergency.multi_tier_checkpointing.initialization": "_absent",
    "experimental.emergency.replicator_checkpoint_manager": "_absent",
    "experimental.v1": "v1",
    "logging.step_statistics": "logging",
    "metadata.tree": "metadata",
    "metadata.value": "metadata",
    "msgpack_utils": "_absent",
    "path.atomicity": "path",
    "path.step": "path",
    "pathways": "_absent",
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
