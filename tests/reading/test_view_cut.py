"""Tensors that are cut into leaves, read and put together again: real files, real elements."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import ostraka
from ostraka.errors import Mismatch
from ostraka.formats.source import Source
from ostraka.layout import box as _box
from ostraka.layout.spec import Target
from ostraka.reading.locate import open_at
from ostraka.reading.names.given import NamesLike
from ostraka.reading.view import renamed
from places import Place
from test_view import assert_any_box_is_its_own, assert_same, everything

Arrays = dict[str, np.ndarray[Any, Any]]


def written(path: Path, tensors: Arrays) -> Source:
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)
    return open_at(path)


def there_and_back(source: Source, names: NamesLike) -> tuple[Arrays, Arrays]:
    """The leaves, and the tensors that they are put together into again."""
    leaves = renamed(source, names)
    return everything(leaves), everything(renamed(leaves, names, back=True))


def random_of(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def interleaved(heads: int) -> dict[str, Any]:
    """Queries, keys and values of each head after each other."""
    cut = {"axis": 2, "into": ["q", "k", "v"]}
    return {"transpose": True, "split": {1: [heads, 3, -1]}, "cut": cut}


def test_interleaved_by_head_and_stacked(tmp_path: Path):
    """As GPT-NeoX has them, into layers that are scanned over: (layers, in, heads, size)."""
    fused = {f"l.{n}.qkv": random_of(24 + n, 8)[:24] for n in range(3)}
    rule = {**interleaved(2), "stack": "n"}
    leaves, back = there_and_back(written(tmp_path / "m.safetensors", fused), {"l.{n}.qkv": rule})
    stacked = np.stack([array.T.reshape(8, 2, 3, 4) for array in fused.values()])
    assert_same(leaves, {name: stacked[:, :, :, at] for at, name in enumerate("qkv")})
    assert_same(back, fused)


def test_groups_of_heads(tmp_path: Path):
    """As InternLM2 has them: for each key three queries, then the key and the value."""
    fused = {"wqkv.weight": random_of(40, 8)}
    rule = {
        "transpose": True,
        "split": {1: [2, 5, 4]},
        "cut": {"axis": 2, "into": {"q": 3, "k": 1, "v": 1}},
        "merge": {1: [2, -1]},
    }
    source = written(tmp_path / "m.safetensors", fused)
    leaves, back = there_and_back(source, {"wqkv.weight": rule})
    grouped = fused["wqkv.weight"].T.reshape(8, 2, 5, 4)
    wanted = {"q": grouped[:, :, :3].reshape(8, 6, 4)}
    assert_same(leaves, {**wanted, "k": grouped[:, :, 3], "v": grouped[:, :, 4]})
    assert_same(back, fused)
    view = renamed(source, {"wqkv.weight": rule})
    assert_any_box_is_its_own(view, leaves)
    assert_any_box_is_its_own(renamed(view, {"wqkv.weight": rule}, back=True), back)


def test_gate_and_up_in_turn(tmp_path: Path):
    """Gpt_oss: in the last axis, gate and up take turns; what is read is read once for each."""
    tensors = {
        "mlp.experts.gate_up_proj": random_of(4, 8, 600),
        "mlp.experts.gate_up_proj_bias": random_of(4, 600),
    }
    names = {
        "mlp.experts.gate_up_proj": {
            "split": {2: [-1, 2]},
            "cut": {"axis": 3, "into": ["gate/kernel", "up/kernel"]},
        },
        "mlp.experts.gate_up_proj_bias": {
            "split": {1: [-1, 2]},
            "cut": {"axis": 2, "into": ["gate/bias", "up/bias"]},
        },
    }
    source = written(tmp_path / "m.safetensors", tensors)
    leaves, back = there_and_back(source, names)
    kernels, biases = tensors.values()
    wanted = {
        "gate/kernel": kernels[..., ::2],
        "up/kernel": kernels[..., 1::2],
        "gate/bias": biases[..., ::2],
        "up/bias": biases[..., 1::2],
    }
    assert_same(leaves, wanted)
    assert_same(back, tensors)
    assert bytes_for(renamed(source, names), "gate/kernel") == kernels.nbytes


# What is read


def bytes_for(source: Source, path: str, box: Any = None) -> int:
    """The bytes of files that reading a leaf takes, or a box of it."""
    (number,) = [n for n, leaf in enumerate(source.saved.leaves) if leaf.path == path]
    read: list[int] = []
    wanted = box or _box.full(source.saved.leaves[number].shape)
    for _ in source.read([Target(number, wanted)], on_bytes=read.append):
        pass
    return sum(read)


def test_only_the_rows_of_a_leaf_are_read(tmp_path: Path):
    tensors = {"rows": random_of(96, 128), "columns": random_of(64, 1536)}
    names = {
        "rows": interleaved(2),
        "columns": {"cut": {"axis": 1, "into": {"gate": 1024, "up": 512}}},
    }
    source = renamed(written(tmp_path / "m.safetensors", tensors), names)
    assert bytes_for(source, "k") == 128 * 32 * 4
    assert bytes_for(source, "k", ((0, 128), (1, 2), (4, 8))) == 128 * 4 * 4
    assert bytes_for(source, "k", ((0, 64), (1, 2), (0, 16))) == 64 * 16 * 4
    assert bytes_for(source, "gate") == 64 * 1024 * 4
    assert bytes_for(source, "up") == 64 * 512 * 4
    assert bytes_for(source, "up", ((0, 64), (0, 64))) == 64 * 64 * 4


def test_where_the_boxes_of_leaves_lie(tmp_path: Path):
    tensors = {"w": random_of(24, 8)}
    rule = interleaved(2)
    source = renamed(written(tmp_path / "m.safetensors", tensors), {"w": rule})
    for number, leaf in enumerate(source.saved.leaves):
        boxes = source.boxes_of(number)
        assert sum(_box.count(box.box) for box in boxes) == 64
        assert sum(box.nbytes for box in boxes) == 256
        assert all(box.file == "m.safetensors" for box in boxes)
        assert len(source.files_of(number)) == np.prod(source.grid_of(number))
        assert leaf.shape == (8, 2, 4)
    joined = renamed(source, {"w": rule}, back=True)
    assert sum(_box.count(box.box) for box in joined.boxes_of(0)) == 24 * 8
    assert len(joined.files_of(0)) == np.prod(joined.grid_of(0))


def test_a_large_leaf_is_put_together_in_pieces(tmp_path: Path):
    large = np.arange(9 * 1024 * 1024, dtype=np.float32).reshape(3072, 3072)
    rule = {"transpose": True, "cut": {"axis": 1, "into": {"q": 2048, "kv": 1024}}}
    leaves, back = there_and_back(written(tmp_path / "m.safetensors", {"w": large}), {"w": rule})
    assert (leaves["q"] == large[:2048].T).all()
    assert (leaves["kv"] == large[2048:].T).all()
    assert (back["w"] == large).all()


# Any cut


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The shape of a tensor, and a rule that cuts it."""
    rank = draw(st.integers(1, 3))
    order = draw(st.permutations(range(rank)))
    shape = [draw(st.integers(1, 5)) for _ in range(rank)]
    rule: dict[str, Any] = {}
    if draw(st.booleans()):
        rule["transpose"] = list(order)
    else:
        order = list(range(rank))
    wide = [shape[axis] for axis in order]
    if draw(st.booleans()):
        axis = draw(st.integers(0, rank - 1))
        sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
        shape[order[axis]] = int(np.prod(sizes))
        rule["split"] = {axis: [*sizes[:-1], -1]}
        wide[axis : axis + 1] = sizes
    axis = draw(st.integers(0, len(wide) - 1))
    if draw(st.booleans()):
        into: Any = [f"leaves/{n}" for n in range(wide[axis])]
        left = [*wide[:axis], *wide[axis + 1 :]]
    else:
        ends = sorted({*draw(st.lists(st.integers(1, wide[axis]), max_size=3)), 0, wide[axis]})
        into = {f"leaves/{low}": high - low for low, high in itertools.pairwise(ends)}
        into[draw(st.sampled_from(list(into)))] = -1
        left = [*wide[:axis], -1, *wide[axis + 1 :]]
    rule["cut"] = {"axis": axis, "into": into}
    if len(left) > 1 and draw(st.booleans()):
        first = draw(st.integers(0, len(left) - 2))
        rule["merge"] = {first: left[first : first + 2]}
    return tuple(shape), rule


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(cuts(), st.booleans(), st.sampled_from(["float32", "bfloat16", "int8"]))
def test_any_cut_there_and_back_is_the_identity(
    cut: tuple[tuple[int, ...], dict[str, Any]], is_stack: bool, dtype: str
):
    shape, rule = cut
    with tempfile.TemporaryDirectory() as directory:
        names = {"t.{n}": {**rule, "stack": "n"}} if is_stack else {"t.0": rule}
        elements = np.arange(np.prod(shape)).reshape(shape)
        tensors = {
            f"t.{n}": (elements + n).astype(jnp.dtype(dtype)) for n in range(3 if is_stack else 1)
        }
        source = written(Path(directory, "m.safetensors"), tensors)
        leaves, back = there_and_back(source, names)
        assert sum(leaf.size for leaf in leaves.values()) == elements.size * len(tensors)
        assert_same(back, tensors)


