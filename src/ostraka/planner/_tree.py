"""Live and abstract trees as states to be planned: what `save` would capture, without values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from ostraka._agree import cast_leaves, number_meshes
from ostraka._capture import (
    Devices,
    check_dtype_rule,
    describe_mesh,
    describe_sharding,
    describe_spec,
    memory_kind,
    savable_dtype,
)
from ostraka._document import encode, encode_state, with_states
from ostraka._nodes import Branch, Leaf, Stateful, branches_of, check_unique, find_shared, leaves_of
from ostraka._place import resolve_specs
from ostraka._spec import LeafKind, LeafSpec, MeshSpec, Partition
from ostraka._tree import is_array, is_key, is_object, parse
from ostraka.errors import InvalidTree, Mismatch
from ostraka.planner._state import (
    State,
    check_mesh_has_names,
    mesh_of_sizes,
    share_devices,
)
from ostraka.sharding._check import resolve_checked
from ostraka.sharding._data import array_leaves, parse_state, to_spec
from ostraka.sharding._findings import Finding, raise_errors
from ostraka.sharding._rules import follow_specs

_ONE_DEVICE = MeshSpec((), (), (0,))


def state_of_tree(
    tree: Any,
    *,
    mesh: Any,
    specs: Any,
    processes: int | None,
    optimizer: Any,
    optimizer_dtype: Any,
    dtype: Any,
    metadata: Mapping[str, Any],
) -> State:
    """What a save of this tree would capture, were it placed as `mesh` and `specs` say."""
    check_dtype_rule(dtype)
    check_dtype_rule(optimizer_dtype)
    if optimizer is None and optimizer_dtype is not None:
        raise ValueError("optimizer_dtype needs optimizer=, the optimizer whose state it is about")
    target = None if mesh is None else describe_target(mesh)
    state = None if optimizer is None else abstract_optimizer(tree, optimizer, optimizer_dtype)
    found, findings = _resolve_specs(tree, mesh, specs, state)
    if optimizer is not None:
        tree = {"model": tree, "optimizer": state}
        if optimizer_dtype is not None and dtype is not None:
            of_model: dict[str, Any] = dtype if isinstance(dtype, dict) else {"**": dtype}
            dtype = {"optimizer/**": None, **of_model}
    parsed = parse(tree)
    leaves = list(leaves_of(parsed))
    check_unique(leaves)
    places = _Places(target, found, processes)
    shared = find_shared(parsed, is_object)
    described = [
        places.describe(leaf)
        for leaf in leaves
        if has_shape(leaf.value) and leaf.path not in shared.arrays
    ]
    arrays, meshes = number_meshes(described, list(places.meshes))
    arrays = cast_leaves(arrays, dtype)
    process_of = places.process_of()
    numbers = {leaf.path: number for number, leaf in enumerate(arrays)}
    numbers |= {path: numbers[first] for path, first in shared.arrays.items() if first in numbers}
    encoded = encode(parsed, numbers, shared.variables)
    encoded = with_states(encoded, _states(leaves, max(process_of) + 1))
    return State(
        leaves=tuple(arrays),
        meshes=tuple(meshes),
        process_of=process_of,
        tree=encoded,
        parameters=_count_parameters(parsed, shared.arrays),
        user=metadata,
        findings=tuple(findings),
        adds_optimizer=optimizer is not None,
    )


def has_shape(value: Any) -> bool:
    return is_array(value) or isinstance(value, jax.ShapeDtypeStruct)


def describe_target(mesh: Any) -> MeshSpec:
    """A mesh as data: axis sizes and an abstract mesh are over the devices 0, 1, …"""
    if isinstance(mesh, Mapping):
        return mesh_of_sizes({str(k): v for k, v in cast("Mapping[Any, int]", mesh).items()})
    if isinstance(mesh, AbstractMesh):
        return _describe_abstract(mesh)
    if isinstance(mesh, Mesh):
        return describe_mesh(mesh, Devices())
    check_mesh_has_names(mesh)
    raise TypeError(
        f"mesh is a {type(mesh).__name__}; it must be a jax.sharding.Mesh, an AbstractMesh, or a "
        'mapping of axis sizes such as {"data": 4}'
    )


def _describe_abstract(mesh: AbstractMesh) -> MeshSpec:
    types = tuple(str(axis_type.name).lower() for axis_type in mesh.axis_types)
    sizes: dict[str, int] = {str(name): size for name, size in mesh.shape.items()}
    return mesh_of_sizes(sizes, () if set(types) <= {"auto"} else types)


def abstract_optimizer(tree: Any, optimizer: Any, dtype: Any) -> Any:
    """The state of an optax transformation for a tree, with shapes and dtypes only.

    With a `dtype`, that which it has for parameters of that dtype.
    """
    transformation = _transformation(optimizer)

    def init(parameters: Any) -> Any:
        return transformation.init(_as_dtype(parameters, dtype))

    try:
        from flax import nnx
    except ImportError:
        return jax.eval_shape(init, tree)
    if not isinstance(tree, nnx.Module):
        return jax.eval_shape(init, tree)

    def make(model: Any) -> Any:
        graph, parameters, rest = nnx.split(model, nnx.Param, ...)
        own = nnx.merge(graph, _as_dtype(parameters, dtype), rest)
        for _, part in nnx.iter_graph(own):
            if isinstance(part, nnx.Variable):
                # Otherwise annotated moments would try to place themselves, and there is no mesh.
                part.set_metadata("eager_sharding", False)
        return nnx.Optimizer(own, transformation, wrt=nnx.Param)

    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(make, tree)


def _as_dtype(parameters: Any, dtype: Any) -> Any:
    if dtype is None:
        return parameters

    def cast_one(x: Any) -> Any:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast_one, parameters)


def _transformation(optimizer: Any) -> Any:
    """An optax transformation, given as such or by name."""
    made: Any = optimizer
    if isinstance(optimizer, str):
        import optax

        make: Any = getattr(optax, optimizer, None)
        if make is None:
            raise ValueError(f"optimizer is {optimizer!r}, which optax does not have")
        with suppress(TypeError):
            made = make(1e-3)
    if not callable(getattr(made, "init", None)):
        raise TypeError(
            f"optimizer is {optimizer!r}; it must be an optax transformation, or the name of one "
            "that needs just a learning rate, such as 'adamw'"
        )
    return made


def _resolve_specs(
    tree: Any, mesh: Any, specs: Any, optimizer_state: Any
) -> tuple[dict[str, PartitionSpec], list[Finding]]:
    """By path the specs of all leaves, those of the optimizer as those of its parameters."""
    if specs is None:
        return {}, []
    if mesh is None:
        raise ValueError("specs needs mesh=, the mesh that the specs cut along")
    parsed = parse_state(tree)
    found, findings = resolve_checked(parsed, mesh, specs)
    raise_errors("the specs do not fit", findings)
    if optimizer_state is None:
        return found, findings
    leaves = list(array_leaves(parsed))
    optimizer_leaves = array_leaves(parse_state(optimizer_state))
    following = follow_specs(optimizer_leaves, leaves, found)
    moved = {f"model/{path}": spec for path, spec in found.items()}
    moved |= {f"optimizer/{path}": spec for path, spec in following.items()}
    return moved, [replace(finding, path=f"model/{finding.path}") for finding in findings]


def partitions_given(
    leaves: Sequence[LeafSpec], specs: Any, known: Sequence[str]
) -> dict[str, Partition]:
    """By path, what the `specs` of a restore say: one spec, or a tree that may leave leaves out.

    `known` are the paths of all that was saved, host arrays included.
    """
    said, unknown = resolve_specs([(leaf.path, leaf, None) for leaf in leaves], specs, None, known)
    found: dict[str, Partition] = {}
    for path, spec in said.items():
        if isinstance(spec, jax.sharding.Sharding):
            unknown.append(f"specs has a {type(spec).__name__} for {path!r}, not a spec")
        elif spec is not None:
            found[path] = describe_spec(path, to_spec(path, spec))
    if unknown:
        raise Mismatch("can't plan the restore", unknown)
    return found


class _Places:
    """Where each leaf is placed: by its own sharding, or by `mesh` and `specs`."""

    def __init__(
        self, mesh: MeshSpec | None, specs: Mapping[str, PartitionSpec], processes: int | None
    ):
        self._mesh = mesh
        self._specs = specs
        self._processes = processes
        self._devices: Devices | None = None
        self.meshes: dict[MeshSpec, int] = {}

    def describe(self, leaf: Leaf) -> LeafSpec:
        value = leaf.value
        kind: LeafKind = "jax"
        prng = None
        shape = tuple(value.shape)
        if is_key(value):
            implementation: Any = value.dtype._impl
            kind, prng, name = "key", str(implementation.name), "uint32"
            shape = (*shape, *implementation.key_shape)
        else:
            name = savable_dtype(leaf.path, value.dtype)
        if isinstance(value, np.ndarray | np.generic):
            kind = "numpy" if isinstance(value, np.ndarray) else "scalar"
            return LeafSpec(leaf.path, kind, name, shape)
        mesh, partition = self._place(leaf)
        if not mesh.axis_names and self._process_count() > 1:
            # Every process has it on a device of its own: what all have alike is a common value.
            return LeafSpec(leaf.path, kind, name, shape, prng=prng, **self._traits(value))
        number = self.meshes.setdefault(mesh, len(self.meshes))
        traits = self._traits(value)
        return LeafSpec(leaf.path, kind, name, shape, number, partition, prng, **traits)

    def _traits(self, value: Any) -> dict[str, Any]:
        """Further attributes of an array; commitment and memory only if it stays in place."""
        traits: dict[str, Any] = {"weak": bool(getattr(value, "weak_type", False))}
        if self._mesh is None and isinstance(value, jax.Array):
            is_on_one = isinstance(value.sharding, SingleDeviceSharding)
            traits["uncommitted"] = is_on_one and not value.committed
            traits["memory"] = memory_kind(value.sharding)
        return traits

    def _process_count(self) -> int:
        if self._processes is None and self._devices is not None:
            return jax.process_count()
        return 1 if self._processes is None else self._processes

    def _place(self, leaf: Leaf) -> tuple[MeshSpec, Partition]:
        sharding = getattr(leaf.value, "sharding", None)
        if self._mesh is not None:
            return self._mesh, describe_spec(leaf.path, self._spec_on_mesh(leaf, sharding))
        if sharding is None:
            return _ONE_DEVICE, ()
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
            mesh = _describe_abstract(sharding.mesh)
            return mesh, describe_spec(leaf.path, sharding.spec)
        self._devices = self._devices or Devices()
        return describe_sharding(leaf.path, sharding, self._devices)

    def _spec_on_mesh(self, leaf: Leaf, sharding: Any) -> PartitionSpec:
        assert self._mesh is not None
        if leaf.path in self._specs:
            return self._specs[leaf.path]
        if self._specs:
            return PartitionSpec()
        if isinstance(sharding, NamedSharding):
            if set(sharding.mesh.axis_names) <= set(self._mesh.axis_names):
                return sharding.spec
            raise InvalidTree(
                f"leaf {leaf.path!r} is cut along {sharding.spec}, and the mesh ({self._mesh}) has "
                "other axes: give specs="
            )
        return PartitionSpec() if leaf.spec is None else leaf.spec

    def process_of(self) -> tuple[int, ...]:
        """The process of each device: that of the run's devices, or as many as were asked for."""
        if self._devices is not None and self._processes is None:
            return self._devices.process_of
        known = [max(mesh.devices) + 1 for mesh in self.meshes]
        count = max([*known, 0 if self._mesh is None else max(self._mesh.devices) + 1, 1])
        if self._devices is not None:
            count = max(count, len(self._devices.all))
        if not known and self._mesh is None:
            count = max(count, self._process_count())
        return share_devices(count, 1 if self._processes is None else self._processes)


def _states(leaves: list[Leaf], processes: int) -> dict[str, list[Any]]:
    """The states of stateful objects; those of other processes are assumed to be as large."""
    return {
        leaf.path: [encode_state(leaf.path, leaf.value.owner.get_state())] * processes
        for leaf in leaves
        if isinstance(leaf.value, Stateful)
    }


def _count_parameters(parsed: Branch | Leaf, again: Collection[str]) -> int | None:
    """The elements of all `nnx.Param`s, each once; None if there are none."""
    sizes = [
        prod(leaf.value.shape)
        for branch in branches_of(parsed)
        if branch.kind == "variable" and branch.cls is not None and branch.cls[1] == "Param"
        for leaf in leaves_of(branch)
        if has_shape(leaf.value) and leaf.path not in again
    ]
    return sum(sizes) if sizes else None
