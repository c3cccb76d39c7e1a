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
from types import ModuleType
from typing import Any, cast

from ostraka._spec import DTYPES, dtype_name, numpy_dtype
from ostraka.errors import UnsupportedFormat

SCALARS = (bool, int, float, complex, str, bytes)
"""Values that are kept in `_METADATA` itself, as is None."""


class Unwritable(Exception):
    """A value that JSON can't hold exactly."""


def encode_scalar(value: Any) -> Any:
    """A value of one of the SCALARS types, or None, with its type; exact for every value."""
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
        return (
            {"float64": struct.pack(">d", value).hex()}
            if _is_odd_nan(value)
            else {"float": value.hex()}
        )
    if kind is complex:
        if _is_odd_nan(value.real) or _is_odd_nan(value.imag):
            return {"complex128": struct.pack(">dd", value.real, value.imag).hex()}
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    raise Unwritable(f"a {kind.__module__}.{kind.__qualname__}")


def decode_scalar(value: Any) -> Any:
    """The value again. Raises ValueError or TypeError for what `encode_scalar` does not write."""
    if value is None:
        return None
    ((kind, content),) = value.items()
    if kind in ("bool", "str", "int") and type(content).__name__ == kind:
        return content
    match kind:
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "float64":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "complex":
            real, imaginary = content
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case "complex128":
            return complex(*struct.unpack(">dd", bytes.fromhex(content)))
        case "bytes":
            return base64.b64decode(content, validate=True)
        case "surrogates":
            return base64.b64decode(content, validate=True).decode(errors="surrogatepass")
        case "bool" | "str":
            raise ValueError(f"{content!r} is no value of the kind {kind!r}")
        case _:
            raise UnsupportedFormat(
                f"its tree has a value of the kind {kind!r}, which this Ostraka does not know; "
                "install a newer ostraka"
            )


def _encode_str(value: str) -> dict[str, str]:
    """Surrogates, which are no characters, go through JSON only if no two of them look like one."""
    if value.isascii():
        return {"str": value}
    try:
        value.encode()
    except UnicodeEncodeError:
        raw = value.encode(errors="surrogatepass")
        return {"surrogates": base64.b64encode(raw).decode()}
    return {"str": value}


def _is_odd_nan(value: float) -> bool:
    """Whether it is a NaN that has a sign or a payload, which its name would lose."""
    return math.isnan(value) and struct.pack(">d", value) != struct.pack(">d", float("nan"))


def encode_plain(value: Any) -> Any:
    """As `encode_scalar`, and also enum members, numpy scalars, and tuples, lists, dicts of those.

    Raises Unwritable for anything else.
    """
    if isinstance(value, enum.Enum):
        kind = type(value)
        return {"enum": [kind.__module__, kind.__qualname__, value.name, _enum_value(value)]}
    if is_numpy_scalar(value):
        return _encode_numpy(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return {kind.__name__: [encode_plain(item) for item in value]}
    if kind is dict:
        pairs = cast("dict[Any, Any]", value).items()
        return {"mapping": [[encode_plain(key), encode_plain(item)] for key, item in pairs]}
    return encode_scalar(value)


def decode_plain(value: Any) -> Any:
    """The value again; an enum member as what stands for it where its class is not loaded."""
    if value is None:
        return None
    ((kind, content),) = value.items()
    match kind:
        case "tuple":
            return tuple([decode_plain(item) for item in content])
        case "list":
            return [decode_plain(item) for item in content]
        case "mapping":
            return {decode_plain(key): decode_plain(item) for key, item in content}
        case "enum":
            module, name, member, standing_for = content
            return _enum_member(module, name, member, decode_plain(standing_for))
        case "numpy":
            return _decode_numpy(*content)
        case _:
            return decode_scalar(value)


def is_numpy_scalar(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")  # It is slow to import, and is where there are scalars.
    return numpy is not None and isinstance(value, numpy.generic)


def is_plain(value: Any) -> bool:
    """Whether `encode_plain` can write it."""
    try:
        encode_plain(value)
    except Unwritable:
        return False
    return True


def _enum_value(member: enum.Enum) -> Any:
    """What stands for a member where its class is not loaded: its value, or else its name."""
    try:
        return encode_plain(member.value)
    except Unwritable:
        return encode_scalar(str(member.name))


def _enum_member(module: str, name: str, member: str, standing_for: Any) -> Any:
    kind = loaded_class(module, name)
    members: Any = kind.__dict__.get("_member_map_") if kind is not None else None
    return members[member] if isinstance(members, dict) and member in members else standing_for


def _encode_numpy(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.str_):
        return {"numpy": ["str_", encode_scalar(str(value))]}
    if isinstance(value, np.bytes_):
        return {"numpy": ["bytes_", encode_scalar(bytes(value))]}
    name = dtype_name(value.dtype)
    if name not in DTYPES:
        raise Unwritable(f"a numpy.{type(value).__name__}")
    little = np.asarray(value).astype(value.dtype.newbyteorder("<"))
    return {"numpy": [name, little.tobytes().hex()]}


def _decode_numpy(name: str, content: Any) -> Any:
    import numpy as np

    if name == "str_":
        return np.str_(decode_scalar(content))
    if name == "bytes_":
        return np.bytes_(decode_scalar(content))
    if name not in DTYPES:
        raise UnsupportedFormat(
            f"its tree has a scalar of the dtype {name!r}, which this Ostraka does not know; "
            "install a newer ostraka"
        )
    (element,) = np.frombuffer(bytes.fromhex(content), numpy_dtype(name))
    return element


# Keys of containers


def encode_key(key: Any) -> Any:
    """A key of a container: text and integers as they are, others as `encode_plain` writes them."""
    if type(key) is str or type(key) is int:
        return key
    return encode_plain(key)


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
    match kind:
        case "enum":
            return f"{content[1].rsplit('.', 1)[-1]}.{content[2]}"
        case "tuple":
            texts = [repr(k["str"]) if k and "str" in k else text_of_encoded(k) for k in content]
            return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
        case "numpy":
            return str(_decode_numpy(*content))
        case _:
            return str(decode_plain(key))


def loaded_class(module: str, qualname: str) -> Any:
    """A class that this program has loaded, or None; nothing is imported or run."""
    # Names are looked up, not asked for: a module or a class may run code when asked.
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        names = found.__dict__ if isinstance(found, ModuleType | type) else {}
        found = names.get(name)
    return found if isinstance(found, type) else None