# Whole programs


QKV_RULES = {
    "l.{n}.qkv": {
        "transpose": True,
        "cut": {
            "axis": 1,
            "into": {"layers/{n}/q": 8, "layers/{n}/k": 4, "layers/{n}/v": 4},
        },
    },
    "norm": "norm",
}


def fused_model() -> Arrays:
    made: Arrays = {f"l.{n}.qkv": random_of(16 + n, 8)[:16] for n in range(2)}
    return {**made, "norm": random_of(8)}


SIZES = {"q": 8, "k": 4, "v": 4}


def cut_of(above: str) -> dict[str, Any]:
    into = {f"{above}/{name}": size for name, size in SIZES.items()}
    return {"transpose": True, "cut": {"axis": 1, "into": into}}


def read_name(name: str, shape: tuple[int, ...]) -> Any:
    return "norm" if name == "norm" else cut_of(f"layers/{name.split('.')[1]}")


def write_name(path: str, shape: tuple[int, ...]) -> Any:
    if path == "norm":
        return "norm"
    above = path.rpartition("/")[0]
    return {"tensor": f"l.{above.rpartition('/')[2]}.qkv", **cut_of(above)}


@pytest.mark.parametrize(
    ("to", "read", "write"),
    [
        ("ostraka", QKV_RULES, QKV_RULES),
        ("orbax", QKV_RULES, QKV_RULES),
        ("ostraka", read_name, write_name),
    ],
    ids=["ostraka", "orbax", "functions"],
)
def test_converted_both_ways(tmp_path: Path, to: Any, read: Any, write: Any):
    tensors = fused_model()
    save_file(tensors, tmp_path / "model.safetensors")
    ostraka.convert(tmp_path / "model.safetensors", tmp_path / "tree", to=to, names=read)
    opened = ostraka.open(tmp_path / "tree")
    assert {path: opened[path].shape for path in opened} == {
        "norm": (8,),
        **{f"layers/{n}/{name}": (8, size) for n in (0, 1) for name, size in SIZES.items()},
    }
    assert np.array_equal(np.asarray(opened["layers/1/v"]), tensors["l.1.qkv"].T[:, 12:])
    ostraka.convert(tmp_path / "tree", tmp_path / "back", to="hf", names=write)
    back = ostraka.open(tmp_path / "back")
    assert sorted(back) == sorted(tensors)
    for name, tensor in tensors.items():
        assert np.asarray(back[name]).tobytes() == tensor.tobytes()


