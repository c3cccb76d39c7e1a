"""Every optimizer and transformation of optax, in `nnx.Optimizer`."""

from __future__ import annotations

from functools import partial

from world.case import Registry
from world.cases.optax_all import all_transformations, in_nnx

CASES = Registry()

for _name, _build in all_transformations().items():
    CASES.case("optax", f"{_name} in nnx.Optimizer", "nnx.Optimizer", mesh_tolerance=5e-2)(
        partial(in_nnx, _name, _build)
    )
