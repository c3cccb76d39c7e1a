"""`ostraka.convert`: what is written is read by the programs that the formats belong to."""

import json
import os
import subprocess
import zipfile
import zlib
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
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import ostraka
from cli_runs import run
from hf_files import save_for_hugging_face
from nnx_models import Block
from orbax_cases import (
    FORMS,
    OPTIMIZER,
    Form,
    flat,
    make_arrays,
    make_local,
    make_values,
    mesh_of,
    numbers,
    ocp,
    quiet,
    read_with_orbax,
    v1,
    write,
)
from ostraka.errors import (
    Busy,
    Damaged,
    InvalidTree,
    PathInTheWay,
    SaveFailed,
    UnsupportedFormat,
)
from ostraka.storage import Claim, LocalStore, _claim, open_store
from ostraka.storage.file import LocalReader, LocalWriter
from ostraka.testing import FaultyStore
from ostraka.transfer.convert import _tensor_files
from ostraka.transfer.convert._workplace import Workplace
from places import Place

TORCH = Path(__file__).parents[2] / ".venv-torch" / "bin" / "python"


def tensors() -> dict[str, Any]:
    """Arrays alone, sharded in several ways."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))

    def put(shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.Array:
        return jax.device_put(numbers(shape, dtype), NamedSharding(mesh, P(*spec)))

    return {
        "rows": put((16, 64), np.float32, "x"),
        "columns": put((64, 16), np.float32, None, ("x", "y")),
        "both": put((64, 512), jnp.bfloat16, "x", "y"),
        "fp8": put((8, 8), jnp.float8_e4m3fn, "y"),
        "replicated": put((5,), np.int16),
        "zero-d": jnp.float16(2.5),
        "empty": np.zeros((0, 3), np.float32),
        "flags": numbers((7,), np.bool_),
        "wide": np.arange(4, dtype=np.int64),
        "layers": [{"w": numbers((3, 5), np.float64)}, {"w": numbers((2,), np.complex64)}],
    }


def same(found: Any, wanted: Any) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()


def arrays_of(path: Any) -> dict[str, np.ndarray[Any, Any]]:
    opened = ostraka.open(path)
    return {name: np.asarray(opened[name]) for name in opened}


# Our own format


def test_a_checkpoint_of_ours_as_another_of_ours(place: Place):
    tree = {**tensors(), "key": jax.random.key(3), "step": 7, "name": "run", "none": None}
    ostraka.save(place / "a", tree, metadata={"run": "x"})
    seen: list[tuple[int, int]] = []
    report = ostraka.convert(
        place / "a",
        place / "b",
        to="ostraka",
        dtype={"both": "float32"},
        compress="zstd",
        on_bytes=lambda done, total: seen.append((done, total)),
    )
    assert (report.arrays, report.bytes_kept) == (12, 0)
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert ostraka.verify(place / "b").ok
    first, second = ostraka.open(place / "a"), ostraka.open(place / "b")
    assert list(first) == list(second)
    assert second.metadata == {"run": "x"}
    for path in arrays_of(place / "a"):
        if path == "both":
            same(second[path], np.asarray(first[path]).astype(np.float32))
        elif path not in ("key", "step", "name", "none"):
            same(second[path], first[path])
            assert (second[path].spec, second[path].mesh) == (first[path].spec, first[path].mesh)
    restored = ostraka.restore(place / "b")
    assert (restored["step"], restored["name"], restored["none"]) == (7, "run", None)
    assert jnp.array_equal(jax.random.key_data(restored["key"]), jax.random.key_data(tree["key"]))
    again = ostraka.convert(
        place / "a", place / "b", to="ostraka", dtype={"both": "float32"}, compress="zstd"
    )
    assert again.arrays == 12
    with pytest.raises(PathInTheWay, match="has another checkpoint, which is not replaced"):
        ostraka.convert(place / "a", place / "b", to="ostraka")


def test_a_part_of_a_model_with_its_optimizer(tmp_path: Path):
    model = Block(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    ostraka.save(tmp_path / "a", {"model": model, "optimizer": optimizer, "step": 3})
    report = ostraka.convert(tmp_path / "a", tmp_path / "b", to="ostraka", only=["model", "step"])
    assert report.arrays == 17
    other = Block(rngs=nnx.Rngs(1))
    restored = ostraka.restore(tmp_path / "b", into={"model": other, "step": 0})
    assert restored["step"] == 3
    assert flat(nnx.state(other)) == flat(nnx.state(model))
    assert other.tied is other.first.kernel


# Orbax


def everything() -> dict[str, Any]:
    return {**make_arrays(mesh_of(x=4, y=2)), **make_local(), **make_values()}


@pytest.mark.parametrize("form", FORMS[:4:2], ids=str)
def test_from_orbax_to_ours_and_back_to_orbax(tmp_path: Path, form: Form):
    real = write(form, tmp_path / "real", everything())
    ostraka.convert(real, tmp_path / "ours", to="ostraka")
    report = ostraka.convert(tmp_path / "ours", tmp_path / "back", to="orbax")
    assert report.arrays == 55
    assert ostraka.verify(tmp_path / "ours").ok
    with quiet():
        wanted = read_with_orbax(form, real)
        assert flat(ocp.PyTreeCheckpointer().restore(tmp_path / "back")) == flat(wanted)
        assert flat(v1.load(tmp_path / "back")) == flat(wanted)


def assert_same(found: Any, wanted: Any) -> None:
    """Names just the leaves that differ."""
    (structure, leaves), (as_wanted, others) = flat(found), flat(wanted)
    assert structure == as_wanted
    assert [pair for pair in zip(leaves, others, strict=True) if pair[0] != pair[1]] == []


def test_all_ways_in_which_orbax_reads(tmp_path: Path):
    model = Block(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    mesh = mesh_of(x=4, y=2)
    tree = {
        "model": model,
        "optimizer": optimizer,
        "arrays": make_arrays(mesh),
        "optax": OPTIMIZER.init({"w": jnp.ones((4, 4))}),
        "rng": jax.random.key(5, impl="rbg"),
        "values": {"step": 3, "rate": 0.1, "flag": True, "none": None},
        "empty": {"dict": {}, "list": [], "tuple": (), "optax": optax.EmptyState()},
        "nested": [(np.arange(3), [np.ones(2, np.float32)])],
    }
    # What Orbax is given is the state of an NNX object.
    like = {**tree, "model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    ostraka.save(tmp_path / "ours", tree, metadata={"who": "me"})
    ostraka.convert(tmp_path / "ours", tmp_path / "tree", to="orbax")
    ostraka.convert(tmp_path / "ours", tmp_path / "run" / "7", to="orbax")
    abstract = jax.tree.map(
        lambda leaf: ocp.utils.to_shape_dtype_struct(leaf) if hasattr(leaf, "dtype") else leaf, like
    )
    with quiet():
        ocp.PyTreeCheckpointer().save(tmp_path / "real", like)
        wanted = ocp.PyTreeCheckpointer().restore(tmp_path / "real")
        assert flat(ocp.PyTreeCheckpointer().restore(tmp_path / "tree")) == flat(wanted)
        with ocp.StandardCheckpointer() as checkpointer:
            by_template = checkpointer.restore(tmp_path / "real", abstract)
            assert flat(checkpointer.restore(tmp_path / "tree", abstract)) == flat(by_template)
        with ocp.CheckpointManager(tmp_path / "run") as manager:
            assert manager.all_steps() == [7]
            assert flat(manager.restore(7)) == flat(wanted)
            restored = manager.restore(7, args=ocp.args.StandardRestore(abstract))
            assert flat(restored) == flat(by_template)
            assert manager.metadata(7).custom_metadata == {"who": "me"}
        for path in (tmp_path / "tree", tmp_path / "run" / "7"):
            assert_same(v1.load(path), wanted)
    for name in ("cut", "rows", "params"):
        found = jax.tree.leaves(wanted["arrays"][name])[0].sharding
        assert found.is_equivalent_to(jax.tree.leaves(tree["arrays"][name])[0].sharding, 2)


def test_dtypes_that_orbax_can_hold(tmp_path: Path):
    dtypes = ["int4", "int2", "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn", "complex128"]
    kinds = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in dtypes}
    wanted = {name: np.arange(12).reshape(3, 4).astype(kind) for name, kind in kinds.items()}
    ostraka.save(tmp_path / "a", wanted)
    ostraka.convert(tmp_path / "a", tmp_path / "o", to="orbax")
    with quiet():
        found = ocp.PyTreeCheckpointer().restore(tmp_path / "o")
    for name, array in wanted.items():
        same(found[name], array)


def test_a_large_array_is_cut_into_chunks_that_need_not_fit(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr("ostraka.transfer.convert._plan_orbax._CHUNK_BYTES", 1 << 10)
    tree = {"prime": numbers((101, 103), np.float32), "even": numbers((64, 3, 8), np.int32)}
    ostraka.save(tmp_path / "a", tree)
    ostraka.convert(tmp_path / "a", tmp_path / "o", to="orbax")
    with quiet():
        assert flat(ocp.PyTreeCheckpointer().restore(tmp_path / "o")) == flat(tree)


def test_what_orbax_cant_hold_is_refused_before_anything_is_written(tmp_path: Path):
    tree = {
        "a": {"b": np.ones(2)},
        "a.b": np.zeros(2),
        "none": np.zeros((0, 2)),
        "uint4": np.ones(2, ml_dtypes.uint4),
        "raw": b"bytes",
        "huge": 1 << 70,
        "complex": 1j,
        "good": np.ones(3),
    }
    ostraka.save(tmp_path / "a", tree)
    with pytest.raises(InvalidTree, match="Orbax can't hold what is to be converted") as caught:
        ostraka.convert(tmp_path / "a", tmp_path / "o", to="orbax")
    for part in (
        "'a/b', 'a.b': Orbax has one place for them",
        "'none' is empty, of the shape (0, 2)",
        "'uint4' has the dtype uint4",
        "'raw' is a value of the type bytes",
        "'huge' is an integer of more than 64 bits",
        "'complex' is a value of the type complex",
    ):
        assert part in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    ostraka.convert(tmp_path / "a", tmp_path / "o", to="orbax", only=["good", "a"])
    with pytest.raises(UnsupportedFormat, match="writes directories of a file system alone"):
        ostraka.convert(tmp_path / "a", "memory://refused/o", to="orbax", only="good")


# Files of tensors


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_the_safetensors_package_reads_it(place: Place, tmp_path: Path, compress: Any):
    tree = tensors()
    ostraka.save(place / "a", tree, compress=compress)
    ostraka.convert(place / "a", place / "out", to="safetensors")
    data = (place / "out" / "model.safetensors").read_bytes()
    (tmp_path / "copy.safetensors").write_bytes(data)
    wanted = arrays_of(place / "a")
    with safe_open(tmp_path / "copy.safetensors", "numpy") as opened:
        assert set(opened.keys()) == set(wanted)
        assert opened.metadata() is None
        for name in wanted:
            if wanted[name].dtype.name not in ("bfloat16", "float8_e4m3fn"):
                same(opened.get_tensor(name), wanted[name])
    assert {p.name for p in place.iterdir()} - {"copy.safetensors"} == {"a", "out"}
    assert [p.name for p in (place / "out").iterdir()] == ["model.safetensors"]


TORCH_PROGRAM = """
import json, sys, torch
from safetensors.torch import load_file
found = load_file(sys.argv[1])
print(json.dumps({
    name: [str(t.dtype), list(t.shape), t.contiguous().view(-1).view(torch.uint8).tolist()]
    for name, t in found.items() if t.ndim
}))
"""


@pytest.mark.skipif(not TORCH.exists(), reason="PyTorch is not installed in .venv-torch")
def test_pytorch_reads_it(tmp_path: Path):
    ostraka.save(tmp_path / "a", tensors())
    ostraka.convert(tmp_path / "a", tmp_path / "out", to="hf")
    file = tmp_path / "out" / "model.safetensors"
    done = subprocess.run(
        [TORCH, "-c", TORCH_PROGRAM, file], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    for name, array in arrays_of(tmp_path / "a").items():
        if array.ndim:
            dtype, shape, data = found[name.replace("/", ".")]
            assert dtype == f"torch.{array.dtype}"
            assert (tuple(shape), bytes(data)) == (array.shape, array.tobytes())


def test_several_files_and_their_index_as_hugging_face_has_them(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_tensor_files, "MAX_FILE_BYTES", 1000)
    tree = {f"model.layers.{n}.weight": numbers((10, 10), np.float32, n) for n in range(4)}
    tree["model.small"] = numbers((60,), np.float32)
    ostraka.save(place / "a", tree)
    ostraka.convert(place / "a", place / "hf", to="hf")
    names = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(p.name for p in (place / "hf").iterdir()) == sorted(
        [*names, "model.safetensors.index.json"]
    )
    index = json.loads((place / "hf" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"] == {"total_size": 1840}
    assert index["weight_map"] == {
        "model.layers.0.weight": names[0],
        "model.layers.1.weight": names[0],
        "model.layers.2.weight": names[1],
        "model.layers.3.weight": names[1],
        "model.small": names[2],
    }
    for name in names:
        data = (place / "hf" / name).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        assert length % 8 == 0
        for tensor, about in header.items():
            start, stop = (8 + length + at for at in about["data_offsets"])
            assert data[start:stop] == tree[tensor].tobytes()
            assert index["weight_map"][tensor] == name


def test_one_safetensors_file(tmp_path: Path):
    tree = {"w": numbers((3, 4), np.float32), "nested": {"b": numbers((5,), np.float16)}}
    ostraka.save(tmp_path / "a", tree)
    target = tmp_path / "w.safetensors"
    target.mkdir()
    for _ in range(2):  # a directory, then a file
        with pytest.raises(PathInTheWay, match="w.safetensors is there already"):
            ostraka.convert(tmp_path / "a", target, to="safetensors")
        if target.is_dir():
            target.rmdir()
            ostraka.convert(tmp_path / "a", target, to="safetensors")
    found = load_file(target)
    assert set(found) == {"w", "nested/b"}
    same(found["nested/b"], tree["nested"]["b"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "w.safetensors"]
    with pytest.raises(UnsupportedFormat, match="file system alone"):
        ostraka.convert(tmp_path / "a", "memory://one/w.safetensors", to="safetensors")


def test_numpy_loads_it_without_pickle(tmp_path: Path):
    ostraka.save(tmp_path / "a", tensors())
    narrow = {"both": "float32", "fp8": "float32"}
    ostraka.convert(tmp_path / "a", tmp_path / "w.npz", to="npz", dtype=narrow)
    wanted, found = arrays_of(tmp_path / "a"), tensors_in(tmp_path / "w.npz")
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        same(found[name], array.astype(np.float32) if name in narrow else array)
    assert subprocess.call(["python3", "-m", "zipfile", "-t", tmp_path / "w.npz"]) == 0


def tensors_in(path: Path) -> dict[str, np.ndarray]:
    """What the program that a file belongs to reads."""
    if path.suffix != ".npz":
        return load_file(path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("to", ["safetensors", "npz"])
def test_arrays_in_several_pieces(tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ostraka.transfer.convert.work.BAND_BYTES", 1 << 12)
    monkeypatch.setattr("ostraka.transfer.convert.work._TOGETHER_BYTES", 1 << 12)
    tree = {"w": numbers((101, 103), np.float32), "v": numbers((3, 64, 64), np.int16)}
    ostraka.save(tmp_path / "a", tree)
    ostraka.convert(tmp_path / "a", tmp_path / f"w.{to}", to=to)
    for name, array in tensors_in(tmp_path / f"w.{to}").items():
        same(array, tree[name])


TURNED: dict[str, tuple[tuple[int, ...], Any, dict[str, Any]]] = {
    "a.weight": ((257, 130), np.float32, {"path": "a/kernel", "transpose": True}),
    "b.weight": ((64, 33, 20), np.int16, {"path": "b/kernel", "transpose": [2, 0, 1]}),
    "c.weight": (
        (96, 200),
        np.uint8,
        {"path": "c/kernel", "transpose": True, "split": {1: [8, -1]}},
    ),
    "d.weight": ((1, 300), np.float64, {"path": "d/kernel", "transpose": True}),
    "e.weight": ((0, 3), np.float32, {"path": "e/kernel", "transpose": True}),
    "f.weight": ((40, 50), np.complex64, {"path": "f/kernel"}),
    **{
        f"x.{n}.weight": ((90, 110), np.float16, {"path": "x/kernel", "transpose": True})
        for n in range(3)
    },
}


@pytest.mark.parametrize("to", ["ostraka", "orbax", "safetensors", "npz"])
@pytest.mark.parametrize("slab_bytes", [1 << 11, 1 << 13, 1 << 30])
def test_arrays_that_are_turned_in_several_pieces(
    tmp_path: Path, to: Any, slab_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    """Their pieces are parts of all rows; each byte of the source is read once."""
    for name, size in {
        "reading.view.BLOCK_BYTES": 1 << 9,
        "transfer.convert.work.SLAB_BYTES": slab_bytes,
        "transfer.convert.work._LEAST_RUN_BYTES": 4,
        "transfer.convert._write_files.READ_BYTES": 1 << 12,
    }.items():
        monkeypatch.setattr(f"ostraka.{name}", size)
    files = {name: numbers(shape, dtype) for name, (shape, dtype, _) in TURNED.items()}
    if to == "orbax":
        del files["e.weight"]  # Orbax has no arrays without elements.
    rules: dict[str, Any] = {name: TURNED[name][2] for name in files if name[0] != "x"}
    rules["x.{e}.weight"] = {"path": "x/kernel", "transpose": True, "stack": ["e"]}
    save_file(files, tmp_path / "in.safetensors")
    tree = tmp_path / "tree"
    first: Any = "orbax" if to == "orbax" else "ostraka"
    ostraka.convert(tmp_path / "in.safetensors", tree, to=first, names=rules)
    if to in ("ostraka", "orbax"):
        found = {path: np.asarray(leaf) for path, leaf in ostraka.open(tree).items()}
        same(found["a/kernel"], np.ascontiguousarray(files["a.weight"].T))
        same(found["b/kernel"], np.ascontiguousarray(files["b.weight"].transpose(2, 0, 1)))
        same(found["c/kernel"], np.ascontiguousarray(files["c.weight"].T.reshape(200, 8, 12)))
        same(found["f/kernel"], files["f.weight"])
        same(found["x/kernel"], np.stack([files[f"x.{n}.weight"].T for n in range(3)]))
        assert to == "orbax" or ostraka.verify(tree).ok
        return
    ostraka.convert(tree, tmp_path / f"out.{to}", to=to, names=rules)
    back = tensors_in(tmp_path / f"out.{to}")
    assert back.keys() == files.keys()
    for name, array in files.items():
        same(back[name], array)


def test_a_turned_array_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """However many pieces it is written in."""
    monkeypatch.setattr("ostraka.transfer.convert.work.SLAB_BYTES", 4 << 20)
    monkeypatch.setattr("ostraka.transfer.convert.work._LEAST_RUN_BYTES", 64)
    array = numbers((4096, 2048), np.float32)
    ostraka.save(tmp_path / "a", {"w": array})
    read: list[int] = []

    def counted(self: Any, offset: int, buffers: Any, real: Any = LocalReader.read_into) -> int:
        read.append(real(self, offset, buffers))
        return read[-1]

    monkeypatch.setattr(LocalReader, "read_into", counted)
    targets: dict[Any, str] = {"ostraka": "o", "hf": "h", "npz": "n.npz"}
    for to, target in targets.items():
        read.clear()
        turned = {"w": {"path": "w", "transpose": True}}
        ostraka.convert(tmp_path / "a", tmp_path / target, to=to, names=turned)
        assert 2 * array.nbytes <= sum(read) < 2.2 * array.nbytes, to


def test_zip_has_64_bit_numbers_past_4_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The layout of 5 GiB, whose data is a hole in the file."""
    from ostraka.layout.spec import LeafSpec
    from ostraka.transfer.convert._tensor_files import plan_npz
    from ostraka.transfer.convert.work import ConvertItem

    shapes = {"a": (5 << 30,), "b": (3,)}
    items = [
        ConvertItem(n, at, LeafSpec(n, "numpy", "uint8", shape), n)
        for at, (n, shape) in enumerate(shapes.items())
    ]
    header = plan_npz("w.npz", items, {}).fixed[1][1]
    crc = zlib.crc32(header[header.index(b"\x93NUMPY") :])
    plan = plan_npz("w.npz", items, {1: zlib.crc32(b"\1\2\3", crc)})  # "a" is not read
    with open(tmp_path / "w.npz", "wb") as file:
        for start, data in plan.fixed:
            file.seek(start)
            file.write(data)
        file.seek(plan.places[1])
        file.write(b"\1\2\3")
    assert (tmp_path / "w.npz").stat().st_size == plan.size
    with np.load(tmp_path / "w.npz", allow_pickle=False) as found:
        same(found["b"], np.array([1, 2, 3], np.uint8))
    with zipfile.ZipFile(tmp_path / "w.npz") as archive:
        (large, small) = archive.infolist()
        assert large.file_size == (5 << 30) + 128
        assert small.header_offset > 5 << 30