def test_elements_of_less_than_a_byte(tmp_path: Path):
    """Whose ranges are no ranges of bytes."""
    packed = np.arange(90).reshape(15, 6).astype(jnp.int4)
    ostraka.save(tmp_path / "c", {"w": packed})
    rule = {"transpose": True, "split": {1: [-1, 3]}, "cut": {"axis": 2, "into": ["a", "b", "c"]}}
    leaves, back = there_and_back(open_at(tmp_path / "c"), {"w": rule})
    for at, name in enumerate("abc"):
        assert np.array_equal(leaves[name], packed.T.reshape(6, 5, 3)[:, :, at])
    assert_same(back, {"w": packed})


def test_what_can_not_be_cut(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"w": jax.random.split(jax.random.key(0), 4), "step": 7})
    rules = {"w": {"cut": {"axis": 0, "into": {"a": 2, "b": 2}}}, "step": "step"}
    with pytest.raises(Mismatch, match="'a' would be rearranged, and is a PRNG key"):
        renamed(open_at(tmp_path / "c"), rules)
    rules = {"w": "w", "step": {"cut": {"axis": 0, "into": ["a"]}}}
    with pytest.raises(Mismatch, match="tensor 'step' has 0 axes when it is to be cut"):
        renamed(open_at(tmp_path / "c"), rules)


