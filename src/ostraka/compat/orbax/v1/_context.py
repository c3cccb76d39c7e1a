"""`Context`: options for the calls inside it."""

from __future__ import annotations

import copy
from contextvars import ContextVar, Token
from typing import Any, Self

import jax

from ostraka.compat.orbax._refuse import Unsupported, refuse_options
from ostraka.compat.orbax.type_handlers import SaveArgs
from ostraka.compat.orbax.v1 import options as options_lib
from ostraka.compat.orbax.v1.options import CheckpointLayout

_ACTIVE: ContextVar[Context | None] = ContextVar("ostraka.orbax.v1", default=None)
_DEFAULTS: dict[str, Any] = {
    "pytree_options": options_lib.PyTreeOptions,
    "array_options": options_lib.ArrayOptions,
    "async_options": options_lib.AsyncOptions,
    "multiprocessing_options": options_lib.MultiprocessingOptions,
    "file_options": options_lib.FileOptions,
    "pathways_options": options_lib.PathwaysOptions,
    "memory_options": options_lib.MemoryOptions,
    "atomicity_options": options_lib.AtomicityOptions,
    "checkpointables_options": options_lib.CheckpointablesOptions,
    "deletion_options": options_lib.DeletionOptions,
    "safetensors_options": options_lib.SafetensorsOptions,
    "checkpoint_layout": lambda: CheckpointLayout.ORBAX,
}


class Context:
    """Options for the calls inside `with Context(…):`. Those of another context are copied.

    Each has a shorter name too: `pytree` for `pytree_options`, `asynchronous` for `async_options`.
    """

    pytree_options: Any
    array_options: Any
    async_options: Any
    checkpointables_options: Any
    deletion_options: Any
    checkpoint_layout: Any

    def __init__(self, context: Context | None = None, **given: Any):
        refuse_options("Context", [k for k, v in given.items() if v is not None], _DEFAULTS)
        for name, make in _DEFAULTS.items():
            value = given.get(name)
            if value is None and context is not None:
                value = getattr(context, name)
            setattr(self, name, make() if value is None else copy.deepcopy(value))
        self.checkpoint_layout = _layout(self.checkpoint_layout)
        self._tokens: list[Token[Context | None]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked by copy, of one that is not made yet
            raise AttributeError(name)
        full = "async_options" if name == "asynchronous" else f"{name}_options"
        if full in _DEFAULTS:
            return getattr(self, full)
        raise Unsupported(
            f"Context has no {name!r}: if it is one of Orbax's, Ostraka's drop-in does not support "
            "it; docs/migrating.md lists what it has"
        )

    # What the calls ask for

    @property
    def registry(self) -> Any:
        return self.checkpointables_options.registry

    @property
    def is_partial(self) -> bool:
        return bool(self.pytree_options.loading.partial_load)

    @property
    def is_strict(self) -> bool:
        return not self.array_options.loading.enable_padding_and_truncation

    @property
    def is_auto(self) -> bool:
        return _layout(self.checkpoint_layout) is CheckpointLayout.AUTO

    @property
    def is_safetensors(self) -> bool:
        return _layout(self.checkpoint_layout) is CheckpointLayout.SAFETENSORS

    def save_args(self, tree: Any) -> Any:
        """Return the SaveArgs of the leaves of a tree, or None if nothing is asked for."""
        saving = self.array_options.saving
        general, scoped = saving.storage_options, saving.scoped_storage_options_creator
        if scoped is None:
            return None if general.dtype is None else SaveArgs(dtype=general.dtype)

        def choose(path: Any, leaf: Any) -> SaveArgs:
            found = scoped(path, leaf)
            return SaveArgs(dtype=(general if found is None else found).dtype)

        return jax.tree_util.tree_map_with_path(choose, tree)

    def __enter__(self) -> Self:
        self._tokens.append(_ACTIVE.set(self))
        return self

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.reset(self._tokens.pop())


def _layout(given: Any) -> CheckpointLayout:
    return CheckpointLayout(getattr(given, "value", given))


def active_context(default: Context | None = None) -> Context:
    """Return the context of the caller, or else `default`, or one without any options."""
    return _ACTIVE.get() or default or Context()
