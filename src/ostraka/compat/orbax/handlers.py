"""How a kind of item is saved and restored; and handlers of one's own."""

from __future__ import annotations

import abc
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ostraka.compat.orbax import args as args_lib
from ostraka.compat.orbax._engine import About, Item, Opened, Payload, as_json, write
from ostraka.compat.orbax._files import empty_directory, pack, resolve, unpack, wait_for
from ostraka.compat.orbax._leaves import prepare_leaf
from ostraka.compat.orbax._place import as_path
from ostraka.compat.orbax._pytree import (
    args_of_template,
    check_standard,
    pytree_payload,
    read_as_saved,
    read_like,
    read_pytree,
    want_of,
)
from ostraka.compat.orbax._refuse import refuse, refuse_options
from ostraka.compat.orbax.metadata import tree_metadata

__getattr__ = refuse(__name__)


class CheckpointHandler(abc.ABC):
    """Saves an item into a directory and restores it from there. Subclass it for your own."""

    @abc.abstractmethod
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None: ...

    @abc.abstractmethod
    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any: ...

    def metadata(self, directory: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no metadata()")

    def finalize(self, directory: Any) -> None:  # noqa: B027 - may be left as it is
        pass

    def close(self) -> None:  # noqa: B027 - may be left as it is
        pass

    @classmethod
    def typestr(cls) -> str:
        return f"{cls.__module__}.{cls.__qualname__}"


class AsyncCheckpointHandler(CheckpointHandler):
    """A handler with `async_save`, which returns futures to wait for."""

    @abc.abstractmethod
    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any: ...


class _EngineHandler(CheckpointHandler):
    """A handler whose items the engine itself writes."""

    _save_cls: Any = None
    _restore_cls: Any = None
    _harmless: tuple[str, ...] = ("multiprocessing_options", "primary_host")

    def __init__(self, *positional: Any, **options: Any):
        if positional:
            raise TypeError(f"{type(self).__name__} takes no positional arguments here")
        refuse_options(type(self).__name__, options, self._harmless)

    def payload(self, args: Any) -> Payload:
        raise NotImplementedError

    def read(self, item: Item, args: Any) -> Any:
        raise NotImplementedError

    def describe(self, item: Item) -> Any:
        return None

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        given = save_args_for(self, args, kwargs)
        write(directory, self.payload(given), About(), force=True)

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        return self.read(Opened(directory).item(None), restore_args_for(self, args, kwargs))

    def metadata(self, directory: Any) -> Any:
        return self.describe(Opened(directory).item(None))


class PyTreeCheckpointHandler(_EngineHandler):
    _save_cls, _restore_cls = args_lib.PyTreeSave, args_lib.PyTreeRestore
    # They are about Orbax's files and its own memory; the engine has bounds of its own.
    _harmless = (
        *_EngineHandler._harmless,
        "aggregate_filename",
        "concurrent_gb",
        "save_concurrent_gb",
        "restore_concurrent_gb",
        "save_device_host_concurrent_gb",
        "use_ocdbt",
        "use_zarr3",
        "use_compression",
        "array_metadata_validator",
        "enable_pinned_host_transfer",
        "enable_post_merge_validation",
        "is_prioritized_key_fn",
        "pytree_metadata_options",
        "type_handler_registry",
        "handler_impl",
        "write_tree_metadata",
        "array_metadata_store",
    )

    def payload(self, args: Any) -> Payload:
        return pytree_payload(args.item, args.save_args, self.typestr())

    def read(self, item: Item, args: Any) -> Any:
        return read_pytree(item, args)

    def describe(self, item: Item) -> Any:
        return tree_metadata(item)


class BasePyTreeCheckpointHandler(PyTreeCheckpointHandler):
    pass


class StandardCheckpointHandler(PyTreeCheckpointHandler):
    _save_cls, _restore_cls = args_lib.StandardSave, args_lib.StandardRestore

    def payload(self, args: Any) -> Payload:
        check_standard(args.item)
        return super().payload(args)

    def read(self, item: Item, args: Any) -> Any:
        if args.support_layout:
            raise NotImplementedError("StandardRestore(support_layout=True) is not supported")
        if args.item is None:
            return read_as_saved(item)
        like = getattr(args.item, "tree", args.item) if _is_metadata(args.item) else args.item
        made = args_of_template(like, strict=args.strict, fallback_sharding=args.fallback_sharding)
        return read_like(item, like, made)


def _is_metadata(item: Any) -> bool:
    return type(item).__name__ in ("TreeMetadata", "_TreeMetadataImpl")


class JsonCheckpointHandler(_EngineHandler):
    _save_cls, _restore_cls = args_lib.JsonSave, args_lib.JsonRestore
    _harmless = (*_EngineHandler._harmless, "filename")

    def payload(self, args: Any) -> Payload:
        return Payload("json", as_json(args.item, "the item of JsonSave"), self.typestr())

    def read(self, item: Item, args: Any) -> Any:
        return read_as_saved(item)


class ArrayCheckpointHandler(_EngineHandler):
    _save_cls, _restore_cls = args_lib.ArraySave, args_lib.ArrayRestore
    _harmless = (*_EngineHandler._harmless, "checkpoint_name")

    def payload(self, args: Any) -> Payload:
        leaf = prepare_leaf((), args.item, args.save_args)
        if isinstance(leaf, dict | list | str):
            raise TypeError(f"ArraySave takes an array or a number, not {type(args.item)}")
        return Payload("array", leaf, self.typestr())

    def read(self, item: Item, args: Any) -> Any:
        given = args.restore_args
        if given is None and args.item is not None:
            given = args_of_template(args.item)
        keys = next(iter(item.tree.leaves))
        return item.read([want_of(keys, item.saved(keys), given)])[0]


class JaxRandomKeyCheckpointHandler(ArrayCheckpointHandler):
    _save_cls, _restore_cls = args_lib.JaxRandomKeySave, args_lib.JaxRandomKeyRestore

    def payload(self, args: Any) -> Payload:
        return Payload("array", args.item, self.typestr())

    def read(self, item: Item, args: Any) -> Any:
        keys = next(iter(item.tree.leaves))
        return item.read([want_of(keys, item.saved(keys), None)])[0]


class NumpyRandomKeyCheckpointHandler(_EngineHandler):
    _save_cls, _restore_cls = args_lib.NumpyRandomKeySave, args_lib.NumpyRandomKeyRestore
    _harmless = (*_EngineHandler._harmless, "key_name")

    def payload(self, args: Any) -> Payload:
        if not isinstance(args.item, tuple) or not isinstance(args.item[0], str):
            raise TypeError("NumpyRandomKeySave takes np.random.get_state()")
        kind, words, position, has_gauss, gauss = args.item
        tree = {"kind": kind, "words": np.asarray(words), "rest": [position, has_gauss, gauss]}
        return Payload("numpy_key", tree, self.typestr())

    def read(self, item: Item, args: Any) -> Any:
        found = read_as_saved(item)
        return (found["kind"], found["words"], *found["rest"])


for _handler in (
    StandardCheckpointHandler,
    PyTreeCheckpointHandler,
    JsonCheckpointHandler,
    ArrayCheckpointHandler,
    NumpyRandomKeyCheckpointHandler,
    JaxRandomKeyCheckpointHandler,
):
    args_lib.register_with_handler(_handler, for_save=True)(_handler._save_cls)
    args_lib.register_with_handler(_handler, for_restore=True)(_handler._restore_cls)

_BY_KIND: dict[str, type[_EngineHandler]] = {
    "pytree": PyTreeCheckpointHandler,
    "json": JsonCheckpointHandler,
    "array": ArrayCheckpointHandler,
    "numpy_key": NumpyRandomKeyCheckpointHandler,
}


# The classes under the names that Orbax's handlers module has for them

PyTreeSaveArgs, PyTreeRestoreArgs = args_lib.PyTreeSave, args_lib.PyTreeRestore
StandardSaveArgs, StandardRestoreArgs = args_lib.StandardSave, args_lib.StandardRestore
JsonSaveArgs, JsonRestoreArgs = args_lib.JsonSave, args_lib.JsonRestore
CompositeArgs = CompositeResults = args_lib.Composite


class CompositeOptions:
    def __init__(self, **options: Any):
        refuse_options("CompositeOptions", options, ("multiprocessing_options", "file_options"))


class CompositeCheckpointHandler(CheckpointHandler):
    """Several items by name, each by its own handler."""

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

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        given = save_args_for(self, args, kwargs)
        write(directory, composite_payloads(self, given), About(), force=True)

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("args") or (args[0] if args else None)
        return read_composite(self, Opened(directory), given)

    def metadata(self, directory: Any) -> Any:
        return describe_composite(self, Opened(directory))

    def handler_for(self, name: str, args: Any) -> Any:
        """The handler of an item. Raises ValueError if none fits."""
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


# Which handler, which args


def composite_payloads(composite: CompositeCheckpointHandler, args: Any) -> dict[str, Payload]:
    if not isinstance(args, args_lib.Composite):
        raise ValueError("Must provide `args` of type `Composite` for several items.")
    payloads: dict[str, Payload] = {}
    for name, given in args.items():
        if given is not None:
            adopted = args_lib.adopt(given)
            payloads[name] = payload_of(composite.handler_for(name, adopted), adopted)
    return payloads


def read_composite(composite: CompositeCheckpointHandler, opened: Opened, args: Any) -> Any:
    """The items that are asked for; without args, all."""
    wanted: dict[str, Any] = dict(args.items()) if args is not None else {}
    if not wanted:
        wanted = dict.fromkeys(opened.items())
    found: dict[str, Any] = {}
    for name, given in sorted(wanted.items()):
        item = opened.item(name)
        adopted = args_lib.adopt(given) if given is not None else None
        found[name] = read_item(composite.handler_for(name, adopted), item, adopted)
    return args_lib.Composite(**found)


def describe_composite(composite: CompositeCheckpointHandler, opened: Opened) -> Any:
    names = opened.items()
    return args_lib.Composite(
        **{n: describe_item(composite.handler_for(n, None), opened.item(n)) for n in names}
    )


def file_size_of(args: Any) -> int | None:
    """How large files may get, if args of an item say so."""
    several = args.values() if isinstance(args, args_lib.Composite) else [args]
    sizes = [getattr(given, "ocdbt_target_data_file_size", None) for given in several]
    return min((size for size in sizes if size), default=None)


def _is_engines(handler: Any) -> bool:
    """Whether the engine writes the item: a handler that changes `save` does so itself."""
    if not isinstance(handler, _EngineHandler):
        return False
    return (
        type(handler).save is _EngineHandler.save
        and type(handler).restore is _EngineHandler.restore
    )


def payload_of(handler: Any, args: Any) -> Payload:
    """An item ready for the engine; of a handler of the user's, the files that it writes."""
    if _is_engines(handler):
        return handler.payload(args)
    with empty_directory() as directory:
        if hasattr(handler, "async_save"):
            _call_async(handler, directory, args)
        else:
            _call(handler.save, directory, args)
        if hasattr(handler, "finalize"):
            resolve(handler.finalize(directory))
        by = f"{type(handler).__module__}.{type(handler).__qualname__}"
        return Payload("files", pack(directory, by), by)


def _call_async(handler: Any, directory: Any, args: Any) -> None:
    """Run `async_save` in a thread: there may be a loop that runs in this one."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            wait_for(resolve(_call(handler.async_save, directory, args)))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def read_item(handler: Any, item: Item, args: Any) -> Any:
    """An item by a handler, or by the kind that it was saved as."""
    if handler is None:
        if item.kind == "files":
            raise ValueError(
                f"{item.path} was saved by a handler of yours; give its args, or the handler "
                "itself (item_handlers=, or a handler registry)"
            )
        handler = _BY_KIND[item.kind]()
    if _is_engines(handler):
        return handler.read(item, args if args is not None else handler._restore_cls())
    if item.directory is not None:
        return _call(handler.restore, as_path(item.directory), args)
    with empty_directory() as directory:
        unpack(item.states(), directory)
        return _call(handler.restore, directory, args)


def describe_item(handler: Any, item: Item) -> Any:
    if handler is None and item.kind != "files":
        handler = _BY_KIND[item.kind]()
    return handler.describe(item) if _is_engines(handler) else None


def _call(function: Any, directory: Any, args: Any) -> Any:
    """Call a handler's function with `args=`, or as older ones have it with `item` alone."""
    if isinstance(args, LegacyArgs):
        return function(directory, *args.positional, **args.keywords)
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "args" in parameters or takes_any:
        return function(directory, args=args)
    if args is None:
        return function(directory)
    return function(directory, getattr(args, "item", args))


class LegacyArgs(args_lib.CheckpointArgs):
    """Arguments for a handler that has no args registered, as they were given."""

    def __init__(self, positional: tuple[Any, ...], keywords: dict[str, Any]):
        self.positional = positional
        self.keywords = keywords


def save_args_for(handler: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The args of a save, in the new form (`args=`) or the old one (`item, save_args=…`)."""
    return _args_for(handler, positional, keywords, 0)


def restore_args_for(handler: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return _args_for(handler, positional, keywords, 1)


def _args_for(
    handler: Any, positional: tuple[Any, ...], keywords: dict[str, Any], which: int
) -> Any:
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
        if rest and not positional:
            positional = (rest.pop("item", None),)
        return args_lib.adopt(positional[0]) if positional and positional[0] is not None else None
    if isinstance(handler, _EngineHandler):
        cls = handler._restore_cls if which else handler._save_cls
        return cls(*positional, **rest)
    if args_lib.has_registered_args(handler):
        cls = args_lib.get_registered_args_cls(handler)[which]
        return cls(*positional, **rest)
    return LegacyArgs(positional, rest)


# Registries


class CheckpointHandlerRegistry:
    """Which handler is for which item and which args."""

    def __init__(self, other: CheckpointHandlerRegistry | None = None):
        self._entries: dict[tuple[str | None, Any], Any] = dict(other._entries) if other else {}

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
        cls = args if isinstance(args, type) or args is None else type(args)
        for key in ((item, cls), (None, cls)):
            if cls is not None and key in self._entries:
                return self._entries[key]
        own = [handler for (name, _), handler in self._entries.items() if name == item and item]
        return own[0] if cls is None and own else None

    def get_all_entries(self) -> dict[tuple[str | None, Any], Any]:
        return dict(self._entries)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)


class DefaultCheckpointHandlerRegistry(CheckpointHandlerRegistry):
    """A registry that has the built-in handlers."""

    def __init__(self, other: CheckpointHandlerRegistry | None = None):
        super().__init__(other)
        for handler in (PyTreeCheckpointHandler, StandardCheckpointHandler, JsonCheckpointHandler):
            made = handler()
            for cls in (handler._save_cls, handler._restore_cls):
                if (None, cls) not in self._entries:
                    self.add(None, cls, made)


def create_default_handler_registry(**items_and_handlers: Any) -> CheckpointHandlerRegistry:
    registry = DefaultCheckpointHandlerRegistry()
    for item, handler in items_and_handlers.items():
        for cls in args_lib.get_registered_args_cls(handler):
            registry.add(item, cls, handler)
    return registry
