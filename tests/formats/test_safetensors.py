"""Safetensors files and Hugging Face directories, written by the real package, read by us."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import ostraka
from hf_decoder import make_decoder
from ostraka.errors import (
    Damaged,
    Mismatch,
    NotACheckpoint,
    PartialRestore,
    PathInTheWay,
    UnsupportedFormat,
)
from ostraka.families.families import parameters_of
from ostraka.layout import box as _box
from ostraka.layout.spec import Target
from ostraka.reading.locate import open_at

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def llama_tensors(dtype: Any = np.float32, **config: Any) -> dict[str, Any]:
    """All tensors of a small Llama, by their names in files."""
    from ostraka.reading.names.given import read_names

    settings = {**CONFIG, **config}
    names = read_names("hf", settings)
    random = np.random.default_rng(0)
    leaves = names.decompose(dict(parameters_of(settings)))
    return {
        tensor: random.normal(size=leaf.form.shape_before).astype(dtype)
        for leaf in leaves
        for tensor in leaf.tensors
    }


def write_hf(path: Path, tensors: dict[str, Any], *, files: int = 4, **config: Any) -> Path:
    """A directory as Hugging Face publishes them: several files, an index, a config."""
    path.mkdir(parents=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {tensor: tensors[tensor] for tensor in names[number::files]}
        save_file(part, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


def abstract_model(*, has_head: bool = True) -> Any:
    return nnx.eval_shape(lambda: make_decoder(CONFIG, has_head=has_head))


@pytest.fixture
def tensors() -> dict[str, Any]:
    return llama_tensors()


@pytest.fixture
def llama(tmp_path: Path, tensors: dict[str, Any]) -> Path:
    return write_hf(tmp_path / "llama", tensors)


def auto_mesh(**axes: int) -> Any:
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def assert_is_model(model: Any, tensors: dict[str, Any]) -> None:
    kernel = model.layers[1].mlp.down_proj.kernel[...]
    assert np.array_equal(kernel, tensors["model.layers.1.mlp.down_proj.weight"].T)
    table = model.embed_tokens.embedding[...]
    assert np.array_equal(table, tensors["model.embed_tokens.weight"])
    state = nnx.to_pure_dict(nnx.state(model))
    assert len(jax.tree.leaves(state)) == len(tensors)


# A model


def test_a_model_on_a_mesh(llama: Path, tensors: dict[str, Any]):
    for mesh, specs in (
        (auto_mesh(x=8), ostraka.sharding.fsdp("x")),
        (auto_mesh(x=4, y=2), ostraka.sharding.tensor_parallel("x")),
        (auto_mesh(x=4), {"**/kernel": P(None, "x")}),
        (auto_mesh(x=2, y=4), {"**/kernel": P("x", "y")}),
    ):
        model = ostraka.restore(llama, like=abstract_model(), names="hf", mesh=mesh, specs=specs)
        assert_is_model(model, tensors)
        assert not model.layers[0].mlp.up_proj.kernel[...].sharding.is_fully_replicated
    found = ostraka.restore(llama, names="hf", mesh={"x": 8}, specs={"**/kernel": P("x")})
    kernel = found["layers"][1]["mlp"]["down_proj"]["kernel"]
    assert np.array_equal(kernel, tensors["model.layers.1.mlp.down_proj.weight"].T)
    assert kernel.sharding.spec == P("x")


def test_into_a_model_that_is_there_and_parts_of_it(tmp_path: Path, llama: Path, tensors: Any):
    model = ostraka.restore(llama, like=abstract_model(), names="hf")
    kernel = model.layers[1].mlp.down_proj.kernel
    kernel[...] *= 0
    model.norm.scale[...] *= 0
    found = ostraka.restore(llama, like=model, names="hf", only="layers/**")
    assert not np.any(found.norm.scale[...])
    wanted = tensors["model.layers.1.mlp.down_proj.weight"].T
    assert np.array_equal(found.layers[1].mlp.down_proj.kernel[...], wanted)
    assert ostraka.restore(llama, into=model, names="llama") is model
    assert model.layers[1].mlp.down_proj.kernel is kernel
    assert_is_model(model, tensors)
    for name, path in (("model.norm.weight", "norm/scale"), ("lm_head.weight", "lm_head/kernel")):
        rest = {tensor: array for tensor, array in tensors.items() if tensor != name}
        smaller = write_hf(tmp_path / name, rest)
        with pytest.raises(Mismatch, match=f"'{path}' is not in the checkpoint"):
            ostraka.restore(smaller, like=model, names="hf")
        with pytest.warns(PartialRestore, match=rf"kept 1 leaf .*'{path}'"):
            ostraka.restore(smaller, like=model, names="hf", strict=False)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float64])
def test_tensors_are_cast_without_names(tmp_path: Path, dtype: Any):
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    save_file({"w": array}, tmp_path / "model.safetensors")
    found = ostraka.restore(tmp_path, like={"w": np.zeros((8, 8), dtype)}, dtype="like")
    assert found["w"].dtype == dtype
    assert np.array_equal(found["w"], array.astype(dtype))


@pytest.mark.parametrize("has_tensor", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
def test_tied_heads(tmp_path: Path, has_head: bool, has_tensor: bool):
    """Made of the embedding if the model has one; and a file may have it all the same."""
    tensors = llama_tensors(tie_word_embeddings=True)
    if has_tensor:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    path = write_hf(tmp_path / "llama", tensors, tie_word_embeddings=True)
    model = ostraka.restore(path, like=abstract_model(has_head=has_head), names="hf")
    if has_head:
        head = model.lm_head.kernel[...]
        assert np.array_equal(head, tensors["model.embed_tokens.weight"].T)
    assert ("lm_head/kernel" in ostraka.open(path, names="hf")) == has_tensor


def test_the_first_remedy_is_names(llama: Path, tensors: dict[str, Any]):
    with pytest.raises(Mismatch, match="pass names='hf' to have those of a llama model") as caught:
        ostraka.restore(llama, like=abstract_model())
    assert "names='hf'" in caught.value.differences[0]
    (llama / "config.json").unlink()
    with pytest.raises(Mismatch, match="pass names= with rules that say which leaf each is"):
        ostraka.restore(llama, like=abstract_model())
    with pytest.raises(ValueError, match="names='hf' needs the model_type of a config.json"):
        ostraka.restore(llama, like=abstract_model(), names="hf")
    assert_is_model(ostraka.restore(llama, like=abstract_model(), names="llama"), tensors)


def test_rules_of_one_s_own_and_attention_of_nnx(tmp_path: Path):
    """PyTorch's (heads * size, in) into the kernels of nnx.MultiHeadAttention."""
    random = np.random.default_rng(0)
    split = {"transpose": True, "split": {1: [4, -1]}}
    tensors: dict[str, Any] = {
        "attn.o.weight": random.normal(size=(16, 24)).astype("f4"),
        "attn.o.bias": random.normal(size=16).astype("f4"),
    }
    rules: dict[str, Any] = {
        "attn.o.weight": {"path": "out/kernel", "transpose": True, "split": {0: [4, 6]}},
        "attn.o.bias": "out/bias",
    }
    for name, kind in {"q": "query", "k": "key", "v": "value"}.items():
        tensors[f"attn.{name}.weight"] = random.normal(size=(24, 16)).astype("f4")
        tensors[f"attn.{name}.bias"] = random.normal(size=24).astype("f4")
        rules[f"attn.{name}.weight"] = {"path": f"{kind}/kernel", **split}
        rules[f"attn.{name}.bias"] = {"path": f"{kind}/bias", "split": {0: [4, 6]}}
    save_file(tensors, tmp_path / "attention.safetensors")
    like = nnx.eval_shape(
        lambda: nnx.MultiHeadAttention(4, 16, qkv_features=24, decode=False, rngs=nnx.Rngs(0))
    )
    path = tmp_path / "attention.safetensors"
    found = ostraka.restore(path, like=like, names=rules, only=["*/kernel", "*/bias"])
    query = tensors["attn.q.weight"].T.reshape(16, 4, 6)
    assert np.array_equal(found.query.kernel[...], query)
    out = tensors["attn.o.weight"].T.reshape(4, 6, 16)
    assert np.array_equal(found.out.kernel[...], out)


