"""`ostraka.plan`: the plan of a tree, or of what a text means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostraka._codec import CompressRule
from ostraka._plan_write import MAX_FILE_BYTES
from ostraka._units import size_bytes
from ostraka.planner._restore import target_mesh
from ostraka.planner._save_plan import Plan, plan_state
from ostraka.planner._sources import Options, plan_source
from ostraka.storage import may_be_path


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
    """What a save of `tree` will write, to the byte; no device is needed, nothing is written.

    `tree` is what `save` takes, or abstract: `nnx.eval_shape`, `jax.ShapeDtypeStruct`s. Text is
    what `ostraka plan` takes: the name of a known model (`"llama-3.1-8b"`), a `config.json` of
    Hugging Face, a checkpoint, or a function as `"package.module:function"`.

    `mesh` is where it will be placed: a mesh, an abstract one, or axis sizes such as `{"data": 8}`.
    `specs` says how it is cut: a tree of specs, one spec, or rules such as `sharding.fsdp("data")`
    and, for patterns, `sharding.combine({"**/kernel": P("data"), "**": P()})`; for text also
    `"fsdp+tp"` and its like. Without them each array is where its own sharding says; a known model
    is cut along the axes that are named for it, a checkpoint as it was. `processes` share the
    devices evenly: 1 for a tree, for text one for every 8 devices unless given.

    `optimizer`, an optax transformation or the name of one, adds the state that it has for the
    model `tree`, under `optimizer` beside `model`, cut as the parameters are. Its moments have the
    dtype that optax gives them, which is that of the parameters unless `optimizer_dtype` is given.
    `dtype`, `compress`, `parity`, `metadata` and `max_file_bytes` are those of `save`; of a known
    model `dtype` is that of its parameters. How small files get with `compress` depends on the
    values: `compressed` of the plan is an estimate, for normal weights, and all other sizes are
    those without. With `parity`, processes are taken to be on hosts of their own; `parity` of the
    plan has its files, and says what may be lost.

    Host arrays are assumed to be the same on all processes; `save` compares them.

    >>> plan(nnx.eval_shape(make), mesh={"data": 8}, specs=sharding.fsdp()).total_bytes
    >>> plan("llama-3.1-70b", mesh={"data": 64}, optimizer="adamw").bytes_by_group
    """
    size = size_bytes("max_file_bytes", max_file_bytes)
    if may_be_path(tree):
        options = Options(
            mesh=None if mesh is None else target_mesh(mesh),
            hosts=processes,
            rules=specs,
            optimizer=optimizer,
            dtype=dtype,
            optimizer_dtype=optimizer_dtype,
            max_file_bytes=size,
            metadata=metadata,
            compress=compress,
            parity=parity,
        )
        return plan_source(tree, options)
    # Only trees need JAX.
    from ostraka.planner._tree import state_of_tree

    state = state_of_tree(
        tree,
        mesh=mesh,
        specs=specs,
        processes=processes,
        optimizer=optimizer,
        optimizer_dtype=optimizer_dtype,
        dtype=dtype,
        metadata=metadata or {},
    )
    return plan_state(state, max_file_bytes=size, compress=compress, parity=parity)
