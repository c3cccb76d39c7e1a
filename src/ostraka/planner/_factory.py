"""Import a user's function that makes a model, and evaluate it without making arrays."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import redirect_stdout
from types import ModuleType
from typing import Any, cast

from ostraka._spec import MeshSpec
from ostraka.errors import InvalidTree, describe, nearest


def is_factory(source: str) -> bool:
    """Whether a text is `package.module:function` or `file.py:function`."""
    where, colon, function = source.rpartition(":")
    if not colon or not all(name.isidentifier() for name in function.split(".")):
        return False
    return where.endswith(".py") or all(name.isidentifier() for name in where.split("."))


def evaluate_factory(source: str, mesh: MeshSpec | None, *, annotations: bool) -> tuple[Any, bool]:
    """What a factory returns, with shapes instead of values: no array is made.

    It runs with the mesh set, as under `jax.set_mesh`, but without devices. Also returned: whether
    variables were placed as their `annotations` say.
    """
    make = _find(source)
    from ostraka.planner._shapes import shapes_on_mesh

    try:
        with _stdout_to_stderr():
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
    """The remedy to add to errors of JAX about a mesh in user code."""
    if "mesh" not in str(error):
        return ""
    if mesh is None:
        return "; give a mesh (--mesh data=8), which is then set while the function runs"
    return f"; the function runs with the mesh ({mesh}) set, and need not make or set one"


def _find(source: str) -> Any:
    where, _, name = source.rpartition(":")
    try:
        with _stdout_to_stderr():
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
    """Import a file as a module; it can import the files beside it, as a script can."""
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


def _stdout_to_stderr() -> redirect_stdout[Any]:
    """Send what user code prints to stderr: stdout is for the answer."""
    return redirect_stdout(sys.stderr)
