"""Initialize a model sharded: it is never whole on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostraka._capture import spec_entries
from ostraka._nodes import Branch, Leaf, leaves_of, rebuild
from ostraka._spec import find_misfits
from ostraka.errors import InvalidSharding, InvalidTree
from ostraka.sharding._arguments import check_function, check_optimizer
from ostraka.sharding._check import resolve_checked
from ostraka.sharding._combine import combine
from ostraka.sharding._data import ArrayLeaf, array_leaves, parse_state
from ostraka.sharding._findings import raise_errors
from ostraka.sharding._mesh import (
    as_mesh,
    has_explicit_axes,
    make_mesh,
    mesh_spec,
    mesh_to_use,
    refuse_swapped,
)
from ostraka.sharding._place import put
from ostraka.sharding._rules import follow_specs


def init(
    model_fn: Callable[[], Any],
    mesh: Mesh | Mapping[str, int],
    specs: Any = None,
    optimizer: Any = None,
    *,
    wrt: Any = None,
    explicit: bool = False,
) -> Any:
    """A sharded NNX model, and its optimizer if an optax transformation is given.

    `model_fn` makes the model, its `nnx.Rngs` included. It is compiled with the shardings of what
    it returns, so that each device computes its own part: neither model nor optimizer is ever whole
    on a device or in host memory. (An initializer that needs the whole array, as an orthogonal one
    does, still makes that one array whole.) The values are those of `model_fn()`, up to rounding.

    `specs` is a tree of specs for the model, or rules as `spec_tree` takes them. None takes the
    annotations of the variables, or the explicit shardings that arrays are made with. The
    optimizer's arrays are cut as the parameters that they belong to, also where they have only some
    of the dimensions, as factored moments do; `wrt` says which variables it changes (`nnx.Param`).
    Returns the model, or model and `nnx.Optimizer`. `model_fn` may also return an
    `nnx.ModelAndOptimizer`, and gets that.

    `mesh` may be axis sizes, of which `make_mesh` makes one. If it has Explicit axes, as those of
    `jax.make_mesh` are, a plain model would fail in its first step: the result is placed on the
    same devices with Auto axes, with a warning. Explicit axes stay if `explicit` is true, or if
    `model_fn` itself makes arrays with explicit shardings (`jnp.zeros(…, out_sharding=P("data"))`).

        model = init(lambda: Model(rngs=nnx.Rngs(0)), mesh, fsdp("data"))
        model, optimizer = init(make_model, mesh, optimizer=optax.adam(1e-3))
    """
    refuse_swapped("init(model_fn, mesh, specs)", specs)
    given = as_mesh(mesh)
    prepared = prepare(model_fn, given, specs, optimizer, wrt)
    target = mesh_to_use(given, explicit=explicit or prepared.is_explicit)
    return prepared.finish(prepared.compiled()(), target)


_LEAST_MEMORY: dict[str, str | bool] = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A function to compile, and how to rebuild objects from its result."""

    make: Callable[[], list[Any]]
    """Returns the arrays of all objects, and puts into `structures` how to rebuild the objects."""
    structures: list[tuple[Any, Any]]
    shardings: list[NamedSharding]
    is_explicit: bool
    """Whether the model can only be made under Explicit axes."""

    def compiled(self) -> Any:
        lowered = jax.jit(self.make, out_shardings=self.shardings).lower()
        devices = {device for sharding in self.shardings[:1] for device in sharding.device_set}
        if all(device.platform == "cpu" for device in devices):
            # By default XLA for CPUs schedules for concurrency, which would take as much memory
            # again as the model. An XLA that does not know the option compiles without it.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                return lowered.compile(compiler_options=_LEAST_MEMORY)
        return lowered.compile()

    def finish(self, arrays: list[Any], mesh: Mesh) -> Any:
        """Rebuild the objects. The arrays stay where they are; their shardings get this mesh."""
        from flax import nnx

        placed = put(arrays, [NamedSharding(mesh, s.spec) for s in self.shardings])
        objects: list[Any] = []
        for graphdef, treedef in self.structures:
            own, placed = placed[: treedef.num_leaves], placed[treedef.num_leaves :]
            objects.append(nnx.merge(graphdef, jax.tree.unflatten(treedef, own)))
        return objects[0] if len(objects) == 1 else tuple(objects)


def prepare(
    model_fn: Callable[[], Any], mesh: Mesh, rules: Any, optimizer: Any, wrt: Any
) -> Prepared:
    """Trace the model for its shapes, and work out where everything goes."""
    check_function(model_fn)
    check_optimizer(optimizer)
    is_explicit, (abstract, model_key) = _trace(model_fn, mesh, optimizer, wrt)
    # Under Explicit axes JAX would compute every array whole on each device, and cut it at the
    # end, unless the model says otherwise.
    making = mesh if is_explicit else make_mesh(mesh)
    model = abstract[0] if model_key is None else abstract[0][model_key]
    model_leaves = list(array_leaves(parse_state(model)))
    specs = _model_specs(model, model_leaves, mesh, rules)
    trees = [parse_state(state) for state in abstract]
    # The optimizer has no part of the model; its arrays follow the parameters.
    places = ["" if model_key is None else f"{model_key}/", *[None for _ in trees[1:]]]
    flat = [
        NamedSharding(making, spec)
        for tree, place in zip(trees, places, strict=True)
        for spec in jax.tree.leaves(_tree_of(tree, _specs_of(tree, place, model_leaves, specs)))
    ]
    structures: list[tuple[Any, Any]] = []
    eager = _annotations_fit([leaf for tree in trees for leaf in array_leaves(tree)], mesh)
    make = _maker(model_fn, optimizer, wrt, structures, eager=eager, mesh=making)
    return Prepared(make, structures, flat, is_explicit)


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
            states = [nnx.split(made) for made in _make_objects(model_fn, optimizer, wrt)]
        structures[:] = [(graphdef, jax.tree.structure(state)) for graphdef, state in states]
        return jax.tree.leaves([state for _, state in states])

    return make


