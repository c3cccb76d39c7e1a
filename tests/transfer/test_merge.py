"""`ostraka.merge`: averages, adapters added to a base, leaves of several checkpoints."""

import json
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from cli_runs import run
from ostraka.common.dtypes import DTYPES, numpy_dtype
from ostraka.errors import Damaged, InvalidTree, Mismatch
from places import Place


def make(seed: int, mesh: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def array(dtype: Any, *spec: Any) -> jax.Array:
        values = rng.normal(size=(16, 8)).astype(dtype)
        return jax.device_put(values, NamedSharding(mesh, P(*spec)))

    return {
        "f32": array("float32", "x", "y"),
        "bf16": array(ml_dtypes.bfloat16, "y"),
        "f16": array("float16"),
        "fp8": array(ml_dtypes.float8_e4m3fn, "x"),
        "c64": (rng.normal(size=3) + 1j * rng.normal(size=3)).astype(np.complex64),
        "f64": rng.normal(size=(5,)),
        "count": jnp.int32(seed),
        "key": jax.random.key(seed),
        "step": seed,
        "name": f"run {seed}",
        "layers": [{"w": array("float32", None, "x")} for _ in range(3)],
    }


@pytest.fixture
def mesh() -> Any:
    return jax.make_mesh((4, 2), ("x", "y"))


@pytest.fixture
def three(place: Place, mesh: Any) -> list[Place]:
    for seed in range(3):
        ostraka.save(place / f"{seed}", make(seed, mesh))
    return [place / f"{seed}" for seed in range(3)]


def expected(path: str, sources: Sequence[Place], weights: Sequence[float]) -> np.ndarray:
    """In the widest type there is, and rounded once."""
    arrays = [np.asarray(ostraka.open(source)[path]) for source in sources]
    narrow, wide = np.float64, np.longdouble
    if arrays[0].dtype.kind == "c":
        narrow, wide = np.complex128, np.clongdouble
    total = sum(a.astype(narrow).astype(wide) * w for a, w in zip(arrays, weights, strict=True))
    return np.asarray(total / sum(weights)).astype(narrow).astype(arrays[0].dtype)


FLOATS = ["f32", "bf16", "f16", "fp8", "c64", "f64", "layers/0/w", "layers/2/w"]


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [1, 1, 1]),
        ({"weights": [1, 2, 5]}, [1, 2, 5]),
        ({"ema": 0.5}, [0.25, 0.25, 0.5]),
        ({"ema": 0}, [0, 0, 1]),
    ],
)
def test_an_average_is_rounded_once_and_the_rest_is_the_last_one(
    three: list[Place], place: Place, options: dict[str, Any], weights: list[float]
):
    report = ostraka.merge(three, place / "merged", **options)
    assert report.averaged == 9
    assert report.taken == (0, 0, 2)
    assert report.weights == pytest.approx([weight / sum(weights) for weight in weights])
    assert ostraka.verify(place / "merged").ok
    merged, last = ostraka.open(place / "merged"), ostraka.open(three[-1])
    assert list(merged) == list(last)
    for path in FLOATS:
        wanted = expected(path, three, weights)
        assert merged[path].dtype == wanted.dtype
        found = np.asarray(merged[path])
        if path == "f64":  # the reference has more bits than the sum
            np.testing.assert_allclose(found, wanted, rtol=1e-15)
        else:
            np.testing.assert_array_equal(found, wanted)
        assert (merged[path].spec, merged[path].mesh) == (last[path].spec, last[path].mesh)
    assert merged["step"] == 2
    assert merged["name"] == "run 2"
    restored = ostraka.restore(place / "merged")
    assert int(restored["count"]) == 2
    assert jnp.array_equal(
        jax.random.key_data(restored["key"]), jax.random.key_data(jax.random.key(2))
    )


FLOAT_DTYPES = [name for name in DTYPES if name.startswith(("float", "bfloat", "complex"))]
SMALL_DTYPES = [name for name in FLOAT_DTYPES if DTYPES[name].bits <= 16]


def some(dtype: str, seed: int) -> np.ndarray:
    """Elements that every dtype can hold, none of them zero."""
    rng = np.random.default_rng(seed)
    signs = 1 if dtype == "float8_e8m0fnu" else rng.choice([-1, 1], size=(16, 6))
    return (rng.choice([0.5, 1, 2, 4], size=(16, 6)) * signs).astype(numpy_dtype(dtype))


