"""Fingerprints do not depend on the sharding, and notice every change."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ostraka.live import fingerprint
from ostraka.live.fingerprint import Sums, add_parts, begin_fingerprints

SHAPE = (16, 24)


def fingerprints(*arrays: Any) -> list[Sums]:
    found = begin_fingerprints(arrays).collect()
    return [add_parts([part.sums for part in parts if part.is_first]) for parts in found]


DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "bool", "int4"]


def test_the_sharding_does_not_matter():
    values = np.random.default_rng(0).standard_normal((64, 24)).astype(np.float32)
    arrays = [jnp.asarray(values).astype(dtype) for dtype in DTYPES]
    auto = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    explicit = jax.make_mesh((2, 4), ("x", "y"))
    shardings = [
        *(NamedSharding(auto, spec) for spec in (P("a", "b"), P(("b", "a")), P(None, "a"), P())),
        NamedSharding(explicit, P("y", "x")),
    ]
    spread = [jax.device_put(array, sharding) for sharding in shardings for array in arrays]
    found = fingerprints(*arrays, *spread)
    for number, other in enumerate(found):
        plain, dtype = found[number % len(DTYPES)], DTYPES[number % len(DTYPES)]
        assert other.lanes == plain.lanes, dtype
        np.testing.assert_allclose(other.numbers, plain.numbers, rtol=1e-4, atol=1e-3)


def test_every_kind_of_leaf_has_a_fingerprint():
    leaves = [jnp.float32(-3), jnp.zeros((0, 3)), jax.random.key(1), jnp.ones((5,), jnp.complex64)]
    scalar, empty, _, _ = fingerprints(*leaves)
    assert scalar.numbers[:2] == (3.0, -3.0)
    assert empty.lanes == (0, 0, 0)
    with jax.enable_x64(True):
        wide = jnp.asarray([2.0**-40 + 1, 5])
        one, other = fingerprints(wide, wide.at[0].set(1))
    assert one.lanes != other.lanes


def test_flips_and_permutations_change_it():
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    rng = np.random.default_rng(1)
    changed: list[Any] = [values]
    for _ in range(60):
        one = values.copy()
        one.view(np.uint32).reshape(-1)[rng.integers(one.size)] ^= np.uint32(1 << rng.integers(32))
        changed.append(one)
    for _ in range(30):
        one = values.copy().reshape(-1)
        here, there = rng.choice(one.size, 2, replace=False)
        one[[here, there]] = one[[there, here]]
        changed.append(one.reshape(SHAPE))
    changed += [values.T.reshape(SHAPE), values[::-1].copy(), np.zeros_like(values)]
    found = fingerprints(*map(jnp.asarray, changed))
    for lane in range(fingerprint.LANES):
        assert len({one.lanes[lane] for one in found}) == len(changed)


def test_donated_arrays_and_large_ones_keep_no_copy():
    array = jnp.ones((512, 1024))
    pending = begin_fingerprints([array])
    jax.jit(lambda x: x * 2, donate_argnums=0)(array)
    (again,) = fingerprints(jnp.ones((512, 1024)))
    assert add_parts([part.sums for part in pending.collect()[0]]) == again
    (group,) = fingerprint._plan((fingerprint._describe(jnp.ones((512, 1024))),))
    call: Any = group.calls[0][1]
    compiled = call.lower(jnp.ones((512, 1024))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * array.nbytes


def test_thousands_of_leaves_are_summed_up_in_pieces():
    """XLA would compile one function of all of them for minutes."""
    arrays = [np.full((n % 2 + 1, 64), n, np.float32) for n in range(600)]
    found = fingerprints(*map(jnp.asarray, arrays))
    assert found[::97] == [fingerprints(jnp.asarray(array))[0] for array in arrays[::97]]
    (group,) = fingerprint._plan(tuple(map(fingerprint._describe, map(jnp.asarray, arrays))))
    assert max(len(places) for places, _ in group.calls) <= 256
    assert len({call for _, call in group.calls}) <= 6
