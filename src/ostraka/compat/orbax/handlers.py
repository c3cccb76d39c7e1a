"""Handlers: the built-in ones for each kind of item, custom ones, and the one for several items."""

from __future__ import annotations

import abc
import contextlib
import inspect
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ostraka.compat.orbax import _files as files_lib
from ostraka.compat.orbax import _pytree as pytree_lib
from ostraka.compat.orbax import args as args_lib
from ostraka.compat.orbax._engine import Item, OpenCheckpoint, Payload, as_json, write
from ostraka.compat.orbax._leaves import prepare_leaf, want_of
from ostraka.compat.orbax._names import absent, refuse_options
from ostraka.compat.orbax.checkpoint_utils import restore_args_of
from ostraka.compat.orbax.future import AsyncResponse
from ostraka.compat.orbax.metadata import tree_metadata
from ostraka.compat.orbax.options import ArrayFileOptions, names_of
from ostraka.compat.orbax.options import CompositeOptions as CompositeOptions

_FILE_NAMES = ("aggregate_filename", "checkpoint_name", "filename", "key_name")
"""How Orbax's handlers call the file that they write. It has no effect."""
_WITHIN = "ostraka_item"
"""In the files of a custom handler: the item that it saved through a built-in one."""

# Args under the names that Orbax's handlers module has for them: `JsonSaveArgs` for `args.JsonSave`

CompositeArgs = CompositeResults = args_lib.Composite
for _kind in ("PyTree", "Standard", "Json", "Array", "JaxRandomKey", "NumpyRandomKey", "Proto"):
    for _name in (f"{_kind}Save", f"{_kind}Restore"):
        globals()[f"{_name}Args"] = getattr(args_lib, _name)
ProtoCheckpointHandler = absent(
    "ProtoCheckpointHandler", "save SerializeToString() of the message as bytes in the tree"
)


