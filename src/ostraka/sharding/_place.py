"""Put a tree onto a mesh, make a model there, and show how arrays lie there.

A model that is made on a mesh is never whole on one device.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostraka.errors import InvalidSharding, InvalidTree
from ostraka.layout.spec import (
    HOST_LOCAL,
    MeshSpec,
    Partition,
    iter_misfits,
    partition_grid,
    show_partition,
)
from ostraka.live.parse import is_key, parse
from ostraka.live.shardings import Devices, describe_sharding, spec_entries
from ostraka.sharding.drawing import draw
from ostraka.sharding.findings import Finding, raise_errors
from ostraka.sharding.leaves import every_dimension
from ostraka.sharding.mesh import (
    AnyMesh,
    as_mesh,
    has_explicit_axes,
    make_mesh,
    mesh_spec,
    mesh_to_use,
    refuse_swapped,
)
from ostraka.sharding.rules import combine
from ostraka.sharding.specs import (
    ArrayLeaf,
    Specs,
    array_leaves,
    follow_specs,
    has_shape,
    parse_state,
    partition_of,
    resolve_checked,
    to_spec,
)
from ostraka.tree.nodes import Node, leaves_of, rebuild, unwrapped


def place(tree: Any, mesh: Mesh | Mapping[str, int], specs: Any, *, explicit: bool = False) -> Any:
    """Put every array of a tree onto a mesh.

    NumPy arrays become JAX arrays, and abstract arrays get a sharding. Other values stay. Every
    process of a job calls this, with the same values in arrays that it has for itself.

    Args:
        tree: The tree: modules, optimizers, arrays. It is not changed.
        mesh: A mesh, or axis sizes for `make_mesh`. If it has Explicit axes, the arrays are placed
            on the same devices with Auto axes, with a warning.
        specs: A tree as `spec_tree` returns it, or rules as it takes them.
        explicit: Keep Explicit axes. Only models that are written for them run under them.

    Returns:
        The same tree with every array sharded as `specs` say. Modules and optimizers are new ones.

    Raises:
        InvalidSharding: Specs do not fit. The message lists all of them, and nothing is placed.

    Example:
        >>> model = place(model, mesh, fsdp("data"))
    """
    refuse_swapped("place(tree, mesh, specs)", specs)
    parsed = parse(tree)
    given = as_mesh(mesh)
    found, findings = resolve_checked(parse_state(tree), given, specs)
    leaves = {leaf.path: leaf for leaf in array_leaves(parsed)}
    findings += _narrowed(leaves.values())
    raise_errors(f"can't place the tree on the mesh ({mesh_spec(given)})", findings)
    target = mesh_to_use(given, explicit=explicit)
    shardings = {path: NamedSharding(target, spec) for path, spec in found.items()}
    abstract = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.value.dtype, sharding=shardings[path])
        for path, leaf in leaves.items()
        if isinstance(leaf.value, jax.ShapeDtypeStruct)
    }
    concrete = [path for path in leaves if path not in abstract]
    placed = put([leaves[path].value for path in concrete], [shardings[path] for path in concrete])
    values = {leaf.path: unwrapped(leaf.value) for leaf in leaves_of(parsed)}
    return rebuild(parsed, values | abstract | dict(zip(concrete, placed, strict=True)))


def _narrowed(leaves: Iterable[ArrayLeaf]) -> Iterator[Finding]:
    """Yield errors for NumPy arrays whose dtype JAX would silently change."""
    for leaf in leaves:
        if leaf.is_key or isinstance(leaf.value, jax.Array | jax.ShapeDtypeStruct):
            continue
        dtype = np.dtype(leaf.value.dtype)
        becomes = jax.dtypes.canonicalize_dtype(dtype)
        if becomes != dtype:
            yield Finding(
                "error",
                leaf.path,
                f"leaf {leaf.path!r} is {dtype} and would become {becomes}: cast it, or turn on "
                "jax_enable_x64",
            )


def put(arrays: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """Put arrays onto meshes, also onto ones that reach over several processes."""
    # JAX can put keys only onto devices of this process, but their words onto any.
    impls = [
        jax.random.key_impl(array) if is_key(array) and not sharding.is_fully_addressable else None
        for array, sharding in zip(arrays, shardings, strict=True)
    ]
    words = [
        array if impl is None else jax.random.key_data(array)
        for array, impl in zip(arrays, impls, strict=True)
    ]
    try:
        placed = jax.device_put(words, shardings)
    except AssertionError as error:
        raise InvalidTree(
            "can't place the tree: an array that each process has for itself is not the same on "
            "all of them; make it the same, or use jax.make_array_from_process_local_data"
        ) from error
    return [
        array if impl is None else jax.random.wrap_key_data(array, impl=impl)
        for array, impl in zip(placed, impls, strict=True)
    ]


def init(
    model_fn: Callable[[], Any],
    mesh: Mesh | Mapping[str, int],
    specs: Any = None,
    optimizer: Any = None,
    *,
    wrt: Any = None,
    explicit: bool = False,
) -> Any:
    """Make a sharded NNX model, and its optimizer if you pass an optax transformation.

    `model_fn` is compiled with the shardings of its result, so that each device computes its own
    part. Neither model nor optimizer is ever whole on a device or in host memory. (An orthogonal
    initializer still makes its array whole.) The values equal those of `model_fn()`, up to
    rounding. The arrays of the optimizer are sharded like the parameters that they belong to.
    Factored moments are, too, in the dimensions that they have.

    Args:
        model_fn: Makes the model, its `nnx.Rngs` included. It may also return an
            `nnx.ModelAndOptimizer`.
        mesh: A mesh, or axis sizes for `make_mesh`. If it has Explicit axes, as those of
            `jax.make_mesh` are, a plain model would fail in its first step. The result is placed on
            the same devices with Auto axes, with a warning.
        specs: A tree of specs for the model, or rules as `spec_tree` takes them. None takes the
            annotations of the variables, or the explicit shardings that arrays are made with.
        optimizer: An optax transformation.
        wrt: The variables that the optimizer changes. Default: `nnx.Param`.
        explicit: Keep Explicit axes. They also stay if `model_fn` makes arrays with explicit
            shardings (`jnp.zeros(…, out_sharding=P("data"))`).

    Returns:
        The model, or a tuple of the model and its `nnx.Optimizer`, or the `nnx.ModelAndOptimizer`.

    Raises:
        InvalidSharding: Specs do not fit the model or the mesh.
        InvalidTree: `model_fn` does not make a model, or `optimizer` is no optax transformation.

    Example:
        >>> model = init(lambda: Model(rngs=nnx.Rngs(0)), mesh, fsdp("data"))
        >>> model, optimizer = init(make_model, mesh, optimizer=optax.adam(1e-3))
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
class PreparedModel:
    """A function to compile, and how to rebuild objects from its result."""

    make: Callable[[], list[Any]]
    """Returns the arrays of all objects, and sets `structures` to rebuild the objects from."""
    structures: list[tuple[Any, Any]]
    shardings: list[NamedSharding]
    is_explicit: bool
    """True if the model can only be made under Explicit axes."""

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
        """Rebuild the objects. The arrays stay on their devices. Their shardings get this mesh."""
        from flax import nnx

        placed = put(arrays, [NamedSharding(mesh, s.spec) for s in self.shardings])
        objects: list[Any] = []
        for graphdef, treedef in self.structures:
            own, placed = placed[: treedef.num_leaves], placed[treedef.num_leaves :]
            objects.append(nnx.merge(graphdef, jax.tree.unflatten(treedef, own)))
        return objects[0] if len(objects) == 1 else tuple(objects)


