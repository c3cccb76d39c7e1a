"""A state to be planned, as plain data, that of a model by its config, and meshes. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import numpy as np

from ostraka.common.dtypes import DTYPES
from ostraka.common.threads import paused_gc
from ostraka.errors import InvalidSharding, nearest
from ostraka.families.families import dtype_of, parameters_of
from ostraka.layout.codec import CompressRule
from ostraka.layout.plan_write import MAX_FILE_BYTES
from ostraka.layout.spec import LeafSpec, MeshSpec, Partition
from ostraka.planner.rules import read_rules, resolve_rules
from ostraka.reading.names.given import NamesLike
from ostraka.sharding.findings import Finding
from ostraka.sharding.leaves import cut_as, kept_dimensions, without_trailing
from ostraka.tree.nodes import nest

SAMPLED_PROCESSES = 2
"""The number of processes to compute if all would take long: the first and the last."""

ONE_DEVICE = MeshSpec((), (), (0,))

_MOST_DEVICES = 1 << 20
_DEVICES_PER_HOST = 8
_USUAL_AXES = ("data", "model")


@dataclass(frozen=True, slots=True)
class State:
    """Everything that decides what a save writes."""

    leaves: tuple[LeafSpec, ...]
    meshes: tuple[MeshSpec, ...]
    process_of: tuple[int, ...]
    tree: Any
    """The tree as `_METADATA` will have it."""
    parameters: int | None = None
    """The number of the model's parameters, if it is known which leaves they are."""
    user: Mapping[str, Any] = field(default_factory=dict[str, Any])
    findings: tuple[Finding, ...] = ()
    adds_optimizer: bool = False
    """True if the optimizer's state is what optax would make, rather than an existing one."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The arguments of `plan`."""

    mesh: MeshSpec | None = None
    hosts: int | None = None
    rules: Any = None
    """Specs or rules of `ostraka.sharding`, or the text of `--rules`."""
    optimizer: Any = None
    dtype: Any = None
    optimizer_dtype: Any = None
    max_file_bytes: int = MAX_FILE_BYTES
    metadata: Mapping[str, Any] | None = None
    compress: CompressRule = None
    parity: int = 0
    names: NamesLike | None = None
    """Names for the tensors of files. Only for a checkpoint."""

    @property
    def adds_optimizer(self) -> bool:
        """True if the state of an optimizer is added to the tree."""
        return self.optimizer is not None and self.optimizer != "none"


def target_mesh(mesh: Any) -> MeshSpec:
    """A mesh as data. Axis sizes and an abstract mesh are over the devices 0, 1, …"""
    if isinstance(mesh, MeshSpec):
        return mesh
    if isinstance(mesh, Mapping):
        sizes = cast("Mapping[Any, int]", mesh)
        return mesh_of_sizes({str(name): size for name, size in sizes.items()})
    if isinstance(mesh, tuple | list | int):
        _refuse_nameless(mesh)
    from jax.sharding import AbstractMesh, Mesh

    from ostraka.live.shardings import Devices, describe_mesh

    if isinstance(mesh, AbstractMesh):
        return describe_abstract(mesh)
    if isinstance(mesh, Mesh):
        return describe_mesh(mesh, Devices())
    raise TypeError(
        f"mesh is a {type(mesh).__name__}; it must be a jax.sharding.Mesh, an AbstractMesh, or a "
        'mapping of axis sizes such as {"data": 4}'
    )


def describe_abstract(mesh: Any) -> MeshSpec:
    """An abstract mesh of JAX as data."""
    types = tuple(str(axis_type.name).lower() for axis_type in mesh.axis_types)
    sizes: dict[str, int] = {str(name): size for name, size in mesh.shape.items()}
    return mesh_of_sizes(sizes, () if set(types) <= {"auto"} else types)


def _refuse_nameless(mesh: Any) -> None:
    sizes = [mesh] if isinstance(mesh, int) else list(cast("Sequence[Any]", mesh))
    names = [*_USUAL_AXES, *(f"axis{n}" for n in range(len(_USUAL_AXES), len(sizes)))]
    named = ", ".join(f'"{name}": {size}' for name, size in zip(names, sizes, strict=False))
    raise TypeError(
        f"mesh is {mesh!r}, sizes without names; name the axes, such as mesh={{{named}}}"
    )


