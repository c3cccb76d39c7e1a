"""Import a user's function that makes a model, and evaluate it without making arrays."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from types import ModuleType
from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from ostraka.errors import InvalidTree, describe, nearest
from ostraka.layout.spec import MeshSpec
from ostraka.sharding.specs import array_leaves, parse_state
from ostraka.tree.nodes import branches_of, leaves_of


def evaluate_factory(source: str, mesh: MeshSpec | None, *, annotations: bool) -> tuple[Any, bool]:
    """Call a factory and return its result with shapes instead of arrays.

    It runs with the mesh set, as under `jax.set_mesh`, but without devices. Also returns True if
    variables were placed by their `annotations`.
    """
    make = _find(source)
    try:
        with redirect_stdout(sys.stderr):  # stdout is for the answer
            made, is_placed = shapes_on_mesh(make, mesh, annotations=annotations)
    except (Exception, SystemExit) as error:
        message = f"{source} raised {type(error).__name__}: {error}".rstrip(". ")
        raise ValueError(f"{message}{_mesh_remedy(error, mesh)}") from error
    if isinstance(made, tuple) and len(cast("tuple[Any, ...]", made)) == 2:
        model, optimizer = cast("tuple[Any, Any]", made)
        return {"model": model, "optimizer": optimizer}, is_placed
    if made is None:
        raise InvalidTree(f"{source} returns nothing; it must return a model, or a tree")
    return made, is_placed


def _mesh_remedy(error: BaseException, mesh: MeshSpec | None) -> str:
    """The remedy for errors of JAX about a mesh in user code."""
    if "mesh" not in str(error):
        return ""
    if mesh is None:
        return "; give a mesh (--mesh data=8), which is then set while the function runs"
    return f"; the function runs with the mesh ({mesh}) set, and need not make or set one"


def _find(source: str) -> Any:
    where, _, name = source.rpartition(":")
    try:
        with redirect_stdout(sys.stderr):
            found: Any = _import_file(where) if where.endswith(".py") else _import_module(where)
    except (Exception, SystemExit) as error:
        raise ValueError(f"can't import {where!r} for {source!r}: {describe(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{where} has no {name!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{source} is of type {type(found).__name__}; it must be a function")
    return found


def _import_module(name: str) -> ModuleType:
    _look_in(os.getcwd())
    return importlib.import_module(name)


def _import_file(path: str) -> ModuleType:
    """Import a file as a module. It can import the files beside it, as a script can."""
    name = os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {path}")
    _look_in(os.path.dirname(os.path.abspath(path)))
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, for one, look their module up; but one that is there already stays.
    is_new = sys.modules.setdefault(name, module) is module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if is_new:
            del sys.modules[name]
        raise
    return module


def _look_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def shapes_on_mesh(
    make: Callable[[], Any], mesh: MeshSpec | None, *, annotations: bool
) -> tuple[Any, bool]:
    """The result of a function, made as if the mesh were set, and True if annotations were used.

    Code is written for axes of one type, explicit or auto, and may raise under the other. With
    `annotations`, NNX variables are placed by theirs. If that fails, they stay unplaced, and the
    later check of the annotations reports the error. The last attempt is without any mesh, for
    boxed Linen variables that name axes of another mesh.
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
    """The result of a function with shapes in the place of JAX arrays. No array is made.

    Numbers, text and numpy arrays stay unchanged, as a save would find them.
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
    """Rules that shard every array by its own sharding or annotation. None if no array has one.

    Variables that were placed by their annotations use their sharding: rules that are no longer
    set have mapped their logical names to axes. Other variables use their annotation.
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
