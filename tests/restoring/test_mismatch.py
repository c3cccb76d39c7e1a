"""Templates and arguments that do not fit a checkpoint: each difference in its exact words."""

import ast
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax import struct as flax_struct
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import ostraka
from ostraka.errors import InvalidSharding, InvalidTree, Mismatch, PartialRestore
from ostraka.restoring._differences import Differences

LEFT_OUT = object()


def struct(*shape: int, dtype: Any = np.float32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def mesh_of(*sizes: int, names: str = "xy") -> Mesh:
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), tuple(names[: len(sizes)]))


def on_mesh(mesh: Mesh, spec: P, *shape: int) -> jax.Array:
    return jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, spec))


class Deep(nnx.Module):
    def __init__(self, layers: int, *, outputs: int = 2):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(4, outputs, rngs=rngs)


class Tied(nnx.Module):
    def __init__(self, *, is_tied: bool):
        self.embed = nnx.Param(jnp.ones((8, 4)))
        self.output = self.embed if is_tied else nnx.Param(jnp.zeros((8, 4)))


class Position:
    """An object with a state, as an iterator of data is."""

    def get_state(self) -> int:
        return 7

    def set_state(self, state: int) -> None:
        raise AssertionError("nothing is set if anything differs")


@flax_struct.dataclass
class Statics:
    weight: Any
    a: Any = flax_struct.field(pytree_node=False, default=1)
    b: Any = flax_struct.field(pytree_node=False, default=1)
    c: Any = flax_struct.field(pytree_node=False, default=1)
    d: Any = flax_struct.field(pytree_node=False, default=1)
    apply: Any = flax_struct.field(pytree_node=False, default=max)


def optimizer_of(model: nnx.Module, transform: Any = None) -> nnx.Optimizer[Any]:
    return nnx.Optimizer(model, transform or optax.adamw(1e-3), wrt=nnx.Param)


SGD = optax.sgd(1e-2, momentum=0.9)


def abstract(layers: int, outputs: int) -> Deep:
    return nnx.eval_shape(lambda: Deep(layers, outputs=outputs))


def both(layers: int = 10) -> dict[str, Any]:
    model = Deep(layers)
    return {"model": model, "optimizer": optimizer_of(model)}


def make_model() -> None:
    pass


def variables() -> dict[str, Any]:
    return {name: nnx.Param(jnp.zeros(2)) for name in "ab"}


