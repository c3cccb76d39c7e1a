"""Long mismatches in few lines, the likely cause first."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

import ostraka
from ostraka.errors import Mismatch, PartialRestore
from ostraka.restoring._differences import Differences
from places import Place


class Deep(nnx.Module):
    def __init__(self, layers: int, *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(4, 2, rngs=rngs)


def make(layers: int = 10) -> tuple[Deep, nnx.Optimizer[Deep]]:
    model = Deep(layers, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def differences(path: Place, like: Any, **choices: Any) -> tuple[str, ...]:
    with pytest.raises(Mismatch, match=r"does not fit checkpoint") as caught:
        ostraka.restore(path, like=like, **choices)
    return caught.value.differences


def test_a_forgotten_optimizer_is_one_line(place: Place):
    model, optimizer = make()
    ostraka.save(place / "c", {"model": model})
    (line,) = differences(place / "c", {"model": model, "optimizer": optimizer})
    assert line == "'optimizer' (46 leaves) is not in the checkpoint"


def test_a_bare_model_is_one_line(place: Place):
    model, optimizer = make()
    ostraka.save(place / "c", {"model": model, "optimizer": optimizer})
    first, *others = differences(place / "c", model)
    assert first == (
        "`like` looks like what was saved under 'model': pass like={'model': …}, and take "
        "['model'] of the result"
    )
    assert others == []


def test_a_model_that_was_saved_bare(place: Place):
    model, _ = make()
    ostraka.save(place / "c", model)
    first, *others = differences(place / "c", {"model": model})
    assert first.startswith("the checkpoint has at its top what `like` has under 'model'")
    assert len(others) <= 2


def test_a_mistyped_name(place: Place):
    model, optimizer = make()
    ostraka.save(place / "c", {"model": model, "optimizer": optimizer})
    (line,) = differences(place / "c", {"modle": model, "optimizer": optimizer})
    assert line == "'modle' (22 leaves) is not in the checkpoint (did you mean 'model'?)"


def test_a_name_unlike_any_other(place: Place):
    ostraka.save(place / "c", {"b": jnp.ones(3), "w": jnp.ones(3)})
    (line,) = differences(place / "c", {"bias": jnp.ones(3), "w": jnp.ones(3)})
    assert line == "'bias' is not in the checkpoint (it also has 'b')"


def test_axes_that_the_mesh_lacks_are_one_line(place: Place):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
    sharding = jax.NamedSharding(mesh, jax.P("fsdp", "tp"))
    tree = {str(n): jax.device_put(jnp.ones((8, 8)), sharding) for n in range(5)}
    ostraka.save(place / "c", tree)
    with pytest.raises(Mismatch, match="can't place checkpoint") as caught:
        ostraka.restore(place / "c", mesh={"data": 8})
    (line,) = caught.value.differences
    assert line == (
        "the mesh (data=8) has no axes 'fsdp' and 'tp', but the specs of 5 leaves use them, such "
        "as '0': pass specs= for the axes of this mesh, or a mesh with 'fsdp' and 'tp'"
    )
    found = ostraka.restore(place / "c", mesh={"data": 8}, specs=jax.P("data"))
    assert found["0"].sharding.spec == jax.P("data")


def test_another_number_of_layers(place: Place):
    ostraka.save(place / "c", {"model": make(3)[0]})
    assert differences(place / "c", {"model": make(5)[0]}) == (
        "'model/layers/3' (2 leaves) is not in the checkpoint",
        "'model/layers/4' (2 leaves) is not in the checkpoint",
    )
    assert differences(place / "c", {"model": make(1)[0]}) == (
        "'model/layers/1' (2 leaves) is in the checkpoint but not in `like`",
        "'model/layers/2' (2 leaves) is in the checkpoint but not in `like`",
    )


def test_leaves_that_differ_in_the_same_way_are_one_line(place: Place):
    ostraka.save(place / "c", {"layers": [np.ones(2, np.float32)] * 2 + [np.ones(2)] * 9})
    like = {"layers": [np.ones(2, np.float16) for _ in range(11)]}
    first, second, third = differences(place / "c", like)
    assert first == "'layers/0': saved as float32, `like` has float16: pass dtype='like' to cast"
    assert second == first.replace("layers/0", "layers/1")
    assert third.endswith("to cast (and so 8 more, such as 'layers/3')")


def test_causes_are_told_before_consequences():
    found = Differences(missing=["a/b"], of_leaves=[("x", "wrong")], general=["said"])
    lines = found.lines(["a/b", "x"], ["k/a/b", "x"])
    assert lines[0] == "a part of `like` ('a') was saved under 'k': pass rename={'k/a': 'a'}"
    assert lines[1:] == ["said", "'x': wrong"]


# Advice that is followed


class Trunk(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(16, 4, rngs=rngs)
        self.norm = nnx.RMSNorm(4, rngs=rngs)


class WithHead(nnx.Module):
    """As `transformers` has it: a trunk called `model`, and a head beside it."""

    def __init__(self, rngs: nnx.Rngs):
        self.model = Trunk(rngs)
        self.lm_head = nnx.Linear(4, 16, use_bias=False, rngs=rngs)


def advised(lines: tuple[str, ...]) -> dict[str, str]:
    """What a message says to pass as `rename`."""
    found = re.search(r"pass rename=(\{.*?\})", lines[0])
    assert found is not None, lines
    return ast.literal_eval(found[1])


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("way", ["like", "into"])
def test_the_head_beside_a_model_is_restored_by_the_advice(tmp_path: Path, is_tied: bool, way: str):
    rng = np.random.default_rng(0)
    tensors = {
        "model.embed_tokens.weight": rng.normal(size=(16, 4)).astype("float32"),
        "model.norm.weight": rng.normal(size=4).astype("float32"),
        "lm_head.weight": rng.normal(size=(16, 4)).astype("float32"),
    }
    head = tensors["model.embed_tokens.weight"] if is_tied else tensors["lm_head.weight"]
    if is_tied:
        del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "tie_word_embeddings": is_tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given: Any = {way: WithHead(nnx.Rngs(0)), "names": "hf"}
    expected = f"has at its top what `{way}` has under 'model'"
    with pytest.raises(Mismatch, match=expected) as caught:
        ostraka.restore(tmp_path, **given)
    found = ostraka.restore(tmp_path, **given, rename=advised(caught.value.differences))
    np.testing.assert_array_equal(found.lm_head.kernel[...], head.T)
    np.testing.assert_array_equal(found.model.norm.scale[...], tensors["model.norm.weight"])
    embedding = found.model.embed_tokens.embedding[...]
    np.testing.assert_array_equal(embedding, tensors["model.embed_tokens.weight"])


def test_a_part_that_was_saved_under_a_name_is_restored_by_the_advice(place: Place):
    ostraka.save(
        place / "c", {"old": {"a": {"w": jnp.ones(2)}, "b": jnp.ones(3)}, "c": jnp.ones(4)}
    )
    like = {"a": {"w": jnp.zeros(2)}, "b": jnp.zeros(3), "c": jnp.zeros(4)}
    rename = advised(differences(place / "c", like))
    assert rename == {"old/a": "a", "old/b": "b"}
    found = ostraka.restore(place / "c", like=like, rename=rename)
    assert all(leaf.all() for leaf in jax.tree.leaves(found))


def test_there_is_no_advice_that_would_move_what_is_found(place: Place):
    ostraka.save(place / "c", {"a": {"w": jnp.ones(2), "v": jnp.ones(2)}})
    like = {"k": {"a": {"w": jnp.zeros(2)}}, "a": {"v": jnp.zeros(2)}}
    assert not any("rename" in line for line in differences(place / "c", like))


def test_all_names_that_a_template_fits_are_told(place: Place):
    ostraka.save(place / "c", {"ema": {"w": jnp.zeros(2)}, "model": {"w": jnp.ones(2)}})
    (line,) = differences(place / "c", {"w": jnp.ones(2)})
    assert line == (
        "`like` looks like what was saved under 'ema' and under 'model': pass like={name: …}, with "
        "the name of the one you want, and take [name] of the result"
    )


# Lenient restores


def test_a_new_head(place: Place):
    model, _ = make()
    ostraka.save(place / "c", {"model": model})
    new, _ = make()
    new.head = nnx.Linear(4, 7, rngs=nnx.Rngs(5))
    kept = np.asarray(new.head.kernel[...])
    for layer in new.layers:
        layer.kernel[...] *= 0
    (one, two) = differences(place / "c", {"model": new})
    assert "'model/head/bias': saved with shape (2,), `like` has (7,)" in one
    assert "'model/head/kernel': saved with shape (4, 2), `like` has (4, 7)" in two
    with pytest.warns(
        PartialRestore, match=r"kept 2 leaves whose shape differs \('model/head/bias', "
    ):
        ostraka.restore(place / "c", into={"model": new}, strict=False)
    assert np.array_equal(new.head.kernel[...], kept)
    assert np.array_equal(new.layers[3].kernel[...], model.layers[3].kernel[...])
    restored = ostraka.restore(place / "c", like={"model": new}, only="!model/head/**")
    assert np.array_equal(restored["model"].head.kernel[...], kept)
    abstract = nnx.eval_shape(lambda: new)
    with pytest.raises(Mismatch, match="saved with shape"):
        ostraka.restore(place / "c", like={"model": abstract}, strict=False)


def test_the_warning_counts(place: Place):
    model, optimizer = make(50)
    ostraka.save(place / "c", {"model": model})
    with pytest.warns(PartialRestore, match="kept 206 leaves .* and 203 more") as seen:
        ostraka.restore(place / "c", like={"model": model, "optimizer": optimizer}, strict=False)
    assert len(str(seen[0].message)) < 400


# Patterns


@pytest.fixture
def flat(place: Place) -> Place:
    tree = {"body": {"w": jnp.ones(2), "b": jnp.zeros(2)}, "head": {"w": jnp.ones(3)}, "step": 3}
    ostraka.save(place / "c", tree)
    return place / "c"


@pytest.mark.parametrize(
    ("only", "paths"),
    [
        ("!head/**", {"body", "step"}),
        ("!head", {"body", "step"}),
        (["!head", "!step"], {"body"}),
        (["body/**", "!**/b"], {"body"}),
        (["**/w"], {"body", "head"}),
    ],
)
def test_only_can_leave_out(flat: Place, only: Any, paths: set[str]):
    assert set(ostraka.restore(flat, only=only)) == paths
    assert "b" not in ostraka.restore(flat, only=["body/**", "!**/b"])["body"]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"only": "haed/**"}, r"only='haed/\*\*' matches no leaf .*\(did you mean 'head'"),
        ({"only": ["head", "!bdoy"]}, r"only='!bdoy' matches .*\(did you mean 'body'\?\)"),
        ({"only": ["head", "!head"]}, "no leaf is selected by only="),
        ({"dtype": {"head/v": "bfloat16"}}, r"dtype=.'head/v': .*\(did you mean 'head/w'\?\)"),
        ({"dtype": {"step": "bfloat16"}}, "dtype=.'step': …. matches no floating-point array"),
    ],
)
def test_patterns_that_match_nothing(flat: Place, choices: Any, message: str):
    with pytest.raises(Mismatch, match=message):
        ostraka.restore(flat, **choices)


def test_a_dtype_pattern_of_a_save_that_matches_nothing(place: Place):
    with pytest.raises(
        ValueError, match=r"dtype=.'modle': …. matches.* \(did you mean 'model'\?\)"
    ):
        ostraka.save(place / "c", {"model": jnp.ones(2)}, dtype={"modle": "bfloat16"})
    assert not (place / "c").exists()


def test_an_explicit_dtype_casts_whatever_the_template_has(flat: Place):
    like = {"body": {"w": jnp.zeros(2), "b": jnp.zeros(2)}}
    restored = ostraka.restore(flat, like=like, dtype="bfloat16")
    assert {x.dtype for x in restored["body"].values()} == {jnp.dtype("bfloat16")}
    some = ostraka.restore(flat, like=like, dtype={"body/w": "float16"})
    assert some["body"]["w"].dtype == jnp.float16
    assert some["body"]["b"].dtype == jnp.float32


def test_a_template_by_position(flat: Place):
    assert ostraka.restore(flat, {"step": 0}) == {"step": 3}
