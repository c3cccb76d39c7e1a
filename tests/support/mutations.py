"""Documents and bytes changed as an attacker would change them: knowing the format."""

import copy
import json
import random
from typing import Any

Json = Any
Place = tuple[Any, ...]

ESCAPE = "\x1b]0;owned\x07\x1b[31m"
"""What a terminal would act on."""
_TEXTS = (
    *("", "x", ".", "/", "~", "~2__metadata__", "__metadata__", "__class__", "class", "_fields"),
    *(ESCAPE, "\u202egnp.exe", "\x9b2J", "\ud800", "\udc80x", "\ufb01", "fi", "\x00", "a\nb"),
    "\u200b",
    *("../../etc/passwd", "0" * 16, "f" * 16, "zzzz", "nan", "inf", "0x1p99999", "-0x1.8p-1080"),
    *("jax", "key", "numpy", "scalar", "uint32", "float32", "int4", "complex128", "bfloat16"),
    *("threefry2x32", "rbg", "auto", "pinned_host", "zstd", "x" * 300, "a/" * 150),
)
_NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 8, 64, 65, 100, 255, 4096, 1 << 16, 1 << 20, 1 << 26, 1 << 31, 1 << 40),
    *((1 << 53) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, 10**400, -(1 << 63), 0.5, 1e308, -0.0),
)
_CLASSES = (
    *(["collections", "OrderedDict"], ["builtins", "dict"], ["enum", "Enum"], ["os", "system"]),
    *(["flax.nnx", "Param"], ["flax.nnx.variablelib", "Param"], ["flax.nnx.statelib", "State"]),
    *(["flax.core.frozen_dict", "FrozenDict"], ["fuzz", "Point"], ["fuzz", "Settings"]),
    *(["fuzz", "Colour"], ["subprocess", "Popen"], ["", ""], ["a", "b.c.d"]),
)
_KINDS = (
    *("dict", "ordered_dict", "defaultdict", "list", "tuple", "namedtuple", "dataclass", "node"),
    *("state", "nnx", "variable", "states", "kept", "same_as", "keys", "items", "static", "about"),
    *("factory", "structure", "json", "bool", "int", "float", "float64", "complex", "complex128"),
    *("str", "surrogates", "bytes", "mapping", "enum", "numpy", "prng", "per_process", "weak"),
    *("uncommitted", "memory", "cast_from", "mesh", "spec", "part", "layout", "types", "data"),
    *("results", "timeline", "hosts", "time", "digest", "version", "ostraka.manager", "metrics"),
)
_MOST_PLACES = 5000
_MOST_BYTES = 16 << 20
"""Of a document: copies of copies of long texts were 300 MB once, which take seconds to read."""
_DEPTHS = (3, 30, 199, 201, 950, 2000, 20000)
_NESTED = "what is nested deep"
"""Stands in a document for the text of it."""


def places_in(value: Json, path: Place = ()) -> list[Place]:
    """The place of every part of a document, itself first."""
    found = [path]
    stack = [(path, value)] if isinstance(value, dict | list) else []
    while stack:
        here, part = stack.pop()
        for key, child in part.items() if isinstance(part, dict) else enumerate(part):
            place = (*here, key)
            found.append(place)
            if isinstance(child, dict | list):
                stack.append((place, child))
    return found


def at(document: Json, place: Place) -> Json:
    for key in place:
        document = document[key]
    return document


def put(document: Json, place: Place, value: Json) -> Json:
    if not place:
        return value
    at(document, place[:-1])[place[-1]] = value
    return document