# What is refused


def test_leaves_that_are_no_tensors_are_refused_with_the_remedy(tmp_path: Path):
    tree = {
        "model": {"w": jnp.ones((2, 2), jnp.bfloat16), "s": jnp.bfloat16(1)},
        "rng": jax.random.key(0),
        "step": 3,
        "name": "x",
        "int4": np.ones(2, ml_dtypes.int4),
    }
    ostraka.save(tmp_path / "a", tree)
    with pytest.raises(InvalidTree, match="with ! in only: '!step', '!name', '!int4'") as caught:
        ostraka.convert(tmp_path / "a", tmp_path / "s", to="hf")
    text = str(caught.value)
    assert "'step', 'name': Python values, which are no arrays" in text
    assert "'int4': int4, for which it has no name\n" in text + "\n"
    with pytest.raises(InvalidTree, match=r"'model/w': bfloat16.*cast it with dtype='float32'"):
        ostraka.convert(tmp_path / "a", tmp_path / "n.npz", to="npz", only="model/w")
    with pytest.raises(InvalidTree, match=r"no array at all but RNG state \('rng'\); key_data has"):
        ostraka.convert(tmp_path / "a", tmp_path / "n.npz", to="npz", only="rng")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    only = ["!step", "!name", "!int4"]
    report = ostraka.convert(tmp_path / "a", tmp_path / "hf", to="hf", only=only)
    assert report.left_out == ("rng",)
    with safe_open(tmp_path / "hf" / "model.safetensors", "np") as file:
        assert set(file.keys()) == {"model.w", "model.s"}
    ostraka.convert(tmp_path / "a", tmp_path / "k.npz", to="npz", only="rng", key_data=True)
    with np.load(tmp_path / "k.npz") as found:
        same(found["rng"], np.asarray(jax.random.key_data(tree["rng"])))