def _model_specs(
    model: Any, leaves: Sequence[ArrayLeaf], mesh: Mesh, rules: Any
) -> dict[str, PartitionSpec]:
    if rules is None and not any(map(_has_own_spec, leaves)):
        raise InvalidSharding(
            "no variable of the model says how it is cut (out_sharding): give rules, such as "
            'fsdp("data")'
        )
    own = combine("metadata", _traced_spec)
    specs, findings = resolve_checked(parse_state(model), mesh, own if rules is None else rules)
    raise_errors(f"can't make the model on the mesh ({mesh_spec(mesh)})", findings)
    return specs


def _has_own_spec(leaf: ArrayLeaf) -> bool:
    return leaf.named is not None or _traced_spec(leaf.value) is not None


def _traced_spec(value: Any) -> PartitionSpec | None:
    """The spec of an array that was traced under Explicit axes, if it is cut."""
    sharding = getattr(value, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    return spec if any(spec) else None


def _make_objects(model_fn: Callable[[], Any], optimizer: Any, wrt: Any) -> list[Any]:
    from flax import nnx

    made = model_fn()
    if isinstance(made, nnx.ModelAndOptimizer):
        if optimizer is not None:
            raise InvalidTree(
                "model_fn returns an nnx.ModelAndOptimizer, which has its optimizer: leave out "
                "optimizer="
            )
        return [made]
    if not isinstance(made, nnx.Module):
        raise InvalidTree(
            f"model_fn returns a {type(made).__name__}; it must return an nnx.Module, or an "
            "nnx.ModelAndOptimizer"
        )
    if optimizer is None:
        return [made]
    return [made, nnx.Optimizer(made, optimizer, wrt=nnx.Param if wrt is None else wrt)]


def _trace(
    model_fn: Callable[[], Any], mesh: Mesh, optimizer: Any, wrt: Any
) -> tuple[bool, tuple[list[Any], str | None]]:
    """Whether the model needs Explicit axes, and its shapes."""
    try:
        return False, _shapes(model_fn, make_mesh(mesh), optimizer, wrt)
    except ValueError as error:
        if "of type Auto" not in str(error):  # JAX has no exception type of its own for this
            raise
        if not has_explicit_axes(mesh):
            raise InvalidSharding(
                f"model_fn makes arrays with explicit shardings, and the mesh ({mesh_spec(mesh)}) "
                "has Auto axes: give one with Explicit axes, as jax.make_mesh makes it"
            ) from error
    return True, _shapes(model_fn, mesh, optimizer, wrt)


def _shapes(
    model_fn: Callable[[], Any], mesh: Mesh, optimizer: Any, wrt: Any
) -> tuple[list[Any], str | None]:
    """The states of what is made, abstract, and under which key of the first the model is.

    Eager sharding is off: no variable is placed by its annotation.
    """
    from flax import nnx
    from flax.errors import TraceContextError

    model_key: list[str | None] = []

    def make() -> list[Any]:
        objects = _make_objects(model_fn, optimizer, wrt)
        model_key[:] = ["model" if isinstance(objects[0], nnx.ModelAndOptimizer) else None]
        return [nnx.state(made) for made in objects]

    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nnx.use_eager_sharding(False):
            return jax.eval_shape(make), model_key[0]
    except TraceContextError as error:
        raise InvalidTree(
            "model_fn changes an NNX object from outside, most likely an nnx.Rngs: make it inside "
            "model_fn, which is compiled"
        ) from error


def _annotations_fit(leaves: Sequence[ArrayLeaf], mesh: Mesh) -> bool:
    """Whether eager sharding can place variables by their annotations.

    Not if they are annotated for another mesh, nor if an optimizer's have the annotations of a
    parameter with more dimensions, as factored moments do.
    """
    sizes = mesh_spec(mesh)
    return not any(
        find_misfits(leaf.path, leaf.shape, sizes, spec_entries(leaf.path, leaf.named))
        for leaf in leaves
        if leaf.named is not None
    )


def _specs_of(
    tree: Branch | Leaf,
    model_place: str | None,
    parameters: Sequence[ArrayLeaf],
    specs: Mapping[str, PartitionSpec],
) -> dict[str, PartitionSpec]:
    """The specs of an object's arrays: those of the model, and of what follows its parameters."""
    found: dict[str, PartitionSpec] = {}
    beside: list[ArrayLeaf] = []
    for leaf in array_leaves(tree):
        if model_place is not None and leaf.path.startswith(model_place):
            found[leaf.path] = specs[leaf.path.removeprefix(model_place)]
        else:
            beside.append(leaf)
    return found | follow_specs(beside, parameters, specs)


def _tree_of(parsed: Branch | Leaf, specs: Mapping[str, PartitionSpec]) -> Any:
    paths = [leaf.path for leaf in leaves_of(parsed)]
    return rebuild(parsed, {path: specs.get(path, PartitionSpec()) for path in paths})
