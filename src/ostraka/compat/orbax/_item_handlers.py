"""The handlers of each kind of item, and the args that a call gives them."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from ostraka.compat.orbax import args as args_lib
from ostraka.compat.orbax._engine import About, Item, Opened, Payload, as_json, write
from ostraka.compat.orbax._leaves import prepare_leaf
from ostraka.compat.orbax._pytree import (
    args_of_template,
    check_standard,
    pytree_payload,
    read_as_saved,
    read_pytree,
    read_standard,
    want_of,
)
from ostraka.compat.orbax._refuse import refuse_options
from ostraka.compat.orbax.metadata import tree_metadata


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


class EngineHandler(CheckpointHandler):
    """A handler whose items the engine itself writes."""

    save_cls: Any = None
    restore_cls: Any = None
    harmless: tuple[str, ...] = ("multiprocessing_options", "primary_host")

    def __init__(self, *positional: Any, **options: Any):
        if positional:
            raise TypeError(f"{type(self).__name__} takes no positional arguments here")
        refuse_options(type(self).__name__, options, self.harmless)

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


class PyTreeCheckpointHandler(EngineHandler):
    save_cls, restore_cls = args_lib.PyTreeSave, args_lib.PyTreeRestore
    # They are about Orbax's files and its own memory; the engine has bounds of its own.
    harmless = (
        *EngineHandler.harmless,
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
    save_cls, restore_cls = args_lib.StandardSave, args_lib.StandardRestore

    def payload(self, args: Any) -> Payload:
        check_standard(args.item)
        return super().payload(args)

    def read(self, item: Item, args: Any) -> Any:
        if args.support_layout:
            raise NotImplementedError("StandardRestore(support_layout=True) is not supported")
        if args.item is None:
            return read_as_saved(item)
        like = getattr(args.item, "tree", args.item) if _is_metadata(args.item) else args.item
        where = args.fallback_sharding
        return read_standard(item, like, strict=args.strict, fallback_sharding=where)


def _is_metadata(item: Any) -> bool:
    return type(item).__name__ in ("TreeMetadata", "_TreeMetadataImpl")


class JsonCheckpointHandler(EngineHandler):
    save_cls, restore_cls = args_lib.JsonSave, args_lib.JsonRestore
    harmless = (*EngineHandler.harmless, "filename")

    def payload(self, args: Any) -> Payload:
        return Payload("json", as_json(args.item, "the item of JsonSave"), self.typestr())

    def read(self, item: Item, args: Any) -> Any:
        return read_as_saved(item)


class ArrayCheckpointHandler(EngineHandler):
    save_cls, restore_cls = args_lib.ArraySave, args_lib.ArrayRestore
    harmless = (*EngineHandler.harmless, "checkpoint_name")

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
        return item.read([keys], [want_of(keys, item.saved(keys), given)])[0]


class JaxRandomKeyCheckpointHandler(ArrayCheckpointHandler):
    save_cls, restore_cls = args_lib.JaxRandomKeySave, args_lib.JaxRandomKeyRestore

    def payload(self, args: Any) -> Payload:
        return Payload("array", args.item, self.typestr())

    def read(self, item: Item, args: Any) -> Any:
        keys = next(iter(item.tree.leaves))
        return item.read([keys], [want_of(keys, item.saved(keys), None)])[0]


class NumpyRandomKeyCheckpointHandler(EngineHandler):
    save_cls, restore_cls = args_lib.NumpyRandomKeySave, args_lib.NumpyRandomKeyRestore
    harmless = (*EngineHandler.harmless, "key_name")

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
    args_lib.register_with_handler(_handler, for_save=True)(_handler.save_cls)
    args_lib.register_with_handler(_handler, for_restore=True)(_handler.restore_cls)

BY_KIND: dict[str, type[EngineHandler]] = {
    "pytree": PyTreeCheckpointHandler,
    "json": JsonCheckpointHandler,
    "array": ArrayCheckpointHandler,
    "numpy_key": NumpyRandomKeyCheckpointHandler,
}


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
    if getattr(handler, "is_composite", False):
        if rest and not positional:
            positional = (rest.pop("item", None),)
        return args_lib.adopt(positional[0]) if positional and positional[0] is not None else None
    if isinstance(handler, EngineHandler):
        cls = handler.restore_cls if which else handler.save_cls
        return cls(*positional, **rest)
    if args_lib.has_registered_args(handler):
        cls = args_lib.get_registered_args_cls(handler)[which]
        return cls(*positional, **rest)
    return LegacyArgs(positional, rest)
