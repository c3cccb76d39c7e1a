"""`ostraka.plan`: the plan of a tree, a known model, a config, a checkpoint or a function."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from ostraka.common.units import size_bytes
from ostraka.errors import InvalidSharding, nearest
from ostraka.families.catalog import MODELS
from ostraka.formats.ostraka.damage import damage_on_contradiction
from ostraka.formats.ostraka.source import OstrakaSource
from ostraka.formats.source import Saved, Source
from ostraka.layout import shard_file
from ostraka.layout.casts import cast_leaf, check_dtype_rule
from ostraka.layout.codec import CompressRule
from ostraka.layout.metadata import Metadata, shard_contents, take_entries
from ostraka.layout.plan_write import MAX_FILE_BYTES, WritePlan
from ostraka.layout.shard_file import FileEntry
from ostraka.layout.spec import LeafSpec
from ostraka.planner._save_plan import CompressedSize, Plan, count_parity, plan_state
from ostraka.planner.rules import read_json, read_rules, resolve_rules
from ostraka.planner.state import (
    PlanOptions,
    State,
    host_count,
    share_devices,
    state_of_config,
    target_mesh,
)
from ostraka.reading.locate import open_at
from ostraka.reading.names.given import NamesLike
from ostraka.storage import PathLike, may_be_path
from ostraka.tree.nodes import ArrayNumber, leaves_of


def plan(
    tree: Any,
    *,
    mesh: Any = None,
    specs: Any = None,
    processes: int | None = None,
    optimizer: Any = None,
    optimizer_dtype: Any = None,
    dtype: Any = None,
    compress: CompressRule = None,
    parity: int = 0,
    metadata: Mapping[str, Any] | None = None,
    max_file_bytes: int | str = MAX_FILE_BYTES,
) -> Plan:
    """Plan a save of `tree`, to the byte, without devices and without writing anything.

    Host arrays are assumed to be the same on all processes. `save` compares them.

    Args:
        tree: A tree as for `save`, or an abstract one (`nnx.eval_shape`, `jax.ShapeDtypeStruct`).
            Text means the same as for `ostraka plan`: the name of a known model
            (`"llama-3.1-8b"`), a Hugging Face `config.json`, a checkpoint, or a function as
            `"package.module:function"`.
        mesh: The mesh of the arrays: a mesh, an abstract mesh, or axis sizes such as
            `{"data": 8}`. By default each array keeps its own sharding.
        specs: How arrays are sharded: a tree of specs, one spec, or rules such as
            `sharding.fsdp("data")` and `sharding.combine({"**/kernel": P("data"), "**": P()})`.
            For text also names of presets, such as `"fsdp+tp"`. By default a known model is
            sharded along the axes that are named for it, and a checkpoint as it was saved.
        processes: How many processes share the devices. By default 1 for a tree, and for text one
            for every 8 devices.
        optimizer: An optax transformation, or the name of one. Its state for the model `tree` is
            added under `optimizer`, beside `model`, and sharded like the parameters.
        optimizer_dtype: The dtype of the optimizer's moments. By default optax chooses it, which
            means the dtype of the parameters.
        dtype: The dtype that arrays are saved as, as in `save`. For a known model, the dtype of
            its parameters.
        compress: As in `save`. The compressed size depends on the values, so `Plan.compressed` is
            an estimate for normal weights. All other sizes are those without compression.
        parity: As in `save`. Each process is assumed to be on a host of its own.
        metadata: As in `save`.
        max_file_bytes: As in `save`.

    Returns:
        The plan, with the sizes of all files.

    Raises:
        InvalidTree: The tree can't be saved.
        InvalidSharding: A spec does not fit the mesh, or processes can't share the devices.
        ValueError: An argument is invalid, or text means nothing that can be planned.

    Example:
        >>> plan(nnx.eval_shape(make), mesh={"data": 8}, specs=sharding.fsdp()).total_bytes
        >>> plan("llama-3.1-70b", mesh={"data": 64}, optimizer="adamw").bytes_by_group
    """
    options = PlanOptions(
        mesh=None if mesh is None else target_mesh(mesh),
        hosts=processes,
        rules=specs,
        optimizer=optimizer,
        dtype=dtype,
        optimizer_dtype=optimizer_dtype,
        max_file_bytes=size_bytes("max_file_bytes", max_file_bytes),
        metadata=metadata,
        compress=compress,
        parity=parity,
    )
    if may_be_path(tree):
        return plan_source(tree, options)
    # Only trees need JAX.
    from ostraka.planner._tree import state_of_tree

    return plan_state(state_of_tree(tree, options), options)


def plan_source(source: PathLike, options: PlanOptions) -> Plan:
    """The plan of a model, config, checkpoint or function. Raises ValueError or OstrakaError."""
    if not isinstance(source, str | os.PathLike):
        return _plan_saved(source, options)
    config = _config_of(source) if options.names is None else None
    if config is not None:
        return plan_state(state_of_config(config, options), options)
    if isinstance(source, str) and _is_factory(source):
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
    if os.path.isdir(name) and not os.path.exists(os.path.join(name, shard_file.METADATA_NAME)):
        name = os.path.join(name, "config.json")
    if not name.endswith(".json") or not os.path.exists(name):
        return None
    loaded = read_json(name, "the config", "is")
    if not isinstance(loaded, dict):
        raise ValueError(f"the config {name} is not a JSON object")
    return cast("dict[str, Any]", loaded)


# Checkpoints


def _plan_saved(source: PathLike, options: PlanOptions) -> Plan:
    if options.adds_optimizer or options.optimizer_dtype is not None:
        raise ValueError("a checkpoint has the optimizer that it was saved with: leave that out")
    if options.mesh is None:
        changed = replace(options, optimizer=None, names=None)
        if changed != PlanOptions():
            raise ValueError(
                "a checkpoint is planned as it is: to plan saving it anew, give a mesh, too "
                "(--mesh, mesh=); to plan a restore onto another, --onto or "
                "plan(path).restore(mesh=…)"
            )
        return plan_checkpoint(source, options.names)
    found = _saved_in_tree(open_at(source, options.names))
    leaves = [_without_place(leaf) for leaf in found.leaves]
    if options.dtype is not None:
        check_dtype_rule(options.dtype, leaves)
        leaves = [cast_leaf(leaf, options.dtype) for leaf in leaves]
    findings = ()
    if options.rules is not None:
        placed = [leaf for leaf in leaves if leaf.kind == "jax"]
        rules = read_rules(options.rules, options.mesh)
        partitions, findings = resolve_rules(placed, options.mesh, rules)
        leaves = [
            replace(leaf, partition=partitions.get(leaf.path, leaf.partition)) for leaf in leaves
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
        return plan_state(state, options)
    except InvalidSharding as error:
        if options.rules is not None:
            raise
        raise InvalidSharding(
            f"{error}; without rules everything is cut as it was: give some (--rules, specs=), or "
            "a mesh that fits"
        ) from error


def _saved_in_tree(source: Source) -> Saved:
    """The saved tree without optional arrays, such as heads that only a template asks for.

    A view has these after all others.
    """
    leaves = leaves_of(source.tree)
    numbers = [leaf.value.number for leaf in leaves if isinstance(leaf.value, ArrayNumber)]
    return replace(source.saved, leaves=source.saved.leaves[: max(numbers, default=-1) + 1])


def plan_checkpoint(path: PathLike, names: NamesLike | None = None) -> Plan:
    """The plan of an existing checkpoint.

    A checkpoint of another format is planned as Ostraka would save it, with the same shardings.
    """
    source = open_at(path, names)
    if not isinstance(source, OstrakaSource):
        saved = _saved_in_tree(source)
        state = State(saved.leaves, saved.meshes, saved.process_of, saved.tree, user=saved.user)
        return plan_state(state, PlanOptions())
    found = source.metadata
    with damage_on_contradiction(source.store):
        take_entries(found, None, source.shards.allowance())
        files = _files_before_compression(found)
    write = WritePlan(found.meshes, found.layouts, found.leaves, files, found.process_of)
    sizes = {process: index.size for process, index in found.indexes.items()}
    planned = Plan(write, found, source.metadata_bytes, sizes, True, None, ())
    if found.parity is not None:
        is_read_back = found.process_count > 1 or files != found.files
        planned = replace(planned, parity=count_parity(write, found.parity, None, is_read_back))
    if files == found.files:
        return planned
    saved_bytes = sum(file.size for file in files) - sum(file.size for file in found.files)
    total_bytes = planned.total_bytes - saved_bytes
    return replace(planned, compressed=CompressedSize(total_bytes, is_estimate=False))


def _files_before_compression(metadata: Metadata) -> tuple[FileEntry, ...]:
    """The files of a checkpoint with their uncompressed sizes."""
    if metadata.version < shard_file.COMPRESSED_VERSION:
        return metadata.files
    return tuple(
        replace(file, size=file.header_bytes + entries[-1].offset + entries[-1].nbytes)
        for file, entries in shard_contents(metadata).values()
    )


def _without_place(leaf: LeafSpec) -> LeafSpec:
    """A saved leaf on the one mesh of the plan. Host arrays stay in host memory."""
    if leaf.per_process:
        raise ValueError(
            f"leaf {leaf.path!r} has a value of its own for each process, and can't be planned on "
            "another mesh"
        )
    mesh = 0 if leaf.kind in ("jax", "key") else leaf.mesh
    return replace(leaf, mesh=mesh, cast_from=None)  # It would be saved from its restored dtype.


# Python factories


def _is_factory(source: str) -> bool:
    """True for `package.module:function` and `file.py:function`."""
    where, colon, function = source.rpartition(":")
    if not colon or not all(name.isidentifier() for name in function.split(".")):
        return False
    return where.endswith(".py") or all(name.isidentifier() for name in where.split("."))


def _plan_factory(source: str, options: PlanOptions) -> Plan:
    from ostraka.planner._factory import evaluate_factory, own_specs
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
        if mesh is not None:
            hosts = host_count(mesh, options.hosts)
            options = replace(options, hosts=hosts, rules=own or read_rules(options.rules, mesh))
        state = state_of_tree(tree, options)
    except InvalidSharding as error:
        if own is None:
            raise
        raise InvalidSharding(
            "without rules arrays are cut as they say themselves: give some (--rules, specs=), or "
            f"a mesh with the axes that they name; {error}"
        ) from error
    return plan_state(state, options)
