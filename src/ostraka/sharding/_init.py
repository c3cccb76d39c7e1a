"""Make a sharded model, in pieces from the first byte on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostraka._capture import spec_entries
from ostraka._document import Branch, Leaf, leaves_of, rebuild
from ostraka._spec import partition_problems
from ostraka.errors import InvalidSharding, InvalidTree
from ostraka.sharding._check import check, raise_errors
from ostraka.sharding._data import ArrayLeaf, array_leaves, mesh_spec, parse_state
from ostraka.sharding._rules import settle


def init(
    model_fn: Callable[[], Any],
    mesh: Mesh,
    rules: Any = None,
    optimizer: Any = None,
    *,
    wrt: Any = None,
) -> Any:
    """A sharded NNX model, and its optimizer if an optax transformation is given.

    `model_fn` makes the model, its `nnx.Rngs` included. It is compiled with the shardings of what
    it returns, so that each device computes its own part: neither model nor optimizer is ever whole
    on a device or in host memory. (An initializer that needs the whole array, as an orthogonal one
    does, still makes that one array whole.) The values are those of `model_fn()`, up to rounding.

    `rules` are those of `spec_tree`; None takes what the variables themselves say. The optimizer's
    arrays lie as the parameters that they belong to; `wrt` says which variables it changes
    (`nnx.Param`). Returns the model, or model and `nnx.Optimizer`.

        model = init(lambda: Model(rngs=nnx.Rngs(0)), mesh, fsdp("data"))
        model, optimizer = init(make_model, mesh, optimizer=optax.adam(1e-3))
    """
    prepared = prepare(model_fn, mesh, rules, optimizer, wrt)
    return prepared.finish(prepared.compiled()(), mesh)


_FRUGAL: dict[str, str | bool] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is to be compiled, and how its result becomes objects."""

    make: Callable[[], list[Any]]
    """Returns the arrays of all objects, and leaves in `structures` how they belong together."""
    structures: list[tuple[Any, Any]]
    shardings: list[NamedSharding]

    def compiled(self) -> Any:
        lowered = jax.jit(self.make, out_shardings=self.shardings).lower()
        devices = {device for sharding in self.shardings[:1] for device in sharding.device_set}
        if all(device.platform == "cpu" for device in devices):
            # XLA for CPUs runs as much as it can at once, with room for all of it. Here that would
            # take as much memory again as the model. Should it no longer know the option, it may.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                return lowered.compile(compiler_options=_FRUGAL)
        return lowered.compile()

    def finish(self, arrays: list[Any], mesh: Mesh) -> Any:
        """The objects. The arrays are in their places; their shardings get the caller's mesh."""
        from flax import nnx

        placed = jax.device_put(arrays, [NamedSharding(mesh, s.spec) for s in self.shardings])
        objects: list[Any] = []
        for graphdef, treedef in self.structures:
            own, placed = placed[: treedef.num_leaves], placed[treedef.num_leaves :]
            objects.append(nnx.merge(graphdef, jax.tree.unflatten(treedef, own)))
        return objects[0] if len(objects) == 1 else tuple(objects)


def prepare(
    model_fn: Callable[[], Any], mesh: Mesh, rules: Any, optimizer: Any, wrt: Any
) -> Prepared:
    """Trace the model for its shapes, and settle where everything goes."""
    # Of an axis of the explicit type JAX would compute every array whole on each device, and cut
    # it at the end.
    auto = Mesh(mesh.devices, mesh.axis_names)
    abstract = _shapes(model_fn, optimizer, wrt)
    parsed = [parse_state(state) for state in abstract]
    model_leaves = list(array_leaves(parsed[0]))
    if rules is None and all(leaf.named is None for leaf in model_leaves):
        raise InvalidSharding(
            "no variable of the model says how it is cut (out_sharding): give rules, such as "
            'fsdp("data")'
        )
    specs = [settle(parsed[0], "metadata" if rules is None else rules, mesh)]
    raise_errors(
        f"can't make the model on the mesh ({mesh_spec(mesh)})",
        check(abstract[0], _tree_of(parsed[0], specs[0]), mesh),
    )
    specs += [_follow(array_leaves(tree), model_leaves, specs[0]) for tree in parsed[1:]]
    flat = [
        NamedSharding(auto, spec)
        for tree, found in zip(parsed, specs, strict=True)
        for spec in jax.tree.leaves(_tree_of(tree, found))
    ]
    structures: list[tuple[Any, Any]] = []
    eager = _annotations_fit(model_leaves, mesh)
    make = _maker(model_fn, optimizer, wrt, structures, eager=eager, mesh=auto)
    return Prepared(make, structures, flat)


