"""What to save or restore, and by which handler."""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)


@dataclass
class CheckpointArgs:
    """What a handler is given. Subclass it, and register it with a handler."""


_FOR_SAVE: dict[Any, Any] = {}
_FOR_RESTORE: dict[Any, Any] = {}


def register_with_handler(
    handler_cls: Any, for_save: bool = False, for_restore: bool = False
) -> Any:
    """A decorator: these args are for this handler."""
    if not for_save and not for_restore:
        raise ValueError("Must specify at least one of `for_save`, `for_restore`.")

    def register(args_cls: Any) -> Any:
        if not issubclass(args_cls, CheckpointArgs):
            raise TypeError(f"{args_cls} must subclass `CheckpointArgs`.")
        if for_save:
            _FOR_SAVE[args_cls] = handler_cls
        if for_restore:
            _FOR_RESTORE[args_cls] = handler_cls
        return args_cls

    return register


def get_registered_handler_cls(args: Any) -> Any:
    """The handler's class, also of args that are registered with Orbax itself, such as Grain's."""
    cls = args if isinstance(args, type) else type(args)
    for registry in (_FOR_SAVE, _FOR_RESTORE):
        for base in cls.__mro__:
            if base in registry:
                return registry[base]
    if _is_of_orbax(cls):
        import orbax.checkpoint

        theirs: Any = orbax.checkpoint.args
        return theirs.get_registered_handler_cls(cls)
    raise ValueError(f"{cls} is not registered with any handler; see args.register_with_handler")


def get_registered_args_cls(handler: Any) -> tuple[Any, Any]:
    """The classes of args of a handler, for saving and for restoring."""
    cls = handler if isinstance(handler, type) else type(handler)
    found = tuple(
        next((args for args, by in registry.items() if by is cls), None)
        for registry in (_FOR_SAVE, _FOR_RESTORE)
    )
    if None in found:
        raise ValueError(f"{cls} has no args registered; see args.register_with_handler")
    return found[0], found[1]


def has_registered_args(handler: Any) -> bool:
    try:
        get_registered_args_cls(handler)
    except ValueError:
        return False
    return True


def is_args(value: Any) -> bool:
    """Whether this is an instance of ours, or of Orbax's own."""
    return isinstance(value, CheckpointArgs) or _is_of_orbax(type(value))


def _is_of_orbax(cls: type) -> bool:
    return any(b.__name__ == "CheckpointArgs" and _is_theirs(b) for b in cls.__mro__)


def _is_theirs(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "orbax"


def adopt(args: Any) -> Any:
    """Orbax's own args for its own handlers as ours; everything else as it is."""
    if not _is_theirs(type(args)):
        return args
    name = type(args).__name__.removesuffix("Args")
    if name == "Composite":
        return Composite(**{key: adopt(value) for key, value in args.items()})
    ours = _BY_NAME.get(name)
    if ours is None:
        return args
    known = {f.name for f in fields(ours)}
    return ours(**{k: v for k, v in vars(args).items() if k in known})


@dataclass
class PyTreeSave(CheckpointArgs):
    """A tree of arrays, numbers and texts. `save_args` casts; the file size becomes ours."""

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None
    enable_pinned_host_transfer: bool | None = None


@dataclass
class PyTreeRestore(CheckpointArgs):
    """`item` says the structure, `restore_args` how each leaf comes back."""

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    partial_restore: bool = False


@dataclass
class StandardSave(CheckpointArgs):
    """A tree of arrays and numbers."""

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@dataclass
class StandardRestore(CheckpointArgs):
    """`item`: a tree of (abstract) arrays, whose shapes, dtypes and shardings hold."""

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: Any = None


@dataclass
class JsonSave(CheckpointArgs):
    """Anything that JSON can hold."""

    item: Any


@dataclass
class JsonRestore(CheckpointArgs):
    item: Any = None


@dataclass
class ArraySave(CheckpointArgs):
    """One array or number."""

    item: Any
    save_args: Any = None


@dataclass
class ArrayRestore(CheckpointArgs):
    item: Any = None
    restore_args: Any = None


@dataclass
class NumpyRandomKeySave(CheckpointArgs):
    """The state of numpy's global generator, as `np.random.get_state()` has it."""

    item: Any


@dataclass
class NumpyRandomKeyRestore(CheckpointArgs):
    item: Any = None


@dataclass
class JaxRandomKeySave(CheckpointArgs):
    item: Any


@dataclass
class JaxRandomKeyRestore(CheckpointArgs):
    item: Any = None


class Composite(CheckpointArgs):
    """Several items by name. As a result, too: `r.state`, `r["state"]`, `r.get("state")`."""

    __items__: Mapping[str, Any]

    def __init__(self, **items: Any):
        object.__setattr__(self, "__items__", dict(items))

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

    def __contains__(self, key: str) -> bool:
        return key in self.__items__

    def __iter__(self) -> Any:
        return iter(self.__items__)

    def __len__(self) -> int:
        return len(self.__items__)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Composite) and self.__items__ == other.__items__

    __hash__ = None

    def __and__(self, other: Any) -> Composite:
        names: Iterable[str] = other
        return Composite(**{k: self[k] for k in names if k in self})

    def __or__(self, other: Any) -> Composite:
        return Composite(**{**self.__items__, **dict(other.items())})

    def keys(self) -> KeysView[str]:
        return self.__items__.keys()

    def values(self) -> Any:
        return self.__items__.values()

    def items(self) -> Any:
        return self.__items__.items()

    def get(self, key: str, default: Any = None) -> Any:
        return self.__items__.get(key, default)

    def __repr__(self) -> str:
        return f"Composite({dict(self.__items__)!r})"


_BY_NAME: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        PyTreeSave,
        PyTreeRestore,
        StandardSave,
        StandardRestore,
        JsonSave,
        JsonRestore,
        ArraySave,
        ArrayRestore,
        NumpyRandomKeySave,
        NumpyRandomKeyRestore,
        JaxRandomKeySave,
        JaxRandomKeyRestore,
    )
}
