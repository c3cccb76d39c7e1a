"""Which dimension of a layer tensor parallelism cuts, by what the layer is for. No JAX.

A layer's name says what it does, where it says anything; the width of the model, known from norms
and embeddings, says which of its dimensions are which, so that kernels of (D, N, H), (N, D, H),
(L, D, N·H) and (N·H, D) are all cut by heads. Layers whose names say nothing go by their shapes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from ostraka.sharding._layer_names import (
    ARRAYS,
    FUSED,
    GPT2,
    INTO_HEADS,
    INTO_HIDDEN,
    INTO_WORDS,
    KERNELS,
    OUT_OF_HEADS,
    OUT_OF_HIDDEN,
    OUT_OF_WORDS,
    is_norm,
    is_norm_of_heads,
    is_of_positions,
    names_on,
    natural_order,
)
from ostraka.sharding._leaf import ShapedLeaf

Role = Literal["in", "out", "up", "down", "head", "embed", "relative"]
"""Into heads and back, into hidden units and back, to the vocabulary and from it; T5's bias."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension to cut, and how many pieces it may be cut into at most: heads stay whole."""

    dimension: int
    units: int


def find_cuts(
    leaves: Sequence[ShapedLeaf], *, column: Collection[str] = (), row: Collection[str] = ()
) -> dict[str, tuple[Cut, ...]]:
    """By path, the cuts of each leaf that has a part in tensor parallelism, best first."""
    return _Model(leaves, frozenset(column), frozenset(row)).cuts()


@dataclass(frozen=True, slots=True)
class _Named:
    """A leaf with the names on its path: of its layer, of what the layer is in, and its own."""

    leaf: ShapedLeaf
    names: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.shape

    @property
    def own(self) -> str:
        """What the layer calls the array; empty for an array that is a layer by itself."""
        return self.names[-1] if len(self.names) > 1 and self.names[-1] in ARRAYS else ""

    @property
    def layer(self) -> str:
        return self.names[-2] if self.own else self.names[-1]

    @property
    def above(self) -> tuple[str, ...]:
        """The names above the layer's."""
        return self.names[:-2] if self.own else self.names[:-1]