TREES: dict[str, Callable[[], Any]] = {
    "mixed": lambda: {
        "dense": {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4, jnp.bfloat16)},
        "key": jax.random.key(0),
        "step": 3,
        "name": "ostrakon",
        "rate": np.float32(0.5),
    },
    "values": lambda: {"i": 1, "b": True, "s": "x", "none": None, "f": 1.0, "empty": []},
    "numbers": lambda: {"i64": np.int64(3), "f32": np.float32(1.5), "nan": float("nan")},
    "sharded": lambda: {
        "w": on_mesh(mesh_of(4, 2), P("x", "y"), 8, 16),
        "b": {"c": on_mesh(mesh_of(4, 2), P("y"), 16)},
        "s": on_mesh(mesh_of(4, 2), P()),
        "six": on_mesh(mesh_of(2), P("x"), 6, 5),
    },
    "axes": lambda: {str(n): on_mesh(mesh_of(4, 2), P("x", "y"), 8, 8) for n in range(5)},
    "one axis": lambda: {str(n): on_mesh(mesh_of(8), P("x"), 8) for n in range(4)},
    "two axes": lambda: {"w": on_mesh(mesh_of(4, 2), P("x", "y"), 8, 8)},
    "several": lambda: {"tree": dict.fromkeys("abc", np.zeros((6, 4), np.float32))},
    "layers": lambda: {"layers": [np.ones(2, np.float32)] * 3 + [np.ones(2)] * 4},
    "many": lambda: {"layers": [np.zeros(2)] * 300},
    "two variables": variables,
    "one variable": lambda: dict.fromkeys("ab", nnx.Param(jnp.zeros(2))),
    "statics": lambda: {"x": 1, "s": Statics(jnp.ones(2), apply=len)},
    "fourteen": lambda: {"old": {f"n{n}": np.ones(1) for n in range(14)}},
    "parts": lambda: {"model": {"w": np.ones(3), "b": np.ones(1)}, "ema": {"w": np.ones(3)}},
    "moved": lambda: {"old": {"a": {"w": jnp.ones(2)}, "b": jnp.ones(3)}, "c": jnp.ones(4)},
    "deep": lambda: {"a": {"w": jnp.ones(2), "v": jnp.ones(2)}},
    "flat": lambda: {"b": jnp.ones(3), "w": jnp.ones(3)},
    "root": lambda: jnp.ones(3),
    "model": lambda: {"model": Deep(3)},
    "bare model": lambda: Deep(3),
    "both": both,
    "untied": lambda: Tied(is_tied=False),
    "tied": lambda: Tied(is_tied=True),
    "adam": lambda: {"opt": optax.adam(1e-2).init(jnp.ones(2))},
    "state": lambda: {"data": Position(), "n": 7, "x": jnp.ones(2)},
    "graphdef": lambda: dict(zip(("graphdef", "state"), nnx.split(Deep(1)), strict=True)),
    "wide": lambda: dict(zip("iufc", map(np.zeros, (1,) * 4, "qQdD"), strict=True)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves a tree of the table above when it is first asked for."""
    folder = tmp_path_factory.mktemp("mismatch")

    @cache
    def save(name: str) -> Path:
        with jax.enable_x64(name == "wide"):
            tree = TREES[name]()
            ostraka.save(folder / name, jax.tree.map(jnp.asarray, tree) if name == "wide" else tree)
        return folder / name

    return save


def mixed(**changes: Any) -> dict[str, Any]:
    """A template that fits the tree "mixed" except for `changes`."""
    dense: dict[str, Any] = {"kernel": struct(6, 4), "bias": struct(4, dtype=jnp.bfloat16)}
    like: dict[str, Any] = {"dense": dense, "key": jax.random.key(1), "step": 0, "name": ""}
    like["rate"] = np.float32(0)
    for name, value in changes.items():
        part = dense if name.startswith("dense_") else like
        part[name.removeprefix("dense_")] = value
    for part in (dense, like):
        for name in [name for name, value in part.items() if value is LEFT_OUT]:
            del part[name]
    return {"like": like}


def values(**changes: Any) -> dict[str, Any]:
    return {"like": {**TREES["values"](), **changes}}


def like(**tree: Any) -> dict[str, Any]:
    return {"like": tree}


def by_rows(mesh: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return struct(*shape, sharding=NamedSharding(mesh, P("x")))


def moved() -> dict[str, Any]:
    return {"a": {"w": jnp.zeros(2)}, "b": jnp.zeros(3), "c": jnp.zeros(4)}


def on(mesh: Mesh, **specs: Any) -> dict[str, Any]:
    return {"mesh": mesh, "specs": specs}


@cache
def expected() -> dict[str, list[str]]:
    """The lines that test_mismatch.txt has for each case."""
    text = Path(__file__).with_suffix(".txt").read_text()
    cases = [case.splitlines() for case in text.split("# ")[1:]]
    return {name: [line for line in lines if line] for name, *lines in cases}


Cases = dict[str, tuple[str, Callable[[], dict[str, Any]]]]
"""By case, the saved tree and the options of the restore."""

CASES: Cases = {
    # Leaves that one side does not have
    "near": ("mixed", lambda: mixed(dense_kernel=LEFT_OUT, dense_kernal=struct(6, 4))),
    "far": ("mixed", lambda: mixed(dense_zzzzzzzz=struct(1))),
    "extra": ("mixed", lambda: mixed(dense_bias=LEFT_OUT)),
    "container": ("mixed", lambda: mixed(dense=[struct(6, 4), struct(4)])),
    "part of a part": ("parts", lambda: {"like": {"model": {"w": np.zeros(3)}}}),
    "other part": ("parts", lambda: {"like": {"modle": {"w": np.zeros(3)}}}),
    "empty part": ("parts", lambda: {"like": {"model": {}, "ema": {"w": np.ones(3)}}}),
    "empty": ("flat", lambda: {"like": {}}),
    "only empty": ("flat", lambda: {"like": {"model": {}}}),
    "no near name": ("flat", lambda: {"like": {"bias": jnp.ones(3), "w": jnp.ones(3)}}),
    "root": ("root", lambda: {"like": {"w": jnp.ones(3)}}),
    "not root": ("flat", lambda: {"like": jnp.ones(3)}),
    # Shapes, dtypes and kinds
    "shape": ("mixed", lambda: mixed(dense_kernel=struct(4, 6))),
    "rank": ("mixed", lambda: mixed(dense_kernel=struct(24))),
    "dtype": ("mixed", lambda: mixed(dense_kernel=struct(6, 4, dtype=np.float16))),
    "no float": ("mixed", lambda: mixed(dense_kernel=struct(6, 4, dtype=np.int32))),
    "numpy dtype": ("mixed", lambda: mixed(dense_bias=np.zeros(4, np.float32))),
    "shape and dtype": ("mixed", lambda: mixed(dense_bias=struct(5))),
    "key for array": ("mixed", lambda: mixed(dense_kernel=jax.random.key(0))),
    "text for array": ("mixed", lambda: mixed(dense_kernel="text")),
    "float for array": ("mixed", lambda: mixed(dense_kernel=1.5)),
    "none for array": ("mixed", lambda: mixed(dense_kernel=None)),
    "text for int": ("mixed", lambda: mixed(step="3")),
    "bool for int": ("mixed", lambda: mixed(step=True)),
    "array for int": ("mixed", lambda: mixed(step=struct(2, dtype=np.int32))),
    "array for text": ("mixed", lambda: mixed(name=struct(2))),
    "data for key": ("mixed", lambda: mixed(key=struct(2, dtype=np.uint32))),
    "other key": ("mixed", lambda: mixed(key=jax.random.key(0, impl="rbg"))),
    "keys": ("mixed", lambda: mixed(key=jax.random.split(jax.random.key(0), 3))),
    "int for array": ("mixed", lambda: mixed(rate=1)),
    "no value is converted": (
        "values",
        lambda: values(i=2.0, b=1, s=b"x", none=1, f=0j, empty={"a": 1}),
    ),
    "none for values": ("values", lambda: values(i=None, b=None)),
    "float for int64": ("numbers", lambda: {"like": {"i64": 0.0}}),
    "nan as int": ("numbers", lambda: {"like": {"nan": np.int32(0)}}),
    "all at once": (
        "mixed",
        lambda: mixed(
            dense_kernel=struct(6, 5), dense_bias=struct(4), name=LEFT_OUT, nome="", step="three"
        ),
    ),
    "alike": ("layers", lambda: {"like": {"layers": [np.ones(2, np.float16)] * 7}}),
    "wide without a template": ("wide", dict),
    "wide": ("wide", lambda: {"like": {"i": struct(1, dtype=np.int64)}}),
    "wide and cast": ("wide", lambda: {"like": {"f": struct(1)}}),
    # Shardings
    "no axis": ("two axes", lambda: {"mesh": mesh_of(8)}),
    "no axis of specs": ("sharded", lambda: on(mesh_of(4, 2), w=P("z"))),
    "no axes": ("axes", lambda: {"mesh": {"data": 8}}),
    "no axis for many": ("one axis", lambda: {"mesh": {"data": 8}}),
    "like does not divide": ("sharded", lambda: like(six=by_rows(mesh_of(4), 6, 5))),
    "mesh does not divide": ("sharded", lambda: {"mesh": mesh_of(4, 2), "only": "six"}),
    "axes do not divide": (
        "sharded",
        lambda: {**on(mesh_of(4, 2), six=P(("x", "y"))), "only": "six"},
    ),
    "entries": ("sharded", lambda: on(mesh_of(2, 2), w=P("x", None, None), s=P("x"))),
    "entries of a sharding": (
        "sharded",
        lambda: {"specs": {"w": NamedSharding(mesh_of(2), P(None, None, "x"))}},
    ),
    "axis twice": ("two axes", lambda: on(mesh_of(2), w=P("x", "x"))),
    "axis twice in one": ("two axes", lambda: on(mesh_of(2), w=P(("x", "x")))),
    "no mesh": ("sharded", lambda: {"specs": {"w": P("x")}}),
    "no mesh for like": ("flat", lambda: {"like": {"w": struct(3)}, "specs": P("x")}),
    "no leaf": ("two axes", lambda: on(mesh_of(4, 2), v=P("x"), w=P())),
    "no leaf below": ("sharded", lambda: on(mesh_of(2, 2), b={"d": P("x")})),
    "no leaf of a rule": (
        "two axes",
        lambda: {"mesh": mesh_of(4, 2), "specs": {"**/kernal": P("x")}},
    ),
    "abstract mesh": ("two axes", lambda: like(w=by_rows(mesh_of(2).abstract_mesh, 8, 8))),
    "shardings and shapes": (
        "several",
        lambda: like(tree={"a": by_rows(mesh_of(4), 6, 4), "b": struct(6, 5), "d": struct(1)}),
    ),
    # Models and optimizers
    "forgotten optimizer": ("model", lambda: {"like": both(3)}),
    "bare": ("both", lambda: {"like": Deep(10)}),
    "saved bare": ("bare model", lambda: {"like": {"model": Deep(3)}}),
    "mistyped": ("both", lambda: like(modle=Deep(10), optimizer=optimizer_of(Deep(10)))),
    "more layers": ("model", lambda: {"like": {"model": Deep(5)}}),
    "fewer layers": ("model", lambda: {"like": {"model": Deep(1)}}),
    "new head": ("model", lambda: {"like": {"model": Deep(3, outputs=7)}}),
    "into": ("model", lambda: {"into": {"model": Deep(3, outputs=7)}}),
    "another model": ("model", lambda: {"like": {"model": nnx.LayerNorm(4, rngs=nnx.Rngs(0))}}),
    "model for optimizer": ("both", lambda: {"like": {"optimizer": Deep(10)}}),
    "another optimizer": ("both", lambda: like(optimizer=optimizer_of(Deep(10), SGD))),
    "another transform": ("adam", lambda: like(opt=SGD.init(jnp.ones(2)))),
    "tied": ("untied", lambda: {"like": Tied(is_tied=True)}),
    "tied into": ("untied", lambda: {"into": Tied(is_tied=True)}),
    "untied": ("tied", lambda: {"like": Tied(is_tied=False)}),
    "two in place of one": ("one variable", lambda: like(**variables())),
    "one in place of two": (
        "two variables",
        lambda: {"into": dict.fromkeys("ab", nnx.Param(jnp.full(2, 5.0)))},
    ),
    "a number for a model": ("bare model", lambda: {"like": 7}),
    "under another name": ("moved", lambda: like(**moved())),
    "too many names for a line": (
        "fourteen",
        lambda: {"like": {"w": 1} | {f"n{n}": np.ones(1) for n in range(13)}, "only": "!w"},
    ),
    "no advice that moves what is found": (
        "deep",
        lambda: like(k={"a": {"w": jnp.zeros(2)}}, a={"v": jnp.zeros(2)}),
    ),
    "two names": ("parts", lambda: {"like": {"w": np.ones(3)}}),
    # Functions, objects with a state, structure
    "function": ("flat", lambda: {"like": make_model}),
    "function into": ("flat", lambda: {"into": {"b": make_model, "w": jnp.ones(3)}}),
    "transform": ("flat", lambda: {"like": {"w": jnp.ones(3), "opt": optax.adam(1e-3)}}),
    "structure": ("graphdef", dict),
    "state": ("state", lambda: {"like": {"data": 0}}),
    "no state": ("state", lambda: {"like": {"n": Position(), "x": Position()}}),
    # Patterns and names
    "only": ("mixed", lambda: {"only": "dnese/**"}),
    "only not": ("mixed", lambda: {"only": ["dense", "!setp"]}),
    "only nothing": ("mixed", lambda: {"only": ["dense", "!dense"]}),
    "only of like": ("flat", lambda: {"like": {"w": 1, "new": 2}, "only": "new"}),
    "not of like": ("flat", lambda: {"like": {"w": 1, "new": 2}, "only": "!nwe"}),
    "only abstract": ("flat", lambda: {"like": {"w": struct(3), "b": struct(3)}, "only": "w"}),
    "dtype of nothing": ("mixed", lambda: {"dtype": {"dense/v": "bfloat16"}}),
    "dtype of an int": ("mixed", lambda: {"dtype": {"step": "bfloat16"}}),
    "rename": ("flat", lambda: {"like": {"b": jnp.ones(3)}, "rename": {"bb": "x"}}),
    "rename onto another": ("flat", lambda: {"like": {"b": jnp.ones(3)}, "rename": {"w": "b"}}),
    # Lenient, and still refused
    "other dtype": ("mixed", lambda: {**mixed(dense_bias=struct(4)), "strict": False}),
    "abstract head": ("model", lambda: {**like(model=abstract(3, 7)), "strict": False}),
    "abstract layer": ("model", lambda: {**like(model=abstract(4, 2)), "strict": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_told(saved: Callable[[str], Path], case: str):
    tree, make = CASES[case]
    path, options, lines = saved(tree), make(), expected()[case]
    with pytest.raises(Mismatch, match=re.escape(str(path))) as caught:
        ostraka.restore(path, **options)
    assert list(caught.value.differences) == lines
    head = "can't place" if not options.keys() & {"like", "into"} else "`like` does not fit"
    head = head.replace("like", "into") if "into" in options else head
    head += f" checkpoint {path}"
    if len(lines) == 1:
        assert str(caught.value) == f"{head}: {lines[0]}"
    else:
        assert str(caught.value) == "\n  ".join([f"{head}, for {len(lines)} reasons:", *lines])


def test_every_case_has_its_lines():
    assert list(expected()) == [*CASES, *(f"warning: {name}" for name in WARNINGS)]


def test_what_fits(saved: Callable[[str], Path]):
    tree = ostraka.restore(saved("mixed"), **mixed())
    assert (tree["step"], tree["name"]) == (3, "ostrakon")
    assert tree["dense"]["kernel"].tolist() == np.ones((6, 4)).tolist()
    assert ostraka.restore(saved("mixed"), {"step": 0}) == {"step": 3}


def test_many_differences_stay_readable(saved: Callable[[str], Path]):
    with pytest.raises(Mismatch, match=r"'layers/0': saved with .* \(and so 299 more") as caught:
        ostraka.restore(saved("many"), like={"layers": [np.zeros(3)] * 300})
    assert len(str(caught.value).splitlines()) == 1
    shapes = [np.zeros(3 + number) for number in range(300)]
    with pytest.raises(Mismatch, match="for 300 reasons") as caught:
        ostraka.restore(saved("many"), like={"layers": shapes})
    assert len(caught.value.differences) == 300
    assert len(str(caught.value).splitlines()) == 52
    assert "and 250 more" in str(caught.value)


def test_causes_are_told_before_consequences():
    found = Differences(missing=["a/b"], of_leaves=[("x", "wrong")], general=["said"])
    lines = found.lines(["a/b", "x"], ["k/a/b", "x"])
    assert lines[0] == "a part of `like` ('a') was saved under 'k': pass rename={'k/a': 'a'}"
    assert lines[1:] == ["said", "'x': wrong"]


WARNINGS: Cases = {
    "missing": ("model", lambda: {"like": both(3), "strict": False}),
    "missing into": ("model", lambda: {"into": {"model": Deep(4)}, "strict": False}),
    "extra": ("model", lambda: {"like": {"model": Deep(2)}, "strict": False}),
    "shape": ("model", lambda: {"into": {"model": Deep(3, outputs=7)}, "strict": False}),
    "function": ("flat", lambda: {"like": {"new": make_model, "w": jnp.ones(3)}, "strict": False}),
    "variables": ("one variable", lambda: {**like(**variables()), "strict": False}),
    "static": ("statics", lambda: {"like": {"s": Statics(jnp.ones(2), b=2)}}),
    "statics": ("statics", lambda: {"like": {"x": 0, "s": Statics(jnp.ones(2), 2, 2, 2, 2)}}),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_what_is_left_as_it_is_is_told(saved: Callable[[str], Path], case: str):
    tree, make = WARNINGS[case]
    options, (message,) = make(), expected()[f"warning: {case}"]
    with pytest.warns(PartialRestore, match=re.escape(str(saved(tree)))) as seen:
        restored = ostraka.restore(saved(tree), **options)
    assert [str(warning.message) for warning in seen] == [message.replace("PATH", str(saved(tree)))]
    assert seen[0].filename == __file__
    given = options.get("into", options.get("like"))
    assert jax.tree.structure(restored) == jax.tree.structure(given)


def test_a_new_head_keeps_its_values(saved: Callable[[str], Path]):
    new, old = Deep(3, outputs=7), Deep(3)
    kept = np.asarray(new.head.kernel[...])
    for layer in new.layers:
        layer.kernel[...] *= 0
    restored = ostraka.restore(saved("model"), like={"model": new}, only="!model/head/**")
    with pytest.warns(PartialRestore, match="kept 2 leaves whose shape differs"):
        ostraka.restore(saved("model"), into={"model": new}, strict=False)
    for model in (restored["model"], new):
        assert np.array_equal(model.head.kernel[...], kept)
        assert np.array_equal(model.layers[2].kernel[...], old.layers[2].kernel[...])


def test_nothing_is_told_of_statics_that_are_equal_or_not_restored(saved: Callable[[str], Path]):
    ostraka.restore(saved("statics"), like={"s": Statics(jnp.zeros(2), apply=min)})
    like = {"x": 0, "s": Statics(jnp.zeros(2), 2)}
    assert ostraka.restore(saved("statics"), like=like, only="x")["x"] == 1


ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "only": ({"only": 5}, TypeError, "only must be a path pattern, or a list of them, not 5"),
    "only a number": ({"only": [5]}, TypeError, r"only must be a path .* of them, not \[5\]"),
    "only nothing": ({"only": []}, ValueError, "only is empty, and would leave out everything"),
    "strict": ({"strict": "no"}, TypeError, "strict must be True or False, not 'no'"),
    "on_record": ({"on_record": 5}, TypeError, "on_record must be a function, not 5"),
    "dtype": ({"dtype": 5}, TypeError, "dtype is 5; it must be a dtype, as bfloat16 is"),
    "sizes": ({"mesh": (4, 2)}, TypeError, r"mesh is \(4, 2\), sizes without names: name the ax"),
    "mesh": ({"mesh": "data"}, TypeError, "mesh is a str; it must be a jax.sharding.Mesh, or axis"),
    "no devices": ({"mesh": AbstractMesh((8,), ("x",))}, ValueError, "the mesh has no devices"),
    "specs": ({"mesh": {"x": 1}, "specs": {"w": "x"}}, InvalidSharding, "leaf 'w' is given a str"),
    "like and into": ({"like": {}, "into": {}}, ValueError, "give like= or into=, not both"),
    "as_state": ({"like": {}, "as_state": True}, ValueError, "as_state"),
    "rename": ({"rename": {"w": "v"}}, ValueError, "rename"),
    "share": ({"share_reads": "always"}, ValueError, "True, False or 'auto', not 'always'"),
    "class": (
        {"like": [nnx.Linear]},
        InvalidTree,
        "the class Linear itself at '0', not an instance",
    ),
    "class at the top": ({"like": nnx.Linear}, InvalidTree, "the class Linear itself at '.'"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_are_wrong(saved: Callable[[str], Path], case: str):
    options, kind, message = ARGUMENTS[case]
    with pytest.raises(kind, match=message):
        ostraka.restore(saved("flat"), **options)


# Parts, patterns, names


def test_parts_of_a_dict_of_several_things(saved: Callable[[str], Path]):
    assert list(ostraka.restore(saved("parts"), like={"ema": {"w": np.zeros(3)}})) == ["ema"]
    two = ostraka.restore(saved("mixed"), like={"step": 0, "name": ""})
    assert list(two.items()) == [("step", 3), ("name", "ostrakon")]
    assert list(ostraka.restore(saved("graphdef"), only="!graphdef")) == ["state"]
    like = {"b": make_model, "w": jnp.zeros(3)}
    found = ostraka.restore(saved("flat"), like=like, only="w")
    assert (found["b"], found["w"].tolist()) == (make_model, [1, 1, 1])


def test_only_can_leave_out(saved: Callable[[str], Path]):
    for only, paths in (
        ("!dense/**", ["key", "step", "name", "rate"]),
        (["!dense", "!step"], ["key", "name", "rate"]),
        (["dense/**", "!**/bias"], ["dense/kernel"]),
        (["**/kernel", "st?p"], ["dense/kernel", "step"]),
    ):
        found = ostraka.restore(saved("mixed"), only=only)
        flat = {f"dense/{name}" for name in found.pop("dense", {})} | found.keys()
        assert flat == set(paths), only


def test_the_advice_to_rename_is_right(saved: Callable[[str], Path]):
    rename = {"old/a": "a", "old/b": "b"}
    found = ostraka.restore(saved("moved"), like=moved(), rename=rename)
    assert all(leaf.all() for leaf in jax.tree.leaves(found))


def test_an_explicit_dtype_casts_whatever_the_template_has(saved: Callable[[str], Path]):
    like = {"b": jnp.zeros(3), "w": jnp.zeros(3)}
    for dtype, expected in (
        ("bfloat16", ["bfloat16", "bfloat16"]),
        ({"w": "float16"}, ["float32", "float16"]),
    ):
        restored = ostraka.restore(saved("flat"), like=like, dtype=dtype)
        assert [str(x.dtype) for x in restored.values()] == expected
    number = ostraka.restore(saved("sharded"), only="s", dtype="bfloat16")["s"]
    assert number.dtype == "float32"  # Single numbers are not cast.


def test_64_bits_are_kept_as_numpy_or_with_x64(tmp_path: Path):
    dtypes = (np.float64, np.int64, np.uint64, np.complex128)
    wide = {
        dtype.__name__: np.array([1, 2**53 + 1 if n in (1, 2) else 0.1], dtype)
        for n, dtype in enumerate(dtypes)
    }
    with jax.enable_x64(True):
        ostraka.save(tmp_path / "c", jax.tree.map(jnp.asarray, wide))
    found = [ostraka.restore(tmp_path / "c", like=wide)]
    with jax.enable_x64(True):
        found.append(ostraka.restore(tmp_path / "c"))
    for restored in found:
        for name, value in wide.items():
            assert restored[name].dtype == value.dtype
            assert np.asarray(restored[name]).tobytes() == value.tobytes()


# A model of `transformers`: a trunk called `model`, and a head beside it


class Trunk(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(16, 4, rngs=rngs)
        self.norm = nnx.RMSNorm(4, rngs=rngs)


class WithHead(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.model = Trunk(rngs)
        self.lm_head = nnx.Linear(4, 16, use_bias=False, rngs=rngs)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("way", ["like", "into"])
def test_the_head_beside_a_model_is_restored_by_the_advice(tmp_path: Path, is_tied: bool, way: str):
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (16, 4), "model.norm": 4, "lm_head": (16, 4)}
    tensors = {
        f"{name}.weight": rng.normal(size=shape).astype("f4") for name, shape in shapes.items()
    }
    embedding, norm, head = tensors.values()
    if is_tied:
        head = embedding
        del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "tie_word_embeddings": is_tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given: Any = {way: WithHead(nnx.Rngs(0)), "names": "hf"}
    expected = f"has at its top what `{way}` has under 'model'.*pass rename="
    with pytest.raises(Mismatch, match=expected) as caught:
        ostraka.restore(tmp_path, **given)
    advice = caught.value.differences[0].rpartition("pass rename=")[2]
    found = ostraka.restore(tmp_path, **given, rename=ast.literal_eval(advice))
    np.testing.assert_array_equal(found.lm_head.kernel[...], head.T)
    np.testing.assert_array_equal(found.model.norm.scale[...], norm)
    np.testing.assert_array_equal(found.model.embed_tokens.embedding[...], embedding)