@pytest.mark.parametrize(
    ("target", "options", "told"),
    [
        ("b", {"to": "zip"}, "to is 'zip'; it must be one of ostraka, orbax"),
        ("b", {"compress": "zstd"}, "compress is for to='ostraka' alone"),
        ("b", {"dtype": "int8"}, "dtype is 'int8'; it must be a floating-point dtype"),
        ("b", {"rename": {"c": "d"}, "to": "orbax"}, "rename is for to='safetensors', 'hf' and"),
        ("b", {"rename": {"x": "y"}}, "rename has 'x', which is not in .*/a"),
        ("b", {"rename": {"w": ""}}, "rename leaves no name for 'w'"),
        ("b", {"rename": {"w": "__metadata__"}}, "'w' would be tensor '__metadata__'"),
        ("b.npz", {"to": "npz", "config": {}}, "config is for to='hf' alone, and to is 'npz'"),
        ("b", {"config": "list.json"}, "no JSON object at its top"),
        ("b", {"config": "broken.json"}, "can't be read as a config.json"),
        ("b", {"config": "missing.json"}, "can't be read as a config.json: .*No such file"),
        ("b", {"config": {"a": np.ones(2)}}, "can't be written as JSON"),
        ("b", {"to": "npz"}, "a file for numpy.load must end in .npz"),
        ("b.safetensors", {"to": "ostraka", "only": "v"}, "only='v' matches no leaf"),
    ],
    ids=str,
)
def test_arguments_that_can_not_be(tmp_path: Path, target: str, options: Any, told: str):
    ostraka.save(tmp_path / "a", {"w": jnp.ones(3)})
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    if isinstance(options.get("config"), str):
        options = {"config": tmp_path / options["config"]}
    with pytest.raises((ValueError, InvalidTree), match=told):
        ostraka.convert(tmp_path / "a", tmp_path / target, **{"to": "hf", **options})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "broken.json", "list.json"]


