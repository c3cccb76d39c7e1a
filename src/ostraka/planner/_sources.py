"""What `ostraka plan SOURCE` means: a model's name, a config, a checkpoint, or a Python factory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ostraka import _checkpoint, _format
from ostraka._codec import CompressRule
from ostraka._lifetime import paused_gc
from ostraka._names_given import NamesLike
from ostraka._plan_write import MAX_FILE_BYTES
from ostraka._spec import DTYPES, LeafSpec, MeshSpec, is_floating
from ostraka.errors import InvalidSharding, nearest, store_error
from ostraka.planner._factory import evaluate_factory, is_factory
from ostraka.planner._models import dtype_of
from ostraka.planner._named import state_of_config
from ostraka.planner._names import MODELS
from ostraka.planner._rules import read_rules, resolve_rules
from ostraka.planner._save_plan import Plan, plan_checkpoint, plan_state
from ostraka.planner._state import State, share_devices
from ostraka.storage import PathLike


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller says about the state to be planned."""

    mesh: MeshSpec | None = None
    hosts: int | None = None
    rules: Any = None
    """Rules of `ostraka.sharding`, or what `--rules` says."""
    optimizer: Any = None
    dtype: Any = None
    optimizer_dtype: Any = None
    max_file_bytes: int = MAX_FILE_BYTES
    metadata: Mapping[str, Any] | None = None
    compress: CompressRule = None
    parity: int = 0
    names: NamesLike | None = None
    """What the tensors of files are called in a tree; only for a checkpoint."""

    @property
    def adds_optimizer(self) -> bool:
        return self.optimizer is not None and self.optimizer != "none"

    def rules_on(self, mesh: MeshSpec) -> Any:
        """The rules; without any, what the names of the axes say."""
        is_text = self.rules is None or isinstance(self.rules, str)
        return read_rules(self.rules, mesh) if is_text else self.rules


def plan_with(state: State, options: Options) -> Plan:
    return plan_state(
        state,
        max_file_bytes=options.max_file_bytes,
        compress=options.compress,
        parity=options.parity,
    )


_DEVICES_PER_HOST = 8


def host_count(mesh: MeshSpec, hosts: int | None) -> int:
    """The number of hosts; without one, hosts have eight devices."""
    if hosts is not None:
        return hosts
    devices = len(mesh.devices)
    return devices // _DEVICES_PER_HOST if devices % _DEVICES_PER_HOST == 0 else 1


def plan_source(source: PathLike, options: Options) -> Plan:
    """The plan of what a source means. Raises ValueError, or OstrakaError, with the remedy."""
    if not isinstance(source, str | os.PathLike):
        return _plan_saved(source, options)
    config = _config_of(source) if options.names is None else None
    if config is not None:
        return _plan_config(config, options)
    if isinstance(source, str) and is_factory(source):
        if options.names is not None:
            raise ValueError("names are for a checkpoint, and the source is a function")
        return _plan_factory(source, options)
    name = os.fspath(source)
    if not os.path.exists(name) and "://" not in name and os.sep not in name:
        raise ValueError(
            f"there is no model, file or checkpoint {name!r}{nearest(name, list(MODELS))}; "
            "give a built-in name (ostraka plan --names), a config.json, a checkpoint, or a "
            "factory as package.module:function or file.py:function"
        )
    if name.endswith(".py") and os.path.isfile(name):
        raise ValueError(f"{name} is a Python file: name the function, as in {name}:make")
    return _plan_saved(name, options)


