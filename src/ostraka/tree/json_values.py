"""Plain values as JSON and back, exactly: Python numbers and texts, enum members, numpy scalars.

They are leaves of a tree, keys of its containers, static fields of its dataclasses and metadata of
NNX variables. No JAX.
"""

from __future__ import annotations

import base64
import enum
import math
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from types import ModuleType
from typing import Any, cast

from ostraka.common.dtypes import DTYPES, dtype_name, numpy_dtype
from ostraka.errors import UnsupportedFormat

SCALARS = (bool, int, float, complex, str, bytes)
"""Values that are kept in `_METADATA` itself, as is None."""


class Unwritable(Exception):
    """A value that JSON can't hold exactly."""


def unknown(what: str) -> UnsupportedFormat:
    """The error for something in a tree that only a newer version can have written."""
    return UnsupportedFormat(
        f"its tree has {what}, which this Ostraka does not know; install a newer ostraka"
    )


def encode_scalar(value: Any) -> Any:
    """A value of one of the SCALARS types, or None, with its type. It is exact."""
    kind = type(value)
    if value is None:
        return None
    if kind is bool:
        return {"bool": value}
    if kind is int:
        return {"int": value if abs(value) < 1 << 53 else hex(value)}
    if kind is str:
        return _encode_str(value)
    if kind is float:
        if _is_odd_nan(value):
            return {"float64": struct.pack(">d", value).hex()}
        return {"float": value.hex()}
    if kind is complex:
        if _is_odd_nan(value.real) or _is_odd_nan(value.imag):
            return {"complex128": struct.pack(">dd", value.real, value.imag).hex()}
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    raise Unwritable(f"a {'.'.join(class_name(kind))}")


def _encode_str(value: str) -> dict[str, str]:
    """Surrogates, which are no characters, go through JSON only if no two of them look like one."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raw = value.encode(errors="surrogatepass")
        return {"surrogates": base64.b64encode(raw).decode()}
    return {"str": value}


def _is_odd_nan(value: float) -> bool:
    """True for a NaN with a sign or a payload, which "nan" would lose."""
    return math.isnan(value) and struct.pack(">d", value) != struct.pack(">d", float("nan"))


def encode_plain(value: Any) -> Any:
    """As `encode_scalar`, and also enum members, numpy scalars, and tuples, lists, dicts of those.

    Raises Unwritable for anything else.
    """
    kind = type(value)
    if isinstance(value, enum.Enum):
        return {"enum": [*class_name(kind), value.name, _enum_value(value)]}
    numpy: Any = sys.modules.get("numpy")  # It is slow to import, and is where there are scalars.
    if numpy is not None and isinstance(value, numpy.generic):
        return {"numpy": _encode_numpy(value)}
    if kind is tuple or kind is list:
        return {kind.__name__: [encode_plain(item) for item in value]}
    if kind is dict:
        pairs = cast("dict[Any, Any]", value).items()
        return {"mapping": [[encode_plain(key), encode_plain(item)] for key, item in pairs]}
    return encode_scalar(value)


def encode_writable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that `encode_plain` can write."""
    written: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(Unwritable):
            written[name] = encode_plain(value)
    return written


def _enum_value(member: enum.Enum) -> Any:
    """The value of an enum member, or its name, for programs without its class."""
    try:
        return encode_plain(member.value)
    except Unwritable:
        return encode_scalar(str(member.name))


def _encode_numpy(value: Any) -> list[Any]:
    import numpy as np

    if isinstance(value, str | bytes):
        kind: Any = str if isinstance(value, str) else bytes
        return [f"{kind.__name__}_", encode_scalar(kind(value))]
    name = dtype_name(value.dtype)
    if name not in DTYPES:
        raise Unwritable(f"a numpy.{type(value).__name__}")
    little = np.asarray(value).astype(value.dtype.newbyteorder("<"))
    return [name, little.tobytes().hex()]


# And back


def decode_plain(value: Any) -> Any:
    """Return the value, with a stand-in for an enum member if its class is not loaded.

    Raises ValueError, TypeError or OverflowError for what `encode_plain` does not write.
    """
    return _decode(value, _DECODERS)


def decode_scalar(value: Any) -> Any:
    """As `decode_plain`, of what `encode_scalar` writes alone."""
    return _decode(value, _SCALAR_DECODERS)


def _decode(value: Any, decoders: Mapping[str, Callable[[Any], Any]]) -> Any:
    if value is None:
        return None
    ((kind, content),) = value.items()
    decode = decoders.get(kind)
    if decode is None:
        raise unknown(f"a value of the kind {kind[:80]!r}")
    return decode(content)


