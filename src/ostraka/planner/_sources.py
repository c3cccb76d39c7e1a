"""What `ostraka plan SOURCE` means: a model's name, a config, a checkpoint, or a Python factory."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any, cast

from ostraka import _checkpoint, _format
from ostraka._parallel import paused_gc
from ostraka._plan import MAX_FILE_BYTES
from ostraka._spec import DTYPES, LeafSpec, MeshSpec, is_floating
from ostraka.errors import InvalidSharding, InvalidTree, describe, nearest, store_error
from ostraka.planner._models import dtype_of
from ostraka.planner._named import state_of_config
from ostraka.planner._names import MODELS
from ostraka.planner._plan import Plan, plan_checkpoint, plan_state
from ostraka.planner._rules import read_rules, settle_rules
from ostraka.planner._state import State, share_devices
from ostraka.storage import open_store


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller says about the state to be planned."""

    mesh: MeshSpec | None = None
    hosts: int | None = None
    rules: str | None = None
    optimizer: str | None = None
    dtype: str | None = None
    optimizer_dtype: str | None = None
    max_file_bytes: int = MAX_FILE_BYTES


_DEVICES_PER_HOST = 8


def host_count(mesh: MeshSpec, hosts: int | None) -> int:
    """The number of hosts; without one, hosts have eight devices."""
    if hosts is not None:
        return hosts
    devices = len(mesh.devices)
    return devices // _DEVICES_PER_HOST if devices % _DEVICES_PER_HOST == 0 else 1


def plan_source(source: str, options: Options) -> Plan:
    """The plan of what a source means. Raises ValueError, or OstrakaError, with the remedy."""
    config = _config_of(source)
    if config is not None:
        return _plan_config(config, options)
    if _is_factory(source):
        return _plan_factory(source, options)
    if not os.path.exists(source) and "://" not in source and os.sep not in source:
        raise ValueError(
            f"there is no model, file or checkpoint {source!r}{nearest(source, list(MODELS))}; "
            "give a built-in name (ostraka plan --names), a config.json, a checkpoint, or a "
            "factory as package.module:function"
        )
    return _plan_saved(source, options)


def _config_of(source: str) -> Mapping[str, Any] | None:
    if source in MODELS:
        return MODELS[source]
    name = source
    if os.path.isdir(source) and not os.path.exists(os.path.join(source, _format.METADATA_NAME)):
        name = os.path.join(source, "config.json")
    if not name.endswith(".json") or not os.path.exists(name):
        return None
    try:
        with open(name, encoding="utf-8") as file:
            loaded: Any = json.load(file)
    except OSError as error:
        raise store_error("read the config", name, error) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the config {name} is not JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"the config {name} is not a JSON object")
    return cast("dict[str, Any]", loaded)


def _plan_config(config: Mapping[str, Any], options: Options) -> Plan:
    mesh = options.mesh or MeshSpec((), (), (0,))
    with paused_gc():
        state = state_of_config(
            config,
            mesh=mesh,
            rules=read_rules(options.rules, mesh),
            processes=host_count(mesh, options.hosts),
            optimizer=options.optimizer or "none",
            dtype=options.dtype or dtype_of(config),
            optimizer_dtype=options.optimizer_dtype,
        )
    return plan_state(state, max_file_bytes=options.max_file_bytes)


# Checkpoints


def _plan_saved(source: str, options: Options) -> Plan:
    if options.optimizer not in (None, "none") or options.optimizer_dtype:
        raise ValueError("a checkpoint has the optimizer that it was saved with: leave that out")
    if options.mesh is None:
        is_cut = options.max_file_bytes != MAX_FILE_BYTES
        if options.hosts or options.rules or options.dtype or is_cut:
            raise ValueError(
                "a checkpoint is planned as it is: give --mesh to plan saving it anew, or --onto"
            )
        return plan_checkpoint(source)
    found = _checkpoint.load(open_store(source)).metadata
    leaves = [_without_place(leaf.spec, options.dtype) for leaf in found.leaves]
    problems = ()
    if options.rules is not None:
        placed = [leaf for leaf in leaves if leaf.kind == "jax"]
        settled = settle_rules(placed, read_rules(options.rules, options.mesh), options.mesh)
        problems = settled.problems
        leaves = [
            replace(leaf, partition=settled.partitions.get(leaf.path, leaf.partition))
            for leaf in leaves
        ]
    processes = host_count(options.mesh, options.hosts)
    state = State(
        leaves=tuple(leaves),
        meshes=(options.mesh,),
        process_of=share_devices(len(options.mesh.devices), processes),
        tree=found.tree,
        user=found.user,
        problems=problems,
    )
    try:
        return plan_state(state, max_file_bytes=options.max_file_bytes)
    except InvalidSharding as error:
        if options.rules is not None:
            raise
        raise InvalidSharding(
            f"{error}; without --rules everything is cut as it was: give --rules, or a mesh that "
            "fits"
        ) from error


