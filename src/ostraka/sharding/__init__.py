"""How arrays are sharded: specs from rules and presets, checks, placement, sharded initialization.

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
    from ostraka.sharding._place import init, picture, place, show
    from ostraka.sharding.findings import Finding
    from ostraka.sharding.mesh import ExplicitAxes, make_mesh
    from ostraka.sharding.presets import data_parallel, fsdp, tensor_parallel
    from ostraka.sharding.rules import Preset, combine, logical
    from ostraka.sharding.specs import check, spec_tree

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
# JAX. The modules that do without it come first.
_HOMES = ("findings", "presets", "rules", "mesh", "specs", "_place")


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        module = import_module(f"ostraka.sharding.{home}")
        if hasattr(module, name):
            value = globals()[name] = getattr(module, name)
            return value
    raise AttributeError(f"module 'ostraka.sharding' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
