"""Data parallelism, FSDP and tensor parallelism, as rules that need only shapes and names. No JAX.

A preset receives a leaf and its partition so far. It may shard dimensions that are still whole,
along axes that the leaf does not use. So presets combine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostraka.errors import InvalidSharding, nearest
from ostraka.layout.spec import MeshSpec, Partition
from ostraka.sharding.leaves import Leaves, ShapedLeaf
from ostraka.sharding.roles import Cut, find_cuts
from ostraka.sharding.rules import Fill, Preset

FSDP_AXES = ("fsdp", "data", "dp")
TENSOR_AXES = ("tp", "model", "tensor")
"""Names of axes that the presets look for if none is given. The first match wins."""


def data_parallel() -> Preset:
    """Keep the whole model on every device. Only the batches are sharded, `P("data")`.

    Returns:
        The preset.

    Example:
        >>> model = place(model, mesh, data_parallel())
    """
    return _DataParallel()


def fsdp(axis: str | None = None, *, min_size: int = 4096) -> Preset:
    """Shard every array along one axis, in its largest dimension that divides.

    Args:
        axis: The axis of the mesh. Default: the axis named `fsdp`, `data` or `dp`, or the only one.
        min_size: Arrays of fewer elements stay whole. So do arrays without a dimension that
            divides.

    Returns:
        The preset.

    Raises:
        InvalidSharding: When the preset is used: the mesh has no such axis.

    Example:
        >>> model = place(model, mesh, fsdp("data"))
    """
    return _Fsdp(axis, min_size)


def tensor_parallel(
    axis: str | None = None, *, column: Sequence[str] = (), row: Sequence[str] = ()
) -> Preset:
    """Shard layers as in Megatron-LM. They are known by their names and shapes.

    Projections into heads and hidden units (`query`, `q_proj`, `q_einsum`, `up_proj`, `wi_0`, …)
    are sharded along their output. Projections back (`out`, `o_proj`, `attn_vec_einsum`,
    `down_proj`, `wo`, …) are sharded along their input, and embeddings along the vocabulary. So
    each pair needs one exchange. Attention kernels of three dimensions are sharded along the heads,
    in any position. Layers with generic names (Linen's `Dense_0`) are matched by shape: if one
    layer's output size is the next one's input size, they are a pair. Biases follow their kernels.

    Dimensions that do not divide stay whole. So do keys and values with fewer heads than parts.
    `check` lists the large ones.

    Args:
        axis: The axis of the mesh. Default: the axis named `tp`, `model` or `tensor`, or the only
            one.
        column: More names of layers to shard along their output.
        row: More names of layers to shard along their input.

    Returns:
        The preset.

    Raises:
        InvalidSharding: When the preset is used: the mesh has no such axis, or no layer is known.

    Example:
        >>> model = place(model, mesh, fsdp("data") | tensor_parallel("model"))
    """
    return _TensorParallel(axis, tuple(column), tuple(row))


def _find_axis(given: str | None, usual: Sequence[str], mesh: MeshSpec, preset: str) -> str:
    if given is not None:
        if given not in mesh.axis_names:
            raise InvalidSharding(
                f"the rules cut along the axis {given!r}, which the mesh ({mesh}) does not have"
                f"{nearest(given, mesh.axis_names)}"
            )
        return given
    only = mesh.axis_names if len(mesh.axis_names) == 1 else ()
    found = next((axis for axis in (*usual, *only) if axis in mesh.axis_names), None)
    if found is None:
        raise InvalidSharding(
            f"{preset}() can't tell which axis of the mesh ({mesh}) to cut along, since none is "
            f"named {', '.join(usual[:-1])} or {usual[-1]}: name it, as in "
            f"{preset}({next(iter(mesh.axis_names), 'data')!r})"
        )
    return found


@dataclass(frozen=True, slots=True)
class _DataParallel(Preset):
    order = 2

    def axis_on(self, mesh: MeshSpec) -> str | None:
        return None

    def filler(self, leaves: Leaves, around: Leaves, mesh: MeshSpec) -> Fill:
        return lambda leaf, partition: partition


@dataclass(frozen=True, slots=True)
class _Fsdp(Preset):
    along: str | None
    min_size: int
    order = 1

    def axis_on(self, mesh: MeshSpec) -> str:
        return _find_axis(self.along, FSDP_AXES, mesh, "fsdp")

    def filler(self, leaves: Leaves, around: Leaves, mesh: MeshSpec) -> Fill:
        axis = self.axis_on(mesh)

        def fill(leaf: ShapedLeaf, partition: Partition) -> Partition:
            if leaf.elements < self.min_size or leaf.is_key:
                return partition
            by_size = sorted(range(len(leaf.shape)), key=lambda d: -leaf.shape[d])
            cuts = [Cut(dimension, leaf.shape[dimension]) for dimension in by_size]
            return _cut_first(mesh, partition, cuts, axis)

        return fill


@dataclass(frozen=True, slots=True)
class _TensorParallel(Preset):
    along: str | None
    column: tuple[str, ...]
    row: tuple[str, ...]
    order = 0

    def axis_on(self, mesh: MeshSpec) -> str:
        return _find_axis(self.along, TENSOR_AXES, mesh, "tensor_parallel")

    def filler(self, leaves: Leaves, around: Leaves, mesh: MeshSpec) -> Fill:
        axis = self.axis_on(mesh)
        cuts = find_cuts(around, column=self.column, row=self.row)
        kernels = [leaf for leaf in leaves if len(leaf.shape) > 1]
        if kernels and not any(leaf.path in cuts for leaf in leaves):
            raise InvalidSharding(
                "tensor_parallel knows none of the layers by name or shape, such as "
                f"{kernels[0].path!r} {kernels[0].shape}: name them with column= and row="
            )
        return lambda leaf, partition: _cut_first(mesh, partition, cuts.get(leaf.path, ()), axis)


def _cut_first(mesh: MeshSpec, partition: Partition, cuts: Sequence[Cut], axis: str) -> Partition:
    """Make the first possible cut: its dimension is whole and divides. An axis is used once."""
    if any(axis in axes for axes in partition):
        return partition
    parts = mesh.size_of((axis,))
    for cut in cuts:
        if not partition[cut.dimension] and cut.units and not cut.units % parts:
            return (*partition[: cut.dimension], (axis,), *partition[cut.dimension + 1 :])
    return partition
