"""Handlers: those of items, the one of several items, and handlers of one's own."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

from ostraka.compat.orbax import args as args_lib
from ostraka.compat.orbax._engine import About, Item, Opened, Payload, write
from ostraka.compat.orbax._files import empty_directory, pack, resolve, unpack, wait_for
from ostraka.compat.orbax._item_handlers import BY_KIND, EngineHandler, LegacyArgs
from ostraka.compat.orbax._item_handlers import ArrayCheckpointHandler as ArrayCheckpointHandler
from ostraka.compat.orbax._item_handlers import AsyncCheckpointHandler as AsyncCheckpointHandler
from ostraka.compat.orbax._item_handlers import (
    BasePyTreeCheckpointHandler as BasePyTreeCheckpointHandler,
)
from ostraka.compat.orbax._item_handlers import CheckpointHandler as CheckpointHandler
from ostraka.compat.orbax._item_handlers import (
    JaxRandomKeyCheckpointHandler as JaxRandomKeyCheckpointHandler,
)
from ostraka.compat.orbax._item_handlers import JsonCheckpointHandler as JsonCheckpointHandler
from ostraka.compat.orbax._item_handlers import (
    NumpyRandomKeyCheckpointHandler as NumpyRandomKeyCheckpointHandler,
)
from ostraka.compat.orbax._item_handlers import PyTreeCheckpointHandler as PyTreeCheckpointHandler
from ostraka.compat.orbax._item_handlers import (
    StandardCheckpointHandler as StandardCheckpointHandler,
)
from ostraka.compat.orbax._item_handlers import restore_args_for as restore_args_for
from ostraka.compat.orbax._item_handlers import save_args_for as save_args_for
from ostraka.compat.orbax._place import as_path
from ostraka.compat.orbax._refuse import refuse, refuse_options

__getattr__ = refuse(__name__)

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

    is_composite = True

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
        """Items of any save; they come back as None."""

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
    composite.given_as_none |= {name for name, given in args.items() if given is None}
    for name, given in args.items():
        if given is not None:
            adopted = args_lib.adopt(given)
            payloads[name] = payload_of(composite.handler_for(name, adopted), adopted)
    return payloads


def read_composite(composite: CompositeCheckpointHandler, opened: Opened, args: Any) -> Any:
    """The items that are asked for; without args, all."""
    wanted: dict[str, Any] = dict(args.items()) if args is not None else {}
    found: dict[str, Any] = {}
    if not wanted:
        wanted = dict.fromkeys(opened.items())
        found = dict.fromkeys(sorted(composite.given_as_none - set(wanted)))
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
    if not isinstance(handler, EngineHandler):
        return False
    return (
        type(handler).save is EngineHandler.save and type(handler).restore is EngineHandler.restore
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
        handler = BY_KIND[item.kind]()
    if _is_engines(handler):
        return handler.read(item, args if args is not None else handler.restore_cls())
    if item.directory is not None:
        return _call(handler.restore, as_path(item.directory), args)
    with empty_directory() as directory:
        unpack(item.states(), directory)
        return _call(handler.restore, directory, args)


def describe_item(handler: Any, item: Item) -> Any:
    if handler is None and item.kind != "files":
        handler = BY_KIND[item.kind]()
    return handler.describe(item) if isinstance(handler, EngineHandler) else None


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
            for cls in (handler.save_cls, handler.restore_cls):
                if (None, cls) not in self._entries:
                    self.add(None, cls, made)


def create_default_handler_registry(**items_and_handlers: Any) -> CheckpointHandlerRegistry:
    registry = DefaultCheckpointHandlerRegistry()
    for item, handler in items_and_handlers.items():
        for cls in args_lib.get_registered_args_cls(handler):
            registry.add(item, cls, handler)
    return registry