def prepare(
    model_fn: Callable[[], Any], mesh: Mesh, rules: Any, optimizer: Any, wrt: Any
) -> PreparedModel:
    """Trace the model for its shapes, and work out where everything goes."""
    check_function(model_fn)
    check_optimizer(optimizer)
    make_objects = partial(_make_objects, model_fn, optimizer, wrt)
    is_explicit, abstract, model_key = _trace(make_objects, mesh)
    # Under Explicit axes JAX would compute every array whole on each device, and cut it at the
    # end, unless the model says otherwise.
    making = mesh if is_explicit else make_mesh(mesh)
    model = parse_state(abstract[0] if model_key is None else abstract[0][model_key])
    model_leaves = list(array_leaves(model))
    specs = _model_specs(model, mesh, rules)
    prefix = "" if model_key is None else f"{model_key}/"
    own = {f"{prefix}{path}": spec for path, spec in specs.items()}
    flat: list[NamedSharding] = []
    arrays: list[ArrayLeaf] = []
    for tree in map(parse_state, abstract):
        leaves = list(array_leaves(tree))
        arrays += leaves
        beside = [leaf for leaf in leaves if leaf.path not in own]
        found = own | follow_specs(beside, model_leaves, specs)
        values = {leaf.path: found.get(leaf.path, PartitionSpec()) for leaf in leaves_of(tree)}
        flat += [NamedSharding(making, spec) for spec in jax.tree.leaves(rebuild(tree, values))]
        own = {}  # The optimizer has no part of the model; its arrays follow the parameters.
    structures: list[tuple[Any, Any]] = []
    # Eager sharding places variables by their annotations. It can't if they are annotated for
    # another mesh, or if arrays of an optimizer have the annotations of a parameter with more
    # dimensions, as factored moments do.
    sizes = mesh_spec(mesh)
    eager = not any(
        misfit
        for leaf in arrays
        if leaf.named is not None
        for misfit in iter_misfits(
            leaf.path, leaf.shape, sizes, spec_entries(leaf.path, leaf.named)
        )
    )

    def make() -> list[Any]:
        from flax import nnx

        with jax.sharding.use_abstract_mesh(making.abstract_mesh), nnx.use_eager_sharding(eager):
            states = [nnx.split(made) for made in make_objects()]
        structures[:] = [(graphdef, jax.tree.structure(state)) for graphdef, state in states]
        return jax.tree.leaves([state for _, state in states])

    return PreparedModel(make, structures, flat, is_explicit)


