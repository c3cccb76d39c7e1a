"""Data parallelism, FSDP and tensor parallelism as rules that need no more than shapes and names.

A preset fills in what is left open: it is given what is settled of a leaf's spec, and may cut
dimensions that are still whole, along axes that the leaf does not use. Thus presets combine.
No JAX.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostraka._spec import MeshSpec, Partition
from ostraka.errors import InvalidSharding, nearest
from ostraka.sharding._leaf import ShapedLeaf


class Preset(ABC):
    """A way to shard a model. `a | b` is both: `fsdp("data") | tensor_parallel("model")`."""

    __slots__ = ()

    order: int
    """Those that go by names come before those that take what is left."""

    @property
    @abstractmethod
    def axis(self) -> str | None:
        """The mesh axis that it cuts along."""

    @abstractmethod
    def fill(self, leaf: ShapedLeaf, partition: Partition, mesh: MeshSpec) -> Partition:
        """The leaf's partition, with more of it settled."""

    def knows(self, leaf: ShapedLeaf) -> bool:
        """Whether the preset has something to say of this leaf, fitting or not."""
        return True

    def __or__(self, other: Any) -> Any:
        from ostraka.sharding._combine import combine

        return combine(self, other)

    def __ror__(self, other: Any) -> Any:
        from ostraka.sharding._combine import combine

        return combine(other, self)


def data_parallel() -> Preset:
    """The whole model on every device; only the batches are cut, `P("data")`."""
    return _DataParallel()


def fsdp(axis: str = "data", *, min_size: int = 4096) -> Preset:
    """Every array is cut along one axis, in the largest dimension that divides.

    Arrays of fewer than `min_size` elements, or without such a dimension, stay whole.
    """
    return _Fsdp(axis, min_size)


def tensor_parallel(
    axis: str = "model", *, column: Sequence[str] = (), row: Sequence[str] = ()
) -> Preset:
    """Layers cut as in Megatron-LM, known by their names.

    Projections into heads and hidden units (`query`, `q_proj`, `up_proj`, `fc1`, `wi`, …) are cut
    in their output, the ones back (`out`, `o_proj`, `down_proj`, `fc2`, `wo`, …) in their input,
    embeddings in the vocabulary, so that each pair needs one exchange. Attention kernels of three
    dimensions are cut by heads. Biases follow their kernels. What does not divide stays whole.
    `column` and `row` are further names of layers of the two kinds.
    """
    return _TensorParallel(axis, tuple(column), tuple(row))


def check_axis(preset: Preset, mesh: MeshSpec) -> None:
    if preset.axis is not None and preset.axis not in mesh.axis_names:
        raise InvalidSharding(
            f"the rules cut along the axis {preset.axis!r}, which the mesh ({mesh}) does not have"
            f"{nearest(preset.axis, mesh.axis_names)}"
        )


@dataclass(frozen=True, slots=True)
class _DataParallel(Preset):
    order = 2

    @property
    def axis(self) -> str | None:
        return None

    def fill(self, leaf: ShapedLeaf, partition: Partition, mesh: MeshSpec) -> Partition:
        return partition


@dataclass(frozen=True, slots=True)
class _Fsdp(Preset):
    along: str
    min_size: int
    order = 1

    @property
    def axis(self) -> str | None:
        return self.along

    def fill(self, leaf: ShapedLeaf, partition: Partition, mesh: MeshSpec) -> Partition:
        if leaf.elements < self.min_size or leaf.is_key:
            return partition
        by_size = sorted(range(len(leaf.shape)), key=lambda d: -leaf.shape[d])
        return _cut_first(leaf, partition, by_size, self.along, mesh)


# Flax's own names, and those of well-known models.
_ATTENTION_IN = (
    *("query", "key", "value", "q", "k", "v", "q_proj", "k_proj", "v_proj", "wq", "wk", "wv"),
    *("qkv", "qkv_proj", "wqkv", "query_key_value", "c_attn", "in_proj"),
)
_ATTENTION_OUT = ("out", "o_proj", "out_proj", "wo", "attn_out", "c_proj")
_MLP_IN = (
    *("up", "gate", "up_proj", "gate_proj", "gate_up_proj", "fc1", "fc_in", "linear1", "dense1"),
    *("wi", "wi_0", "wi_1", "w1", "w3", "c_fc", "dense_h_to_4h", "intermediate", "mlp_in"),
)
_MLP_OUT = (
    *("down", "down_proj", "fc2", "fc_out", "linear2", "dense2"),
    *("w2", "dense_4h_to_h", "mlp_out"),
)
_COLUMN = frozenset({*_ATTENTION_IN, *_MLP_IN, "lm_head", "unembed"})
_ROW = frozenset({*_ATTENTION_OUT, *_MLP_OUT})
_BY_HEADS = frozenset({"query", "key", "value", "out"})
_EMBEDDINGS = frozenset(
    {"embed", "embedding", "embeddings", "embed_tokens", "tok_embeddings", "wte"}
)
_PARAMETERS = frozenset({"kernel", "weight", "w", "embedding"})


@dataclass(frozen=True, slots=True)
class _TensorParallel(Preset):
    along: str
    column: tuple[str, ...]
    row: tuple[str, ...]
    order = 0

    @property
    def axis(self) -> str | None:
        return self.along

    def knows(self, leaf: ShapedLeaf) -> bool:
        return bool(self._dimensions(leaf))

    def fill(self, leaf: ShapedLeaf, partition: Partition, mesh: MeshSpec) -> Partition:
        return _cut_first(leaf, partition, self._dimensions(leaf), self.along, mesh)

    def _dimensions(self, leaf: ShapedLeaf) -> tuple[int, ...]:
        """The dimensions to cut, best first."""
        names = leaf.path.split("/")
        rank = len(leaf.shape)
        if rank < 2 or names[-1] in ("bias", "scale"):
            return ()
        if names[-1] == "embedding":
            return rank - 2, rank - 1
        layer = names[-2] if names[-1] in _PARAMETERS and len(names) > 1 else names[-1]
        # Dimensions before those of the kernel itself are stacked layers.
        first = rank - (3 if layer in _BY_HEADS and rank > 2 else 2)
        if layer in self.column or (layer in _COLUMN and layer not in self.row):
            return (first + 1,)
        if layer in self.row or layer in _ROW:
            return (first,)
        return (rank - 2, rank - 1) if layer in _EMBEDDINGS else ()


def _cut_first(
    leaf: ShapedLeaf, partition: Partition, dimensions: Sequence[int], axis: str, mesh: MeshSpec
) -> Partition:
    """Cut the first of the dimensions that is whole and divides, if the axis is not used yet."""
    if any(axis in axes for axes in partition):
        return partition
    parts = mesh.size_of((axis,))
    for dimension in dimensions:
        if not partition[dimension] and leaf.shape[dimension] and not leaf.shape[dimension] % parts:
            return (*partition[:dimension], (axis,), *partition[dimension + 1 :])
    return partition
