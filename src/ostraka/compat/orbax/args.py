"""Arguments of a save or a restore, each registered with the handler that takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from ostraka.compat.orbax._names import absent


@dataclass
class CheckpointArgs:
    """Arguments for a handler. Subclass it, and register the subclass with a handler."""


_FOR_SAVE: dict[Any, Any] = {}
_FOR_RESTORE: dict[Any, Any] = {}


def register_with_handler(
    handler_cls: Any, for_save: bool = False, for_restore: bool = False
) -> Any:
    """Return a decorator that registers args with a handler."""
    if not for_save and not for_restore:
        raise ValueError("Must specify at least one of `for_save`, `for_restore`.")

    def register(args_cls: Any) -> Any:
        if not issubclass(args_cls, CheckpointArgs) and not _is_of_orbax(args_cls):
            raise TypeError(f"{args_cls} must subclass `CheckpointArgs`.")
        if for_save:
            _FOR_SAVE[args_cls] = handler_cls
        if for_restore:
            _FOR_RESTORE[args_cls] = handler_cls
        return args_cls

    return register


def get_registered_handler_cls(arg: Any) -> Any:
    """Return the class of handler for args. Finds those registered with Orbax itself too."""
    cls = arg if isinstance(arg, type) else type(arg)
    for registry, base in product((_FOR_SAVE, _FOR_RESTORE), cls.__mro__):
        if base in registry:
            return registry[base]
    if _is_of_orbax(cls):
        import orbax.checkpoint

        theirs: Any = orbax.checkpoint.args
        return theirs.get_registered_handler_cls(cls)
    raise ValueError(f"{cls} is not registered with any handler; see args.register_with_handler")


def get_registered_args_cls(handler: Any) -> tuple[Any, Any]:
    """Return the classes of args that a handler saves and restores with."""
    cls = handler if isinstance(handler, type) else type(handler)
    found = tuple(
        next((args for args, by in registry.items() if by is cls), None)
        for registry in (_FOR_SAVE, _FOR_RESTORE)
    )
    if None in found:
        raise ValueError(f"{cls} has no args registered; see args.register_with_handler")
    return found[0], found[1]


def has_registered_args(handler: Any) -> bool:
    with suppress(ValueError):
        return bool(get_registered_args_cls(handler))
    return False


def is_args(value: Any) -> bool:
    """True for args of this module and for those of Orbax itself."""
    return isinstance(value, CheckpointArgs) or _is_of_orbax(type(value))


def _is_of_orbax(cls: type) -> bool:
    return any(b.__name__ == "CheckpointArgs" and _is_theirs(b) for b in cls.__mro__)


def _is_theirs(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "orbax"


def adopt(args: Any) -> Any:
    """Turn args of Orbax itself into those of this module. Return others unchanged."""
    if not _is_theirs(type(args)):
        return args
    name = type(args).__name__.removesuffix("Args")
    if name == "Composite":
        return Composite(**{key: adopt(value) for key, value in args.items()})
    ours = globals().get(name)
    if not isinstance(ours, type) or not issubclass(ours, CheckpointArgs):
        return args
    known = {f.name for f in fields(ours)}
    return ours(**{k: v for k, v in vars(args).items() if k in known})


@dataclass
class _Save(CheckpointArgs):
    item: Any


@dataclass
class _Restore(CheckpointArgs):
    item: Any = None


@dataclass
class PyTreeSave(_Save):
    """A tree of arrays, numbers and strings. `save_args` can cast leaves."""

    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None
    enable_pinned_host_transfer: bool | None = None


@dataclass
class PyTreeRestore(_Restore):
    """`item` has the structure of the result. `restore_args` has the type of each leaf."""

    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    partial_restore: bool = False


@dataclass
class StandardSave(_Save):
    """A tree of arrays and numbers."""

    save_args: Any = None
    custom_metadata: Any = None


@dataclass
class StandardRestore(_Restore):
    """`item` is a tree of (abstract) arrays with the shapes, dtypes and shardings to restore."""

    strict: bool = True
    support_layout: bool = False
    fallback_sharding: Any = None


class JsonSave(_Save):
    """Anything that JSON can hold."""


class JsonRestore(_Restore):
    """JSON as saved, whatever `item` is."""


@dataclass
class ArraySave(_Save):
    """One array or number."""

    save_args: Any = None


@dataclass
class ArrayRestore(_Restore):
    """`restore_args` or `item` has the type of the array."""

    restore_args: Any = None


class NumpyRandomKeySave(_Save):
    """The state of numpy's global generator: `np.random.get_state()`."""


class NumpyRandomKeyRestore(_Restore):
    """The state as saved, whatever `item` is."""


class JaxRandomKeySave(ArraySave):
    """A key of `jax.random`."""


@dataclass
class JaxRandomKeyRestore(CheckpointArgs):
    restore_args: Any = None
    item: Any = None


ProtoSave = absent("args.ProtoSave", "save its SerializeToString() as bytes in the tree")
ProtoRestore = absent("args.ProtoRestore", "restore bytes, and call ParseFromString on them")


class Composite(Mapping[str, Any], CheckpointArgs):
    """Several items by name, also as a result: `r.state`, `r["state"]`, `r.get("state")`."""

    __items__: dict[str, Any]

    def __init__(self, **items: Any):
        object.__setattr__(self, "__items__", items)

    def __getitem__(self, key: str) -> Any:
        if key not in self.__items__:
            raise KeyError(f"Unknown key: {key}. Available keys: {list(self.__items__)}")
        return self.__items__[key]

    def __getattr__(self, key: str) -> Any:
        if key == "_items":  # Orbax's own attribute, which programs look into
            return self.__items__
        if key.startswith("__"):
            raise AttributeError(key)
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        raise ValueError("Composite can't be changed.")

    def __iter__(self) -> Iterator[str]:
        return iter(self.__items__)

    def __len__(self) -> int:
        return len(self.__items__)

    def __and__(self, other: Iterable[str]) -> Composite:
        return Composite(**{k: self[k] for k in other if k in self})

    def __or__(self, other: Any) -> Composite:
        return Composite(**self.__items__ | dict(other.items()))

    def __repr__(self) -> str:
        return f"Composite({self.__items__!r})"