def mesh_of_sizes(sizes: Mapping[str, int], axis_types: Sequence[str] = ()) -> MeshSpec:
    """A mesh over the devices 0, 1, … in row-major order."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
            raise ValueError(
                f"the mesh axis {name!r} has the size {size!r}; it must be an integer, at least 1"
            )
    sizes = {name: int(size) for name, size in sizes.items()}
    count = prod(sizes.values())
    if count > _MOST_DEVICES:
        raise ValueError(
            f"the mesh has {count:,} devices; at most {_MOST_DEVICES:,} can be planned for"
        )
    return MeshSpec(tuple(sizes), tuple(sizes.values()), tuple(range(count)), tuple(axis_types))


def host_count(mesh: MeshSpec, hosts: int | None) -> int:
    """The number of hosts. Without one, hosts have eight devices."""
    if hosts is not None:
        return hosts
    count, rest = divmod(len(mesh.devices), _DEVICES_PER_HOST)
    return 1 if rest else count


def share_devices(devices: int, processes: int) -> tuple[int, ...]:
    """The process of each device: as many devices for each, one after the other."""
    if processes < 1 or devices % processes:
        close = [n for n in range(1, devices + 1) if devices % n == 0]
        closest = min(close, key=lambda n: (abs(n - processes), n))
        raise InvalidSharding(
            f"{devices:,} devices do not divide evenly among {processes:,} processes; the nearest "
            f"number that does is {closest:,}"
        )
    each = devices // processes
    return tuple(device // each for device in range(devices))


# A model by its config, with an optimizer of optax

OptimizerLeaf = tuple[str, tuple[int, ...], str, str | None]
"""Path, shape, dtype, and the path of the parameter that it belongs to."""

OPTIMIZERS = ("adam", "adamw", "sgd", "adafactor", "lion", "none")
_MOMENTS = {
    "adam": ("mu", "nu"),
    "adamw": ("mu", "nu"),
    "lion": ("mu",),
    "adafactor": ("v", "v_col", "v_row"),
}
_FACTORED_FROM = 128
"""Adafactor keeps rows and columns if both have at least this size."""


def optimizer_leaves(
    name: str, parameters: Sequence[tuple[str, tuple[int, ...]]], dtype: str
) -> list[OptimizerLeaf]:
    """The leaves below `optimizer/`, in the order of `nnx.State`. None for "none"."""
    if name not in OPTIMIZERS:
        raise ValueError(
            f"there is no optimizer {name!r}{nearest(name, OPTIMIZERS)}; those there are: "
            f"{', '.join(OPTIMIZERS)}"
        )
    if name == "none":
        return []
    step: OptimizerLeaf = ("step", (), "uint32", None)
    if name == "sgd":
        return [step]
    count: OptimizerLeaf = ("opt_state/0/count", (), "int32", None)
    moments = [
        (f"opt_state/0/{moment}/{path}", shape, dtype, path)
        for moment in _MOMENTS[name]
        for path, whole in parameters
        for shape in [factored_shapes(whole)[moment] if name == "adafactor" else whole]
    ]
    return [count, *moments, step]


def factored_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of Adafactor's mean squares: of rows and columns, or of all elements."""
    by_size = sorted(range(len(shape)), key=lambda dimension: shape[dimension])
    if len(shape) < 2 or shape[by_size[-2]] < _FACTORED_FROM:
        return {"v": shape, "v_col": (1,), "v_row": (1,)}
    second, first = by_size[-2:]
    return {
        "v": (1,),
        "v_col": tuple(n for d, n in enumerate(shape) if d != second),
        "v_row": tuple(n for d, n in enumerate(shape) if d != first),
    }


_VARIABLES = "flax.nnx.variablelib"
_OPTIMIZER = "flax.nnx.training.optimizer"