@pytest.mark.parametrize("to", ["ostraka", "orbax", "safetensors", "hf", "npz"])
def test_what_is_there_is_not_overwritten(tmp_path: Path, to: Any):
    source = tmp_path / "b" / "a"
    ostraka.save(source, {"w": jnp.ones(3)})
    if to != "npz":
        with pytest.raises(PathInTheWay, match=r"is there already|other things in it"):
            ostraka.convert(source, tmp_path / "b", to=to)
    target = tmp_path / ("out.npz" if to == "npz" else "out")
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(PathInTheWay, match=r"there already|other things in it"):
        ostraka.convert(source, target, to=to)
    assert [path.name for path in target.iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", target.name]
    assert ostraka.verify(source).ok
    (target / "notes.txt").unlink()
    if to == "npz":  # It is refused before anything is read, not when all is done.
        with pytest.raises(PathInTheWay, match="out.npz is there already"):
            ostraka.convert(source, target, to=to)
    else:  # An empty directory is in nobody's way.
        ostraka.convert(source, target, to=to)


@pytest.mark.parametrize("to", ["ostraka", "orbax", "safetensors", "hf", "npz"])
def test_a_target_in_the_source(tmp_path: Path, to: Any):
    """It would become a part of the checkpoint that it is made of."""
    ostraka.save(tmp_path / "a", {"w": np.arange(4.0)})
    name = {"npz": "o.npz", "safetensors": "o.safetensors"}.get(to, "o")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = sorted(tmp_path.rglob("*"))
    for target in (tmp_path / "a" / name, tmp_path / "link" / "below" / name):
        with pytest.raises(PathInTheWay, match=r"converted to .*, which is inside it.*beside it"):
            ostraka.convert(tmp_path / "a", target, to=to)
    with pytest.raises(PathInTheWay, match="can't be converted onto itself"):
        ostraka.convert(tmp_path / "a", tmp_path / "link", to=to)
    assert sorted(tmp_path.rglob("*")) == before
    assert ostraka.verify(tmp_path / "a").ok


def test_a_bucket_with_something_in_it(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"w": jnp.ones(3)})
    open_store("memory://taken").put("notes.txt", b"mine")
    with pytest.raises(PathInTheWay, match="has something in it already"):
        ostraka.convert(tmp_path / "a", "memory://taken", to="hf")
    assert open_store("memory://taken").list() == ["notes.txt"]


