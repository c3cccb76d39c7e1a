"""The public surface: its names, what importing it costs, and lazy reading."""

import ast
import inspect
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from counting import CountingStore
from ostraka.formats import open_source
from ostraka.reading.lazy import Checkpoint
from places import Place

HEAVY = ["jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "xxhash", "click", "rich"]
OPTIONAL = ["orbax", "tensorstore", "obstore", "plotly", "torch", "safetensors", "grain"]


def run_python(code: str, *arguments: str) -> Any:
    """What a new interpreter prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOADED = """
import json, sys
names = {name.partition(".")[0] for name in sys.modules}
print(json.dumps(sorted(names)))
"""


# Names


PUBLIC = """
    Best Checkpoint ConvertReport CopyReport LazyArray Manager MergeReport Plan Record RepairReport
    SaveHandle VerifyReport __version__ annotate convert copy data errors exercises latest merge
    metrics open plan repair restore save save_async sharding verify
"""


@pytest.mark.parametrize("module", [ostraka, ostraka.sharding])
def test_the_public_names(module: Any):
    if module is ostraka:
        assert sorted(module.__all__) == sorted(PUBLIC.split())
    for name in module.__all__:
        assert name == "__version__" or inspect.getdoc(getattr(module, name)), name
    assert dir(module) == sorted(module.__all__)
    with pytest.raises(AttributeError, match=f"'{module.__name__}' has no attribute 'sav'"):
        _ = module.sav
    assert files("ostraka").joinpath("py.typed").is_file()


def test_imports_are_light():
    """Of the package, of the exercises, and of rules for shardings."""
    code = f"""
import ostraka
{LOADED}
from ostraka.sharding import combine, data_parallel, fsdp, logical, tensor_parallel
fsdp() | tensor_parallel() | logical({{'embed': 'data'}})
combine({{'**': ()}}, data_parallel())
assert not {{'jax', 'jaxlib', 'flax'}} & sys.modules.keys()
import ostraka.exercises
assert 'flax' not in sys.modules
"""
    loaded = run_python(code)
    assert "ostraka" in loaded
    assert not {*HEAVY, *OPTIONAL} & set(loaded)


def test_a_star_import():
    names: dict[str, Any] = {}
    exec("from ostraka import *", names)
    assert set(ostraka.__all__) <= names.keys()


def test_the_type_checker_sees_the_same_names():
    """What `__getattr__` finds is also imported under TYPE_CHECKING, by the same name."""
    tree = ast.parse(files("ostraka").joinpath("__init__.py").read_text())
    seen = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(ostraka.__all__) <= seen


# What an import costs


def test_reading_needs_no_jax(place: Place):
    path = place / "checkpoint"
    value = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    tree = {
        "a": jax.device_put(
            value, NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), P(None, "x"))
        ),
        "b": np.arange(4).astype(ml_dtypes.bfloat16),
        "key": jax.random.key(3),
        "step": 3,
    }
    ostraka.save(path, tree)
    code = """
import json, sys

class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, NoJax())
import ostraka
path = sys.argv[1]
checkpoint = ostraka.open(path)
report = ostraka.verify(path)
found = {
    "a": checkpoint["a"][1:, ::2].tolist(),
    "b": checkpoint["b"][...].astype("float32").tolist(),
    "step": checkpoint["step"],
    "prng": checkpoint["key"].prng,
    "ok": report.ok,
    "texts": [repr(checkpoint), repr(checkpoint["a"]), str(report)],
    "bad": [name for name in sys.modules if name.partition(".")[0] in ("jax", "flax", "jaxlib")],
}
try:
    ostraka.open(path + "-nothing")
except ostraka.errors.CheckpointNotFound as error:
    found["error"] = str(error)
print(json.dumps(found))
"""
    found = run_python(code, str(path))
    assert found["a"] == value[1:, ::2].tolist()
    assert found["b"] == [0, 1, 2, 3]
    assert found["step"] == 3
    assert found["prng"] == "threefry2x32"
    assert found["ok"]
    assert found["bad"] == []
    assert str(path) in found["error"]
    for text in found["texts"]:
        assert "object at 0x" not in text


def test_saving_imports_no_optional_package(tmp_path: Path):
    code = f"""