def test_a_manager_restores_with_a_cut(tmp_path: Path):
    """From a step that was saved with its leaves fused, into a template that has them apart."""
    model = {"layers": [{"qkv": jnp.arange(48.0).reshape(6, 8)}], "step": 3}
    with ostraka.Manager(tmp_path / "run") as manager:
        manager.save(1, model)
    names = {
        "layers/{n}/qkv": {"cut": {"axis": 1, "into": {"layers/{n}/q": 4, "layers/{n}/kv": 4}}},
        "step": "step",
    }
    like = {"layers": {0: {"q": jnp.zeros((6, 4)), "kv": jnp.zeros((6, 4))}}, "step": 0}
    with ostraka.Manager(tmp_path / "run") as manager:
        found = manager.restore(1, like=like, names=names)
    assert found["step"] == 3
    assert (found["layers"][0]["q"] == model["layers"][0]["qkv"][:, :4]).all()
    assert (found["layers"][0]["kv"] == model["layers"][0]["qkv"][:, 4:]).all()


def test_in_any_store(place: Place, tmp_path: Path):
    """Interleaved by head, which in a bucket is read with what lies between."""
    tensors = {"qkv": random_of(96, 64)}
    rule = interleaved(4)
    (tmp_path / "here").mkdir()
    save_file(tensors, tmp_path / "here" / "model.safetensors")
    ostraka.copy(tmp_path / "here", str(place / "model"))
    names = {"qkv": rule}
    opened = ostraka.open(str(place / "model"), names=names)
    wanted = tensors["qkv"].T.reshape(64, 4, 3, 8)
    for at, name in enumerate("qkv"):
        assert np.array_equal(np.asarray(opened[name]), wanted[:, :, at])
        assert np.array_equal(opened[name][3:5, 1:, 2], wanted[3:5, 1:, at, 2])
    ostraka.convert(str(place / "model"), str(place / "ours"), to="ostraka", names=names)
    ostraka.convert(str(place / "ours"), str(place / "back"), to="hf", names=names)
    assert (
        np.asarray(ostraka.open(str(place / "back"))["qkv"]).tobytes() == tensors["qkv"].tobytes()
    )


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"q": np.ones((4, 2), np.float16)}, "'w' would be put together of float16 and float32"),
        ({"q": 3.5}, "leaf 'q' has the shape \\(\\), which has no axis 0"),
        ({}, "tensor 'w' is put together of 2 leaves, of which there is no 'q'"),
    ],
)
def test_leaves_that_are_not_alike(tmp_path: Path, leaves: dict[str, Any], message: str):
    ostraka.save(tmp_path / "c", {"k": np.ones((3, 2), np.float32), **leaves})
    rules = {"w": {"cut": {"axis": 0, "into": {"q": 4, "k": 3}}}}
    with pytest.raises(Mismatch, match=message):
        ostraka.convert(tmp_path / "c", tmp_path / "out", to="hf", names=rules)
    assert not (tmp_path / "out").exists()
