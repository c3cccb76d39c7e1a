"""Which dimension of a layer tensor parallelism shards, by the role of the layer. No JAX.

The name of a layer usually says what it does. The width of the model, known from norms and
embeddings, tells its dimensions apart. So kernels of (D, N, H), (N, D, H), (L, D, N·H) and (N·H, D)
are all sharded along the heads. Layers with generic names are matched by their shapes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from ostraka.sharding.leaves import Leaves
from ostraka.tree.nodes import natural_order

# Names of layers, and of their arrays, in widely used models. No JAX.


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


Role = Literal["in", "out", "up", "down", "head", "embed", "relative"]
"""Into heads and back, into hidden units and back, to the vocabulary and from it, T5's bias."""

NAMES: dict[Role, frozenset[str]] = {
    "in": _words(
        """
        query key value q k v q_proj k_proj v_proj query_proj key_proj value_proj wq wk wv
        q_einsum k_einsum v_einsum kv_einsum qkv_einsum kv kv_proj wkv qkv qkv_proj wqkv
        query_key_value c_attn in_proj in_proj_qkv to_q to_k to_v to_qkv q_lin k_lin v_lin
        wq_b wkv_b q_b_proj kv_b_proj
        """
    ),
    "out": _words(
        "out o o_proj out_proj wo attn_out c_proj attn_vec_einsum o_einsum to_out out_lin"
    ),
    "up": _words(
        """
        up gate up_proj gate_proj gate_up_proj fc1 fc_in linear1 linear_1 dense1 linear_fc1 lin1
        wi wi_0 wi_1 w1 w3 c_fc dense_h_to_4h intermediate mlp_in ff_proj gating_einsum ffn_in
        w_in w_gate w_up pwconv1
        """
    ),
    "down": _words(
        """
        down down_proj fc2 fc_out linear2 linear_2 dense2 linear_fc2 lin2 w2 dense_4h_to_h mlp_out
        ff_out ffn_out w_out w_down pwconv2
        """
    ),
    "head": _words("lm_head unembed logits_dense logitdense embed_out output_projection"),
    "embed": _words(
        """
        embed embedding embeddings embedder embed_tokens tok_embeddings token_embedder
        token_embedding word_embeddings wte embed_in shared
        """
    ),
}
"""The usual names of the layers with each role."""
FUSED = _words("kv_einsum qkv_einsum kv kv_proj wkv qkv qkv_proj wqkv query_key_value to_qkv")
"""Layers with keys, values and perhaps queries in one kernel."""
GPT2 = ("c_attn", "c_fc", "c_proj")
KERNELS = frozenset({"kernel", "weight", "w"})
ARRAYS = KERNELS | {"embedding", "bias", "scale"}
"""The names of a layer's arrays."""

_BOXED = ARRAYS | NAMES["in"] | NAMES["out"] | NAMES["up"] | NAMES["down"]


def names_on(path: str) -> tuple[str, ...]:
    """Return the names on a path, without the one that Linen's boxes add."""
    names = path.split("/")
    if len(names) > 1 and names[-1] == "value" and names[-2] in _BOXED:
        names.pop()
    return tuple(names)


def is_norm(layer: str) -> bool:
    return "norm" in layer.lower() or re.fullmatch(r"ln(\w{1,2}|_\w+)?", layer.lower()) is not None


def is_norm_of_heads(layer: str) -> bool:
    """Return True if a norm is over heads, and so does not have the model's width."""
    found = re.search(r"(^|_)(q|k|v|kv|query|key|value|head)_?(layer)?norm", layer.lower())
    return found is not None


def is_of_positions(name: str) -> bool:
    """Return True if an embedding is of positions or types, and not of words."""
    return "pos" in name.lower() or "type" in name.lower() or name == "wpe"


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension to shard, and the most parts that it may have: heads stay whole."""

    dimension: int
    units: int


Cuts = dict[str, tuple[Cut, ...]]
"""The cuts of each leaf, by path, best first."""


def find_cuts(leaves: Leaves, *, column: Collection[str] = (), row: Collection[str] = ()) -> Cuts:
    """Return the cuts of each leaf that tensor parallelism shards."""
    return _Model(leaves, column, row).cuts()


def roles_of(leaves: Leaves) -> dict[str, Role | None]:
    """Return the role of the layer of each leaf, by path. None if its name does not tell."""
    return _Model(leaves, (), ()).roles()


@dataclass(frozen=True, slots=True)
class _NamedLeaf:
    """A leaf with the names on its path: above the layer, of the layer, and its own."""

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def own(self) -> str:
        """The name of the array in its layer. Empty for an array that is a layer by itself."""
        return self.names[-1] if len(self.names) > 1 and self.names[-1] in ARRAYS else ""

    @property
    def layer(self) -> str:
        return self.names[-2] if self.own else self.names[-1]

    @property
    def above(self) -> tuple[str, ...]:
        """The names above the layer's."""
        return self.names[:-2] if self.own else self.names[:-1]


