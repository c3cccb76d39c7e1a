"""JAX's devices, meshes and shardings as data."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import Any, cast

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from ostraka.common.dtypes import DTYPES, dtype_name
from ostraka.errors import InvalidTree
from ostraka.layout.spec import MeshSpec, Partition


class Devices:
    """The run's devices in one order for all processes. The index of a device is its number."""

    def __init__(self) -> None:
        self.all: list[Any] = list(jax.devices())
        self._numbers = dict(zip(self.all, range(len(self.all)), strict=True))

    def number(self, device: Any) -> int:
        found = self._numbers.setdefault(device, len(self.all))
        if found == len(self.all):
            # Of another backend than the default one, such as host memory beside accelerators.
            self.all.append(device)
        return found

    @property
    def process_of(self) -> tuple[int, ...]:
        return tuple(map(attrgetter("process_index"), self.all))


@cache
def generator_name(path: str, dtype: Any) -> str:
    """The name of the generator of keys. Raises InvalidTree if a restore could not use it."""
    name = str(dtype._impl.name)
    try:
        known: Any = jax.eval_shape(lambda: jax.random.key(0, impl=name)).dtype
    except ValueError:  # A generator that the user has defined: JAX does not know it by name.
        known = dtype
    if known != dtype or name == "<unnamed>" or len(dtype._impl.key_shape) != 1:
        raise InvalidTree(
            f"leaf {path!r} has keys of the generator {dtype}, which could not be restored: "
            "define it with a name of its own and a key_shape of one dimension"
        )
    return name


def memory_kind(sharding: Any) -> str | None:
    """The kind of memory that a sharding names, if it is not the default one of its devices."""
    found = sharding.memory_kind
    if found is None:
        return None
    device = next(iter(sharding.device_set))
    return None if found == device.default_memory().kind else found


def savable_dtype(path: str, dtype: Any) -> str:
    """The name of a dtype. Raises InvalidTree if a leaf can't be saved for it."""
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise InvalidTree(
            f"leaf {path!r} has the dtype {dtype}, which can't be saved; only numbers, booleans "
            "and PRNG keys can"
        )
    return name


def describe_sharding(path: str, sharding: Any, devices: Devices) -> tuple[MeshSpec, Partition]:
    """A JAX sharding as data."""
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return MeshSpec((), (), (devices.number(device),)), ()
    if not isinstance(sharding, NamedSharding):
        raise InvalidTree(
            f"leaf {path!r} has a {type(sharding).__name__}; only NamedSharding and "
            "SingleDeviceSharding can be saved: put it on a mesh with jax.device_put first"
        )
    for name in sharding.mesh.axis_names:
        if not isinstance(name, str):
            raise InvalidTree(
                f"leaf {path!r} is on a mesh with the axis {name!r}; to be saved, axes must have "
                "names that are text"
            )
    if getattr(sharding.spec, "unreduced", None) or getattr(sharding.spec, "reduced", None):
        raise InvalidTree(
            f"leaf {path!r} has the spec {sharding.spec}, of which only parts of a sum are there: "
            "reduce it first"
        )
    return describe_mesh(sharding.mesh, devices), describe_spec(path, sharding.spec)


def describe_mesh(mesh: Any, devices: Devices) -> MeshSpec:
    names, numbers = tuple(map(str, mesh.axis_names)), tuple(map(devices.number, mesh.devices.flat))
    sizes = tuple(mesh.shape[name] for name in mesh.axis_names)
    types = tuple(axis_type.name.lower() for axis_type in mesh.axis_types)
    return MeshSpec(names, sizes, numbers, () if set(types) <= {"auto"} else types)


def describe_spec(path: str, spec: Any) -> Partition:
    """A PartitionSpec as data, without trailing whole dimensions."""
    entries = spec_entries(path, spec)
    return entries[: max((at for at, axes in enumerate(entries, 1) if axes), default=0)]


def spec_entries(path: str, spec: Any) -> Partition:
    """A PartitionSpec as data, just as long as it is."""
    entries: list[tuple[str, ...]] = []
    for axes in spec:
        several = () if axes is None else (axes,) if isinstance(axes, str) else axes
        if not isinstance(several, tuple):
            raise InvalidTree(
                f"leaf {path!r} has the spec {spec}, which leaves a dimension open ({axes})"
            )
        entries.append(tuple(map(str, cast("tuple[Any, ...]", several))))
    return tuple(entries)