@pytest.mark.parametrize("to", ["ostraka", "orbax", "safetensors", "hf", "npz"])
def test_a_damaged_source_leaves_no_target(tmp_path: Path, to: Any):
    ostraka.save(tmp_path / "a", {"w": np.arange(4096.0), "v": np.arange(10.0)})
    shard = max((tmp_path / "a").glob("shards-*/shard_*"), key=lambda file: file.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(Damaged, match=r"is damaged.*"):
        ostraka.convert(tmp_path / "a", tmp_path / ("o.npz" if to == "npz" else "o"), to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("to", ["orbax", "safetensors", "npz"])
def test_what_is_written_wrong_is_found(tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch):
    """A disk that changes a byte of what it is given: the result must not appear."""
    ostraka.save(tmp_path / "a", {"w": np.arange(4096.0)})

    def spoil(self: Any, offset: int, buffers: Any, write: Any = LocalWriter.write) -> None:
        write(self, offset, [bytes(b.nbytes) if hasattr(b, "nbytes") else b for b in buffers])

    if to == "orbax":
        encode = "ostraka.transfer.convert._write_orbax._Encoder.encode"
        monkeypatch.setattr(encode, lambda self, array, chunk: bytes(array.nbytes))
    else:
        monkeypatch.setattr(LocalWriter, "write", spoil)
    with pytest.raises(Damaged, match="what was read back is not what was written"):
        ostraka.convert(tmp_path / "a", tmp_path / ("o.npz" if to == "npz" else "o"), to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_save_that_fails_is_said(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"w": np.arange(4096.0)})
    full = FaultyStore(tmp_path / "b", fail={"create": OSError(28, "No space left on device")})
    with pytest.raises(SaveFailed, match="No space left on device"):
        ostraka.convert(tmp_path / "a", full, to="ostraka")
    assert not (tmp_path / "b" / "_METADATA").exists()
    ostraka.convert(tmp_path / "a", tmp_path / "b", to="ostraka")
    assert ostraka.verify(tmp_path / "b").ok


# Random state, names, config.json


class WithDropout(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(4, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)


WEIGHTS = {"dense.kernel", "dense.bias", "norm.scale", "norm.bias", "norm.mean", "norm.var"}
RANDOM = ("drop/rngs/count", "drop/rngs/key")


@pytest.mark.parametrize("written_by", ["ostraka", "orbax"])
@pytest.mark.parametrize("to", ["hf", "safetensors", "npz"])
def test_random_state_is_left_out_with_a_note(
    tmp_path: Path, to: Any, written_by: str, caplog: pytest.LogCaptureFixture
):
    source, end = tmp_path / "a", ""
    ostraka.save(source, WithDropout(nnx.Rngs(0)))
    if written_by == "orbax":
        ostraka.convert(source, tmp_path / "b", to="orbax")
        source, end = tmp_path / "b", "/value"
    target = tmp_path / ("out.npz" if to == "npz" else "out")
    with caplog.at_level("INFO", "ostraka"):
        report = ostraka.convert(source, target, to=to)
    assert report.left_out == tuple(f"{path}{end}" for path in RANDOM)
    assert report.notes[0].startswith("RNG state was left out: 2 leaves ('drop/rngs/count")
    assert report.notes[0] in caplog.text
    names = {name.replace(".", "/") + end for name in WEIGHTS}
    wanted = {name.replace("/", ".") for name in names} if to == "hf" else names
    assert set(tensors_in(target if to == "npz" else target / "model.safetensors")) == wanted
    if to != "npz":
        ostraka.convert(source, tmp_path / "all", to=to, key_data=True)
        assert len(ostraka.open(tmp_path / "all")) == len(WEIGHTS) + 2


def test_random_state_needs_no_rule(tmp_path: Path):
    model = WithDropout(nnx.Rngs(0))
    ostraka.save(tmp_path / "a", {"model": model, "key": jax.random.key(0)})
    names = {
        "fc.weight": {"path": "dense/kernel", "transpose": True},
        "fc.bias": "dense/bias",
        "bn.{what}": "norm/{what}",
    }
    report = ostraka.convert(tmp_path / "a", tmp_path / "out", to="hf", names=names, only="model")
    assert report.left_out == RANDOM
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"fc.weight", "fc.bias", "bn.scale", "bn.bias", "bn.mean", "bn.var"}
    same(found["fc.weight"], np.ascontiguousarray(np.asarray(model.dense.kernel[...]).T))


@pytest.mark.parametrize("to", ["hf", "safetensors"])
def test_leaves_are_renamed(tmp_path: Path, to: Any):
    tree = {
        "model": {"a": {"w": jnp.ones(2), "v": jnp.ones(3)}, "b": jnp.ones(4)},
        "c": jnp.ones(5),
    }
    ostraka.save(tmp_path / "a", tree)
    rename = {"model": "", "model/a": "block.0", "c": "head/c"}
    ostraka.convert(tmp_path / "a", tmp_path / "out", to=to, rename=rename)
    wanted = {"block.0/w": 2, "block.0/v": 3, "b": 4, "head/c": 5}
    if to == "hf":
        wanted = {name.replace("/", "."): size for name, size in wanted.items()}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: array.size for name, array in found.items()} == wanted
    # Tensors of files have names of their own.
    again = {"block": "layer", "head.c" if to == "hf" else "head/c": "c"}
    ostraka.convert(tmp_path / "out", tmp_path / "again", to=to, rename=again)
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert {name.replace("/", "."): array.size for name, array in found.items()} == {
        "layer.0.w": 2,
        "layer.0.v": 3,
        "b": 4,
        "c": 5,
    }


def test_renames_that_can_not_be(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2), "c": jnp.ones(2)})
    for rename, told in [
        (None, r"'a/b' and 'a.b' would both be tensor 'a.b'; .* rename"),
        ({"a/b": "k", "c": "k"}, r"rename makes 'a/b' and 'c' .* the same, 'k'"),
    ]:
        with pytest.raises(InvalidTree, match=told):
            ostraka.convert(tmp_path / "a", tmp_path / "out", to="hf", rename=rename)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    ostraka.convert(tmp_path / "a", tmp_path / "out", to="hf", rename={"a.b": "d"})
    assert set(ostraka.open(tmp_path / "out")) == {"a.b", "c", "d"}


