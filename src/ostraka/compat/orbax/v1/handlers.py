"""Handlers of v1, registered for a checkpointable's name or for its type."""

from __future__ import annotations

from typing import Any, Protocol, Self, runtime_checkable

from ostraka.compat.orbax._names import absent

Checkpointable = AbstractCheckpointable = Any


class CheckpointableHandler(Protocol):
    """Writes an object into a directory, and reads it from there. Subclass it for your own.

    `save` and `load` are coroutines. They return an awaitable: the work in the background.
    """

    async def save(self, directory: Any, checkpointable: Any) -> Any: ...

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any: ...

    async def metadata(self, directory: Any) -> Any: ...

    def is_handleable(self, checkpointable: Any) -> bool: ...

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None: ...


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """An object that writes itself into a directory, and reads itself from one."""

    async def save(self, directory: Any) -> Any: ...

    async def load(self, directory: Any) -> Any: ...


class BuiltInHandler:
    """The base class of handlers whose values the engine itself saves."""


class JsonHandler(BuiltInHandler):
    """Saves JSON. The name of the file has no effect."""

    def __init__(self, filename: str | None = None):
        self.filename = filename

    def is_handleable(self, checkpointable: Any) -> bool:
        return is_json(checkpointable)


class PyTreeHandler(BuiltInHandler):
    """Saves trees."""

    def __init__(self, **options: Any):
        self.options = options

    def is_handleable(self, checkpointable: Any) -> bool:
        return True


ProtoHandler = absent("v1.handlers.ProtoHandler", "save SerializeToString() as bytes in a tree")


def is_json(value: Any) -> bool:
    """True if a value can be written as JSON."""
    if isinstance(value, dict):
        known: dict[Any, Any] = value
        keys = all(key is None or isinstance(key, str | int | float | bool) for key in known)
        return keys and all(map(is_json, known.values()))
    if type(value) in (list, tuple):
        return all(map(is_json, value))
    return value is None or type(value) in (bool, int, float, str)


def typestr(handler: Any) -> str:
    cls = handler if isinstance(handler, type) else type(handler)
    return f"{cls.__module__}.{cls.__qualname__}"


class CheckpointableHandlerRegistry:
    """Handlers for one name, or for all values that they accept. The last one added is first."""

    def __init__(self, entries: Any = ()):
        self._entries: list[tuple[Any, str | None]] = list(entries)

    def add(
        self,
        handler_type: Any,
        checkpointable_name: str | None = None,
        secondary_typestrs: Any = None,
    ) -> Self:
        if checkpointable_name is not None and self.has(checkpointable_name):
            raise ValueError(f"a handler for {checkpointable_name!r} is registered already")
        self._entries.append((handler_type, checkpointable_name))
        return self

    def has(self, checkpointable_name: str) -> bool:
        return any(name == checkpointable_name for _, name in self._entries)

    def get(self, checkpointable_name: str) -> Any:
        for handler, name in self._entries:
            if name == checkpointable_name:
                return handler
        raise KeyError(f"no handler is registered for {checkpointable_name!r}")

    def get_all_entries(self) -> list[tuple[Any, str | None]]:
        return list(self._entries)

    def for_save(self, name: str, value: Any) -> Any:
        """Return the handler that saves a value, or None if none is registered for it."""
        if self.has(name):
            return _made(self.get(name))
        made = [_made(handler) for handler, known in reversed(self._entries) if known is None]
        return next((handler for handler in made if handler.is_handleable(value)), None)

    def for_load(self, name: str | None, by: str | None) -> Any:
        """Return the handler of a name, or one of the class that has saved the item."""
        if name is not None and self.has(name):
            return _made(self.get(name))
        found = [handler for handler, _ in reversed(self._entries) if typestr(handler) == by]
        return _made(found[0]) if found else None


def _made(handler: Any) -> Any:
    return handler() if isinstance(handler, type) else handler


_GLOBAL = CheckpointableHandlerRegistry()


def global_registry() -> CheckpointableHandlerRegistry:
    """Return the handlers that `register_handler` has added."""
    return _GLOBAL


def local_registry(
    other_registry: CheckpointableHandlerRegistry | None = None,
    *,
    include_global_registry: bool = True,
) -> CheckpointableHandlerRegistry:
    """Return a registry for `Context().checkpointables.registry`."""
    entries = _GLOBAL.get_all_entries() if include_global_registry else []
    more = other_registry.get_all_entries() if other_registry is not None else []
    return CheckpointableHandlerRegistry([*entries, *[e for e in more if e not in entries]])


def register_handler(
    cls: Any, *, checkpointable_name: str | None = None, secondary_typestrs: Any = None
) -> Any:
    """Register a handler for the whole program. Works as a decorator."""
    _GLOBAL.add(cls, checkpointable_name, secondary_typestrs)
    return cls
