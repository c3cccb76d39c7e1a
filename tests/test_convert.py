"""`ostraka.convert`: what is written is read by the programs that the formats belong to."""

import json
import subprocess
import zipfile
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
from ostraka.errors import Damaged, InvalidTree, PathInTheWay, SaveFailed, UnsupportedFormat
from ostraka.interop import _tensor_files
from ostraka.storage import open_store
from places import Place

TORCH = Path(__file__).parent.parent / ".venv-torch" / "bin" / "python"


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
    assert not [name for name in (place / "b").rglob("*") if name.name.endswith(".finished")]
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
    with pytest.raises(ValueError, match="only has 'modle'.*matches no leaf"):
        ostraka.convert(tmp_path / "a", tmp_path / "c", to="ostraka", only="modle")


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


@pytest.mark.parametrize(
    "dtype", ["int4", "int2", "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn", "complex128"]
)
def test_dtypes_that_orbax_can_hold(tmp_path: Path, dtype: str):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    wanted = np.arange(12).reshape(3, 4).astype(kind)
    ostraka.save(tmp_path / "a", {"w": wanted})
    ostraka.convert(tmp_path / "a", tmp_path / "o", to="orbax")
    with quiet():
        same(ocp.PyTreeCheckpointer().restore(tmp_path / "o")["w"], wanted)