def test_another_rename_does_not_continue_a_conversion(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"a": jnp.ones((1 << 10, 1 << 10)), "b": jnp.zeros(2)})

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt("stopped")

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        ostraka.convert(tmp_path / "a", tmp_path / "o", to="hf", rename={"a": "x"}, on_bytes=stop)
    ostraka.convert(tmp_path / "a", tmp_path / "o", to="hf", rename={"a": "yy"})
    assert set(ostraka.open(tmp_path / "o")) == {"b", "yy"}


def test_config_json_is_the_one_that_is_given(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"w": jnp.ones(2)})
    config = {"model_type": "mine", "width": 2}
    file = tmp_path / "given" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(config))

    def convert(source: str, target: str, given: Any, **options: Any) -> Any:
        report = ostraka.convert(
            tmp_path / source, tmp_path / target, to="hf", config=given, **options
        )
        written = tmp_path / target / "config.json"
        return report, json.loads(written.read_text()) if written.exists() else None

    for number, given in enumerate([config, file, file.parent]):
        report, written = convert("a", str(number), given)
        assert (report.notes, written) == ((), config)
    report, written = convert("a", "none", None)
    assert "there is no config.json, which transformers needs" in str(report)
    # One that is given counts more than that of the source, and names the family.
    wanted = save_for_hugging_face(tmp_path / "hf")
    (tmp_path / "bare").mkdir()
    for part in (tmp_path / "hf").glob("model*"):
        (tmp_path / "bare" / part.name).write_bytes(part.read_bytes())
    ostraka.convert(tmp_path / "bare", tmp_path / "tree", to="ostraka", names="llama")
    other = {"model_type": "mistral", "hidden_size": 64}
    assert convert("tree", "back", other, names="hf")[1] == other
    assert set(ostraka.open(tmp_path / "back")) == set(wanted)
    assert convert("hf", "copy", other)[1] == other
    assert (tmp_path / "copy" / "tokenizer.json").exists()