def all_values(dtype: str) -> np.ndarray:
    """Every finite number that a dtype of at most two bytes can hold, in order."""
    bits = 6 if dtype.startswith("float6") else DTYPES[dtype].bits
    codes = np.arange(1 << bits, dtype=np.uint16 if bits > 8 else np.uint8)
    with np.errstate(invalid="ignore"):
        values = codes.view(numpy_dtype(dtype)).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def is_nearest(found: float, exact: Fraction, values: np.ndarray) -> bool:
    at = int(np.searchsorted(values, float(exact)))
    near = [Fraction(float(value)) for value in values[max(at - 2, 0) : at + 2]]
    return abs(Fraction(found) - exact) == min(abs(value - exact) for value in near)


def test_every_floating_dtype_is_averaged(tmp_path: Path, mesh: Any):
    sharding = NamedSharding(mesh, P("x"))
    trees = [
        {
            dtype: {
                "host": some(dtype, seed),
                "sharded": np.ones(1)
                if dtype.startswith(("float6", "float64", "complex128"))
                else jax.device_put(some(dtype, seed + 10), sharding),
            }
            for dtype in FLOAT_DTYPES
        }
        for seed in range(3)
    ]
    places = [tmp_path / f"{seed}" for seed in range(3)]
    for place, tree in zip(places, trees, strict=True):
        ostraka.save(place, tree)
    for options, weights in [({}, [1, 1, 1]), ({"ema": 0.5}, [1, 1, 2]), ({"ema": 0}, [0, 0, 1])]:
        out = tmp_path / f"out{len(options)}{options.get('ema')}"
        report = ostraka.merge(places, out, **options)
        assert (report.averaged, report.taken) == (2 * len(FLOAT_DTYPES), (0, 0, 0))
        merged = ostraka.open(out)
        for path in merged:
            found = np.asarray(merged[path])
            parts = [np.asarray(ostraka.open(place)[path]) for place in places]
            assert found.dtype == parts[0].dtype, path
            if found.dtype.itemsize > 2:
                np.testing.assert_array_equal(found, expected(path, places, weights), path)
                continue
            values = all_values(found.dtype.name)
            for index in np.ndindex(found.shape):
                exact = sum(
                    Fraction(float(part[index])) * weight
                    for part, weight in zip(parts, weights, strict=True)
                )
                exact = Fraction(exact) / sum(weights)
                assert is_nearest(float(found[index]), exact, values), (path, exact)


@pytest.mark.parametrize("dtype", SMALL_DTYPES)
def test_an_average_next_to_a_tie_is_rounded_once(tmp_path: Path, dtype: str):
    # By way of float32 it would become the tie itself, and go to the even neighbor.
    values = all_values(dtype)
    values = values[(values >= 0.5) & (values <= 4)][:20]
    tie = (values[:-1] + values[1:]) / 2
    ostraka.save(tmp_path / "base", {"kernel": values[:-1].astype(numpy_dtype(dtype))[None]})
    for name, step, wanted in [("up", 2.0**-45, values[1:]), ("down", -(2.0**-45), values[:-1])]:
        pair = {"lora_a": np.ones((1, 1)), "lora_b": (tie - values[:-1] + step)[None]}
        ostraka.save(tmp_path / f"{name}_adapters", {"lora": pair})
        sources = [tmp_path / "base", tmp_path / f"{name}_adapters"]
        ostraka.merge(sources, tmp_path / name, lora=1.0)
        found = np.asarray(ostraka.open(tmp_path / name)["kernel"])
        np.testing.assert_array_equal(found.astype(np.float64)[0], wanted)


def test_an_average_has_the_precision_of_the_dtype_that_is_asked_for(tmp_path: Path):
    for number, value in enumerate([1.0, 1.0078125]):
        ostraka.save(tmp_path / f"{number}", {"w": jnp.full(4, value, jnp.bfloat16)})
    ostraka.merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out", dtype="float32")
    found = np.asarray(ostraka.open(tmp_path / "out")["w"])
    np.testing.assert_array_equal(found, np.full(4, 1.00390625, np.float32))


