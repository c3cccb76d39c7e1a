"""Rules, presets, trees of specs and single specs mean the same wherever specs are taken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.errors import InvalidSharding
from ostraka.live.shardings import describe_spec
from ostraka.sharding import check, combine, fsdp, init, make_mesh, picture, place, spec_tree
from ostraka.sharding._place import prepare
from ostraka.sharding.specs import array_leaves, parse_state, resolve, to_spec
from ostraka.tree.nodes import leaves_of

SIZES = {"data": 2, "model": 4}


class Two(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(16, 8, rngs=rngs)
        self.second = nnx.Linear(8, 16, rngs=rngs)


def two() -> Two:
    return Two(nnx.Rngs(0))


def specs_of(tree: Any) -> dict[str, P]:
    return {leaf.path: leaf.value.sharding.spec for leaf in array_leaves(parse_state(tree))}


WAYS: dict[str, Any] = {
    "patterns": {"**/kernel": P("data"), "**/bias": P()},
    "patterns in lists": {"**/kernel": ["data"], "**/bias": None},
    "combined": combine({"**/kernel": P("data")}, {"**": P()}),
    "paths": {
        "first/kernel": P("data"),
        "first/bias": P(),
        "second/kernel": P("data"),
        "second/bias": P(),
    },
    "a tree": {
        "first": {"kernel": P("data"), "bias": P()},
        "second": {"kernel": P("data"), "bias": None},
    },
    "a spec tree": spec_tree(nnx.eval_shape(two), {"**/kernel": P("data"), "**/bias": P()}),
    "names and patterns": {"first/kernel": P("data"), "second/k*": P("data"), "**": P()},
    "a function": lambda leaf: P("data") if leaf.ndim == 2 else P(),
    "a preset": fsdp("data", min_size=100),
    "one spec": P("data"),
}
EXPECTED = {
    "first/bias": P(),
    "first/kernel": P("data"),
    "second/bias": P(),
    "second/kernel": P("data"),
}

OF_THE_PRESET = {  # the largest dimension of each kernel
    "first/bias": P(),
    "first/kernel": P("data", None),
    "second/bias": P("data"),
    "second/kernel": P(None, "data"),
}


OTHERWISE: dict[str, dict[str, P]] = {
    "a preset": OF_THE_PRESET,
    "one spec": dict.fromkeys(EXPECTED, P("data")),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c"
    ostraka.save(path, two())
    return path


@pytest.mark.parametrize("way", WAYS)
def test_specs_mean_the_same_everywhere(way: str, saved: Path):
    specs, mesh = WAYS[way], make_mesh(SIZES)
    expected = OTHERWISE.get(way, EXPECTED)
    made = spec_tree(two(), specs, mesh=SIZES)
    leaves = array_leaves(parse_state(two()))
    assert {leaf.path: leaf.value for leaf in leaves_of(parse_state(made))} == expected
    assert specs_of(place(two(), mesh, specs)) == expected
    prepared = prepare(two, mesh, specs, None, None)  # as `init` does, before it compiles
    assert [sharding.spec for sharding in prepared.shardings] == [*expected.values()]
    warned = ["first/bias", "second/bias"] if way == "one spec" else []  # not cut as the kernels
    assert [finding.path for finding in check(two(), SIZES, specs)] == warned
    resolved = resolve(list(leaves), SIZES, specs)
    assert {path: to_spec(path, spec) for path, spec in resolved.specs.items()} == expected
    assert resolved.missing == resolved.unknown == []
    like = ostraka.restore(saved, like=two(), mesh=mesh, specs=specs)
    assert specs_of(like) == specs_of(ostraka.restore(saved, mesh=SIZES, specs=specs)) == expected
    planned = [leaf.spec for leaf in ostraka.plan(two(), mesh=SIZES, specs=specs)._write.leaves]
    partitions = {path: describe_spec(path, spec) for path, spec in expected.items()}
    assert {leaf.path: leaf.partition for leaf in planned} == partitions
    # Each of two processes has a half of what is cut along the axis of two.
    halves = [leaf.nbytes // (2 if "data" in expected[leaf.path] else 1) for leaf in planned]
    onto = ostraka.plan(saved).restore(mesh=SIZES, specs=specs, processes=2)
    assert [process.needed_bytes for process in onto.processes] == [sum(halves)] * 2


SWAPPED: Any = P()
MESHES = {"sizes": SIZES, "a mesh": make_mesh(SIZES), "abstract": AbstractMesh((2,), ("data",))}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("use", "order"),
    [
        (lambda mesh: check(two(), SWAPPED, mesh), "check(state, mesh, specs)"),
        (lambda mesh: place(two(), SWAPPED, mesh), "place(tree, mesh, specs)"),
        (lambda mesh: init(two, SWAPPED, mesh), "init(model_fn, mesh, specs)"),
        (lambda mesh: picture((8,), SWAPPED, mesh), "picture(shape, mesh, spec)"),
        (lambda mesh: spec_tree(two(), mesh), "spec_tree(state, rules, mesh=mesh)"),
    ],
    ids=["check", "place", "init", "picture", "spec_tree"],
)
def test_a_mesh_in_the_place_of_specs(use: Callable[[Any], Any], order: str, mesh: str):
    with pytest.raises(TypeError, match=r"the mesh \(data=2.*\) is given where specs") as caught:
        use(MESHES[mesh])
    assert str(caught.value).endswith(f"the order is {order}")


def test_one_spec_for_all():
    mesh = make_mesh(SIZES)
    for spec in (P("data"), ("data",), NamedSharding(mesh, P("data"))):
        placed = place({"a": np.ones(8, np.float32), "n": np.float32(1)}, mesh, spec)
        assert placed["a"].sharding.spec == P("data")
        assert placed["n"].sharding.spec == P()


MISTAKES = {
    "patterns": (
        {"**/kernel": P()},
        "no pattern matches 'first/bias', 'second/bias': add one, or '**' with P()",
    ),
    "paths": ({"first": P()}, "leaf 'second/kernel' has no spec"),
    "unknown pattern": (
        {"**/kernle": P(), "**": P()},
        "specs={'**/kernle': …} matches no leaf (did you mean '",
    ),
    "unknown path": (
        {"first": P(), "second": P(), "secnd": P()},
        "specs has 'secnd', which is no leaf",
    ),
    "unknown name in a tree": (
        {"first": {"kernel": P(), "biass": P()}, "second": P()},
        "specs has 'first/biass', which is no leaf (did you mean 'first/bias'?)",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_told_everywhere(case: str):
    specs, sentence = MISTAKES[case]
    findings = check(two(), SIZES, specs)
    assert any(sentence in str(finding) for finding in findings)
    assert {finding.severity for finding in findings} == {"error"}
    mesh = make_mesh(SIZES)
    for use in (
        lambda: spec_tree(two(), specs),
        lambda: place(two(), mesh, specs),
        lambda: init(two, mesh, specs),
    ):
        with pytest.raises(InvalidSharding, match=".") as caught:
            use()
        assert sentence in str(caught.value)


def test_many_leaves_without_a_pattern_are_one_sentence():
    tree = {f"layer_{n}": {"kernel": np.ones(8), "scale": np.ones(8)} for n in range(48)}
    (finding,) = check(tree, SIZES, {"**/kernel": P("data")})
    assert str(finding) == (
        "no pattern matches 'layer_0/scale', 'layer_1/scale', 'layer_2/scale' and 45 more: add "
        "one, or '**' with P() to leave the rest whole"
    )


def test_names_with_characters_of_patterns_and_paths():
    tree = {"a/b": np.ones(8), "c*": np.ones(8), "d": {"e": np.ones(8)}, "empty": ()}
    rules = {"a/b": P("data"), "c*": P("model"), "d/e": P(), "empty": ()}
    made = spec_tree(tree, rules)
    assert made == {"a/b": P("data"), "c*": P("model"), "d": {"e": P()}, "empty": ()}
    assert check(tree, SIZES, made) == []
    assert spec_tree(tree, made) == made
    assert spec_tree(tree, {"c*": P("model"), "**": P()})["c*"] == P("model")


def test_scalars_need_no_spec_and_take_none():
    state = {"w": np.ones((4, 8), np.float32), "opt": {"count": np.int32(3), "mu": np.ones(8)}}
    assert check(state, SIZES, {"w": P("data"), "opt": P("model")}) == []
    assert check(state, SIZES, {"w": P(), "opt/mu": P()}) == []
    (finding,) = check(state, SIZES, {"w": P(), "opt": {"mu": P(), "count": P("data")}})
    assert "leaf 'opt/count' has 0 dimensions" in str(finding)


def test_a_named_tuple_is_a_tree():
    state = optax.adam(1e-3).init({"w": np.ones((4, 8), np.float32)})
    specs = spec_tree(state, fsdp("data", min_size=1), mesh=SIZES)
    assert check(state, SIZES, specs) == []
    placed = place(state, make_mesh(SIZES), specs)
    assert placed[0].mu["w"].sharding.spec == P(None, "data")


@given(
    st.recursive(
        st.just(None),
        lambda children: st.one_of(
            st.dictionaries(
                st.sampled_from(["a", "b", "a/b", "*", "a*", "~"]), children, min_size=1
            ),
            st.lists(children, min_size=1, max_size=3),
            st.tuples(children),
        ),
        max_leaves=6,
    )
)
def test_a_spec_tree_goes_where_it_came_from(shape: Any):
    """Whatever the names: what `spec_tree` makes is read as the same tree."""
    tree = jax.tree.map(lambda _: np.ones(8), shape, is_leaf=lambda x: x is None)
    rules = lambda path, leaf: P("data") if len(path) % 2 else P("model")  # noqa: E731
    specs = spec_tree(tree, rules)
    assert spec_tree(tree, specs) == specs
    assert check(tree, SIZES, specs) == []


def test_what_a_resolved_spec_keeps():
    """For a restore: shardings as they are, None as None, and nothing of what is left out."""
    mesh = make_mesh(SIZES)
    leaves = list(array_leaves(parse_state({"a": np.ones(8), "b": np.ones(8), "c": np.ones(8)})))
    sharding = NamedSharding(mesh, P("data"))
    resolved = resolve(leaves, None, {"a": sharding, "b": None, "d": P()})
    assert resolved.specs == {"a": sharding, "b": None}
    assert [finding.path for finding in resolved.missing] == ["c"]
    assert [finding.path for finding in resolved.unknown] == ["d"]
