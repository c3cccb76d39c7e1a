"""A model by its config, with an optimizer, as a state to be planned. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ostraka._spec import DTYPES, LeafSpec, MeshSpec, Partition
from ostraka.planner._models import parameters_of
from ostraka.planner._optimizers import OptimizerLeaf, optimizer_leaves
from ostraka.planner._rules import resolve_rules
from ostraka.planner._state import State, share_devices
from ostraka.sharding._follow import cut_as, kept_dimensions
from ostraka.sharding._leaf import without_trailing

_VARIABLES = "flax.nnx.variablelib"
_OPTIMIZER = "flax.nnx.training.optimizer"


def state_of_config(
    config: Mapping[str, Any],
    *,
    mesh: MeshSpec,
    rules: Any,
    processes: int,
    optimizer: str,
    dtype: str,
    optimizer_dtype: str | None,
    metadata: Mapping[str, Any] | None = None,
) -> State:
    """The state of `{"model": model, "optimizer": optimizer}` for an NNX model of that config."""
    for name in (dtype, optimizer_dtype or dtype):
        if name not in DTYPES:
            raise ValueError(f"there is no dtype {name!r}; give one such as bfloat16 or float32")
    parameters = parameters_of(config)
    process_of = share_devices(len(mesh.devices), processes)
    # Rules see paths inside the model, as in `sharding.init`; in the state it is below `model/`.
    unplaced = [LeafSpec(path, "jax", dtype, shape) for path, shape in parameters]
    resolved = resolve_rules(unplaced, mesh, rules)
    model = [
        LeafSpec(f"model/{path}", "jax", dtype, shape, 0, resolved.partitions[path])
        for path, shape in parameters
    ]
    state = optimizer_leaves(optimizer, parameters, optimizer_dtype or dtype)
    leaves = [*model, *_place_beside(state, model)]
    return State(
        leaves=tuple(leaves),
        meshes=(mesh,),
        process_of=process_of,
        tree=_encode([leaf.path for leaf in leaves]),
        parameters=sum(prod(shape) for _, shape in parameters),
        user=metadata or {},
        findings=tuple(replace(found, path=f"model/{found.path}") for found in resolved.findings),
        adds_optimizer=bool(state),
    )


def _place_beside(state: Sequence[OptimizerLeaf], model: Sequence[LeafSpec]) -> Iterator[LeafSpec]:
    """The optimizer's leaves, cut as the parameters that they belong to."""
    parameters = {leaf.path: leaf for leaf in model}
    for path, shape, dtype, belongs_to in state:
        partition: Partition = ()
        if belongs_to is not None:
            parameter = parameters[f"model/{belongs_to}"]
            dimensions = kept_dimensions(path, shape, parameter.shape)
            if dimensions is not None:
                partition = without_trailing(cut_as(parameter.partition, dimensions))
        yield LeafSpec(f"optimizer/{path}", "jax", dtype, shape, 0, partition)


def _encode(paths: Sequence[str]) -> Any:
    """The tree as `_METADATA` would have it for NNX objects with these paths."""
    root: dict[str, Any] = {}
    for number, path in enumerate(paths):
        *above, name = path.split("/")
        node = root
        for key in above:
            node = node.setdefault(key, {})
        node[name] = number
    kinds = {"model": ["model", "Model"], "optimizer": [_OPTIMIZER, "Optimizer"]}
    items = [{"nnx": kinds[top], "items": [_encode_node(top, root[top])]} for top in root]
    return {"dict": list(root), "items": items}


def _encode_node(path: str, node: Any) -> Any:
    if isinstance(node, int):
        return {"variable": _variable(path), "about": {}, "items": [node]}
    items: dict[str, Any] = node
    keys = [int(key) if key.isdigit() else key for key in items]
    kind = "dict" if "/" in path else "state"  # below its top a state is made of dicts
    return {
        kind: keys,
        "items": [_encode_node(f"{path}/{key}", item) for key, item in items.items()],
    }


def _variable(path: str) -> list[str]:
    if path.startswith("model/"):
        return [_VARIABLES, "Param"]
    if path == "optimizer/step":
        return [_OPTIMIZER, "OptState"]
    return [_OPTIMIZER, "OptArray" if path.endswith("/count") else "OptVariable"]