def _model_specs(model: Node, mesh: Mesh, rules: Any) -> Specs:
    if rules is None:
        leaves = array_leaves(model)
        if all(leaf.named is None and _traced_spec(leaf.value) is None for leaf in leaves):
            raise InvalidSharding(
                "no variable of the model says how it is cut (out_sharding): give rules, such as "
                'fsdp("data")'
            )
        rules = combine("metadata", _traced_spec)
    specs, findings = resolve_checked(model, mesh, rules)
    raise_errors(f"can't make the model on the mesh ({mesh_spec(mesh)})", findings)
    return specs


def _traced_spec(value: Any) -> PartitionSpec | None:
    """Return the spec of an array that was traced under Explicit axes, if it is sharded."""
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


def _trace(make: Callable[[], list[Any]], mesh: Mesh) -> tuple[bool, list[Any], str | None]:
    """Return True if the model needs Explicit axes, and the abstract states of the objects.

    Also returns the key of the model in the first. Eager sharding is off: no variable is placed by
    its annotation.
    """
    from flax import nnx
    from flax.errors import TraceContextError

    model_key: str | None = None

    def make_states() -> list[Any]:
        nonlocal model_key
        objects = make()
        model_key = "model" if isinstance(objects[0], nnx.ModelAndOptimizer) else None
        return [nnx.state(made) for made in objects]

    def trace(on: Mesh) -> list[Any]:
        try:
            with jax.sharding.use_abstract_mesh(on.abstract_mesh), nnx.use_eager_sharding(False):
                return jax.eval_shape(make_states)
        except TraceContextError as error:
            raise InvalidTree(
                "model_fn changes an NNX object from outside, most likely an nnx.Rngs: make it "
                "inside model_fn, which is compiled"
            ) from error

    try:
        return False, trace(make_mesh(mesh)), model_key
    except ValueError as error:
        if "of type Auto" not in str(error):  # JAX has no exception type of its own for this
            raise
        if not has_explicit_axes(mesh):
            raise InvalidSharding(
                f"model_fn makes arrays with explicit shardings, and the mesh ({mesh_spec(mesh)}) "
                "has Auto axes: give one with Explicit axes, as jax.make_mesh makes it"
            ) from error
    return True, trace(mesh), model_key


# Check the arguments of `init`: likely mistakes get a message with the remedy.