class _Model:
    """The leaves of a tree, with what follows from looking at them together."""

    def __init__(
        self, leaves: Sequence[ShapedLeaf], column: frozenset[str], row: frozenset[str]
    ) -> None:
        self._leaves = [_Named(leaf, names_on(leaf.path)) for leaf in leaves]
        self._column = column
        self._row = row
        self._beside: dict[tuple[str, ...], dict[str, list[_Named]]] = defaultdict(dict)
        for leaf in self._leaves:
            self._beside[leaf.above].setdefault(leaf.layer, []).append(leaf)

    def cuts(self) -> dict[str, tuple[Cut, ...]]:
        found: dict[str, tuple[Cut, ...]] = {}
        rest: list[_Named] = []
        for leaf in self._leaves:
            if len(leaf.shape) < 2 or leaf.own in ("bias", "scale") or is_norm(leaf.layer):
                continue
            role = self._role(leaf)
            if role is not None:
                found[leaf.leaf.path] = self._cuts_of(leaf, role)
            elif leaf.own in KERNELS and leaf.layer not in ("gate", "router"):
                rest.append(leaf)
        found |= self._by_shape(rest)
        return found | dict(self._separate_biases(found))

    # What a layer does

    def _role(self, leaf: _Named) -> Role | None:
        layer = leaf.layer
        if layer in self._column or layer in self._row:
            return self._role_given(layer)
        if layer == "relative_attention_bias":
            return "relative"
        if leaf.own == "embedding":
            return "embed"
        for name in (layer.lower().lstrip("_"), re.sub(r"_\d+$", "", layer.lower())):
            role = self._role_of_name(name, leaf)
            if role is not None:
                return role
        return "embed" if not leaf.own and "embed" in layer and len(leaf.shape) == 2 else None

    def _role_given(self, layer: str) -> Role:
        if layer in self._column:
            return "in" if layer in INTO_HEADS else "up"
        return "out" if layer in OUT_OF_HEADS else "down"

    def _role_of_name(self, name: str, leaf: _Named) -> Role | None:
        above = leaf.above[-1].lower() if leaf.above else ""
        beside = self._beside[leaf.above]
        in_attention = "attn" in above or "attention" in above
        if name == "dense":  # BERT, GPT-NeoX
            return _role_of_dense(leaf.above, in_attention=in_attention)
        if name in ("proj", "projection"):
            return "out" if in_attention else None
        if name == "linear":
            return "down" if "gating_einsum" in beside else None
        if name == "gate" and self._is_router(leaf):
            return None
        if name in OUT_OF_HEADS:
            return "down" if not in_attention and INTO_HIDDEN & beside.keys() else "out"
        tables: tuple[tuple[frozenset[str], Role], ...] = (
            (INTO_HEADS, "in"),
            (INTO_HIDDEN, "up"),
            (OUT_OF_HIDDEN, "down"),
            (INTO_WORDS, "head"),
            (OUT_OF_WORDS, "embed"),
        )
        return next((role for names, role in tables if name in names), None)

    def _is_router(self, leaf: _Named) -> bool:
        """Whether a layer chooses among experts, which lie beside it or are stacked there."""
        beside = self._beside[leaf.above]
        experts = [other for name in INTO_HIDDEN - {"gate"} for other in beside.get(name, ())]
        return (
            (*leaf.above, "experts") in self._branches
            or "experts" in beside
            or any(len(other.shape) > len(leaf.shape) for other in experts if other.own != "bias")
        )

    @cached_property
    def _branches(self) -> set[tuple[str, ...]]:
        return {leaf.names[:end] for leaf in self._leaves for end in range(1, len(leaf.names))}

    # Which dimension that is

    def _cuts_of(self, leaf: _Named, role: Role) -> tuple[Cut, ...]:
        rank = len(leaf.shape)
        if role == "embed":
            return tuple(Cut(d, leaf.shape[d]) for d in (rank - 2, rank - 1))
        if role == "relative":
            return (Cut(rank - 1, leaf.shape[rank - 1]),)
        width, stacked = self._width(leaf)
        core = [d for d in range(rank) if d != stacked]
        if len(core) < 2:
            return ()
        if leaf.layer in self._column or leaf.layer in self._row:
            width = None  # the caller has said which side it is
        sizes = [leaf.shape[d] for d in core]
        place = self._hidden_place(leaf, role, sizes, width)
        dimension = core[place]
        return (Cut(dimension, self._units(leaf, role, leaf.shape[dimension], len(core))),)

    def _hidden_place(
        self, leaf: _Named, role: Role, sizes: Sequence[int], width: int | None
    ) -> int:
        """The place of the heads, hidden units or words among the dimensions of a kernel."""
        last = len(sizes) - 1
        layer = leaf.layer.lower()
        # Where the width may be, the usual place first.
        places = {
            "in": (last - 1, 0, last) if "einsum" in layer else (0, last - 1, last),
            "out": (last, 0),
            "up": (last - 1, 0, last),
            "head": (last - 1, 0, last),
            "down": (last, last - 1, 0),
        }[role]
        if role in ("in", "out") and self._is_stacked_flat(leaf):
            return last if role == "in" else last - 1
        if last == 1 and role != "head":
            is_turned = layer in GPT2 and self._is_transposed(leaf)
            return int((role in ("in", "up")) != is_turned)
        narrow = next((place for place in places if sizes[place] == width), places[0])
        rest = [place for place in range(last + 1) if place != narrow]
        if role == "in" and last == 2 and narrow == 1 and "einsum" not in layer and not self._norms:
            return last  # nothing tells heads from stacked layers, and these are more common
        if role not in ("in", "out") or len(rest) == 1:
            return rest[-1]
        of_parts = layer in FUSED and len(rest) == 2 and sizes[rest[0]] in (2, 3)
        return rest[-1] if of_parts else rest[-2]

    def _is_stacked_flat(self, leaf: _Named) -> bool:
        """Whether a bias says that the first of three dimensions counts layers."""
        biases = [other for other in self._beside[leaf.above][leaf.layer] if other.own == "bias"]
        shape = leaf.shape
        return (
            len(shape) == 3
            and any(other.shape == (shape[0], shape[2]) for other in biases)
            and shape[0] != shape[1]
        )

    def _is_transposed(self, leaf: _Named) -> bool:
        """Whether these layers have their outputs first, as Hugging Face's GPT-2 for Flax."""
        beside = self._beside[leaf.above]
        kernels = [other for name in GPT2[:2] for other in beside.get(name, ())]
        return any(len(o.shape) == 2 and o.shape[0] > o.shape[1] for o in kernels)

    def _units(self, leaf: _Named, role: Role, size: int, rank: int) -> int:
        """How many heads there are in a dimension that has all of them, where that is known."""
        if role not in ("in", "out") or rank > 2:
            return size
        norms = [
            other.shape[-1]
            for name, others in self._beside[leaf.above].items()
            if is_norm_of_heads(name)
            for other in others
        ]
        known = norms and not size % norms[0]
        return size // norms[0] if known else size

    # The width of the model

    def _width(self, leaf: _Named) -> tuple[int | None, int | None]:
        """The model's width where the leaf is, and the dimension that counts stacked layers.

        Norms have the width, and the number of layers if they are stacked; the nearest count.
        """
        for end in range(len(leaf.above), -1, -1):
            shapes = self._norms.get(leaf.above[:end])
            if shapes:
                return self._read_norm(shapes.most_common(1)[0][0], leaf.shape)
        widths = {shape[-1] for shape in self._tables}
        return (widths.pop() if len(widths) == 1 else None), None

    def _read_norm(
        self, norm: tuple[int, ...], shape: tuple[int, ...]
    ) -> tuple[int | None, int | None]:
        if len(norm) == 1:
            return norm[0], None
        # MaxText stacks along the second dimension, others along the first.
        axis = 1 if norm[0] in self._widths and norm[1] not in self._widths else 0
        is_stacked = len(shape) > axis and shape[axis] == norm[axis]
        return norm[1 - axis], axis if is_stacked else None

    @cached_property
    def _norms(self) -> dict[tuple[str, ...], Counter[tuple[int, ...]]]:
        """The shapes of all norms below each name."""
        found: dict[tuple[str, ...], Counter[tuple[int, ...]]] = defaultdict(Counter)
        for leaf in self._leaves:
            is_wanted = leaf.own != "bias" and len(leaf.shape) in (1, 2)
            if is_wanted and is_norm(leaf.layer) and not is_norm_of_heads(leaf.layer):
                for end in range(len(leaf.above) + 1):
                    found[leaf.above[:end]][leaf.shape] += 1
        return found

    @cached_property
    def _tables(self) -> list[tuple[int, ...]]:
        """The shapes of the embeddings of words."""
        return [
            leaf.shape
            for leaf in self._leaves
            if len(leaf.shape) == 2
            and self._role(leaf) == "embed"
            and not any(map(is_of_positions, leaf.names[-2:]))
        ]

    @cached_property
    def _widths(self) -> set[int]:
        norms = (shape for shapes in self._norms.values() for shape in shapes)
        return {shape[0] for shape in norms if len(shape) == 1} | {s[-1] for s in self._tables}

    # Layers whose names say nothing

    def _by_shape(self, leaves: Sequence[_Named]) -> dict[str, tuple[Cut, ...]]:
        found: dict[str, tuple[Cut, ...]] = {}
        together: dict[tuple[str, ...], list[_Named]] = defaultdict(list)
        words = {shape[0] for shape in self._tables}
        for leaf in leaves:
            width, stacked = self._width(leaf)
            if len(leaf.shape) == 2 and leaf.shape[0] == width and leaf.shape[1] in words:
                found[leaf.leaf.path] = (Cut(1, leaf.shape[1]),)
            elif len(leaf.shape) - (stacked is not None) in (2, 3):
                together[leaf.above].append(leaf)
        for group in together.values():
            group.sort(key=lambda leaf: natural_order(leaf.layer))
            found |= self._attention_by_shape(group)
            found |= self._chains(group)
        return found

    def _attention_by_shape(self, group: Sequence[_Named]) -> dict[str, tuple[Cut, ...]]:
        """Kernels of (D, N, H) beside one of (N, H, D)."""
        found: dict[str, tuple[Cut, ...]] = {}
        for leaf in group:
            if len(leaf.shape) != 3:
                continue
            width, heads, size = leaf.shape
            back = [o for o in group if o.shape == (heads, size, width) and o is not leaf]
            if back and width == self._width(leaf)[0]:
                found[leaf.leaf.path] = (Cut(1, heads),)
                found |= {other.leaf.path: (Cut(0, heads),) for other in back}
        return found

    def _chains(self, group: Sequence[_Named]) -> dict[str, tuple[Cut, ...]]:
        """Pairs of kernels of which one takes what the other gives: Dense_0 and Dense_1."""
        found: dict[str, tuple[Cut, ...]] = {}
        pairs = pairwise(group)
        for first, second in pairs:
            ordered = self._as_pair(first, second)
            if ordered is None:
                continue
            into, back = ordered
            last = len(into.shape) - 1
            found[into.leaf.path] = (Cut(last, into.shape[last]),)
            found[back.leaf.path] = (Cut(last - 1, back.shape[last - 1]),)
            next(pairs, None)  # the second has its partner
        return found

    def _as_pair(self, first: _Named, second: _Named) -> tuple[_Named, _Named] | None:
        width, stacked = self._width(first)
        core = 2 + (stacked is not None)
        if not len(first.shape) == len(second.shape) == core or stacked == 1:
            return None
        if first.shape[:-2] != second.shape[:-2]:
            return None
        forth = first.shape[-1] == second.shape[-2]
        back = second.shape[-1] == first.shape[-2]
        # Without numbers the order of the names says little: what is hidden is not the width.
        if back and (not forth or (first.shape[-1] == width and second.shape[-1] != width)):
            return second, first
        return (first, second) if forth else None

    # Biases that are not in their layer

    def _separate_biases(
        self, cuts: dict[str, tuple[Cut, ...]]
    ) -> Iterator[tuple[str, tuple[Cut, ...]]]:
        """`q_bias` beside `q_proj`, `wi_0_bias` beside `wi_0`."""
        for leaf in self._leaves:
            stem = leaf.layer.removesuffix("_bias")
            if leaf.own or stem == leaf.layer or not leaf.shape:
                continue
            beside = self._beside[leaf.above]
            kernels = [k for name in (f"{stem}_proj", stem) for k in beside.get(name, ())]
            kernel = next((k for k in kernels if k.leaf.path in cuts), None)
            if kernel is None or self._role(kernel) not in ("in", "up", "head"):
                continue
            units = cuts[kernel.leaf.path][0].units
            last = len(leaf.shape) - 1
            dimension = last - 1 if last and leaf.shape[last - 1] == units else last
            if not leaf.shape[dimension] % units:
                yield leaf.leaf.path, (Cut(dimension, units),)


def _role_of_dense(above: Sequence[str], *, in_attention: bool) -> Role | None:
    parent = above[-1].lower() if above else ""
    if parent == "intermediate":
        return "up"
    if parent == "output":
        return "out" if len(above) > 1 and "attention" in above[-2].lower() else "down"
    return "out" if in_attention else None