# The command


def test_the_command_renames_and_writes_a_config(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"model": WithDropout(nnx.Rngs(0)), "step": 3})
    (tmp_path / "c.json").write_text('{"model_type": "mine"}')
    done = run(
        *("convert", tmp_path / "a", tmp_path / "out", "--to", "hf", "--only", "model"),
        *("--rename", "model=", "--rename", "model/dense=fc", "--config", tmp_path / "c.json"),
    )
    assert done.exit_code == 0, done.stderr
    first, note = done.stdout.splitlines()
    assert "(hf): 6 arrays, 288 B" in first
    assert note.startswith("note: RNG state was left out: 2 leaves")
    found = set(ostraka.open(tmp_path / "out"))
    assert found == {name.replace("dense", "fc") for name in WEIGHTS}
    assert (tmp_path / "out" / "config.json").exists()


def test_the_command(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"model": {"w": jnp.ones((2, 3))}, "step": 3})

    def convert(target: str, *options: str) -> Any:
        return run("convert", tmp_path / "a", tmp_path / target, "--to", *options)

    done = convert("hf", "hf", "--only", "model")
    assert done.exit_code == 0, done.stderr
    assert "(hf): 1 array, 24 B" in done.stdout
    done = convert("o", "orbax", "--dtype", "bfloat16", "--json")
    assert json.loads(done.stdout)["nbytes"] == 12
    for target, options, told in [
        ("x", ["hf"], "can't hold"),
        ("x", ["zip"], "zip"),
        ("hf", ["hf", "--only", "model"], "is there already"),
        ("x", ["hf", "--rename", "model"], "is no OLD=NEW, such as"),
    ]:
        done = convert(target, *options)
        assert (done.exit_code, told in done.stderr) == (2, True), done.stderr
    assert convert("x", "hf").stderr.count("\n") <= 2