def _without_place(leaf: LeafSpec, dtype: str | None) -> LeafSpec:
    """A saved leaf on the one mesh of the plan; host arrays stay in host memory."""
    if leaf.per_process:
        raise ValueError(
            f"leaf {leaf.path!r} has a value of its own for each process, and can't be planned on "
            "another mesh"
        )
    if dtype is not None:
        leaf = _saved_as(leaf, dtype)
    return replace(leaf, mesh=0) if leaf.kind in ("jax", "key") else leaf


def _saved_as(leaf: LeafSpec, dtype: str) -> LeafSpec:
    """What `save(dtype=…)` makes of a leaf."""
    if dtype not in DTYPES or not is_floating(dtype):
        raise ValueError(
            f"there is no floating-point dtype {dtype!r}; give one such as bfloat16 or float32"
        )
    if leaf.shape and is_floating(leaf.dtype) and leaf.dtype != dtype:
        return replace(leaf, dtype=dtype, cast_from=leaf.cast_from or leaf.dtype)
    return leaf


# Python factories


def _is_factory(source: str) -> bool:
    module, colon, function = source.partition(":")
    names = [*module.split("."), *function.split(".")]
    return bool(colon) and all(name.isidentifier() for name in names)


def _plan_factory(source: str, options: Options) -> Plan:
    from ostraka.planner._plan import plan

    if options.optimizer_dtype:
        raise ValueError(
            "a factory's optimizer has the dtypes that optax gives it: leave --optimizer-dtype out"
        )
    tree = evaluate_factory(source)
    mesh = options.mesh
    if mesh is None and (options.rules or options.hosts):
        raise ValueError("rules and hosts need --mesh, such as --mesh data=8")
    return plan(
        tree,
        mesh=None if mesh is None else dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)),
        specs=_factory_specs(tree, options),
        processes=None if mesh is None else host_count(mesh, options.hosts),
        optimizer=None if options.optimizer in (None, "none") else options.optimizer,
        dtype=options.dtype,
        max_file_bytes=options.max_file_bytes,
    )


def _factory_specs(tree: Any, options: Options) -> Any:
    """The rules; without any, what the variables name; without that, the usual ones."""
    if options.mesh is None:
        return None
    from ostraka.sharding._data import array_leaves, parse_state

    named = any(leaf.named is not None for leaf in array_leaves(parse_state(tree)))
    if options.rules is None and named:
        return "metadata"
    return read_rules(options.rules, options.mesh)


def evaluate_factory(source: str) -> Any:
    """What a factory returns, with shapes instead of values: no array is made."""
    module, _, name = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with _talking_aside():
            found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"can't import {module!r} for {source!r}: {describe(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {name!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{source} is of type {type(found).__name__}; it must be a function")
    from ostraka.planner._tree import shapes_of

    try:
        with _talking_aside():
            made = shapes_of(found)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{source} raised {type(error).__name__}: {error}") from error
    if isinstance(made, tuple) and len(cast("tuple[Any, ...]", made)) == 2:
        model, optimizer = cast("tuple[Any, Any]", made)
        return {"model": model, "optimizer": optimizer}
    if made is None:
        raise InvalidTree(f"{source} returns nothing; it must return a model, or a tree")
    return made


def _talking_aside() -> redirect_stdout[Any]:
    """What somebody else's code prints must not come between the lines of the answer."""
    return redirect_stdout(sys.stderr)