def check_function(model_fn: Any) -> None:
    """Raise InvalidTree if `model_fn` is not a function that can be called without arguments."""
    from flax import nnx

    kind = type(model_fn).__name__
    if isinstance(model_fn, nnx.Module | nnx.ModelAndOptimizer):
        raise InvalidTree(
            f"model_fn is a {kind} that is made already: give a function that makes it, such as "
            f"lambda: {kind}(…), or put this one onto the mesh with sharding.place"
        )
    if not callable(model_fn):
        raise InvalidTree(
            f"model_fn is a {kind}; it must be a function that makes the model, such as "
            "lambda: Model(rngs=nnx.Rngs(0))"
        )
    is_class = isinstance(model_fn, type)
    parameters: list[inspect.Parameter] = []
    with contextlib.suppress(TypeError, ValueError):  # some builtins have no signature
        # The signature of a Flax class is that of its metaclass, which takes anything.
        found = inspect.signature(model_fn.__init__ if is_class else model_fn)
        parameters += list(found.parameters.values())[is_class:]
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        name = getattr(model_fn, "__name__", "model_fn")
        given = ", ".join(f"{n}=nnx.Rngs(0)" if n == "rngs" else f"{n}=…" for n in needed)
        raise InvalidTree(
            f"model_fn is called without arguments, and {name} needs {', '.join(needed)}: give "
            f"lambda: {name}({given})"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise InvalidTree if `optimizer` is neither None nor an optax transformation."""
    from flax import nnx

    if optimizer is None:
        return
    if isinstance(optimizer, nnx.Optimizer):
        what, remedy = "an nnx.Optimizer", "give the optax transformation that it is made of"
    elif isinstance(optimizer, str):
        what, remedy = repr(optimizer), f"give the transformation, such as optax.{optimizer}(1e-3)"
    elif hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return
    elif callable(optimizer):
        name = getattr(optimizer, "__name__", "adamw")
        what, remedy = f"the function {name}", f"call it, as in optax.{name}(1e-3)"
    else:
        what, remedy = f"a {type(optimizer).__name__}", "give one, such as optax.adamw(1e-3)"
    raise InvalidTree(f"optimizer is {what}, and no optax transformation: {remedy}")


# Show how arrays lie over devices, as text to print.


def picture(
    shape: Sequence[int],
    mesh: AnyMesh,
    spec: Any,
    *,
    dimensions: tuple[int, int] | None = None,
) -> str:
    """Draw the parts of an array, with the numbers of the devices that hold each.

    Two dimensions are drawn, one down and one across. If more are sharded, there is a drawing for
    each of their parts.

    Args:
        shape: The shape of the array.
        mesh: The mesh, or axis sizes such as `{"data": 2, "model": 2}`.
        spec: The PartitionSpec of the array.
        dimensions: The two dimensions to draw. Default: the first two that are sharded.

    Returns:
        The drawing as text.

    Raises:
        InvalidSharding: The spec does not fit the shape or the mesh.

    Example:
        >>> print(picture((8, 4), {"data": 2, "model": 2}, P("data", "model")))
        (8, 4) P('data', 'model') on data=2, model=2
              0:2   2:4
            ┌─────┬─────┐
        0:4 │  0  │  1  │
            ├─────┼─────┤
        4:8 │  2  │  3  │
            └─────┴─────┘
    """
    refuse_swapped("picture(shape, mesh, spec)", spec)
    sizes = mesh_spec(mesh)
    partition = partition_of("array", to_spec("array", spec), len(shape))
    return draw(tuple(shape), sizes, partition, dimensions=dimensions)


def show(value: Any, *, dimensions: tuple[int, int] | None = None) -> str:
    """Describe how an array, a variable or a whole tree lies over devices.

    Args:
        value: An array, a variable or a tree.
        dimensions: For an array: the two dimensions to draw, as in `picture`.

    Returns:
        Text to print: for an array the drawing of `picture`, for a tree a table with the path, the
        shape, the spec and the bytes on each device of every array.

    Example:
        >>> print(show(model))
    """
    parsed = parse(value)
    leaves = list(leaves_of(parsed))
    if len(leaves) == 1 and has_shape(leaves[0].value):
        mesh, partition = _lies(leaves[0].path, leaves[0].value)
        shape = tuple(leaves[0].value.shape)
        return draw(shape, mesh, every_dimension(partition, len(shape)), dimensions=dimensions)
    rows = [("leaf", "shape", "spec", "bytes a device", "mesh")]
    for leaf in array_leaves(parsed):
        mesh, partition = _lies(leaf.path, leaf.value)
        nbytes = leaf.nbytes // prod(partition_grid(mesh, partition, len(leaf.shape)))
        spec, where = show_partition(partition), str(mesh)
        if mesh.devices == (HOST_LOCAL,):
            spec, where = "host", ""
        rows.append((leaf.path, str(leaf.shape), spec, f"{nbytes:,}", where))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column == 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def _lies(path: str, value: Any) -> tuple[MeshSpec, Partition]:
    """Return a leaf's mesh and partition. Host memory is a mesh of its own."""
    sharding = getattr(value, "sharding", None)
    if sharding is None:
        return MeshSpec((), (), (HOST_LOCAL,)), ()
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, jax.sharding.Mesh):
        return mesh_spec(sharding.mesh), partition_of(path, sharding.spec, len(value.shape))
    return describe_sharding(path, sharding, Devices())
