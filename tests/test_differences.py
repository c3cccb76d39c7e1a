"""Long mismatches in few lines, the likely cause first."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ostraka
from ostraka._differences import Differences
from ostraka.errors import Mismatch, PartialRestore
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
    assert lines[0].startswith("`like` looks like what was saved under 'k'")
    assert lines[1:] == ["said", "'x': wrong"]


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
        ({"only": "haed/**"}, r"only has 'haed/\*\*' \(did you mean 'head'\?\), which matches no"),
        ({"only": ["head", "!bdoy"]}, r"only has '!bdoy' \(did you mean 'body'\?\)"),
        ({"only": ["head", "!head"]}, "no leaf is selected by only="),
        ({"dtype": {"head/v": "bfloat16"}}, r"dtype has 'head/v' \(did you mean 'head/w'\?\)"),
        ({"dtype": {"step": "bfloat16"}}, "dtype has 'step'.* matches no floating-point array"),
    ],
)
def test_patterns_that_match_nothing(flat: Place, choices: Any, message: str):
    with pytest.raises(Mismatch, match=message):
        ostraka.restore(flat, **choices)


def test_a_dtype_pattern_of_a_save_that_matches_nothing(place: Place):
    with pytest.raises(ValueError, match=r"dtype has 'modle' \(did you mean 'model'\?\), which"):
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