# Files


def test_a_single_file_of_odd_tensors(tmp_path: Path):
    tensors = {
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "with/slash": np.arange(3, dtype=np.int64),
        "with~tilde": np.arange(3, dtype=np.uint8),
        "a.b": np.arange(2, dtype=np.int32),
        "a": np.array([True, False]),
        "a/b": np.arange(5, dtype=np.uint16),
        "z.10": np.ones(1, np.float32),
        "z.9": np.ones(2, np.float32),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"note": "x" * 70_000})  # more than the first read takes
    opened = ostraka.open(path)
    assert sorted(opened) == sorted(n.replace("~", "~0").replace("/", "~1") for n in tensors)
    assert list(opened)[-2:] == ["z.9", "z.10"]
    like = {name: np.zeros_like(array) for name, array in tensors.items()}
    for name, array in ostraka.restore(path, like=like).items():
        assert array.dtype == tensors[name].dtype
        assert np.array_equal(array, tensors[name])


CODES = {
    "bool": "BOOL",
    "uint16": "U16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
}


def test_every_dtype(tmp_path: Path):
    random = np.random.default_rng(0)
    raw = {name: random.integers(0, 2, 64, dtype=np.uint8).tobytes() for name in CODES}
    header: dict[str, Any] = {}
    for n, (name, code) in enumerate(CODES.items()):
        size = np.dtype(getattr(ml_dtypes, name, name)).itemsize
        offsets = [64 * n, 64 * n + 64]
        header[name] = {"dtype": code, "shape": [2, 32 // size], "data_offsets": offsets}
    header["four"] = {"dtype": "F4", "shape": [3, 4], "data_offsets": [64 * 9, 64 * 9 + 6]}
    header["six"] = {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [64 * 9 + 6, 64 * 9 + 9]}
    header["new"] = {"dtype": "F2_NEW", "shape": [9], "data_offsets": [64 * 9 + 9, 64 * 9 + 13]}
    text = json.dumps(header).encode()
    text += b" " * 13  # padded, as the format allows
    four = bytes([0x21, 0x43, 0x65, 0x07, 0xF8, 0x9A])
    data = b"".join(raw.values()) + four + b"123" + b"1234"
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    opened = ostraka.open(path)
    for name in CODES:
        assert np.asarray(opened[name]).tobytes() == raw[name], name
    elements = np.asarray(opened["four"]).view(np.uint8).reshape(-1).tolist()
    assert elements == [1, 2, 3, 4, 5, 6, 7, 0, 8, 15, 10, 9]
    assert np.array_equal(opened["four"][1:, 2:].view(np.uint8), [[7, 0], [10, 9]])
    with pytest.raises(UnsupportedFormat, match="leaf 'six' .* of the dtype F6_E2M3, which"):
        opened["six"]
    with pytest.raises(Mismatch, match="dtype F2_NEW, which Ostraka does not know: leave it out"):
        ostraka.restore(path, names=lambda name, shape: name, only=["new"])
    found = ostraka.restore(path, only=["!six", "!new"])
    assert found["bfloat16"].dtype == jnp.bfloat16


def test_files_without_an_index(tmp_path: Path):
    save_file({"a": np.arange(3)}, tmp_path / "one.safetensors")
    save_file({"b": np.arange(4)}, tmp_path / "two.safetensors")
    (tmp_path / "README.md").write_text("hello")
    assert sorted(ostraka.open(tmp_path)) == ["a", "b"]
    save_file({"c": np.arange(3), "a": np.arange(3)}, tmp_path / "three.safetensors")
    with pytest.raises(UnsupportedFormat, match="has tensor 'a' in both one.safetensors and three"):
        ostraka.open(tmp_path)
    assert sorted(ostraka.open(tmp_path / "two.safetensors")) == ["b"]


def test_numbered_files_without_an_index_must_all_be_there(llama: Path, tensors: dict[str, Any]):
    (llama / "model.safetensors.index.json").unlink()
    assert len(ostraka.open(llama)) == len(tensors)
    (llama / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(Damaged, match="model-00003-of-00004.safetensors: it is missing: 3 of 4"):
        ostraka.open(llama)


def test_the_index_decides(tmp_path: Path, llama: Path, tensors: dict[str, Any]):
    """Mistral publishes the same weights once more, under names of its own."""
    single = tmp_path / "single"
    single.mkdir()
    save_file(tensors, single / "model.safetensors")
    for path in (llama, single):
        save_file({"tok_embeddings.weight": np.ones(3)}, path / "consolidated.safetensors")
        if path == llama:
            save_file({"base.x.lora_A.weight": np.ones(3)}, path / "adapter_model.safetensors")
        assert sorted(ostraka.open(path)) == sorted(tensors)


def test_several_indexes(tmp_path: Path):
    """Diffusers publishes variants beside each other."""
    save_file({"a": np.ones(2)}, tmp_path / "diffusion_pytorch_model.safetensors")
    save_file({"a": np.ones(3)}, tmp_path / "diffusion_pytorch_model.fp16.safetensors")
    for variant in ("", ".fp16"):
        name = f"diffusion_pytorch_model{variant}.safetensors"
        document = json.dumps({"weight_map": {"a": name}})
        (tmp_path / f"{name}.index.json").write_text(document)
    with pytest.raises(UnsupportedFormat, match="has 2 indexes of safetensors files"):
        ostraka.open(tmp_path)
    index = tmp_path / "diffusion_pytorch_model.fp16.safetensors.index.json"
    assert ostraka.open(index)["a"].shape == (3,)


def test_the_cache_of_the_hub(tmp_path: Path, llama: Path, tensors: dict[str, Any]):
    """Its snapshots are links to blobs beside them: those are followed, others are not."""
    root = tmp_path / "models--org--name"
    snapshot = root / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for number, file in enumerate(sorted(llama.iterdir())):
        digest = f"{number:064x}"
        shutil.copy(file, root / "blobs" / digest)
        (snapshot / file.name).symlink_to(f"../../blobs/{digest}")
    assert_is_model(ostraka.restore(snapshot, like=abstract_model(), names="hf"), tensors)
    ostraka.copy(snapshot, tmp_path / "copy")
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == sorted(os.listdir(llama))
    assert not any(p.is_symlink() for p in (tmp_path / "copy").iterdir())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(llama / "config.json")
    with pytest.raises(Damaged, match="config.json: it is a symbolic link"):
        ostraka.open(snapshot)


def test_shards_of_pytorch_and_of_ours_are_refused(tmp_path: Path):
    info = json.dumps({"w": {"saved_offsets": [0]}})
    save_file({"w": np.ones(2)}, tmp_path / "w.safetensors", metadata={"DCP_SHARDING_INFO": info})
    with pytest.raises(UnsupportedFormat, match="is a shard of PyTorch's distributed checkpoint"):
        ostraka.open(tmp_path)
    ostraka.save(tmp_path / "ours", {"w": jnp.ones(3)})
    (shards,) = (tmp_path / "ours").glob("shards-*")
    for path in (shards, next(shards.glob("*.safetensors"))):
        with pytest.raises(NotACheckpoint, match="is a (part of|file, not)"):
            ostraka.open(path)


# Boxes


def test_any_box(tmp_path: Path):
    random = np.random.default_rng(0)
    tensors = {
        "matrix": random.normal(size=(37, 91)).astype(np.float32),
        "wide": random.normal(size=(5, 4000)).astype(np.float16),
        "cube": random.integers(0, 9, (7, 11, 130)).astype(np.int32),
        "vector": random.normal(size=1000).astype(np.float64),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    source = open_at(tmp_path / "x.safetensors")
    for number, leaf in enumerate(source.saved.leaves):
        targets: list[Target] = []
        for _ in range(30):
            ends = [sorted(random.integers(0, n + 1, 2).tolist()) for n in leaf.shape]
            targets.append(Target(number, tuple((a, b) for a, b in ends)))
        targets += [Target(number, _box.full(leaf.shape))] * 2
        found = dict(source.read(targets))
        for at, target in enumerate(targets):
            wanted = tensors[leaf.path][tuple(slice(*span) for span in target.box)]
            assert np.array_equal(found[at], wanted), (leaf.path, target)
            assert not found[at].size or not found[at].ctypes.data % 64


def test_only_what_is_wanted_is_read(tmp_path: Path):
    save_file({"w": np.zeros((2048, 2048), np.float32)}, tmp_path / "x.safetensors")
    source = open_at(tmp_path / "x.safetensors")

    def bytes_for(*boxes: Any) -> int:
        read: list[int] = []
        for _ in source.read([Target(0, box) for box in boxes], on_bytes=read.append):
            pass
        return sum(read)

    whole = 2048 * 2048 * 4
    assert bytes_for(((0, 512), (0, 2048))) == whole // 4
    assert bytes_for(((0, 2048), (512, 1024))) == whole // 4
    assert bytes_for(((7, 9), (3, 100))) == 2 * 97 * 4
    # Short runs, and nearly whole rows, are read with what lies between.
    assert bytes_for(((0, 2048), (0, 8))) == whole
    assert bytes_for(((0, 2048), (0, 2000))) == whole
    # Boxes side by side are read once, together.
    bands = [((0, 2048), (n * 8, n * 8 + 8)) for n in range(256)]
    assert bytes_for(*bands) == whole


# In any store, and what else is done with them


def test_in_a_bucket(bucket: str, llama: Path, tensors: dict[str, Any]):
    there = f"{bucket}/copied"
    assert ostraka.copy(llama, there).copied == 1
    assert_is_model(ostraka.restore(there, like=abstract_model(), names="hf"), tensors)
    part = ostraka.open(there)["model.norm.weight"][3:7]
    assert np.array_equal(part, tensors["model.norm.weight"][3:7])
    assert ostraka.verify(there).ok
    assert 0 < len(ostraka.open(f"{there}/model-00001-of-00004.safetensors")) < len(tensors)


def test_verify_says_what_it_can_not_tell(llama: Path):
    report = ostraka.verify(llama)
    assert report.ok
    assert not report.has_digests
    assert "it has no digests, so values can't be checked" in str(report)
    file = llama / "model-00002-of-00004.safetensors"
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(Damaged, match="model-00002.*it is cut short"):
        ostraka.verify(llama)


def test_copies(tmp_path: Path, llama: Path):
    for name in ("tokenizer.json", ".git/config", "1_Pooling/config.json"):
        (llama / name).parent.mkdir(exist_ok=True)
        (llama / name).write_text("{}")
    target = tmp_path / "copy"
    assert ostraka.copy(llama, target).copied == 1
    there, here = (
        {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        for root in (target, llama)
    )
    assert there == {name: data for name, data in here.items() if name != ".git/config"}
    assert ostraka.copy(llama, target).skipped == 1
    other = write_hf(tmp_path / "other", llama_tensors(np.float16))
    with pytest.raises(PathInTheWay, match="has something else in it"):
        ostraka.copy(other, target)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_manager_is_not_confused(tmp_path: Path, llama: Path):
    with ostraka.Manager(tmp_path / "run") as manager:
        manager.save(3, {"w": jnp.ones(3)})
        manager.wait()
        shutil.copytree(llama, tmp_path / "run" / "7")
        shutil.copytree(llama, tmp_path / "run" / "step_9")
        (tmp_path / "run" / "step_9" / "model-00001-of-00004.safetensors").unlink()
        assert ostraka.Manager(tmp_path / "run", read_only=True).steps() == [3]
        assert np.array_equal(ostraka.restore(tmp_path / "run")["w"], np.ones(3))


def test_saving_it_with_ostraka_and_back(tmp_path: Path, llama: Path, tensors: dict[str, Any]):
    """A restored model is saved as any other; the sharding of `like` is used without specs."""
    sharding = NamedSharding(auto_mesh(x=8), P("x"))
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract_model(),
    )
    model = ostraka.restore(llama, like=like, names="hf")
    assert_is_model(model, tensors)
    assert model.norm.scale[...].sharding == sharding
    ostraka.save(tmp_path / "ours", model)
    assert_is_model(ostraka.restore(tmp_path / "ours", like=like), tensors)


def test_names_of_a_manager_s_step(tmp_path: Path):
    """A checkpoint of ours has other names, too, if they are asked for."""
    with ostraka.Manager(tmp_path) as manager:
        manager.save(1, {"old": {"w": jnp.arange(6.0).reshape(2, 3)}})
        manager.wait()
        rules = {"old/w": {"path": "new/kernel", "transpose": True}}
        found = manager.restore(like={"new": {"kernel": jnp.zeros((3, 2))}}, names=rules)
    assert np.array_equal(found["new"]["kernel"], np.arange(6.0).reshape(2, 3).T)
