"""Orbax's private modules that public programs import, each the public one that has its names."""

from __future__ import annotations

import sys
from types import ModuleType

from ostraka.compat.orbax import (
    checkpoint_managers,
    checkpointers,
    future,
    handlers,
    metadata,
    multihost,
    path,
    tree,
    type_handlers,
)
from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)

_PACKAGES: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "checkpoint_managers": (checkpoint_managers, ()),
    "checkpointers": (
        checkpointers,
        ("async_checkpointer", "checkpointer", "pytree_checkpointer", "standard_checkpointer"),
    ),
    "futures": (future, ("future",)),
    "handlers": (
        handlers,
        (
            "async_checkpoint_handler",
            "checkpoint_handler",
            "composite_checkpoint_handler",
            "handler_registration",
            "json_checkpoint_handler",
            "pytree_checkpoint_handler",
            "standard_checkpoint_handler",
        ),
    ),
    "metadata": (metadata, ("checkpoint", "tree", "value")),
    "multihost": (multihost, ("multihost",)),
    "path": (path, ()),
    "serialization": (
        type_handlers,
        ("jax_array_handlers", "jax_array_restore_args", "type_handler_registry", "type_handlers"),
    ),
    "tree": (tree, ("utils",)),
}
"""Each package with the module that stands for it, and the modules in it that are the same."""
_OWN = {
    "checkpoint_managers": ("preservation_policy", "save_decision_policy"),
    "path": ("atomicity", "step"),
}
"""Modules of such a package that are modules here, too."""


def _stand_in(name: str, module: ModuleType) -> None:
    sys.modules[f"{__name__}.{name}"] = module


class _Package(ModuleType):
    """A package whose modules are others; what it lacks is refused by name."""


for _name, (_module, _same) in _PACKAGES.items():
    _package = _Package(f"{__name__}.{_name}", _module.__doc__)
    _package.__path__ = []
    _package.__dict__["__getattr__"] = refuse(_package.__name__)
    for _below in _same:
        setattr(_package, _below, _module)
        _stand_in(f"{_name}.{_below}", _module)
    for _below in _OWN.get(_name, ()):
        setattr(_package, _below, getattr(_module, _below))
        _stand_in(f"{_name}.{_below}", getattr(_module, _below))
    globals()[_name] = _package
    _stand_in(_name, _package)
