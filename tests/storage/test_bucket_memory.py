"""What a save to a bucket and a restore from it take in memory, beside the state itself."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.testing import run_processes
from peaks import extra_bytes

MOST_EXTRA = 512 << 20


def make_tree(leaves: int, mib: int) -> dict[str, jax.Array]:
    """Values that bfloat16 has, too, and that compress to about a third."""
    placed = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
    shape = (8 * 64, (mib << 20) // leaves // 8 // 64 // 4)
    some = np.random.default_rng(0).standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
    shard = np.resize(some.astype(np.float32), (64, shape[1]))
    return {
        f"w{n}": jax.make_array_from_callback(shape, placed, lambda i: shard.copy())
        for n in range(leaves)
    }


def measure(
    path: str, leaves: int, mib: int, how: dict[str, Any], cast: str | None = None
) -> list[int]:
    """Of a save, and of a restore, which may `cast`, beyond the arrays that it makes."""
    tree = jax.block_until_ready(make_tree(leaves, mib))
    ostraka.save(f"{path}-small", {"x": np.zeros(99_999)}, **how)
    saved = extra_bytes(lambda: ostraka.save(path, tree, **how))
    dtype = cast or how.get("dtype") or "float32"
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype, sharding=a.sharding), tree)
    kept: list[Any] = []

    def restore() -> None:
        kept.append(jax.block_until_ready(ostraka.restore(path, like=like, dtype=cast)))

    read = extra_bytes(restore)
    for name, leaf in kept[0].items():
        assert leaf.dtype == dtype
        found, wanted = (np.asarray(a.addressable_shards[-1].data[-9:]) for a in (leaf, tree[name]))
        assert (found == wanted.astype(dtype)).all()
    return [saved, read - sum(leaf.nbytes for leaf in jax.tree.leaves(kept))]


AS_BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}
COMPRESSED: dict[str, Any] = {"compress": "zstd"}


def case(leaves: int, mib: int, how: dict[str, Any], cast: str | None, name: str) -> Any:
    """Those of 4 GiB take long. Casts on the way back are in the soak test alone."""
    marks = [pytest.mark.soak] if mib == 4096 or cast else []
    return pytest.param(leaves, mib, how, cast, marks=marks, id=name)


# Files written or read in one go, and boxes converted or cast whole, would be more.
@pytest.mark.parametrize(
    ("leaves", "mib", "how", "cast"),
    [
        case(2, 576, {}, None, "plain"),
        case(1, 1152, AS_BFLOAT16, None, "converted"),
        case(1, 640, COMPRESSED, None, "compressed"),
        case(1, 640, {}, "bfloat16", "cast"),
        case(1, 640, COMPRESSED, "bfloat16", "compressed, cast"),
        case(1, 4096, {}, None, "plain, 4 GiB"),
        case(1, 4096, AS_BFLOAT16, None, "converted, 4 GiB"),
        case(64, 4096, AS_BFLOAT16, None, "converted, many"),
        case(1, 4096, COMPRESSED, None, "compressed, 4 GiB"),
        case(64, 4096, COMPRESSED, None, "compressed, many"),
        case(1, 4096, AS_BFLOAT16 | COMPRESSED, None, "both, 4 GiB"),
        case(1, 4096, {}, "bfloat16", "cast, 4 GiB"),
        case(64, 4096, {}, "bfloat16", "cast, many"),
        case(1, 4096, COMPRESSED, "bfloat16", "compressed, cast, 4 GiB"),
        case(1, 4096, AS_BFLOAT16, "float32", "cast back, 4 GiB"),
    ],
)
@pytest.mark.parametrize("bucket", ["seaweed"], indirect=True)
def test_memory_is_bounded(bucket: str, leaves: int, mib: int, how: Any, cast: str | None):
    sizes: Any = {"processes": 1, "devices_per_process": 8, "timeout_s": 600}
    (result,) = run_processes(measure, f"{bucket}/large", leaves, mib, how, cast, **sizes)
    print("save, restore, MiB:", [n >> 20 for n in result.value])
    assert max(result.value) <= MOST_EXTRA
