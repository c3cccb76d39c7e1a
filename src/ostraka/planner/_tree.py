"""Live and abstract trees as states to be planned: a capture without values."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from ostraka.errors import InvalidTree, Mismatch
from ostraka.layout.casts import cast_leaf, check_dtype_rule
from ostraka.layout.spec import LeafKind, LeafSpec, MeshSpec, Partition
from ostraka.live.parse import is_key, is_object, parse
from ostraka.live.shardings import (
    Devices,
    describe_sharding,
    describe_spec,
    generator_name,
    memory_kind,
    savable_dtype,
)
from ostraka.live.values import check_savable, refuse_empty, refuse_functions
from ostraka.planner.state import (
    ONE_DEVICE,
    PlanOptions,
    State,
    describe_abstract,
    share_devices,
)
from ostraka.restoring.destinations import resolve_specs
from ostraka.saving.agree import number_meshes
from ostraka.sharding.findings import Finding, raise_errors
from ostraka.sharding.specs import (
    array_leaves,
    follow_specs,
    has_shape,
    parse_state,
    resolve_checked,
    to_spec,
)
from ostraka.tree.json_tree import encode, encode_state, with_states
from ostraka.tree.nodes import (
    Branch,
    Leaf,
    Stateful,
    branches_of,
    check_unique,
    find_shared,
    leaves_of,
)


def state_of_tree(tree: Any, options: PlanOptions) -> State:
    """The state that a save of this tree captures if it is placed as the options say."""
    optimizer_dtype = options.optimizer_dtype
    check_dtype_rule(options.dtype)
    check_dtype_rule(optimizer_dtype)
    if not options.adds_optimizer and optimizer_dtype is not None:
        raise ValueError("optimizer_dtype needs optimizer=, the optimizer whose state it is about")
    state = abstract_optimizer(tree, options) if options.adds_optimizer else None
    found, findings = _resolve_specs(tree, options, state)
    parsed = parse({"model": tree, "optimizer": state} if options.adds_optimizer else tree)
    leaves = list(leaves_of(parsed))
    check_unique(leaves)
    for leaf in leaves:
        # A deleted array has a shape, and an abstract one has no more.
        if not isinstance(leaf.value, jax.Array | jax.ShapeDtypeStruct):
            check_savable(leaf)
    refuse_functions(parsed)
    refuse_empty(parsed)
    places = _Places(options, found)
    shared = find_shared(parsed, is_object)
    described = [
        places.describe(leaf)
        for leaf in leaves
        if has_shape(leaf.value) and leaf.path not in shared.arrays
    ]
    arrays, meshes = number_meshes(described, list(places.meshes))
    check_dtype_rule(options.dtype, arrays)
    arrays = [
        leaf
        if optimizer_dtype is not None and leaf.path.startswith("optimizer/")
        else cast_leaf(leaf, options.dtype)
        for leaf in arrays
    ]
    process_of = places.process_of()
    numbers = {leaf.path: number for number, leaf in enumerate(arrays)}
    numbers |= {path: numbers[first] for path, first in shared.arrays.items() if first in numbers}
    encoded = encode(parsed, numbers, shared.variables)
    # The states of stateful objects on other processes are assumed to be as large.
    states = {
        leaf.path: [encode_state(leaf.path, leaf.value.owner.get_state())] * (max(process_of) + 1)
        for leaf in leaves
        if isinstance(leaf.value, Stateful)
    }
    return State(
        leaves=tuple(arrays),
        meshes=tuple(meshes),
        process_of=process_of,
        tree=with_states(encoded, states),
        parameters=_count_parameters(parsed, shared.arrays),
        user=options.metadata or {},
        findings=tuple(findings),
        adds_optimizer=options.adds_optimizer,
    )


def abstract_optimizer(tree: Any, options: PlanOptions) -> Any:
    """The state of an optax transformation for a tree, with shapes and dtypes only.

    With an `optimizer_dtype`, the state for parameters of that dtype.
    """
    transformation, dtype = _transformation(options.optimizer), options.optimizer_dtype

    def convert(parameter: Any) -> Any:
        is_cast = dtype is not None and jnp.issubdtype(parameter.dtype, jnp.floating)
        return parameter.astype(dtype) if is_cast else parameter

    def init(parameters: Any) -> Any:
        return transformation.init(jax.tree.map(convert, parameters))

    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(tree, nnx.Module):
        return jax.eval_shape(init, tree)

    def make(model: Any) -> Any:
        graph, parameters, rest = nnx.split(model, nnx.Param, ...)
        own = nnx.merge(graph, jax.tree.map(convert, parameters), rest)
        for _, part in nnx.iter_graph(own):
            if isinstance(part, nnx.Variable):
                # Otherwise annotated moments would try to place themselves, and there is no mesh.
                part.set_metadata("eager_sharding", False)
        return nnx.Optimizer(own, transformation, wrt=nnx.Param)

    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(make, tree)


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
    tree: Any, options: PlanOptions, optimizer_state: Any
) -> tuple[dict[str, PartitionSpec], list[Finding]]:
    """By path the specs of all leaves. The optimizer's leaves follow their parameters."""
    mesh = options.mesh
    if options.rules is None:
        return {}, []
    if mesh is None:
        raise ValueError("specs needs mesh=, the mesh that the specs cut along")
    parsed = parse_state(tree)
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    found, findings = resolve_checked(parsed, sizes, options.rules)
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
    """By path, the `specs` of a restore: one spec, or a tree that may leave leaves out.

    `known` are the paths of all saved arrays, host arrays included.
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
    """The mesh and partition of each leaf: its own, or by `mesh` and `specs`."""

    def __init__(self, options: PlanOptions, specs: Mapping[str, PartitionSpec]):
        self._mesh = options.mesh
        self._processes = options.hosts
        self._specs = specs
        self._devices: Devices | None = None
        self.meshes: dict[MeshSpec, int] = {}

    def describe(self, leaf: Leaf) -> LeafSpec:
        value = leaf.value
        kind: LeafKind = "jax"
        prng = None
        shape = tuple(value.shape)
        if is_key(value):
            kind, prng, name = "key", generator_name(leaf.path, value.dtype), "uint32"
            shape = (*shape, *value.dtype._impl.key_shape)
        else:
            name = savable_dtype(leaf.path, value.dtype)
        if isinstance(value, np.ndarray | np.generic):
            kind = "numpy" if isinstance(value, np.ndarray) else "scalar"
            return LeafSpec(leaf.path, kind, name, shape)
        mesh, partition = self._place(leaf)
        traits: dict[str, Any] = {"weak": bool(getattr(value, "weak_type", False))}
        if self._mesh is None and isinstance(value, jax.Array):  # which keeps its sharding
            is_on_one = isinstance(value.sharding, SingleDeviceSharding)
            traits["uncommitted"] = is_on_one and not value.committed
            traits["memory"] = memory_kind(value.sharding)
        if not mesh.axis_names and self._process_count() > 1:
            # Every process has it on a device of its own: what all have alike is a common value.
            return LeafSpec(leaf.path, kind, name, shape, prng=prng, **traits)
        number = self.meshes.setdefault(mesh, len(self.meshes))
        return LeafSpec(leaf.path, kind, name, shape, number, partition, prng, **traits)

    def _process_count(self) -> int:
        if self._processes is None and self._devices is not None:
            return jax.process_count()
        return 1 if self._processes is None else self._processes

    def _place(self, leaf: Leaf) -> tuple[MeshSpec, Partition]:
        sharding = getattr(leaf.value, "sharding", None)
        if self._mesh is not None:
            return self._mesh, describe_spec(leaf.path, self._spec_on_mesh(leaf, sharding))
        if sharding is None:
            return ONE_DEVICE, ()
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
            mesh = describe_abstract(sharding.mesh)
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
        """The process of each device: as in this run, or shared evenly by `hosts`."""
        if self._devices is not None and self._processes is None:
            return self._devices.process_of
        meshes = self.meshes if self._mesh is None else (self._mesh,)
        count = max((max(mesh.devices) + 1 for mesh in meshes), default=self._process_count())
        if self._devices is not None:
            count = max(count, len(self._devices.all))
        return share_devices(count, 1 if self._processes is None else self._processes)


def _count_parameters(parsed: Branch | Leaf, again: Collection[str]) -> int | None:
    """The elements of all `nnx.Param`s, each once. None if there are none."""
    sizes = [
        prod(leaf.value.shape)
        for branch in branches_of(parsed)
        if branch.kind == "variable" and branch.cls is not None and branch.cls[1] == "Param"
        for leaf in leaves_of(branch)
        if has_shape(leaf.value) and leaf.path not in again
    ]
    return sum(sizes) if sizes else None