class Mutator:
    """Changes documents; the same seed makes the same changes."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self._nested_text = ""

    def document(self, document: Json) -> Json:
        """A copy with one to four changes."""
        document = json.loads(json.dumps(document))  # ten times as fast as `deepcopy`
        for _ in range(self.random.choice((1, 1, 1, 2, 3, 4))):
            if len(places := places_in(document)) < _MOST_PLACES:
                document = self._change(document, places)
        if self.random.random() < 0.05:
            place = self.random.choice(places_in(document))
            document = put(document, place, self._nested(at(document, place)))
        return document

    def text(self, document: Json) -> bytes:
        """A document as JSON, now and then not quite as it should be written."""
        text = json.dumps(document, separators=(",", ":"))
        if self._nested_text:
            text = text.replace(json.dumps(_NESTED), self._nested_text, 1)
        if self.random.random() < 0.03:
            text = text.replace(":1", self.random.choice((":NaN", ":Infinity", ":1e999", ":01")), 1)
        if self.random.random() < 0.03:
            text = text.replace("{", '{"items":[],', 1) if "{" in text else text  # a key twice
        return text[:_MOST_BYTES].encode(errors="surrogatepass")

    def bytes(self, data: bytes) -> bytes:
        """A copy with some bytes flipped, cut, repeated or set."""
        rng, changed = self.random, bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            start = rng.randrange(len(changed) + 1)
            stop = min(start + rng.choice((1, 1, 1, 2, 4, 8, 64)), len(changed))
            match rng.randrange(5):
                case 0:
                    changed[start:stop] = rng.randbytes(stop - start)
                case 1:
                    del changed[start:stop]
                case 2:
                    changed[start:start] = changed[start:stop]
                case 3:
                    changed[start:stop] = bytes([rng.choice((0, 1, 127, 128, 255))]) * (
                        stop - start
                    )
                case _:
                    for place in range(start, stop):
                        changed[place] ^= 1 << rng.randrange(8)
        return bytes(changed)

    def value(self, depth: int = 0) -> Json:
        """Anything that JSON has, rather what a reader might take for something."""
        rng = self.random
        match rng.randrange(10 if depth < 3 else 5):
            case 0:
                return rng.choice((None, True, False))
            case 1 | 2:
                return rng.choice(_NUMBERS)
            case 3 | 4:
                return rng.choice(_TEXTS)
            case 5:
                return [self.value(depth + 1) for _ in range(rng.randrange(4))]
            case 6:
                return [
                    [rng.choice(_NUMBERS) for _ in range(3)] for _ in range(rng.randrange(1, 4))
                ]
            case 7:
                return list(rng.choice(_CLASSES))
            case _:
                return self._node(depth)

    def _node(self, depth: int) -> Json:
        rng = self.random
        node = {rng.choice(_KINDS): self.value(depth + 1) for _ in range(rng.choice((1, 1, 2, 3)))}
        if rng.random() < 0.5:
            node["items"] = [self.value(depth + 1) for _ in range(rng.randrange(3))]
        if rng.random() < 0.3:
            node["keys"] = [rng.choice(_TEXTS) for _ in range(rng.randrange(4))]
        return node

    def _change(self, document: Json, places: list[Place]) -> Json:
        rng = self.random
        place = rng.choice(places)
        found = at(document, place)
        match rng.randrange(8):
            case 0 | 1:
                return put(document, place, self.value())
            case 2 if isinstance(found, bool) or not isinstance(found, int | float):
                return put(document, place, rng.choice(_NUMBERS))
            case 2:
                return put(document, place, self._number(found))
            case 3:
                return put(document, place, copy.deepcopy(at(document, rng.choice(places))))
            case 4 if place:
                del at(document, place[:-1])[place[-1]]
                return document
            case 5 if isinstance(found, list) and found:
                again = copy.deepcopy(rng.choice(found))
                often = 1000 if len(places_in(again)) < 10 else 3
                found[rng.randrange(len(found)) : 0] = [again] * rng.choice((1, 1, 2, often))
                return document
            case 6 if isinstance(found, dict):
                found[rng.choice(_KINDS + _TEXTS)] = self.value()
                return document
            case _:
                return put(document, place, self._other_text(found))

    def _number(self, number: Any) -> Any:
        small = self.random.randrange(-3, 4)
        half = number % 1000 + 0.5
        return self.random.choice((number + small, -number, number * 2, number * small, half))

    def _nested(self, value: Json) -> Json:
        """What stands in a document for a value that is nested too deep for the json package."""
        rng = self.random
        wraps = [
            [_NESTED],
            {"list": None, "items": [_NESTED]},
            {"tuple": [_NESTED]},
            {"x": _NESTED},
            {"variable": ["flax.nnx", "Param"], "about": {}, "items": [_NESTED]},
        ]
        wrap = json.dumps(rng.choice(wraps), separators=(",", ":"))
        before, after = wrap.split(json.dumps(_NESTED))
        depth = rng.choice(_DEPTHS)
        self._nested_text = before * depth + json.dumps(value) + after * depth
        return _NESTED

    def _other_text(self, found: Json) -> Json:
        text = self.random.choice(_TEXTS)
        return found + text if isinstance(found, str) and self.random.random() < 0.5 else text