@paused_gc()
def state_of_config(config: Mapping[str, Any], options: PlanOptions) -> State:
    """The state of `{"model": model, "optimizer": optimizer}` for an NNX model of that config."""
    if options.adds_optimizer and not isinstance(options.optimizer, str):
        raise ValueError(
            "the optimizer of a model by name or config is given by its name, such as 'adamw'; to "
            "plan a transformation of your own, make the model: plan(nnx.eval_shape(make), "
            "optimizer=…)"
        )
    dtype = _dtype_name(options.dtype) or dtype_of(config)
    optimizer_dtype = _dtype_name(options.optimizer_dtype) or dtype
    for name in (dtype, optimizer_dtype):
        if name not in DTYPES:
            raise ValueError(f"there is no dtype {name!r}; give one such as bfloat16 or float32")
    mesh = options.mesh or ONE_DEVICE
    parameters = parameters_of(config)
    process_of = share_devices(len(mesh.devices), host_count(mesh, options.hosts))
    # Rules see paths inside the model, as in `sharding.init`. In the state it is below `model/`.
    unplaced = [LeafSpec(path, "jax", dtype, shape) for path, shape in parameters]
    partitions, findings = resolve_rules(unplaced, mesh, read_rules(options.rules, mesh))
    model = [
        LeafSpec(f"model/{path}", "jax", dtype, shape, 0, partitions[path])
        for path, shape in parameters
    ]
    state = optimizer_leaves(options.optimizer or "none", parameters, optimizer_dtype)
    leaves = [*model, *_place_beside(state, model)]
    return State(
        leaves=tuple(leaves),
        meshes=(mesh,),
        process_of=process_of,
        tree=_encode([leaf.path for leaf in leaves]),
        parameters=sum(prod(shape) for _, shape in parameters),
        user=options.metadata or {},
        findings=tuple(replace(found, path=f"model/{found.path}") for found in findings),
        adds_optimizer=bool(state),
    )


def _dtype_name(dtype: Any) -> str | None:
    """The name of a dtype, given as text or as anything that numpy takes."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        return np.dtype(dtype).name
    except (TypeError, ValueError):
        raise TypeError(f"{dtype!r} is no dtype; give one such as 'bfloat16'") from None


def _place_beside(state: Sequence[OptimizerLeaf], model: Sequence[LeafSpec]) -> Iterator[LeafSpec]:
    """The optimizer's leaves, sharded like their parameters."""
    parameters = {leaf.path: leaf for leaf in model}
    for path, shape, dtype, belongs_to in state:
        partition: Partition = ()
        if belongs_to is not None:
            parameter = parameters[f"model/{belongs_to}"]
            dimensions = kept_dimensions(path, shape, parameter.shape)
            if dimensions is not None:
                partition = without_trailing(cut_as(parameter.partition, dimensions))
        yield LeafSpec(f"optimizer/{path}", "jax", dtype, shape, 0, partition)


def _encode(paths: Sequence[str]) -> Any:
    """The tree as `_METADATA` would have it for NNX objects with these paths."""
    root = nest((path.split("/"), number) for number, path in enumerate(paths))
    kinds = {"model": ["model", "Model"], "optimizer": [_OPTIMIZER, "Optimizer"]}
    items = [{"nnx": kinds[top], "items": [_encode_node(top, root[top])]} for top in root]
    return {"dict": list(root), "items": items}


def _encode_node(path: str, node: Any) -> Any:
    if isinstance(node, int):
        return {"variable": _variable(path), "about": {}, "items": [node]}
    items: dict[str, Any] = node
    keys = [int(key) if key.isdigit() else key for key in items]
    kind = "dict" if "/" in path else "state"  # below its top a state is made of dicts
    return {
        kind: keys,
        "items": [_encode_node(f"{path}/{key}", item) for key, item in items.items()],
    }


def _variable(path: str) -> list[str]:
    if path.startswith("model/"):
        return [_VARIABLES, "Param"]
    if path == "optimizer/step":
        return [_OPTIMIZER, "OptState"]
    return [_OPTIMIZER, "OptArray" if path.endswith("/count") else "OptVariable"]