def _checked(kind: type) -> Callable[[Any], Any]:
    def check(content: Any) -> Any:
        if type(content) is not kind:
            raise ValueError(f"{content!r:.80} is no value of the kind {kind.__name__!r}")
        return content

    return check


def _decode_bytes(content: str) -> bytes:
    return base64.b64decode(content, validate=True)


def _decode_complex(content: Any) -> complex:
    real, imaginary = content
    return complex(float.fromhex(real), float.fromhex(imaginary))


def _decode_enum(content: Any) -> Any:
    module, name, member, standing_for = content
    kind = loaded_class(module, name)
    members: Any = kind.__dict__.get("_member_map_") if kind is not None else None
    is_there = isinstance(members, dict) and member in members
    if not is_there or kind is None or not _has_plain_identity(kind):
        return decode_plain(standing_for)
    return cast("dict[str, Any]", members)[member]


def _has_plain_identity(kind: type) -> bool:
    """True if comparing members of this enum as keys runs no code of the program."""
    names = ("__eq__", "__hash__")
    homes = [next(base for base in kind.__mro__ if name in base.__dict__) for name in names]
    return all(home.__module__ in ("builtins", "enum") for home in homes)


def _decode_numpy(content: Any) -> Any:
    import numpy as np

    name, encoded = content
    if name in ("str_", "bytes_"):
        found = decode_scalar(encoded)
        if type(found) is not (str if name == "str_" else bytes):
            raise ValueError(f"a numpy.{name} is no {type(found).__name__}")
        return getattr(np, name)(found)
    if name not in DTYPES:
        raise unknown(f"a scalar of the dtype {name!r}")
    (element,) = np.frombuffer(bytes.fromhex(encoded), numpy_dtype(name))
    return element


def _unpack(form: str, content: Any) -> tuple[float, ...]:
    packed = bytes.fromhex(content)
    if len(packed) != struct.calcsize(form):
        raise ValueError(f"a number has {len(packed)} bytes")
    return struct.unpack(form, packed)


_SCALAR_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "bool": _checked(bool),
    "int": lambda content: content if type(content) is int else int(content, 16),
    "str": _checked(str),
    "surrogates": lambda content: _decode_bytes(content).decode(errors="surrogatepass"),
    "bytes": _decode_bytes,
    "float": float.fromhex,
    "float64": lambda content: _unpack(">d", content)[0],
    "complex": _decode_complex,
    "complex128": lambda content: complex(*_unpack(">dd", content)),
}
_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    **_SCALAR_DECODERS,
    "tuple": lambda items: tuple(map(decode_plain, items)),
    "list": lambda items: list(map(decode_plain, items)),
    "mapping": lambda pairs: {decode_plain(key): decode_plain(item) for key, item in pairs},
    "enum": _decode_enum,
    "numpy": _decode_numpy,
}


# Keys of containers


def encode_key(key: Any) -> Any:
    """A key of a container: text and integers as they are, others as `encode_plain` writes them."""
    return key if type(key) is str or type(key) is int else encode_plain(key)


def decode_key(key: Any) -> Any:
    return key if type(key) is str or type(key) is int else decode_plain(key)


def key_text(key: Any) -> str:
    """How a key is shown in a path."""
    return key if type(key) is str else text_of_encoded(encode_key(key))


def text_of_encoded(key: Any) -> str:
    """The same, of the JSON of a key: it must not depend on which classes are loaded."""
    if not isinstance(key, dict):
        return str(key)
    ((kind, content),) = cast("dict[str, Any]", key).items()
    if kind == "enum":
        return f"{content[1].rsplit('.', 1)[-1]}.{content[2]}"
    if kind == "tuple":
        texts = [repr(k["str"]) if k and "str" in k else text_of_encoded(k) for k in content]
        return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
    return str(decode_plain(key))


@lru_cache(maxsize=256)
def class_name(kind: type) -> tuple[str, str]:
    """Module and name of a class, as a checkpoint has them."""
    return kind.__module__, kind.__qualname__


def loaded_class(module: str, qualname: str) -> Any:
    """A class that this program has loaded, or None. Imports nothing and runs no code."""
    if type(module) is not str or type(qualname) is not str:
        raise ValueError("a class has no name")
    # Names are looked up, not asked for: a module or a class may run code when asked.
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        names = found.__dict__ if issubclass(type(found), ModuleType | type) else {}
        found = names.get(name)
    return found if issubclass(type(found), type) else None


def mro_lookup(kind: type, name: str) -> Any:
    """The attribute of a class or its bases, found without running code, or None."""
    return next((base.__dict__[name] for base in kind.__mro__ if name in base.__dict__), None)