class CheckpointHandler(abc.ABC):
    """Saves an item into a directory and restores it from there. Subclass it for your own."""

    @abc.abstractmethod
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None: ...

    @abc.abstractmethod
    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any: ...

    def metadata(self, directory: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no metadata()")

    def finalize(self, directory: Any) -> None:  # noqa: B027 - a subclass may leave it out
        """Called once all processes have saved."""

    def close(self) -> None:  # noqa: B027 - a subclass may leave it out
        """Called with the `close` of a checkpointer."""

    @classmethod
    def typestr(cls) -> str:
        return f"{cls.__module__}.{cls.__qualname__}"


class AsyncCheckpointHandler(CheckpointHandler):
    """A handler with `async_save`, which returns futures to wait for."""

    @abc.abstractmethod
    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any: ...


_LENT: dict[str, Item | Payload | None] = {}
"""Directories that stand for an item while a custom handler has them.

Each has the item to restore from, or the one that the handler has saved through a built-in one.
"""


@contextlib.contextmanager
def _lend(directory: Any, item: Item | None = None) -> Generator[None]:
    """Lend a custom handler a directory.

    A subclass of a built-in handler may call inherited methods with it. Then arrays go to and
    come from the engine instead of files.
    """
    _LENT[os.fspath(directory)] = item
    try:
        yield
    finally:
        _LENT.pop(os.fspath(directory), None)


class EngineHandler(AsyncCheckpointHandler):
    """A built-in handler: the engine itself writes its items."""

    save_cls: Any = None
    restore_cls: Any = None
    ignored: tuple[str, ...] = ("multiprocessing_options", "primary_host", *_FILE_NAMES)

    def __init__(self, file_name: str | None = None, /, **options: Any):
        refuse_options(type(self).__name__, options, self.ignored)

    def payload(self, args: Any, *, background: bool) -> Any:
        raise NotImplementedError

    def read(self, item: Any, args: Any) -> Any:
        raise NotImplementedError

    def describe(self, item: Any) -> Any:
        return None

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        self._write(directory, args_for(SAVE, self, args, kwargs), background=False)

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Copy the values, then save in the background. Return futures to wait for."""
        handle = self._write(directory, args_for(SAVE, self, args, kwargs), background=True)
        return [] if handle is None else [AsyncResponse(handle.wait)]

    def _write(self, directory: Any, given: Any, *, background: bool) -> Any:
        payload = self.payload(given, background=background)
        if os.fspath(directory) not in _LENT:
            return write(directory, payload, force=True, background=background)
        _LENT[os.fspath(directory)] = payload
        return None

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        return self.read(self._at(directory), args_for(RESTORE, self, args, kwargs))

    def metadata(self, directory: Any) -> Any:
        return self.describe(self._at(directory))

    def _at(self, directory: Any) -> Any:
        lent = _LENT.get(os.fspath(directory))
        return lent if isinstance(lent, Item) else part_of(self, OpenCheckpoint(directory))


class PyTreeCheckpointHandler(EngineHandler):
    save_cls, restore_cls = args_lib.PyTreeSave, args_lib.PyTreeRestore
    # Options about Orbax's files and memory. The engine has its own limits.
    ignored = (
        *EngineHandler.ignored,
        *names_of(ArrayFileOptions),
        "memory_limit_options",
        "save_concurrent_bytes",
        "restore_concurrent_bytes",
        "save_device_host_concurrent_bytes",
        "concurrent_gb",
        "save_concurrent_gb",
        "restore_concurrent_gb",
        "save_device_host_concurrent_gb",
        "array_metadata_validator",
        "is_prioritized_key_fn",
        "pytree_metadata_options",
        "type_handler_registry",
        "handler_impl",
        "write_tree_metadata",
    )

    def payload(self, args: Any, *, background: bool) -> Payload:
        return pytree_lib.pytree_payload(args.item, args.save_args, self.typestr())

    def read(self, item: Item, args: Any) -> Any:
        return pytree_lib.read_pytree(item, args)

    def describe(self, item: Item) -> Any:
        return tree_metadata(item) if item.kind != "files" else None


class BasePyTreeCheckpointHandler(PyTreeCheckpointHandler):
    """The same, under another name."""


class StandardCheckpointHandler(PyTreeCheckpointHandler):
    save_cls, restore_cls = args_lib.StandardSave, args_lib.StandardRestore

    def payload(self, args: Any, *, background: bool) -> Payload:
        pytree_lib.check_standard(args.item)
        return super().payload(args, background=background)

    def read(self, item: Item, args: Any) -> Any:
        if args.support_layout:
            raise NotImplementedError("StandardRestore(support_layout=True) is not supported")
        if args.item is None:
            return pytree_lib.read_as_saved(item)
        is_metadata = type(args.item).__name__ in ("TreeMetadata", "_TreeMetadataImpl")
        like = args.item.tree if is_metadata else args.item
        where = args.fallback_sharding
        return pytree_lib.read_standard(item, like, strict=args.strict, fallback_sharding=where)


class JsonCheckpointHandler(EngineHandler):
    save_cls, restore_cls = args_lib.JsonSave, args_lib.JsonRestore

    def payload(self, args: Any, *, background: bool) -> Payload:
        return Payload("json", as_json(args.item, "the item of JsonSave"), self.typestr())

    def read(self, item: Item, args: Any) -> Any:
        return pytree_lib.read_as_saved(item)


class ArrayCheckpointHandler(EngineHandler):
    save_cls, restore_cls = args_lib.ArraySave, args_lib.ArrayRestore

    def payload(self, args: Any, *, background: bool) -> Payload:
        leaf = prepare_leaf((), args.item, args.save_args)
        if isinstance(leaf, dict | list | str):
            raise TypeError(f"ArraySave takes an array or a number, not {type(args.item)}")
        return Payload("array", leaf, self.typestr())

    def read(self, item: Item, args: Any) -> Any:
        given = args.restore_args
        if given is None and args.item is not None:
            given = restore_args_of(args.item)
        keys = next(iter(item.tree.leaves))
        return item.read({keys: want_of(keys, item.saved(keys), given)})[keys]


class JaxRandomKeyCheckpointHandler(ArrayCheckpointHandler):
    save_cls, restore_cls = args_lib.JaxRandomKeySave, args_lib.JaxRandomKeyRestore


class NumpyRandomKeyCheckpointHandler(EngineHandler):
    save_cls, restore_cls = args_lib.NumpyRandomKeySave, args_lib.NumpyRandomKeyRestore

    def payload(self, args: Any, *, background: bool) -> Payload:
        if not isinstance(args.item, tuple) or not isinstance(args.item[0], str):
            raise TypeError("NumpyRandomKeySave takes np.random.get_state()")
        kind, words, position, has_gauss, gauss = args.item
        tree = {"kind": kind, "words": np.asarray(words), "rest": [position, has_gauss, gauss]}
        return Payload("numpy_key", tree, self.typestr())

    def read(self, item: Item, args: Any) -> Any:
        found = pytree_lib.read_as_saved(item)
        return (found["kind"], found["words"], *found["rest"])


_BY_KIND: dict[str, type[EngineHandler]] = {
    "standard": StandardCheckpointHandler,
    "pytree": PyTreeCheckpointHandler,
    "json": JsonCheckpointHandler,
    "array": ArrayCheckpointHandler,
    "numpy_key": NumpyRandomKeyCheckpointHandler,
    "jax_key": JaxRandomKeyCheckpointHandler,
}
for _handler in _BY_KIND.values():
    args_lib.register_with_handler(_handler, for_save=True)(_handler.save_cls)
    args_lib.register_with_handler(_handler, for_restore=True)(_handler.restore_cls)


# The args of a call


@dataclass
class LegacyArgs(args_lib.CheckpointArgs):
    """Arguments of a call for a custom handler without registered args."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]


SAVE, RESTORE = 0, 1


def args_for(which: int, handler: Any, positional: tuple[Any, ...], keywords: Any) -> Any:
    """Return the args of a call, given as `args=` or in the old form `item, save_args=…`."""
    rest = {key: value for key, value in keywords.items() if key != "args"}
    given = keywords.get("args")
    if given is None and positional and args_lib.is_args(positional[0]):
        # As Brax has it: `restore(path, PyTreeRestore(…), item=None)`.
        given, positional = positional[0], positional[1:]
        rest = {key: value for key, value in rest.items() if value is not None}
    if given is not None:
        if positional or rest:
            raise ValueError(f"give args=, or {', '.join(rest) or 'an item'}; not both")
        return args_lib.adopt(given)
    if isinstance(handler, CompositeCheckpointHandler):
        item = positional[0] if positional else rest.get("item")
        return None if item is None else args_lib.adopt(item)
    if isinstance(handler, EngineHandler):
        return (handler.save_cls, handler.restore_cls)[which](*positional, **rest)
    if args_lib.has_registered_args(handler):
        return args_lib.get_registered_args_cls(handler)[which](*positional, **rest)
    return LegacyArgs(positional, rest)


# One item, by any handler


def _inherits(handler: Any, name: str) -> bool:
    """True if a handler leaves a method to the engine."""
    if not isinstance(handler, EngineHandler):
        return False
    is_composite = isinstance(handler, CompositeCheckpointHandler)
    return is_composite or getattr(type(handler), name) is getattr(EngineHandler, name)


def payload_of(handler: Any, args: Any, *, background: bool) -> Any:
    """Return an item ready for the engine. For a custom handler it holds the files it writes.

    As in Orbax, `async_save` is called in the background, `save` otherwise.
    """
    is_async = hasattr(handler, "async_save") and (background or not hasattr(handler, "save"))
    name = "async_save" if is_async else "save"
    if _inherits(handler, name):
        return handler.payload(args, background=background)
    by = f"{type(handler).__module__}.{type(handler).__qualname__}"
    with files_lib.empty_directory() as directory, _lend(directory):
        result = files_lib.await_result(_call(getattr(handler, name), directory, args))
        if is_async:
            files_lib.wait_for(result)
        if hasattr(handler, "finalize"):
            files_lib.await_result(handler.finalize(directory))
        saved = _LENT[os.fspath(directory)]
        if isinstance(saved, Payload):
            if not any(directory.iterdir()):
                return replace(saved, handler=by)
            write(directory / _WITHIN, saved, force=True)
        return Payload("files", files_lib.pack(directory, by), by)


def part_of(handler: Any, opened: OpenCheckpoint) -> Any:
    """Return what a handler reads: the only item, or the checkpoint if it is for several."""
    return opened if isinstance(handler, CompositeCheckpointHandler) else opened.item(None)


def read_item(handler: Any, item: Any, args: Any) -> Any:
    """Restore an item with a handler. None stands for the built-in handler of its kind."""
    if handler is None:
        if item.kind == "files":
            raise ValueError(
                f"{item.path} was saved by a handler of yours; give its args, or the handler "
                "itself (item_handlers=, or a handler registry)"
            )
        handler = _BY_KIND[item.kind]()
    if _inherits(handler, "restore"):
        return handler.read(item, args if args is not None else handler.restore_cls())
    with _directory_of(item, handler) as directory:
        return _call(handler.restore, directory, args)


@contextlib.contextmanager
def _directory_of(item: Item, handler: Any) -> Generator[Any]:
    """Yield the directory that a custom handler restores from. Raises ValueError if it has none."""
    is_ours = isinstance(handler, EngineHandler) and item.kind != "files"
    with files_lib.empty_directory() if is_ours else files_of(item) as directory:
        within = directory / _WITHIN
        found = OpenCheckpoint(within).item(None) if within.exists() else None
        with _lend(directory, item if is_ours else found):
            yield directory


@contextlib.contextmanager
def files_of(item: Item) -> Generator[Any]:
    """Yield a directory with the files that a custom handler has saved as an item."""
    if item.directory is not None:  # Orbax has them in a directory of the step.
        yield files_lib.as_path(item.directory)
        return
    with files_lib.empty_directory() as directory:
        files_lib.unpack(item.states(), directory)
        yield directory


def describe_item(handler: Any, item: Any) -> Any:
    """Return a handler's metadata of an item, or None if it has none."""
    if handler is None and item.kind != "files":
        handler = _BY_KIND[item.kind]()
    if handler is None or not hasattr(handler, "metadata"):
        return None
    if _inherits(handler, "metadata"):
        return handler.describe(item)
    with _directory_of(item, handler) as directory:
        try:
            return handler.metadata(directory)
        except NotImplementedError:
            return None


def _call(function: Any, directory: Any, args: Any) -> Any:
    """Call a handler's method with `args=`, or with the item alone if it takes no args."""
    if isinstance(args, LegacyArgs):
        return function(directory, *args.positional, **args.keywords)
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "args" in parameters or takes_any:
        return function(directory, args=args)
    if args is None:
        return function(directory)
    return function(directory, getattr(args, "item", args))


# Several items


class CompositeCheckpointHandler(EngineHandler):
    """Several items by name, each with its own handler."""

    restore_cls = args_lib.Composite

    def __init__(
        self,
        *item_names: str,
        composite_options: Any = None,
        handler_registry: Any = None,
        **items_and_handlers: Any,
    ):
        self.item_names = item_names
        self.known: dict[str, Any] = {k: h for k, h in items_and_handlers.items() if h is not None}
        self.registry = handler_registry
        self.given_as_none: set[str] = set()
        """Items that a save was given as None. A restore of all items returns None for them."""

    def payload(self, args: Any, *, background: bool) -> dict[str, Payload]:
        if not isinstance(args, args_lib.Composite):
            raise ValueError("Must provide `args` of type `Composite` for several items.")
        given = {name: args_lib.adopt(own) for name, own in args.items() if own is not None}
        self.given_as_none |= args.keys() - given.keys()
        return {
            name: payload_of(self._handler_for(name, own), own, background=background)
            for name, own in given.items()
        }

    def read(self, item: OpenCheckpoint, args: Any) -> args_lib.Composite:
        """Restore the items that args ask for, all without args."""
        wanted: dict[str, Any] = dict(args or {})
        found: dict[str, Any] = {}
        if not wanted:
            wanted = dict.fromkeys(item.items())
            found = dict.fromkeys(sorted(self.given_as_none - set(wanted)))
        for name, given in sorted(wanted.items()):
            one, adopted = item.item(name), args_lib.adopt(given)
            found[name] = read_item(self._handler_for(name, adopted), one, adopted)
        return args_lib.Composite(**found)

    def describe(self, item: OpenCheckpoint) -> args_lib.Composite:
        handlers = {name: self._handler_for(name, None) for name in item.items()}
        return args_lib.Composite(
            **{name: describe_item(by, item.item(name)) for name, by in handlers.items()}
        )

    def _handler_for(self, name: str, args: Any) -> Any:
        """Return the handler of an item, None without args. Raises ValueError if none fits."""
        if name in self.known:
            return self.known[name]
        if self.registry is not None:
            found = self.registry.find(name, args)
            if found is not None:
                return found
        if args is None:
            return None
        if self.item_names and name not in self.item_names:
            raise ValueError(
                f'Item "{name}" and args "{args}" does not match with any registered handler; the '
                f"items are {', '.join(self.item_names)}"
            )
        return args_lib.get_registered_handler_cls(args)()


def file_size_of(args: Any) -> int | None:
    """Return the smallest file size that the args of any item ask for."""
    several = args.values() if isinstance(args, args_lib.Composite) else [args]
    sizes = [getattr(given, "ocdbt_target_data_file_size", None) for given in several]
    return min((size for size in sizes if size), default=None)


# Registries


class CheckpointHandlerRegistry:
    """Handlers by the item and the args that they are for."""

    def __init__(self, other_registry: CheckpointHandlerRegistry | None = None):
        known = other_registry._entries if other_registry is not None else {}
        self._entries: dict[tuple[str | None, Any], Any] = dict(known)

    def add(self, item: str | None, args: Any, handler: Any = None) -> None:
        cls = args if isinstance(args, type) else type(args)
        if (item, cls) in self._entries:
            raise ValueError(f"an entry for item={item} and args={cls} is there already")
        made = args_lib.get_registered_handler_cls(cls) if handler is None else handler
        self._entries[item, cls] = made() if isinstance(made, type) else made

    def get(self, item: str | None, args: Any) -> Any:
        found = self.find(item, args)
        if found is None:
            raise ValueError(f"no handler is registered for item={item} and args={args}")
        return found

    def has(self, item: str | None, args: Any) -> bool:
        return self.find(item, args) is not None

    def find(self, item: str | None, args: Any) -> Any:
        """Return the handler of an item and args, or None. Without args any of the item will do."""
        if args is not None:
            cls = args if isinstance(args, type) else type(args)
            return self._entries.get((item, cls), self._entries.get((None, cls)))
        own = (handler for (name, _), handler in self._entries.items() if name == item and item)
        return next(own, None)

    def get_all_entries(self) -> dict[tuple[str | None, Any], Any]:
        return dict(self._entries)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)


class DefaultCheckpointHandlerRegistry(CheckpointHandlerRegistry):
    """A registry that has the built-in handlers."""

    def __init__(self, other_registry: CheckpointHandlerRegistry | None = None):
        super().__init__(other_registry)
        for handler in (PyTreeCheckpointHandler, StandardCheckpointHandler, JsonCheckpointHandler):
            made = handler()
            for cls in (handler.save_cls, handler.restore_cls):
                self._entries.setdefault((None, cls), made)


def create_default_handler_registry(**items_and_handlers: Any) -> CheckpointHandlerRegistry:
    registry = DefaultCheckpointHandlerRegistry()
    for item, handler in items_and_handlers.items():
        for cls in args_lib.get_registered_args_cls(handler):
            registry.add(item, cls, handler)
    return registry
