"""`Context`: options for the calls inside it."""

from __future__ import annotations

import copy
from contextvars import ContextVar, Token
from typing import Any, Self

import jax

from ostraka.compat.orbax._refuse import Unsupported, refuse_options
from ostraka.compat.orbax.type_handlers import SaveArgs
from ostraka.compat.orbax.v1 import options as options_lib

_ACTIVE: ContextVar[Context | None] = ContextVar("ostraka.orbax.v1", default=None)


class Context:
    """Options for the calls inside `with Context(…):`; those of another context are copied."""

    def __init__(
        self,
        context: Context | None = None,
        *,
        pytree_options: Any = None,
        array_options: Any = None,
        async_options: Any = None,
        multiprocessing_options: Any = None,
        file_options: Any = None,
        pathways_options: Any = None,
        memory_options: Any = None,
        atomicity_options: Any = None,
        checkpoint_layout: Any = None,
        **others: Any,
    ):
        refuse_options("Context", {k: v for k, v in others.items() if v is not None})
        options = options_lib

        def choose(given: Any, name: str, make: Any) -> Any:
            if given is None and context is not None:
                given = getattr(context, name)
            return copy.deepcopy(given) if given is not None else make()

        self.pytree_options = choose(pytree_options, "pytree_options", options.PyTreeOptions)
        self.array_options = choose(array_options, "array_options", options.ArrayOptions)
        self.async_options = choose(async_options, "async_options", options.AsyncOptions)
        self.multiprocessing_options = choose(
            multiprocessing_options, "multiprocessing_options", options.MultiprocessingOptions
        )
        self.file_options = choose(file_options, "file_options", options.FileOptions)
        self.pathways_options = choose(
            pathways_options, "pathways_options", options.PathwaysOptions
        )
        self.memory_options = choose(memory_options, "memory_options", options.MemoryOptions)
        self.atomicity_options = choose(
            atomicity_options, "atomicity_options", options.AtomicityOptions
        )
        self.checkpoint_layout = _layout(
            choose(checkpoint_layout, "checkpoint_layout", lambda: options.CheckpointLayout.ORBAX)
        )
        self._tokens: list[Token[Context | None]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked by copy, of one that is not made yet
            raise AttributeError(name)
        raise Unsupported(
            f"Context has no {name!r}: if it is one of Orbax's, Ostraka's drop-in does not support "
            "it; docs/migrating.md lists what it has"
        )

    # The same under the shorter names that Orbax has

    @property
    def pytree(self) -> Any:
        return self.pytree_options

    @property
    def array(self) -> Any:
        return self.array_options

    @property
    def asynchronous(self) -> Any:
        return self.async_options

    @property
    def multiprocessing(self) -> Any:
        return self.multiprocessing_options

    @property
    def file(self) -> Any:
        return self.file_options

    @property
    def pathways(self) -> Any:
        return self.pathways_options

    @property
    def memory(self) -> Any:
        return self.memory_options

    @property
    def atomicity(self) -> Any:
        return self.atomicity_options

    # What the calls ask for

    @property
    def is_partial(self) -> bool:
        return bool(self.pytree_options.loading.partial_load)

    @property
    def is_strict(self) -> bool:
        return not self.array_options.loading.enable_padding_and_truncation

    @property
    def is_auto(self) -> bool:
        return _layout(self.checkpoint_layout) is options_lib.CheckpointLayout.AUTO

    @property
    def is_safetensors(self) -> bool:
        return _layout(self.checkpoint_layout) is options_lib.CheckpointLayout.SAFETENSORS

    def save_args(self, tree: Any) -> Any:
        """What is asked of the leaves that are saved; None for nothing."""
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


def _layout(given: Any) -> options_lib.CheckpointLayout:
    return options_lib.CheckpointLayout(getattr(given, "value", given))


def active_context(default: Context | None = None) -> Context:
    """The one that the caller is inside of; else the one given, or one with nothing asked."""
    return _ACTIVE.get() or default or Context()
