"""Where each leaf goes: spec trees from rules, presets, checks, placement, sharded initialization.

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from ostraka import sharding

mesh = jax.make_mesh((2, 4), ("data", "model"))
model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))

specs = sharding.spec_tree(model, {"**/kernel": P(None, "model"), "**/bias": P("model")})
assert sharding.check(model, specs, mesh) == []
model = sharding.place(model, mesh, specs)
print(sharding.show(model))
"""

from __future__ import annotations

from ostraka.sharding._check import Finding, check
from ostraka.sharding._init import init
from ostraka.sharding._picture import picture, show
from ostraka.sharding._place import place
from ostraka.sharding._presets import Preset, data_parallel, fsdp, tensor_parallel
from ostraka.sharding._rules import combine, logical, spec_tree

__all__ = [
    "Finding",
    "Preset",
    "check",
    "combine",
    "data_parallel",
    "fsdp",
    "init",
    "logical",
    "picture",
    "place",
    "show",
    "spec_tree",
    "tensor_parallel",
]