class _Model:
    """The leaves of a tree, and properties of the whole model."""

    def __init__(self, leaves: Leaves, column: Collection[str], row: Collection[str]) -> None:
        self._leaves = [_NamedLeaf(leaf.path, leaf.shape, names_on(leaf.path)) for leaf in leaves]
        self._column = column
        self._row = row
        self._beside: dict[tuple[str, ...], dict[str, list[_NamedLeaf]]] = defaultdict(dict)
        for leaf in self._leaves:
            self._beside[leaf.above].setdefault(leaf.layer, []).append(leaf)

    def cuts(self) -> Cuts:
        found: Cuts = {}
        rest: list[_NamedLeaf] = []
        for leaf in self._leaves:
            if len(leaf.shape) < 2 or leaf.own in ("bias", "scale") or is_norm(leaf.layer):
                continue
            role = self._role(leaf)
            if role is not None:
                found[leaf.path] = self._cuts_of(leaf, role)
            elif leaf.own in KERNELS and leaf.layer not in ("gate", "router"):
                rest.append(leaf)
        found |= self._by_shape(rest)
        return found | self._separate_biases(found)

    # What a layer does

    def roles(self) -> dict[str, Role | None]:
        return {leaf.path: self._role(leaf) for leaf in self._leaves}

    def _role(self, leaf: _NamedLeaf) -> Role | None:
        layer = leaf.layer
        if layer in self._column:
            return "in" if layer in NAMES["in"] else "up"
        if layer in self._row:
            return "out" if layer in NAMES["out"] else "down"
        if layer == "relative_attention_bias":
            return "relative"
        if leaf.own == "embedding":
            return "embed"
        for name in (layer.lower().lstrip("_"), re.sub(r"_\d+$", "", layer.lower())):
            role = self._role_of_name(name, leaf)
            if role is not None:
                return role
        return "embed" if not leaf.own and "embed" in layer and len(leaf.shape) == 2 else None

    def _role_of_name(self, name: str, leaf: _NamedLeaf) -> Role | None:
        above = leaf.above[-1].lower() if leaf.above else ""
        beside = self._beside[leaf.above]
        in_attention = "attn" in above or "attention" in above
        if name == "dense" and above == "intermediate":  # BERT
            return "up"
        if name == "dense" and above == "output":  # BERT
            return "out" if "attention" in "".join(leaf.above[-2:-1]).lower() else "down"
        if name in ("dense", "proj", "projection"):
            return "out" if in_attention else None
        if name == "linear":
            return "down" if "gating_einsum" in beside else None
        if name == "gate" and self._is_router(leaf):
            return None
        if name in NAMES["out"]:
            return "down" if not in_attention and NAMES["up"] & beside.keys() else "out"
        return next((role for role, names in NAMES.items() if name in names), None)

    def _is_router(self, leaf: _NamedLeaf) -> bool:
        """Return True if a layer chooses among experts, which are beside it or stacked there."""
        beside = self._beside[leaf.above]
        experts = [other for name in NAMES["up"] - {"gate"} for other in beside.get(name, ())]
        return (
            (*leaf.above, "experts") in self._branches
            or "experts" in beside
            or any(len(other.shape) > len(leaf.shape) for other in experts if other.own != "bias")
        )

    @cached_property
    def _branches(self) -> set[tuple[str, ...]]:
        return {leaf.names[:end] for leaf in self._leaves for end in range(1, len(leaf.names))}

    # Which dimension that is

    def _cuts_of(self, leaf: _NamedLeaf, role: Role) -> tuple[Cut, ...]:
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
        dimension = core[self._hidden_place(leaf, role, sizes, width)]
        return (Cut(dimension, self._units(leaf, role, leaf.shape[dimension], len(core))),)

    def _hidden_place(
        self, leaf: _NamedLeaf, role: Role, sizes: Sequence[int], width: int | None
    ) -> int:
        """Return the position of heads, hidden units or words among a kernel's dimensions."""
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
            # Hugging Face's Flax GPT-2 has the outputs of these layers first.
            beside = self._beside[leaf.above]
            kernels = [other for name in GPT2[:2] for other in beside.get(name, ())]
            is_turned = layer in GPT2 and any(
                len(other.shape) == 2 and other.shape[0] > other.shape[1] for other in kernels
            )
            return int((role in ("in", "up")) != is_turned)
        narrow = next((place for place in places if sizes[place] == width), places[0])
        rest = [place for place in range(last + 1) if place != narrow]
        if role == "in" and last == 2 and narrow == 1 and "einsum" not in layer and not self._norms:
            return last  # nothing tells heads from stacked layers, and these are more common
        if role not in ("in", "out") or len(rest) == 1:
            return rest[-1]
        of_parts = layer in FUSED and len(rest) == 2 and sizes[rest[0]] in (2, 3)
        return rest[-1] if of_parts else rest[-2]

    def _is_stacked_flat(self, leaf: _NamedLeaf) -> bool:
        """Return True if a bias says that the first of three dimensions counts layers."""
        beside, shape = self._beside[leaf.above][leaf.layer], leaf.shape
        biases = {other.shape for other in beside if other.own == "bias"}
        return len(shape) == 3 and shape[0] != shape[1] and (shape[0], shape[2]) in biases

    def _units(self, leaf: _NamedLeaf, role: Role, size: int, rank: int) -> int:
        """Return the number of heads in a dimension that has all of them, if it is known."""
        if role not in ("in", "out") or rank > 2:
            return size
        beside = self._beside[leaf.above].items()
        norms = [o.shape[-1] for name, others in beside if is_norm_of_heads(name) for o in others]
        return size // norms[0] if norms and not size % norms[0] else size

    # The width of the model

    def _width(self, leaf: _NamedLeaf) -> tuple[int | None, int | None]:
        """Return the model's width around a leaf, and the dimension that counts stacked layers.

        The nearest norms have the width, and the number of layers if they are stacked.
        """
        for end in range(len(leaf.above), -1, -1):
            shapes = self._norms.get(leaf.above[:end])
            if not shapes:
                continue
            norm = shapes.most_common(1)[0][0]
            if len(norm) == 1:
                return norm[0], None
            # MaxText stacks along the second dimension, others along the first.
            axis = 1 if norm[0] in self._widths and norm[1] not in self._widths else 0
            is_stacked = len(leaf.shape) > axis and leaf.shape[axis] == norm[axis]
            return norm[1 - axis], axis if is_stacked else None
        widths = {shape[-1] for shape in self._tables}
        return (widths.pop() if len(widths) == 1 else None), None

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

    def _by_shape(self, leaves: Sequence[_NamedLeaf]) -> Cuts:
        found: Cuts = {}
        together: dict[tuple[str, ...], list[_NamedLeaf]] = defaultdict(list)
        words = {shape[0] for shape in self._tables}
        for leaf in leaves:
            width, stacked = self._width(leaf)
            if len(leaf.shape) == 2 and leaf.shape[0] == width and leaf.shape[1] in words:
                found[leaf.path] = (Cut(1, leaf.shape[1]),)
            elif len(leaf.shape) - (stacked is not None) in (2, 3):
                together[leaf.above].append(leaf)
        for group in together.values():
            group.sort(key=lambda leaf: natural_order(leaf.layer))
            found |= self._attention_by_shape(group)
            found |= self._chains(group)
        return found

    def _attention_by_shape(self, group: Sequence[_NamedLeaf]) -> Cuts:
        """Return the cuts of kernels of (D, N, H) beside one of (N, H, D)."""
        found: Cuts = {}
        for leaf in group:
            if len(leaf.shape) != 3:
                continue
            width, heads, size = leaf.shape
            back = [o for o in group if o.shape == (heads, size, width) and o is not leaf]
            if back and width == self._width(leaf)[0]:
                found[leaf.path] = (Cut(1, heads),)
                found |= {other.path: (Cut(0, heads),) for other in back}
        return found

    def _chains(self, group: Sequence[_NamedLeaf]) -> Cuts:
        """Return the cuts of pairs whose sizes fit each other: Dense_0 and Dense_1."""
        found: Cuts = {}
        pairs = pairwise(group)
        for first, second in pairs:
            ordered = self._as_pair(first, second)
            if ordered is None:
                continue
            into, back = ordered
            last = len(into.shape) - 1
            found[into.path] = (Cut(last, into.shape[last]),)
            found[back.path] = (Cut(last - 1, back.shape[last - 1]),)
            next(pairs, None)  # the second has its partner
        return found

    def _as_pair(
        self, first: _NamedLeaf, second: _NamedLeaf
    ) -> tuple[_NamedLeaf, _NamedLeaf] | None:
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

    def _separate_biases(self, cuts: Cuts) -> Cuts:
        """Return the cuts of `q_bias` beside `q_proj`, `wi_0_bias` beside `wi_0`."""
        found: Cuts = {}
        for leaf in self._leaves:
            stem = leaf.layer.removesuffix("_bias")
            if leaf.own or stem == leaf.layer or not leaf.shape:
                continue
            beside = self._beside[leaf.above]
            kernels = [k for name in (f"{stem}_proj", stem) for k in beside.get(name, ())]
            kernel = next((k for k in kernels if k.path in cuts), None)
            if kernel is None or self._role(kernel) not in ("in", "up", "head"):
                continue
            units = cuts[kernel.path][0].units
            last = len(leaf.shape) - 1
            dimension = last - 1 if last and leaf.shape[last - 1] == units else last
            if not leaf.shape[dimension] % units:
                found[leaf.path] = (Cut(dimension, units),)
        return found