def test_complex_infinities_stay_such(tmp_path: Path):
    for number, value in enumerate([np.inf, 1.0]):
        tree = {"z": np.array([value, 2 + 4j], np.complex64), "one": np.array(value + 2j)}
        ostraka.save(tmp_path / f"{number}", tree)
    ostraka.merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out", weights=[1, 3])
    merged = ostraka.open(tmp_path / "out")
    np.testing.assert_array_equal(np.asarray(merged["z"]), np.array([np.inf, 2 + 4j], np.complex64))
    assert complex(np.asarray(merged["one"])) == complex(np.inf, 2)


def test_a_source_without_weight_has_no_part_in_the_average(tmp_path: Path):
    ostraka.save(tmp_path / "0", {"w": jnp.full(2, jnp.nan)})
    ostraka.save(tmp_path / "1", {"w": jnp.array([-0.0, 3.0])})
    ostraka.merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out", weights=[0, 1])
    found = np.asarray(ostraka.open(tmp_path / "out")["w"])
    assert found.tobytes() == np.array([-0.0, 3.0], np.float32).tobytes()


@pytest.mark.parametrize("dtype", ["bool", "int2", "int4", "uint2", "uint4", "int8", "uint64"])
def test_other_dtypes_come_from_the_last_source_or_the_chosen_one(tmp_path: Path, dtype: str):
    for seed in range(2):
        array = np.full((3, 5), 1 - seed).astype(numpy_dtype(dtype))
        ostraka.save(tmp_path / f"{seed}", {"q": array, "w": np.full(3, float(seed))})
    sources = [tmp_path / "0", tmp_path / "1"]
    report = ostraka.merge(sources, tmp_path / "last")
    assert (report.averaged, report.taken) == (1, (0, 1))
    assert not np.asarray(ostraka.open(tmp_path / "last")["q"]).any()
    ostraka.merge(sources, tmp_path / "first", take={"q": 0})
    assert np.asarray(ostraka.open(tmp_path / "first")["q"]).all()
    with pytest.raises(InvalidTree, match=r"nothing to average: .*only='q' selects.*with take"):
        ostraka.merge(sources, tmp_path / "none", only="q")


def test_leaves_are_taken_as_they_are(tmp_path: Path, mesh: Any):
    for seed in range(2):
        ostraka.save(tmp_path / f"{seed}", make(seed, mesh))
    sources = [tmp_path / "0", tmp_path / "1"]
    report = ostraka.merge(
        sources, tmp_path / "both", take={"layers/1/**": 1, "layers": 0, "count": 0, "f32": 1}
    )
    assert report.taken == (3, 3)
    first, second, both = map(ostraka.open, [*sources, tmp_path / "both"])
    for path, source in [("layers/0/w", first), ("layers/1/w", second), ("f32", second)]:
        np.testing.assert_array_equal(np.asarray(both[path]), np.asarray(source[path]))
    assert int(both["count"][()]) == 0
    np.testing.assert_array_equal(np.asarray(both["bf16"]), expected("bf16", sources, [0.5, 0.5]))
    report = ostraka.merge(sources, tmp_path / "part", only="layers")
    assert (report.averaged, report.taken) == (3, (0, 8))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rank: int | None = None):
        def linear(rows: int, columns: int) -> Any:
            if rank is None:
                return nnx.Linear(rows, columns, rngs=rngs)
            return nnx.LoRALinear(rows, columns, lora_rank=rank, rngs=rngs)

        self.up, self.down = linear(16, 64), linear(64, 4)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


def test_a_merged_lora_computes_what_base_and_adapters_do(tmp_path: Path):
    base = Net(nnx.Rngs(0))
    model = Net(nnx.Rngs(1), rank=2)
    ostraka.save(
        tmp_path / "base",
        {"model": base, "optimizer": nnx.Optimizer(base, optax.adam(1e-3), wrt=nnx.Param)},
    )
    ostraka.restore(tmp_path / "base", into={"model": model}, only=["model", "!**/lora"])
    for layer in (model.up, model.down):
        layer.lora.lora_b[...] = jnp.ones(layer.lora.lora_b.shape) * 0.1
    adapters = nnx.state(model, nnx.LoRAParam)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
    ostraka.save(tmp_path / "adapters", {"model": adapters, "optimizer": optimizer})
    report = ostraka.merge([tmp_path / "base", tmp_path / "adapters"], tmp_path / "out", lora=1.0)
    assert (report.adapted, report.taken) == (2, (12, 0))
    merged = Net(nnx.Rngs(5))
    ostraka.restore(tmp_path / "out", into={"model": merged}, only="model")
    x = jax.random.normal(jax.random.key(3), (8, 16))
    np.testing.assert_allclose(merged(x), model(x), rtol=1e-5, atol=1e-6)
    assert not np.allclose(merged(x), base(x))


