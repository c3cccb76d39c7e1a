"""The place of each leaf in a map of layers and roles, such as `model/blocks/3` and `q`. No JAX."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from ostraka.sharding.leaves import ShapedLeaf
from ostraka.sharding.roles import KERNELS, Role, is_norm, names_on, roles_of
from ostraka.tree.blocks import separator_of, split_number
from ostraka.tree.nodes import ROOT

ROLES = (
    *("embedding", "q", "k", "v", "kv", "qkv", "o", "router", "gate", "up", "down"),
    *("weight", "norm", "bias", "head", "other"),
)
"""The columns of the map, in order. `weight` is a kernel whose name does not tell its role."""

_STAGES = re.compile(r"(stage|level|stack|group)s?_?", re.IGNORECASE)
"""Names of containers of blocks that are themselves numbered."""
_OPTAX = frozenset({"count", "mu", "nu", "trace", "inner_state", "inner_opt_state"})
"""Names below the numbers of a chain of optax, which are no layers."""
_HEADS = frozenset({"head", "classifier", "logits", "unembedding"})
_PLAIN: dict[Role, str] = {"out": "o", "down": "down", "head": "head", "embed": "embedding"}


@dataclass(frozen=True, slots=True)
class Place:
    """The row and the column of a leaf, and the rest of its path."""

    layer: str
    """The beginning of the path: up to the number of the block, or a name beside the blocks."""
    name: str
    """The rest of the path. Empty if the layer is the leaf."""
    role: str
    """One of `ROLES`."""


@dataclass(slots=True)
class _Repeat:
    """Names that differ only in a number, below one name."""

    below: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By number, the names of the items."""

    def is_repeated(self) -> bool:
        """True if two in a row share half of their items, and they are no chain of optax."""
        found = [self.below[number] for number in sorted(self.below)]
        is_alike = any(2 * len(a & b) >= len(a | b) for a, b in pairwise(found))
        return is_alike and not any(_OPTAX & names for names in found)


def places_of(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Place], list[str], str]:
    """The place of each path, the layers in the order of the model, and the separator of paths.

    Embeddings come before the blocks, and norms and heads beside the blocks come after them.
    """
    separator = separator_of(shapes)
    layers, blocks = _layers_of([*shapes], separator)
    roles = _columns_of(shapes, separator)
    places = {
        path: Place(layer, path[len(layer) + 1 :], roles[path]) for path, layer in layers.items()
    }
    by_layer: dict[str, set[str]] = defaultdict(set)
    for place in places.values():
        by_layer[place.layer].add(place.role)
    first: dict[str, int] = {}
    order: dict[str, tuple[int, int, int]] = {}
    for layer, own in by_layer.items():
        container, number = blocks.get(layer, (layer, 0))
        turn = 1
        if layer not in blocks:
            turn = 0 if "embedding" in own else 2 if own & {"head", "norm"} else 1
        order[layer] = (turn, first.setdefault(container, len(first)), number)
    return places, sorted(order, key=order.__getitem__), separator


# Rows


def _layers_of(
    paths: Sequence[str], separator: str
) -> tuple[dict[str, str], dict[str, tuple[str, int]]]:
    """The layer of each path. For those that are blocks: their container and their number."""
    number_of = cache(split_number)
    repeats: dict[tuple[str, str, str], _Repeat] = defaultdict(_Repeat)
    splits: dict[str, list[tuple[tuple[str, str, str], int, str]]] = {}
    for path in paths:
        names, above = path.split(separator), ""
        found: list[tuple[tuple[str, str, str], int, str]] = []
        for name, item in pairwise(names):
            parts = number_of(name)
            if parts is not None:
                key = (above, parts[0], parts[2])
                repeats[key].below[parts[1]].add(item)
                found.append((key, parts[1], f"{above}{name}"))
            above += f"{name}{separator}"
        splits[path] = found
    repeated = {key for key, repeat in repeats.items() if repeat.is_repeated()}
    parents = {key[0].rstrip(separator).rpartition(separator)[0] for key in repeated if not key[1]}
    parents |= {key[0].rstrip(separator) for key in repeated if key[1]}
    if not repeated:
        parents = {separator.join(_common([path.split(separator)[:-1] for path in paths]))}
    beginnings = [parent.split(separator) if parent else [] for parent in parents]
    layers: dict[str, str] = {}
    blocks: dict[str, tuple[str, int]] = {}
    for path in paths:
        if path == ROOT:
            layers[path] = ROOT
            continue
        own = [one for one in splits[path] if one[0] in repeated]
        if not own:
            names = path.split(separator)
            depth = max((len(_common([names, some])) for some in beginnings), default=0)
            layers[path] = separator.join(names[: depth + 1])
            continue
        is_stage = len(own) > 1 and _is_stage(own[0][0], separator)
        (above, *ends), number, layer = own[1] if is_stage else own[0]
        layers[path] = layer
        blocks[layer] = (f"{above}{ends}", number)
    return layers, blocks


def _is_stage(key: tuple[str, str, str], separator: str) -> bool:
    container = key[1] or key[0].rstrip(separator).rpartition(separator)[2]
    return _STAGES.fullmatch(container) is not None


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """The names that all paths begin with."""
    common: list[str] = []
    for names in zip(*paths, strict=False):
        if len({*names}) > 1:
            break
        common.append(names[0])
    return common


# Columns


def _columns_of(shapes: Mapping[str, tuple[int, ...]], separator: str) -> dict[str, str]:
    """One of `ROLES` for each path."""
    slashed = {path: path.replace(separator, "/") for path in shapes}
    leaves = [ShapedLeaf(slashed[path], shape, 4, False) for path, shape in shapes.items()]
    roles = roles_of(leaves)
    return {path: _column_of(slashed[path], roles[slashed[path]]) for path in shapes}


def _column_of(path: str, role: Role | None) -> str:
    names = [name.lower() for name in names_on(path)]
    own, layer = names[-1], names[-2] if len(names) > 1 else ""
    is_array = own in KERNELS | {"bias", "b", "scale", "embedding", "mean", "var"}
    called = layer if is_array else own
    if is_norm(called):
        return "norm"
    if own in ("bias", "b") or own.endswith("_bias"):
        return "bias"
    if role in _PLAIN:
        return _PLAIN[role]
    if role == "in":
        core = re.sub(r"^(to_|w)|(_proj|_einsum|_lin|_b)+$", "", called)
        known = {"q": "q", "query": "q", "k": "k", "key": "k", "v": "v", "value": "v", "kv": "kv"}
        return known.get(core, "qkv")
    if role == "up":
        is_gate = "gate" in called and "up" not in called
        return "gate" if is_gate or called in ("w1", "wi_0") else "up"
    if called in _HEADS:
        return "head"
    if called in ("gate", "router"):
        return "router"
    return "weight" if own in KERNELS else "other"
