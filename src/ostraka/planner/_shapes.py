"""What a function makes, as shapes on a mesh without devices, and the specs of its arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from ostraka._nodes import branches_of, leaves_of
from ostraka._spec import MeshSpec
from ostraka.sharding._data import array_leaves, parse_state


def shapes_on_mesh(
    make: Callable[[], Any], mesh: MeshSpec | None, *, annotations: bool
) -> tuple[Any, bool]:
    """What a function returns, made as if the mesh were set, and whether annotations were used.

    Code is written for axes of one type, explicit or auto, and under the other it may raise. With
    `annotations`, NNX variables are also placed by theirs; if that fails, they are left as they
    are, and the later check of the annotations reports the error. The last attempt is without any
    mesh, for boxed variables of Linen that name axes of another one.
    """
    if mesh is None:
        return shapes_of(make, eager=False), False
    attempts = [(eager, kind) for eager in (True, False) for kind in _AXIS_TYPES]
    failure: Exception | None = None
    for eager, kind in attempts if annotations else attempts[len(_AXIS_TYPES) :]:
        kinds = (kind,) * len(mesh.axis_names)
        try:
            with use_abstract_mesh(AbstractMesh(mesh.axis_sizes, mesh.axis_names, kinds)):
                return shapes_of(make, eager=eager), eager
        except Exception as error:
            failure = error
    try:
        return shapes_of(make, eager=False), False
    except Exception:
        assert failure is not None
        raise failure from None


_AXIS_TYPES = (AxisType.Explicit, AxisType.Auto)


def shapes_of(make: Callable[[], Any], *, eager: bool) -> Any:
    """What a function returns, with shapes in the place of JAX's arrays, none of which is made.

    Numbers, text and numpy arrays stay what they are, as a save would find them.
    """
    kept: list[Any] = []
    structures: list[Any] = []

    def is_object(value: Any) -> bool:
        return isinstance(value, nnx.Pytree | nnx.Variable)

    def trace() -> list[Any]:
        leaves, structure = jax.tree.flatten(make(), is_leaf=is_object)
        structures[:] = [structure]
        kept[:] = [None if is_object(x) or isinstance(x, jax.Array) else x for x in leaves]
        return [leaf if keep is None else None for leaf, keep in zip(leaves, kept, strict=True)]

    with nnx.use_eager_sharding(eager):
        shapes: list[Any] = nnx.eval_shape(trace)
    found = [shape if keep is None else keep for shape, keep in zip(shapes, kept, strict=True)]
    return jax.tree.unflatten(structures[0], found)


def own_specs(tree: Any, *, is_placed: bool) -> Callable[[str, Any], PartitionSpec | None] | None:
    """Rules that cut every array by its own sharding or annotation; None if no array has one.

    For variables that were placed by their annotations the sharding is used, since their logical
    names were mapped to axes by rules that are no longer set. For others the annotation is.
    """
    parsed = parse_state(tree)
    variables = [branch for branch in branches_of(parsed) if branch.kind == "variable"]
    placed = {leaf.path for variable in variables for leaf in leaves_of(variable) if is_placed}
    found: dict[str, PartitionSpec | None] = {}
    has_any = False
    for leaf in array_leaves(parsed):
        sharding = getattr(leaf.value, "sharding", None)
        own = sharding.spec if isinstance(sharding, NamedSharding) else None
        is_cut = own is not None and any(own)
        has_any = has_any or is_cut or leaf.named is not None
        if own is None or (leaf.named is not None and leaf.path not in placed):
            own = leaf.named
        found[leaf.path] = own
    return (lambda path, leaf: found.get(path)) if has_any else None