@pytest.mark.parametrize(
    ("names", "options", "told"),
    [
        ("a", {}, "two checkpoints or more, and got 1"),
        ("ab", {"weights": [1, 2, 3]}, "there are 3 weights for 2 checkpoints"),
        ("ab", {"weights": [1, -1]}, "whose sum is not 0"),
        ("ab", {"weights": [1, 1], "ema": 0.5}, "give one of them"),
        ("ab", {"ema": 1.0}, "at least 0 and less than 1"),
        ("ab", {"take": {"x": 0}}, "='x' matches no array|.'x': …. matches no array"),
        ("ab", {"take": {"w": 2}}, "number of a source, from 0 to 1"),
        ("ab", {"lora": 1.0}, "has no adapters"),
        ("al", {"lora": 1.0}, "is the adapter of 'w/kernel' or 'w/base_module/kernel'"),
        ("ad", {}, "is damaged.*'v'"),
        ("ao", {}, r"'u' is not in .*/a"),
        ("ao", {}, r"'w': its shape is \(4, 5\), and in .*/a \(4, 4\)"),
        ("ao", {}, r"'v': in .*/a, not in .*/o"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, names: str, options: dict[str, Any], told: str):
    both = {"w": jnp.ones((4, 4)), "v": jnp.ones(3)}
    for name, tree in {
        "a": both,
        "b": both,
        "d": both,
        "o": {"w": jnp.ones((4, 5)), "u": jnp.ones(3, jnp.bfloat16)},
        "l": {"w": {"lora_a": jnp.ones((4, 2)), "lora_b": jnp.ones((2, 4))}},
    }.items():
        ostraka.save(tmp_path / name, tree)
    (shard,) = (tmp_path / "d").glob("shards-*/shard_*")
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises((ValueError, Mismatch, InvalidTree, Damaged), match=told):
        ostraka.merge([tmp_path / name for name in names], tmp_path / "out", **options)
    with pytest.raises(ValueError, match="takes a list of checkpoints first, not 'runs/a'"):
        ostraka.merge("runs/a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path):
    for seed in range(2):
        ostraka.save(
            tmp_path / f"{seed}", {"w": jnp.full(4, float(seed)), "head": jnp.full(2, seed)}
        )
    sources = [str(tmp_path / "0"), str(tmp_path / "1")]
    done = run("merge", *sources, str(tmp_path / "out"), "--weights", "3,1", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["averaged"] == 1
    np.testing.assert_array_equal(np.asarray(ostraka.open(tmp_path / "out")["w"]), [0.25] * 4)
    done = run("merge", *sources, str(tmp_path / "p"), "--take", "w=0")
    assert "1 array of" in done.stdout
    for wrong in (["--weights", "a,b"], ["--take", "w"]):
        done = run("merge", *sources, str(tmp_path / "q"), *wrong)
        assert done.exit_code == 2
        assert "such as" in done.stderr


PROGRAM = """
import sys
import ostraka
from ostraka.transfer.convert import merge
def most_kib():
    # Not getrusage: a process begins with the most that the one which started it has ever had.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
before = most_kib()
merge(sys.argv[1:3], sys.argv[3])
print(most_kib() - before)
"""


@pytest.mark.soak
def test_memory_is_bounded(tmp_path: Path):
    for seed in range(2):
        ostraka.save(tmp_path / f"{seed}", {"w": np.ones((1 << 15, 1 << 13), np.float32)})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(str(tmp_path / name) for name in ("0", "1", "out"))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 16 << 10 < int(done.stdout) < 512 << 10, "more than 512 MiB for 1 GiB"
