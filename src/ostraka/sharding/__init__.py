"""Where each leaf goes: spec trees from rules, presets, checks, placement, sharded initialization.

from flax import nnx
from jax.sharding import PartitionSpec as P
from ostraka import sharding

mesh = sharding.make_mesh({"data": 2, "model": 4})
model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))

specs = sharding.spec_tree(model, {"**/kernel": P(None, "model"), "**/bias": P("model")})
assert sharding.check(model, mesh, specs) == []
model = sharding.place(model, mesh, specs)
print(sharding.show(model))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostraka.sharding._check import check
    from ostraka.sharding._combine import Preset, combine, logical
    from ostraka.sharding._findings import Finding
    from ostraka.sharding._init import init
    from ostraka.sharding._mesh import ExplicitAxes, make_mesh
    from ostraka.sharding._picture import picture, show
    from ostraka.sharding._place import place
    from ostraka.sharding._presets import data_parallel, fsdp, tensor_parallel
    from ostraka.sharding._rules import spec_tree

__all__ = [
    "ExplicitAxes",
    "Finding",
    "Preset",
    "check",
    "combine",
    "data_parallel",
    "fsdp",
    "init",
    "logical",
    "make_mesh",
    "picture",
    "place",
    "show",
    "spec_tree",
    "tensor_parallel",
]

# Looked up when first used: the planner takes presets and checks from here, and must not wait for
# JAX.
_HOMES = {
    "ExplicitAxes": "_mesh",
    "Finding": "_findings",
    "Preset": "_combine",
    "check": "_check",
    "combine": "_combine",
    "data_parallel": "_presets",
    "fsdp": "_presets",
    "init": "_init",
    "logical": "_combine",
    "make_mesh": "_mesh",
    "picture": "_picture",
    "place": "_place",
    "show": "_picture",
    "spec_tree": "_rules",
    "tensor_parallel": "_presets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ostraka.sharding' has no attribute {name!r}")
    module = import_module(f"ostraka.sharding.{_HOMES[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