def test_a_large_array_is_cut_into_chunks_that_need_not_fit(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr("ostraka.interop._orbax_plan._CHUNK_BYTES", 1 << 10)
    tree = {"prime": numbers((101, 103), np.float32), "even": numbers((64, 3, 8), np.int32)}
    ostraka.save(tmp_path / "a", tree)
    ostraka.convert(tmp_path / "a", tmp_path / "o", to="orbax")
    with quiet():
        found = ocp.PyTreeCheckpointer().restore(tmp_path / "o")
    assert flat(found) == flat(tree)


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
            dtype, shape, data = found[name]
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
    ostraka.convert(tmp_path / "a", tmp_path / "w.safetensors", to="safetensors")
    found = load_file(tmp_path / "w.safetensors")
    assert set(found) == {"w", "nested/b"}
    same(found["nested/b"], tree["nested"]["b"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "w.safetensors"]
    with pytest.raises(PathInTheWay, match=r"w.safetensors is there already"):
        ostraka.convert(tmp_path / "a", tmp_path / "w.safetensors", to="safetensors")
    with pytest.raises(UnsupportedFormat, match="file system alone"):
        ostraka.convert(tmp_path / "a", "memory://one/w.safetensors", to="safetensors")


def test_numpy_loads_it_without_pickle(tmp_path: Path):
    tree = tensors()
    ostraka.save(tmp_path / "a", tree)
    ostraka.convert(
        tmp_path / "a", tmp_path / "w.npz", to="npz", dtype={"both": "float32", "fp8": "float32"}
    )
    wanted = arrays_of(tmp_path / "a")
    with np.load(tmp_path / "w.npz", allow_pickle=False) as found:
        assert set(found) == set(wanted)
        for name, array in wanted.items():
            narrow = array.dtype.name in ("bfloat16", "float8_e4m3fn")
            same(found[name], array.astype(np.float32) if narrow else array)
    with zipfile.ZipFile(tmp_path / "w.npz") as archive:
        assert archive.testzip() is None
    assert subprocess.call(["python3", "-m", "zipfile", "-t", tmp_path / "w.npz"]) == 0


def test_arrays_in_several_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ostraka.interop._cut.BAND_BYTES", 1 << 12)
    monkeypatch.setattr("ostraka.interop._cut._TOGETHER_BYTES", 1 << 12)
    tree = {"w": numbers((101, 103), np.float32), "v": numbers((3, 64, 64), np.int16)}
    ostraka.save(tmp_path / "a", tree)
    ostraka.convert(tmp_path / "a", tmp_path / "w.npz", to="npz")
    ostraka.convert(tmp_path / "a", tmp_path / "w.safetensors", to="safetensors")
    with np.load(tmp_path / "w.npz", allow_pickle=False) as found:
        for name, array in tree.items():
            same(found[name], array)
    with zipfile.ZipFile(tmp_path / "w.npz") as archive:
        assert archive.testzip() is None
    for name, array in load_file(tmp_path / "w.safetensors").items():
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
    monkeypatch.setattr("ostraka._view.BLOCK_BYTES", 1 << 9)
    monkeypatch.setattr("ostraka.interop._cut.SLAB_BYTES", slab_bytes)
    monkeypatch.setattr("ostraka.interop._cut._LEAST_RUN_BYTES", 4)
    monkeypatch.setattr("ostraka.interop._digest_files.READ_BYTES", 1 << 12)
    files = {name: numbers(shape, dtype) for name, (shape, dtype, _) in TURNED.items()}
    if to == "orbax":
        del files["e.weight"]  # Orbax has no arrays without elements.
    rules: dict[str, Any] = {name: rule for name, (_, _, rule) in TURNED.items() if name in files}
    rules = {name: rule for name, rule in rules.items() if not name.startswith("x.")}
    rules["x.{e}.weight"] = {"path": "x/kernel", "transpose": True, "stack": ["e"]}
    save_file(files, tmp_path / "in.safetensors")
    if to in ("ostraka", "orbax"):
        ostraka.convert(tmp_path / "in.safetensors", tmp_path / "out", to=to, names=rules)
        found = {path: np.asarray(leaf) for path, leaf in ostraka.open(tmp_path / "out").items()}
        same(found["a/kernel"], np.ascontiguousarray(files["a.weight"].T))
        same(found["b/kernel"], np.ascontiguousarray(files["b.weight"].transpose(2, 0, 1)))
        same(found["c/kernel"], np.ascontiguousarray(files["c.weight"].T.reshape(200, 8, 12)))
        same(found["f/kernel"], files["f.weight"])
        experts = np.stack([files[f"x.{n}.weight"].T for n in range(3)])
        same(found["x/kernel"], experts)
        if to == "ostraka":
            assert ostraka.verify(tmp_path / "out").ok
        return
    ostraka.convert(tmp_path / "in.safetensors", tmp_path / "tree", to="ostraka", names=rules)
    target = tmp_path / f"out.{to}"
    ostraka.convert(tmp_path / "tree", target, to=to, names=rules)
    if to == "npz":
        with zipfile.ZipFile(target) as archive:
            assert archive.testzip() is None
        with np.load(target, allow_pickle=False) as arrays:
            back = dict(arrays)
    else:
        back = load_file(target)
    assert back.keys() == files.keys()
    for name, array in files.items():
        same(back[name], array)


def test_a_turned_array_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """However many pieces it is written in."""
    from ostraka.storage._file import LocalReader

    monkeypatch.setattr("ostraka.interop._cut.SLAB_BYTES", 4 << 20)
    monkeypatch.setattr("ostraka.interop._cut._LEAST_RUN_BYTES", 64)
    array = numbers((4096, 2048), np.float32)
    ostraka.save(tmp_path / "a", {"w": array})
    read_into, read = LocalReader.read_into, [0]

    def counted(self: LocalReader, offset: int, buffers: Any) -> int:
        found = read_into(self, offset, buffers)
        read[0] += found
        return found

    monkeypatch.setattr(LocalReader, "read_into", counted)
    targets = {"ostraka": "o", "hf": "h", "npz": "n.npz"}
    for to, target in targets.items():
        read[0] = 0
        turned = {"w": {"path": "w", "transpose": True}}
        ostraka.convert(tmp_path / "a", tmp_path / target, to=to, names=turned)  # pyright: ignore
        assert 2 * array.nbytes <= read[0] < 2.2 * array.nbytes, to


def test_zip_has_64_bit_numbers_past_4_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The layout of 5 GiB, whose data is a hole in the file."""
    from ostraka._spec import LeafSpec
    from ostraka.interop._crc import join_crcs
    from ostraka.interop._npz import plan_npz
    from ostraka.interop._work import Item

    shapes = {"a": (5 << 30,), "b": (3,)}
    items = [
        Item(n, at, LeafSpec(n, "numpy", "uint8", shape), n)
        for at, (n, shape) in enumerate(shapes.items())
    ]
    plan = plan_npz("w.npz", items)
    crc = 0
    for bit in range(33):  # of that many zeros
        if (5 << 30) >> bit & 1:
            zero = _crc_of_zeros(bit)
            crc = join_crcs(crc, zero, 1 << bit)
    assert plan.finish is not None
    with open(tmp_path / "w.npz", "wb") as file:
        for start, data in (*plan.fixed, *plan.finish({0: crc, 1: _crc(b"\1\2\3")})):
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


def _crc(data: bytes) -> int:
    import zlib

    return zlib.crc32(data)


def _crc_of_zeros(bit: int) -> int:
    from ostraka.interop._crc import join_crcs

    crc = _crc(b"\0")
    for doubling in range(bit):
        crc = join_crcs(crc, crc, 1 << doubling)
    return crc


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
    with pytest.raises(InvalidTree, match="choose leaves with only, as 'model") as caught:
        ostraka.convert(tmp_path / "a", tmp_path / "s", to="hf")
    text = str(caught.value)
    assert "'step', 'name': Python values, which are no arrays" in text
    assert "'rng': PRNG keys; ask for their integers with key_data" in text
    assert "'int4': int4, for which it has no name\n" in text + "\n"
    with pytest.raises(InvalidTree, match=r"'model/w': bfloat16.*cast it with dtype='float32'"):
        ostraka.convert(tmp_path / "a", tmp_path / "n.npz", to="npz", only="model/w")
    with pytest.raises(ValueError, match=r"a file for numpy.load must end in .npz"):
        ostraka.convert(tmp_path / "a", tmp_path / "n", to="npz", only="model/w", dtype="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    ostraka.convert(tmp_path / "a", tmp_path / "k.npz", to="npz", only="rng", key_data=True)
    with np.load(tmp_path / "k.npz") as found:
        same(found["rng"], np.asarray(jax.random.key_data(tree["rng"])))


def test_arguments_that_can_not_be(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"w": jnp.ones(3)})
    wrong: Any = "zip"
    with pytest.raises(ValueError, match="to is 'zip'; it must be one of ostraka, orbax"):
        ostraka.convert(tmp_path / "a", tmp_path / "b", to=wrong)
    with pytest.raises(ValueError, match="compress is for to='ostraka' alone"):
        ostraka.convert(tmp_path / "a", tmp_path / "b", to="hf", compress="zstd")
    with pytest.raises(ValueError, match="dtype is 'int8'; it must be a floating-point dtype"):
        ostraka.convert(tmp_path / "a", tmp_path / "b", to="hf", dtype="int8")
    with pytest.raises(PathInTheWay, match="can't be converted onto itself"):
        ostraka.convert(tmp_path / "a", tmp_path / "a", to="ostraka")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("to", ["ostraka", "orbax", "safetensors", "hf", "npz"])
def test_what_is_there_is_not_overwritten(tmp_path: Path, to: Any):
    ostraka.save(tmp_path / "a", {"w": jnp.ones(3)})
    target = tmp_path / ("out.npz" if to == "npz" else "out")
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(PathInTheWay, match=r"there already|other things in it"):
        ostraka.convert(tmp_path / "a", target, to=to)
    assert [path.name for path in target.iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", target.name]
    (target / "notes.txt").unlink()
    if to != "npz":  # An empty directory is in nobody's way.
        ostraka.convert(tmp_path / "a", target, to=to)


@pytest.mark.parametrize("to", ["ostraka", "orbax", "safetensors", "hf", "npz"])
def test_a_target_in_the_source(tmp_path: Path, to: Any):
    """It would become a part of the checkpoint that it is made of."""
    ostraka.save(tmp_path / "a", {"w": np.arange(4.0)})
    name = {"npz": "o.npz", "safetensors": "o.safetensors"}.get(to, "o")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = sorted(tmp_path.rglob("*"))
    for target in (tmp_path / "a" / name, tmp_path / "link" / "below" / name):
        with pytest.raises(PathInTheWay, match=r"lies in .*, which is to be converted.*beside it"):
            ostraka.convert(tmp_path / "a", target, to=to)
    with pytest.raises(PathInTheWay, match="can't be converted onto itself"):
        ostraka.convert(tmp_path / "a", tmp_path / "link", to=to)
    assert sorted(tmp_path.rglob("*")) == before
    assert ostraka.verify(tmp_path / "a").ok


@pytest.mark.parametrize("to", ["ostraka", "orbax", "safetensors", "hf"])
def test_a_source_in_the_target(tmp_path: Path, to: Any):
    ostraka.save(tmp_path / "b" / "a", {"w": np.arange(4.0)})
    with pytest.raises(PathInTheWay, match=r"is there already|other things in it"):
        ostraka.convert(tmp_path / "b" / "a", tmp_path / "b", to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert ostraka.verify(tmp_path / "b" / "a").ok


@pytest.mark.parametrize("to", ["safetensors", "npz"])
def test_an_empty_directory_in_the_place_of_a_file(tmp_path: Path, to: Any):
    """It is refused before anything is read, not when all is done."""
    ostraka.save(tmp_path / "a", {"w": np.arange(4.0)})
    target = tmp_path / f"o.{to}"
    target.mkdir()
    with pytest.raises(PathInTheWay, match=f"o.{to} is there already"):
        ostraka.convert(tmp_path / "a", target, to=to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", f"o.{to}"]


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
    if to == "orbax":
        encode = "ostraka.interop._to_orbax._Encoder.encode"
        monkeypatch.setattr(encode, lambda self, array, chunk: bytes(array.nbytes))
    else:
        from ostraka.storage._file import LocalWriter

        write = LocalWriter.write

        def spoil(self: LocalWriter, offset: int, buffers: Any) -> None:
            write(self, offset, [np.zeros(b.nbytes, np.uint8) if hasattr(b, "nbytes") else b
                                 for b in buffers])  # fmt: skip

        monkeypatch.setattr(LocalWriter, "write", spoil)
    with pytest.raises(Damaged, match="what was read back is not what was written"):
        ostraka.convert(tmp_path / "a", tmp_path / ("o.npz" if to == "npz" else "o"), to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_save_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from ostraka.testing import FaultyStore

    ostraka.save(tmp_path / "a", {"w": np.arange(4096.0)})
    full = FaultyStore(tmp_path / "b", fail={"create": OSError(28, "No space left on device")})
    with pytest.raises(SaveFailed, match="No space left on device"):
        ostraka.convert(tmp_path / "a", full, to="ostraka")
    assert not (tmp_path / "b" / "_METADATA").exists()
    ostraka.convert(tmp_path / "a", tmp_path / "b", to="ostraka")
    assert ostraka.verify(tmp_path / "b").ok


# The command


def test_the_command(tmp_path: Path):
    ostraka.save(tmp_path / "a", {"model": {"w": jnp.ones((2, 3))}, "step": 3})
    done = run("convert", tmp_path / "a", tmp_path / "hf", "--to", "hf", "--only", "model")
    assert done.exit_code == 0, done.stderr
    assert "(hf): 1 array, 24 B" in done.stdout
    done = run(
        *("convert", tmp_path / "a", tmp_path / "o", "--to", "orbax", "--dtype", "bfloat16"),
        "--json",
    )
    assert json.loads(done.stdout)["nbytes"] == 12
    done = run("convert", tmp_path / "a", tmp_path / "x", "--to", "hf")
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: safetensors can't hold") or "can't hold" in done.stderr
    assert done.stderr.count("\n") <= 2
    done = run("convert", tmp_path / "a", tmp_path / "x", "--to", "zip")
    assert done.exit_code == 2
    done = run("convert", tmp_path / "a", tmp_path / "hf", "--to", "hf", "--only", "model")
    assert done.exit_code == 2
    assert "is there already" in done.stderr


# Hugging Face


def save_for_hugging_face(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A model of several files with an index, as the safetensors package writes them."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (128, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (128, 64),
    }
    for layer in range(2):
        above = f"model.layers.{layer}"
        shapes |= {
            f"{above}.self_attn.q_proj.weight": (128, 64),
            f"{above}.self_attn.k_proj.weight": (64, 64),
            f"{above}.self_attn.v_proj.weight": (64, 64),
            f"{above}.self_attn.o_proj.weight": (64, 128),
            f"{above}.mlp.gate_proj.weight": (96, 64),
            f"{above}.mlp.up_proj.weight": (96, 64),
            f"{above}.mlp.down_proj.weight": (64, 96),
            f"{above}.input_layernorm.weight": (64,),
            f"{above}.post_attention_layernorm.weight": (64,),
        }
    found = {name: numbers(shape, np.float16, n) for n, (name, shape) in enumerate(shapes.items())}
    names = list(found)
    path.mkdir()
    weights: dict[str, str] = {}
    for number in (1, 2, 3):
        file = f"model-{number:05d}-of-00003.safetensors"
        part = {name: found[name] for name in names[number - 1 :: 3]}
        save_file(part, path / file, {"format": "pt"})
        weights |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(a.nbytes for a in found.values())}}
    (path / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": weights}))
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    return found


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
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        same(found[name], array)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == json.loads((tmp_path / "hf" / "config.json").read_text())
    again = ostraka.open(tmp_path / "back")
    for name, array in wanted.items():
        same(again[name], array)


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
    with np.load(tmp_path / "w.npz", allow_pickle=False) as loaded:
        assert set(loaded) == set(found)
    assert load_file(tmp_path / "again.safetensors").keys() == found.keys()
