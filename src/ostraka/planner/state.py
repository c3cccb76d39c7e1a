"""A state to be planned, as plain data, and meshes that need no device. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

from ostraka.errors import InvalidSharding
from ostraka.layout.codec import CompressRule
from ostraka.layout.plan_write import MAX_FILE_BYTES
from ostraka.layout.spec import LeafSpec, MeshSpec
from ostraka.reading.names.given import NamesLike
from ostraka.sharding.findings import Finding

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
        nearest = min(close, key=lambda n: (abs(n - processes), n))
        raise InvalidSharding(
            f"{devices:,} devices do not divide evenly among {processes:,} processes; the nearest "
            f"number that does is {nearest:,}"
        )
    each = devices // processes
    return tuple(device // each for device in range(devices))