def _config_of(source: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    if isinstance(source, str) and source in MODELS:
        return MODELS[source]
    name = os.fspath(source)
    if os.path.isdir(name) and not os.path.exists(os.path.join(name, _format.METADATA_NAME)):
        name = os.path.join(name, "config.json")
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
    if options.adds_optimizer and not isinstance(options.optimizer, str):
        raise ValueError(
            "the optimizer of a model by name or config is given by its name, such as 'adamw'; to "
            "plan a transformation of your own, make the model: plan(nnx.eval_shape(make), "
            "optimizer=…)"
        )
    with paused_gc():
        state = state_of_config(
            config,
            mesh=mesh,
            rules=options.rules_on(mesh),
            processes=host_count(mesh, options.hosts),
            optimizer=options.optimizer or "none",
            dtype=_dtype_name(options.dtype) or dtype_of(config),
            optimizer_dtype=_dtype_name(options.optimizer_dtype),
            metadata=options.metadata,
        )
    return plan_with(state, options)


def _dtype_name(dtype: Any) -> str | None:
    """The name of a dtype: text, or anything that numpy takes for one."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        return np.dtype(dtype).name
    except (TypeError, ValueError):
        raise TypeError(f"{dtype!r} is no dtype; give one such as 'bfloat16'") from None


# Checkpoints


def _plan_saved(source: PathLike, options: Options) -> Plan:
    if options.adds_optimizer or options.optimizer_dtype is not None:
        raise ValueError("a checkpoint has the optimizer that it was saved with: leave that out")
    if options.mesh is None:
        changed = replace(options, optimizer=None, names=None)
        if changed != Options():
            raise ValueError(
                "a checkpoint is planned as it is: to plan saving it anew, give a mesh, too "
                "(--mesh, mesh=); to plan a restore onto another, --onto or "
                "plan(path).restore(mesh=…)"
            )
        return plan_checkpoint(source, options.names)
    found = _checkpoint.open_at(source, options.names).saved
    dtype = _dtype_name(options.dtype)
    leaves = [_without_place(leaf, dtype) for leaf in found.leaves]
    findings = ()
    if options.rules is not None:
        placed = [leaf for leaf in leaves if leaf.kind == "jax"]
        resolved = resolve_rules(placed, options.mesh, options.rules_on(options.mesh))
        findings = resolved.findings
        leaves = [
            replace(leaf, partition=resolved.partitions.get(leaf.path, leaf.partition))
            for leaf in leaves
        ]
    processes = host_count(options.mesh, options.hosts)
    state = State(
        leaves=tuple(leaves),
        meshes=(options.mesh,),
        process_of=share_devices(len(options.mesh.devices), processes),
        tree=found.tree,
        user=found.user if options.metadata is None else options.metadata,
        findings=findings,
    )
    try:
        return plan_with(state, options)
    except InvalidSharding as error:
        if options.rules is not None:
            raise
        raise InvalidSharding(
            f"{error}; without rules everything is cut as it was: give some (--rules, specs=), or "
            "a mesh that fits"
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


def _plan_factory(source: str, options: Options) -> Plan:
    from ostraka.planner._shapes import own_specs
    from ostraka.planner._tree import state_of_tree

    mesh = options.mesh
    if mesh is None and (options.rules is not None or options.hosts is not None):
        raise ValueError("rules and hosts need a mesh, such as --mesh data=8")
    if options.optimizer_dtype is not None and not options.adds_optimizer:
        raise ValueError(
            "the state of a factory's own optimizer has the dtypes that it was made with: leave "
            "--optimizer-dtype out, or have --optimizer add one"
        )
    tree, is_placed = evaluate_factory(source, mesh, annotations=options.rules is None)
    own = own_specs(tree, is_placed=is_placed) if options.rules is None else None
    try:
        state = state_of_tree(
            tree,
            mesh=None if mesh is None else dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)),
            specs=None if mesh is None else own or options.rules_on(mesh),
            processes=None if mesh is None else host_count(mesh, options.hosts),
            optimizer=options.optimizer if options.adds_optimizer else None,
            optimizer_dtype=options.optimizer_dtype,
            dtype=options.dtype,
            metadata=options.metadata or {},
        )
    except InvalidSharding as error:
        if own is None:
            raise
        raise InvalidSharding(
            "without rules arrays are cut as they say themselves: give some (--rules, specs=), or "
            f"a mesh with the axes that they name; {error}"
        ) from error
    return plan_with(state, options)