def _maker(
    model_fn: Callable[[], Any],
    optimizer: Any,
    wrt: Any,
    structures: list[tuple[Any, Any]],
    *,
    eager: bool,
    mesh: Mesh,
) -> Callable[[], list[Any]]:
    from flax import nnx

    def make() -> list[Any]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nnx.use_eager_sharding(eager):
            states = _make_states(model_fn, optimizer, wrt)
        structures[:] = [(graphdef, jax.tree.structure(state)) for graphdef, state in states]
        return jax.tree.leaves([state for _, state in states])

    return make


def _make_states(model_fn: Callable[[], Any], optimizer: Any, wrt: Any) -> list[tuple[Any, Any]]:
    from flax import nnx

    model = model_fn()
    if not isinstance(model, nnx.Module):
        raise InvalidTree(
            f"model_fn returns a {type(model).__name__}; it must return an nnx.Module"
        )
    if optimizer is None:
        return [nnx.split(model)]
    made = nnx.Optimizer(model, optimizer, wrt=nnx.Param if wrt is None else wrt)
    return [nnx.split(model), nnx.split(made)]


def _shapes(model_fn: Callable[[], Any], optimizer: Any, wrt: Any) -> list[Any]:
    """The states of model and optimizer, abstract; no variable places itself."""
    from flax import nnx
    from flax.errors import TraceContextError

    def make() -> list[Any]:
        return [state for _, state in _make_states(model_fn, optimizer, wrt)]

    try:
        with nnx.use_eager_sharding(False):
            return jax.eval_shape(make)
    except TraceContextError as error:
        raise InvalidTree(
            "model_fn changes an NNX object from outside, most likely an nnx.Rngs: make it inside "
            "model_fn, which is compiled"
        ) from error


def _annotations_fit(leaves: Sequence[ArrayLeaf], mesh: Mesh) -> bool:
    """Whether variables may place themselves; not if they are annotated for another mesh."""
    sizes = mesh_spec(mesh)
    return not any(
        partition_problems(leaf.path, leaf.shape, spec_entries(leaf.path, leaf.named), sizes)
        for leaf in leaves
        if leaf.named is not None
    )


def _tree_of(parsed: Branch | Leaf, specs: Mapping[str, PartitionSpec]) -> Any:
    paths = [leaf.path for leaf in leaves_of(parsed)]
    return rebuild(parsed, {path: specs.get(path, PartitionSpec()) for path in paths})


def _follow(
    leaves: Iterator[ArrayLeaf],
    parameters: Sequence[ArrayLeaf],
    specs: Mapping[str, PartitionSpec],
) -> dict[str, PartitionSpec]:
    """The specs of an optimizer's arrays: those of the parameters that end their paths.

    What has another shape than its parameter, as a factored moment has, stays whole.
    """
    by_path = {leaf.path: leaf for leaf in parameters}
    found: dict[str, PartitionSpec] = {}
    for leaf in leaves:
        names = leaf.path.split("/")
        ends = ("/".join(names[start:]) for start in range(len(names)))
        parameter = next((by_path[end] for end in ends if end in by_path), None)
        if parameter is not None and parameter.shape == leaf.shape:
            found[leaf.path] = specs[parameter.path]
    return found
