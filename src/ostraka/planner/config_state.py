"""A model by its config, with an optimizer, as a state to be planned. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ostraka.common.dtypes import DTYPES
from ostraka.common.lifetime import paused_gc
from ostraka.errors import nearest
from ostraka.families.families import dtype_of, parameters_of
from ostraka.layout.spec import LeafSpec, Partition
from ostraka.planner.rules import read_rules, resolve_rules
from ostraka.planner.state import ONE_DEVICE, PlanOptions, State, host_count, share_devices
from ostraka.sharding.leaves import cut_as, kept_dimensions, without_trailing
from ostraka.tree.nodes import nest

# The state that optax's optimizers have for a model, as plain data. No JAX.

OptimizerLeaf = tuple[str, tuple[int, ...], str, str | None]
"""Path, shape, dtype, and the path of the parameter that it belongs to."""

OPTIMIZERS = ("adam", "adamw", "sgd", "adafactor", "lion", "none")
_MOMENTS = {
    "adam": ("mu", "nu"),
    "adamw": ("mu", "nu"),
    "lion": ("mu",),
    "adafactor": ("v", "v_col", "v_row"),
}
_FACTORED_FROM = 128
"""Adafactor keeps rows and columns if both have at least this size."""


def optimizer_leaves(
    name: str, parameters: Sequence[tuple[str, tuple[int, ...]]], dtype: str
) -> list[OptimizerLeaf]:
    """The leaves below `optimizer/`, in the order of `nnx.State`. None for "none"."""
    if name not in OPTIMIZERS:
        raise ValueError(
            f"there is no optimizer {name!r}{nearest(name, OPTIMIZERS)}; those there are: "
            f"{', '.join(OPTIMIZERS)}"
        )
    if name == "none":
        return []
    step: OptimizerLeaf = ("step", (), "uint32", None)
    if name == "sgd":
        return [step]
    count: OptimizerLeaf = ("opt_state/0/count", (), "int32", None)
    moments = [
        (f"opt_state/0/{moment}/{path}", shape, dtype, path)
        for moment in _MOMENTS[name]
        for path, whole in parameters
        for shape in [factored_shapes(whole)[moment] if name == "adafactor" else whole]
    ]
    return [count, *moments, step]


def factored_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of Adafactor's mean squares: of rows and columns, or of all elements."""
    by_size = sorted(range(len(shape)), key=lambda dimension: shape[dimension])
    if len(shape) < 2 or shape[by_size[-2]] < _FACTORED_FROM:
        return {"v": shape, "v_col": (1,), "v_row": (1,)}
    second, first = by_size[-2:]
    return {
        "v": (1,),
        "v_col": tuple(n for d, n in enumerate(shape) if d != second),
        "v_row": tuple(n for d, n in enumerate(shape) if d != first),
    }


_VARIABLES = "flax.nnx.variablelib"
_OPTIMIZER = "flax.nnx.training.optimizer"


@paused_gc()
def state_of_config(config: Mapping[str, Any], options: PlanOptions) -> State:
    """The state of `{"model": model, "optimizer": optimizer}` for an NNX model of that config."""
    if options.adds_optimizer and not isinstance(options.optimizer, str):
        raise ValueError(
            "the optimizer of a model by name or config is given by its name, such as 'adamw'; to "
            "plan a transformation of your own, make the model: plan(nnx.eval_shape(make), "
            "optimizer=…)"
        )
    dtype = _dtype_name(options.dtype) or dtype_of(config)
    optimizer_dtype = _dtype_name(options.optimizer_dtype) or dtype
    for name in (dtype, optimizer_dtype):
        if name not in DTYPES:
            raise ValueError(f"there is no dtype {name!r}; give one such as bfloat16 or float32")
    mesh = options.mesh or ONE_DEVICE
    parameters = parameters_of(config)
    process_of = share_devices(len(mesh.devices), host_count(mesh, options.hosts))
    # Rules see paths inside the model, as in `sharding.init`. In the state it is below `model/`.
    unplaced = [LeafSpec(path, "jax", dtype, shape) for path, shape in parameters]
    partitions, findings = resolve_rules(unplaced, mesh, read_rules(options.rules, mesh))
    model = [
        LeafSpec(f"model/{path}", "jax", dtype, shape, 0, partitions[path])
        for path, shape in parameters
    ]
    state = optimizer_leaves(options.optimizer or "none", parameters, optimizer_dtype)
    leaves = [*model, *_place_beside(state, model)]
    return State(
        leaves=tuple(leaves),
        meshes=(mesh,),
        process_of=process_of,
        tree=_encode([leaf.path for leaf in leaves]),
        parameters=sum(prod(shape) for _, shape in parameters),
        user=options.metadata or {},
        findings=tuple(replace(found, path=f"model/{found.path}") for found in findings),
        adds_optimizer=bool(state),
    )


def _dtype_name(dtype: Any) -> str | None:
    """The name of a dtype, given as text or as anything that numpy takes."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        return np.dtype(dtype).name
    except (TypeError, ValueError):
        raise TypeError(f"{dtype!r} is no dtype; give one such as 'bfloat16'") from None


def _place_beside(state: Sequence[OptimizerLeaf], model: Sequence[LeafSpec]) -> Iterator[LeafSpec]:
    """The optimizer's leaves, sharded like their parameters."""
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
    root = nest((path.split("/"), number) for number, path in enumerate(paths))
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