# Hugging Face


@pytest.mark.parametrize("names", [None, "hf", "llama"])
def test_from_hugging_face_to_ours_and_back(
    tmp_path: Path, names: Any, monkeypatch: pytest.MonkeyPatch
):
    wanted = save_for_hugging_face(tmp_path / "hf")
    report = ostraka.convert(tmp_path / "hf", tmp_path / "ours", to="ostraka", names=names)
    assert report.arrays == len(wanted)
    assert ostraka.verify(tmp_path / "ours").ok
    opened = ostraka.open(tmp_path / "ours")
    if names is None:
        assert set(opened) == set(wanted)
    else:
        kernel = np.asarray(opened["layers/1/mlp/down_proj/kernel"])
        same(kernel, np.ascontiguousarray(wanted["model.layers.1.mlp.down_proj.weight"].T))
    monkeypatch.setattr(_tensor_files, "MAX_FILE_BYTES", 100_000)
    ostraka.convert(tmp_path / "ours", tmp_path / "back", to="hf", names=names)
    files = sorted((tmp_path / "back").glob("model-*-of-00003.safetensors"))
    assert len(files) == 3
    found = {name: array for file in files for name, array in load_file(file).items()}
    again = ostraka.open(tmp_path / "back")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        same(found[name], array)
        same(again[name], array)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == json.loads((tmp_path / "hf" / "config.json").read_text())


def test_what_lies_beside_the_weights_goes_along(tmp_path: Path):
    wanted = save_for_hugging_face(tmp_path / "hf")
    (tmp_path / "hf" / "notes.txt").write_text("not of a model")
    ostraka.convert(tmp_path / "hf", tmp_path / "wide", to="hf", dtype="float32")
    assert sorted(path.name for path in (tmp_path / "wide").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "wide" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    for name, array in load_file(tmp_path / "wide" / "model.safetensors").items():
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(array, wanted[name].astype(np.float32))


def test_a_model_beside_its_optimizer_to_hugging_face(tmp_path: Path):
    wanted = save_for_hugging_face(tmp_path / "hf")
    ostraka.convert(tmp_path / "hf", tmp_path / "model", to="ostraka", names="hf")
    model = ostraka.restore(tmp_path / "model")
    ostraka.save(tmp_path / "run", {"model": model, "moments": jax.tree.map(jnp.zeros_like, model)})
    ostraka.convert(tmp_path / "run", tmp_path / "back", to="hf", only="model", names="llama")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        same(found[name], array)
    ostraka.convert(tmp_path / "hf", tmp_path / "orbax", to="orbax", names="llama")
    with quiet():
        restored = ocp.PyTreeCheckpointer().restore(tmp_path / "orbax")
    same(restored["norm"]["scale"], wanted["model.norm.weight"])


def test_names_of_tensors_are_not_changed(tmp_path: Path):
    found = {"a/b": numbers((2,), np.float32), "c~d": numbers((3,), np.float32, 1)}
    save_file(found, tmp_path / "odd.safetensors")
    ostraka.convert(tmp_path / "odd.safetensors", tmp_path / "w.npz", to="npz")
    ostraka.convert(tmp_path / "odd.safetensors", tmp_path / "ours", to="ostraka")
    ostraka.convert(tmp_path / "ours", tmp_path / "again.safetensors", to="safetensors")
    for name in ("w.npz", "again.safetensors"):
        assert tensors_in(tmp_path / name).keys() == found.keys()


# Two conversions to one target


def test_a_conversion_that_another_takes_over_gives_no_name_to_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It stands still between its last check and the rename, while the other writes."""
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 0.1)
    monkeypatch.setattr(LocalStore, "lock", lambda self: None)  # as on some network file systems
    target = str(tmp_path / "out")
    first, second = Workplace(target, "same"), Workplace(target, "same")
    first.take()
    first.files.put("model.safetensors", b"whole")
    check = Claim.check

    def stand_still(claim: Claim) -> None:
        check(claim)
        monkeypatch.setattr(Claim, "check", check)
        second.take()
        second.files.delete("model.safetensors")
        second.files.put("model.safetensors", b"ha")

    monkeypatch.setattr(Claim, "check", stand_still)
    with pytest.raises(Busy, match="took this one for dead"):
        first.commit()
    first.release()
    assert not os.path.exists(target)
    second.files.put("model.safetensors", b"half, and the rest")
    second.commit()
    second.release()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"half, and the rest"
    assert sorted(os.listdir(tmp_path)) == ["out"]


@pytest.mark.parametrize("tree", [np.ones(3), {"": np.ones(2), "b": np.ones(2)}])
def test_orbax_has_no_place_for_an_array_without_a_key(tmp_path: Path, tree: Any):
    ostraka.save(tmp_path / "a", tree)
    with pytest.raises(InvalidTree, match="would have no name: put it under a key"):
        ostraka.convert(tmp_path / "a", tmp_path / "b", to="orbax")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