import sys
import numpy as np
import ostraka
ostraka.save(sys.argv[1], {{"a": np.arange(3)}})
ostraka.restore(sys.argv[1])
{LOADED}
"""
    loaded = run_python(code, str(tmp_path / "checkpoint"))
    assert "jax" in loaded
    assert not {*OPTIONAL, "flax", "optax", "click", "rich"} & set(loaded)


# Lazy arrays


def spread(value: np.ndarray, spec: P) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    return jax.device_put(value, NamedSharding(mesh, spec))


@pytest.fixture(scope="module")
def lazy(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, np.ndarray], Checkpoint]:
    """Arrays of several ranks, dtypes and layouts, with a checkpoint of them."""
    rng = np.random.default_rng(1)
    values = {
        "cube": rng.standard_normal((8, 6, 4)).astype(np.float32),
        "turned": rng.integers(-9, 9, (6, 8), dtype=np.int16),
        "half": rng.standard_normal((4, 2, 3, 2)).astype(ml_dtypes.bfloat16),
        "packed": rng.integers(-8, 8, (8, 5)).astype(ml_dtypes.int4),
        "packed odd": rng.integers(0, 4, (3, 3, 3)).astype(ml_dtypes.uint2),
        "vector": rng.standard_normal(11) + 1j * rng.standard_normal(11),
        "scalar": np.asarray(np.float32(2.5)),
        "empty": np.empty((0, 3), np.int8),
    }
    tree = {
        **values,
        "cube": spread(values["cube"], P("x", "y")),
        "turned": spread(values["turned"], P("y", "x")),
        "half": spread(values["half"], P("x")),
        "packed": spread(values["packed"], P(("x", "y"))),
    }
    path = tmp_path_factory.mktemp("lazy") / "checkpoint"
    ostraka.save(path, tree)
    return values, ostraka.open(path)


NAMES = ["cube", "turned", "half", "packed", "packed odd", "vector", "scalar", "empty"]


def assert_same(found: Any, expected: Any, index: Any) -> None:
    assert type(found) is type(expected), index
    assert found.shape == expected.shape, index
    assert found.dtype == expected.dtype, index
    assert found.tobytes() == expected.tobytes(), index


@given(data=st.data())
@settings(max_examples=80)
@pytest.mark.parametrize("name", NAMES)
def test_lazy_indexing_is_that_of_numpy(lazy: Any, name: str, data: st.DataObject):
    values, checkpoint = lazy
    shape = values[name].shape
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=False, allow_ellipsis=True))
    assert_same(checkpoint[name][index], values[name][index], index)


@pytest.mark.parametrize(
    "index",
    [
        slice(None, None, -1),
        slice(7, 2, -2),
        slice(100, 200),
        slice(-100, 100),
        slice(5, 2),
        (Ellipsis, -1),
        (-8, -6, -4),
        (slice(None, None, 3), 1, slice(None, None, -3)),
        np.int64(3),
        (Ellipsis,),
        (),
        (1, 2, 3, Ellipsis),
    ],
    ids=str,
)
def test_lazy_indices(lazy: Any, index: Any):
    values, checkpoint = lazy
    assert_same(checkpoint["cube"][index], values["cube"][index], index)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (8, "index 8 is out of range for dimension 0"),
        (-9, "index -9 is out of range for dimension 0"),
        ((0, 0, 4), "index 4 is out of range for dimension 2"),
        ((0, 0, 0, 0), "has 3 dimensions, not 4"),
        ((Ellipsis, Ellipsis), "only one"),
        (None, "integers, slices"),
        ([0, 1], "integers, slices"),
        (np.array([0, 1]), "integers, slices"),
        (1.0, "integers, slices"),
        ("a", "integers, slices"),
        (True, "integers, slices"),  # numpy would take it for a mask, and Python for 1
        (slice(None, None, 0), "step cannot be zero"),
    ],
    ids=str,
)
def test_lazy_indices_that_are_wrong(lazy: Any, index: Any, message: str):
    _, checkpoint = lazy
    with pytest.raises(ValueError if isinstance(index, slice) else IndexError, match=message):
        checkpoint["cube"][index]


def test_a_lazy_array_as_numpy(lazy: Any):
    values, checkpoint = lazy
    for name in NAMES:
        leaf = checkpoint[name]
        assert_same(np.asarray(leaf), values[name], name)
        assert (leaf.shape, leaf.ndim, leaf.dtype) == (
            values[name].shape,
            values[name].ndim,
            values[name].dtype,
        )
    assert np.asarray(checkpoint["turned"], dtype=np.float32).dtype == np.float32
    assert len(checkpoint["cube"]) == 8
    assert np.add(checkpoint["cube"], 1).shape == (8, 6, 4)
    with pytest.raises(TypeError, match="no dimensions"):
        len(checkpoint["scalar"])
    assert list(checkpoint) == list(values)
    assert len(checkpoint) == len(values)
    assert checkpoint.get("cub") is None
    own = checkpoint["cube"][...]
    own[:] = 0
    assert_same(checkpoint["cube"][...], values["cube"], ...)


def test_a_lazy_array_tells_how_it_lay(lazy: Any):
    _, checkpoint = lazy
    assert checkpoint["cube"].spec == (("x",), ("y",))
    assert str(checkpoint["cube"].mesh) == "x=4, y=2"
    assert checkpoint["vector"].mesh is None
    assert checkpoint["cube"].prng is None
    assert "float32[8, 6, 4]" in repr(checkpoint["cube"])
    assert checkpoint["cube"].nbytes == 8 * 6 * 4 * 4


def test_what_wrote_a_checkpoint(place: Place):
    ostraka.save(place / "c", {"a": 1}, metadata={"run": 7, "tags": ["x"]})
    checkpoint = ostraka.open(place / "c")
    assert checkpoint.metadata == {"run": 7, "tags": ["x"]}
    assert checkpoint.writer["ostraka"] == ostraka.__version__
    assert checkpoint.path == str(place / "c")
    assert checkpoint.nbytes == 0


# How much is read


BLOCK = 4 << 20
HEADER = 4096


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """64 MiB on eight devices, and as much in host memory."""
    value = np.arange(16 << 20, dtype=np.float32).reshape(4096, 4096)
    path = tmp_path_factory.mktemp("large") / "checkpoint"
    ostraka.save(
        path, {"sharded": spread(value, P("x", "y")), "whole": value, "small": np.arange(9)}
    )
    return path


def counting(path: Place) -> tuple[CountingStore, Checkpoint]:
    store = CountingStore(path)
    return store, Checkpoint(open_source(store))  # type: ignore[arg-type]


def test_opening_reads_no_array(large: Place):
    store, checkpoint = counting(large)
    assert [checkpoint[name].shape for name in checkpoint] == [(4096, 4096), (4096, 4096), (9,)]
    assert repr(checkpoint["whole"])
    assert list(store.gotten) == ["_METADATA"]
    assert store.opened == []
    assert store.bytes_read == 0


@pytest.mark.parametrize("leaf", ["sharded", "whole"])
@pytest.mark.parametrize(
    ("index", "files", "blocks"),
    [
        (np.s_[0, 0], 1, 1),
        (np.s_[:16], 2, 1),
        (np.s_[-1], 2, 1),
        (np.s_[100:101, 5:6], 1, 1),
        (np.s_[5:5], 1, 0),
    ],
    ids=str,
)
def test_only_what_is_needed_is_read(large: Place, leaf: str, index: Any, files: int, blocks: int):
    store, checkpoint = counting(large)
    found = checkpoint[leaf][index]
    expected = np.arange(16 << 20, dtype=np.float32).reshape(4096, 4096)[index]
    assert np.array_equal(found, expected)
    assert len(store.opened) <= files
    # Headers are checked with what they describe, blocks are read whole.
    assert store.bytes_read <= files * (HEADER + blocks * BLOCK)


def test_no_block_is_read_twice(large: Place):
    for leaf in ("sharded", "whole"):
        store, checkpoint = counting(large)
        found = checkpoint[leaf][...]
        assert store.bytes_read - len(store.opened) * HEADER - found.nbytes < BLOCK
        assert len(store.opened) == len(set(store.opened))
    store, checkpoint = counting(large)
    assert checkpoint["sharded"][::2, ::2].shape == (2048, 2048)
    assert store.bytes_read <= (64 << 20) + 8 * HEADER


def test_a_small_leaf_beside_large_ones(large: Place):
    store, checkpoint = counting(large)
    assert checkpoint["small"][3:5].tolist() == [3, 4]
    assert store.bytes_read <= HEADER + BLOCK
