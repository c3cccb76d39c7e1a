"""Trees: every container and value comes back as it was, and what can't be saved is named."""

import dataclasses
import datetime
import decimal
import enum
import json
import math
import subprocess
import sys
import types
import uuid
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ostraka
from ostraka.errors import InvalidTree, Mismatch, OstrakaError, PartialRestore
from ostraka.layout import shard_file
from ostraka.storage import MemoryStore
from ostraka.tree import json_values


class Point(NamedTuple):
    x: Any
    y: Any


class WiderPoint(NamedTuple):
    x: Any
    y: Any
    z: Any


class Empty(NamedTuple):
    pass


class State(NamedTuple):
    step: Any
    inner: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any
    name: str = dataclasses.field(default="dense", metadata={"static": True})
    width: int = dataclasses.field(default=1, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nothing:
    pass


class Outer:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Inner:
        value: Any


@jax.tree_util.register_pytree_node_class
class Pair:
    """A node without names for its children."""

    def __init__(self, first, second, note="none"):
        self.first, self.second, self.note = first, second, note

    def tree_flatten(self):
        return (self.first, self.second), self.note

    @classmethod
    def tree_unflatten(cls, note, children):
        first, second = children
        return cls(first, second, note)


@jax.tree_util.register_pytree_with_keys_class
class Named:
    """A node with names for its children."""

    def __init__(self, values):
        self.values = values

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return [(key(name), value) for name, value in self.values.items()], tuple(self.values)

    @classmethod
    def tree_unflatten(cls, names, children):
        return cls(dict(zip(names, children, strict=True)))


@dataclasses.dataclass
class Unregistered:
    x: int = 0
    made = 0

    def __post_init__(self):
        type(self).made += 1


@pytest.fixture
def place():
    name = f"tree-{uuid.uuid4().hex}"
    yield f"memory://{name}"
    clear(name)


def clear(name):
    store = MemoryStore(name)
    for found in store.list() or []:
        store.delete(found)


def round_trip(tree, **options):
    name = f"tree-{uuid.uuid4().hex}"
    try:
        ostraka.save(f"memory://{name}", tree)
        return ostraka.restore(f"memory://{name}", **options)
    finally:
        clear(name)


def assert_same(a, b):
    """The same types, the same order of keys, the same bits."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        assert [type(key) for key in a] == [type(key) for key in b]
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, float):
        assert a.hex() == b.hex()
    elif isinstance(a, complex):
        assert_same([a.real, a.imag], [b.real, b.imag])
    elif isinstance(a, np.ndarray | np.generic | jax.Array):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    else:
        assert a == b


# Containers, without a template


@pytest.mark.parametrize(
    "tree",
    [
        {},
        [],
        (),
        OrderedDict(),
        None,
        {"a": None},
        [None, [None], (None,)],
        {"a": {}, "b": [], "c": (), "d": OrderedDict(), "e": Empty(), "f": [[], [{}]]},
        {"z": 1, "a": 2, "m": 3},
        {3: "three", -1: "minus one", 0: "zero", 10**30: "large"},
        {"1": 1, 2: 2},
        OrderedDict(b=1, a=OrderedDict(z=2, y=3)),
        [1, (2, [3, (4,)]), {"five": [5]}],
        Point(1, Point([2], None)),
        State(3),
        [State(1, Empty()), Empty()],
        {"p": {"q": {"r": {"s": [{"t": 1}]}}}},
    ],
)
def test_containers_keys_and_order_come_back(tree):
    assert_same(round_trip([tree, 0]), [tree, 0])


@pytest.mark.parametrize(
    "tree",
    [{}, [], (), None, {"a": None}, [None, 1], Point(1, None), {"a": {}, "b": 2}, Empty(), 7],
)
def test_containers_come_back_as_in_the_template(tree):
    assert_same(round_trip([tree, 0], like=[tree, 0]), [tree, 0])


def test_arrays_in_containers_come_back():
    tree = {
        "list": [np.arange(3), {"deep": (np.float32(1.5), jnp.ones((2, 2)))}],
        7: Point(jnp.int32(1), np.zeros((0, 3))),
        "none": None,
        "ordered": OrderedDict(b=np.arange(2), a=np.arange(4)),
    }
    assert_same(round_trip(tree), tree)
    assert_same(round_trip(tree, like=tree), tree)


keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.integers(-5, 5)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.binary(max_size=8)
    | st.text(max_size=8)
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=2).map(OrderedDict)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=10,
)


def may_be_saved(tree):
    """Whether no dict has keys such as 0 and "0"."""
    if isinstance(tree, dict):
        return len({str(k) for k in tree}) == len(tree) and all(map(may_be_saved, tree.values()))
    return not isinstance(tree, list | tuple) or all(map(may_be_saved, tree))


@settings(max_examples=100)
@given(trees.filter(may_be_saved))
def test_any_tree_comes_back(tree):
    tree = {"tree": tree, "beside": 0}  # Without anything beside it, an empty tree is refused.
    assert_same(round_trip(tree), tree)


@settings(max_examples=30)
@given(trees.filter(may_be_saved))
def test_any_tree_is_its_own_template(tree):
    tree = {"tree": tree, "beside": 0}
    assert_same(round_trip(tree, like=tree), tree)


# Registered classes


def test_a_dataclass_comes_back_with_its_static_fields():
    layer = Layer(np.arange(4.0), [1, None], name="mine", width=4)
    found = round_trip({"layer": layer})["layer"]
    assert type(found) is Layer
    assert (found.name, found.width, found.bias) == ("mine", 4, [1, None])
    np.testing.assert_array_equal(found.kernel, layer.kernel)


def test_a_nested_dataclass_and_one_without_fields_come_back():
    found = round_trip([Outer.Inner(1), Nothing()])
    assert [type(value) for value in found] == [Outer.Inner, Nothing]
    assert found[0].value == 1


def test_a_template_gives_a_dataclass_its_class_and_static_fields():
    saved = Layer(np.arange(4.0), 1.5, name="saved")
    like = Layer(np.zeros(4), 0.0, name="wanted")
    with pytest.warns(PartialRestore, match=r"'name' stays 'wanted' \(saved: 'saved'\)"):
        found = round_trip(saved, like=like)
    assert type(found) is Layer
    assert (found.bias, found.name) == (1.5, "wanted")
    np.testing.assert_array_equal(found.kernel, saved.kernel)


def test_a_dataclass_that_can_not_be_found_becomes_a_dict():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Local:
        a: Any
        b: Any

    found = round_trip([Local(1, np.arange(2))])
    assert_same(found, [{"a": 1, "b": np.arange(2)}])
    assert type(round_trip(Local(1, 2), like=Local(0, 0))) is Local


def test_a_namedtuple_that_can_not_be_found_becomes_one_of_the_same_name():
    class Local(NamedTuple):
        alpha: Any
        beta: Any

    value = Local(1, [np.float32(2.5)])
    found = round_trip({"v": value})["v"]
    assert type(found).__name__ == "Local"
    assert found._fields == ("alpha", "beta")
    assert found == value
    assert isinstance(found, tuple)


def test_a_namedtuple_whose_fields_have_changed_becomes_one_of_the_same_name(monkeypatch):
    value = Point(1, 2)
    name = f"tree-{uuid.uuid4().hex}"
    ostraka.save(f"memory://{name}", value)
    monkeypatch.setattr(sys.modules[__name__], "Point", WiderPoint)
    found = ostraka.restore(f"memory://{name}")
    clear(name)
    assert type(found).__name__ == "Point"
    assert found._fields == ("x", "y")
    assert found == (1, 2)


def test_other_nodes_become_dicts_of_their_children():
    assert_same(round_trip(Pair(1, [2])), {0: 1, 1: [2]})
    assert_same(round_trip(Named({"b": 1, "a": 2})), {"b": 1, "a": 2})


def test_other_nodes_come_back_by_template():
    found = round_trip(Pair(1, [2], "kept"), like=Pair(0, [0], "wanted"))
    assert type(found) is Pair
    assert (found.first, found.second, found.note) == (1, [2], "wanted")
    named = round_trip({"n": Named({"a": 1, "b": 2})}, like={"n": Named({"b": 0, "a": 0})})["n"]
    assert named.values == {"b": 2, "a": 1}


def test_a_default_dict_becomes_a_dict_with_its_keys():
    tree = defaultdict(list, {"b": [1], "a": [2]})
    assert round_trip(tree) == {"a": [2], "b": [1]}
    assert type(round_trip(tree, like=tree)) is defaultdict


def test_a_template_may_use_other_containers_for_the_same_paths():
    found = round_trip({"a": [1, 2]}, like=OrderedDict(a=(0, 0)))
    assert_same(found, OrderedDict(a=(1, 2)))
    assert_same(round_trip(Point(1, 2), like={"y": 0, "x": 0}), {"y": 2, "x": 1})


# Values


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        2**53,
        2**53 + 1,
        -(2**64),
        10**400,
        7**9000,
        True,
        False,
        0.0,
        -0.0,
        0.1,
        5e-324,
        1.7976931348623157e308,
        math.inf,
        -math.inf,
        math.nan,
        0j,
        complex(-0.0, math.inf),
        complex(math.nan, -0.0),
        "",
        "naïve 漢字 🜲",
        '\x00\n"\\',
        "\ud800",
        b"",
        bytes(range(256)),
        None,
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) else f"int{value % 997}",
)
def test_a_python_value_comes_back_exactly(value):
    assert_same(round_trip({"v": value, "w": 0}), {"v": value, "w": 0})
    if value is not None:  # which alone is refused
        assert_same(round_trip(value), value)
        assert_same(round_trip(value, like=value), value)


@pytest.mark.parametrize(
    "value",
    [np.arange(6).reshape(2, 3), np.float16(2.5), jnp.arange(3), np.array(5)],
    ids=["numpy", "scalar", "jax", "0-d"],
)
def test_a_tree_may_be_one_array(value):
    assert_same(round_trip(value), value)
    assert_same(round_trip(value, like=value), value)


def test_a_tree_may_be_one_key():
    key = jax.random.key(7)
    found = round_trip(key)
    assert found.dtype == key.dtype
    assert (jax.random.key_data(found) == jax.random.key_data(key)).all()


# Paths

ODD_KEYS = [
    "/",
    "~",
    "",
    "a/b",
    "a~1b",
    "~0",
    "~1",
    ".",
    "..",
    "é",
    "漢字",
    "🜲",
    " ",
    "\n",
    '"',
    "\\",
]
ODD_KEYS += ["\x00", "__metadata__", "items", "dict", "list", "int", "a" * 300]


@pytest.mark.parametrize("key", ODD_KEYS, ids=lambda key: repr(key)[:12])
def test_any_string_is_a_key(key, place):
    tree = {key: np.arange(3), "other": {key: [1, {key: np.float32(2)}]}}
    ostraka.save(place, tree)
    assert_same(ostraka.restore(place), tree)
    assert_same(ostraka.restore(place, like=tree), tree)
    assert ostraka.verify(place).ok


def test_all_odd_keys_fit_in_one_dict(place):
    tree = {key: np.full(2, number) for number, key in enumerate(ODD_KEYS)}
    nested = {key: dict(tree) for key in ODD_KEYS}
    ostraka.save(place, nested)
    assert_same(ostraka.restore(place), nested)
    assert len(ostraka.open(place)) == len(ODD_KEYS) ** 2


def test_paths_name_the_leaves():
    tree = {"a/b": {"~": 1}, "l": [np.arange(2), {"x": 2}], 5: Point(3, 4), "": 6}
    name = f"tree-{uuid.uuid4().hex}"
    ostraka.save(f"memory://{name}", tree)
    checkpoint = ostraka.open(f"memory://{name}")
    assert list(checkpoint) == ["a~1b/~0", "l/0", "l/1/x", "5/x", "5/y", "~"]
    assert checkpoint["a~1b/~0"] == 1
    assert checkpoint["5/y"] == 4
    clear(name)


@pytest.mark.parametrize(
    "tree",
    [
        {0: 1, "0": 2},
        {0: np.arange(2), "0": np.arange(3)},
        {"a": {-1: 1, "-1": 2}},
        {1: [np.arange(2)], "1": [3]},
    ],
)
def test_keys_that_look_the_same_in_a_path_raise(tree):
    with pytest.raises(InvalidTree, match="two leaves have the path '.*': keys such as 0 and '0'"):
        round_trip(tree)


# What can't be saved


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


class Dict(dict):
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (range(3), "builtins.range"),
        (datetime.date(2020, 1, 1), "datetime.date"),
        (decimal.Decimal(1), "decimal.Decimal"),
        (bytearray(b"x"), "builtins.bytearray"),
        (Unregistered(), "test_tree.Unregistered"),
        (Dict(a=1), "test_tree.Dict"),
        (Colour.RED, "test_tree.Colour"),
        (Text("x"), "test_tree.Text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_of_another_type_is_named_with_its_path(value, kind):
    with pytest.raises(InvalidTree, match=rf"leaf 'a/1/b' is a {kind}, which can't be saved"):
        round_trip({"a": [0, {"b": value}]})


@pytest.mark.parametrize(
    "array",
    [
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([None, 1]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(2, [("x", "f4"), ("y", "i4")]),
        np.str_("text"),
        np.datetime64("2020-01-01"),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_an_array_of_another_dtype_is_named_with_its_path(array):
    with pytest.raises(InvalidTree, match="leaf 'a/b' has the dtype .*, which can't be saved"):
        round_trip({"a": {"b": array}})


def test_a_masked_array_would_lose_its_mask():
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    with pytest.raises(InvalidTree, match="leaf 'a/b' is a .*MaskedArray"):
        round_trip({"a": {"b": masked}})


@pytest.mark.parametrize(
    "key", [frozenset(), Text("x"), object(), len, (1, (2, frozenset())), np.datetime64(1, "s")]
)
def test_a_key_of_another_type_is_named_with_its_path(key):
    with pytest.raises(InvalidTree, match="the container at 'a/0' has the key .* keys must be"):
        round_trip({"a": [{key: 1}]})


class Size(str, enum.Enum):  # noqa: UP042
    LARGE = "large"


@pytest.mark.parametrize(
    "key",
    [
        1.5,
        float("-inf"),
        None,
        (),
        (1, ("a/b", None)),
        b"k",
        True,
        1j,
        np.int64(3),
        np.float32(0.1),
        np.bool_(False),
        np.str_("x"),
        Colour.RED,
        Size.LARGE,
        (Colour.RED, np.int8(1)),
        10**30,
    ],
    ids=repr,
)
def test_a_key_of_any_plain_kind_comes_back(key):
    tree = {"a": [{key: np.arange(2)}], "b": OrderedDict([(key, 1)])}
    for restored in (round_trip(tree), round_trip(tree, like=tree)):
        (found,) = restored["a"][0]
        assert type(found) is type(key)
        assert found == key
        assert_same(restored["b"], tree["b"])


def test_a_key_of_another_type_at_the_top_is_named():
    with pytest.raises(InvalidTree, match=r"the container at '\.' has the key frozenset"):
        round_trip({frozenset(): 1})


def test_a_key_that_is_no_unicode_is_named():
    with pytest.raises(
        InvalidTree, match="the container at 'a' has the key .*surrogates not allowed"
    ):
        round_trip({"a": {"\ud800": 1}})


def test_a_deleted_array_is_named():
    array = jnp.arange(3)
    array.delete()
    with pytest.raises(InvalidTree, match="leaf 'a/0' has been deleted or donated"):
        round_trip({"a": [array]})


def test_a_donated_array_is_named():
    array = jnp.arange(1024.0)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    with pytest.raises(InvalidTree, match="leaf 'params' has been deleted or donated: .* step"):
        round_trip({"params": array})


def test_a_deleted_key_is_named():
    key = jax.random.key(0)
    key.delete()
    with pytest.raises(InvalidTree, match="leaf 'rng' has been deleted"):
        round_trip({"rng": key})


def test_a_tracer_is_named():
    @jax.jit
    def step(x):
        round_trip({"x": x})
        return x

    with pytest.raises(InvalidTree, match="leaf 'x' is a traced value: call save outside of jit"):
        step(jnp.ones(2))


def test_a_traced_key_is_named():
    @jax.jit
    def step(x):
        round_trip({"k": x})
        return x

    with pytest.raises(InvalidTree, match="leaf 'k' is a traced value"):
        step(jax.random.key(0))


def test_an_abstract_value_is_named():
    abstract = jax.ShapeDtypeStruct((2,), jnp.float32)
    with pytest.raises(InvalidTree, match="leaf 'x/0' is abstract .*it has no values to save"):
        round_trip({"x": [abstract]})


def test_a_tree_that_can_not_be_saved_leaves_nothing(tmp_path):
    with pytest.raises(TypeError, match="leaf 'bad'"):
        ostraka.save(tmp_path / "new", {"good": np.arange(3), "bad": object()})
    assert not (tmp_path / "new").exists()
    ostraka.save(tmp_path / "old", {"a": 1})
    with pytest.raises(InvalidTree, match="leaf 'bad'"):
        ostraka.save(tmp_path / "old", {"bad": object()})
    assert ostraka.restore(tmp_path / "old") == {"a": 1}


# Templates that do not fit


def test_every_difference_is_told_at_once(place):
    ostraka.save(place, {"a": 1, "b": "text", "c": np.arange(3), "d": None})
    with pytest.raises(Mismatch, match="for 4 reasons") as caught:
        ostraka.restore(place, like={"a": 1.0, "b": b"", "c": 3, "e": None})
    told = "\n".join(caught.value.differences)
    for expected in (
        "'a'",
        "'b'",
        "'c'",
        "'e' is not in the checkpoint",
    ):
        assert expected in told


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (1, 2.0),
        (1, True),
        (True, 1),
        ("x", b"x"),
        (None, 1),
        (1, None),
        (1.0, 1 + 0j),
        ([], {"a": 1}),
    ],
)
def test_a_value_is_never_turned_into_another_type(saved, wanted):
    with pytest.raises(Mismatch, match="'v"):
        round_trip({"v": saved, "w": 1}, like={"v": wanted, "w": 1})


@pytest.mark.parametrize(
    ("saved", "dtype"),
    [
        (3, np.int32),
        (2**31, np.int64),
        (1.5, np.float16),
        (math.nan, np.float32),
        (-0.0, np.float32),
        (True, np.bool_),
        (1j, np.complex64),
        (2**60, np.float64),
    ],
)
def test_a_number_becomes_an_array_that_holds_it_exactly(saved, dtype):
    found = round_trip({"v": saved}, like={"v": np.zeros((), dtype)})["v"]
    assert_same(found, np.array(saved, dtype))
    scalar = round_trip({"v": saved}, like={"v": dtype(0)})["v"]
    assert_same(scalar, dtype(saved))


@pytest.mark.parametrize(
    ("saved", "dtype"),
    [
        (300, np.uint8),
        (-1, np.uint32),
        (0.1, np.float32),
        (1.5, np.int32),
        (math.nan, np.int32),
        (math.inf, np.int64),
        (1e300, np.float32),
        (2**70, np.int64),
        (2**53 + 1, np.float64),
        (True, np.int32),
        (1, np.bool_),
        (1 + 1j, np.float32),
    ],
)
def test_a_number_that_the_array_can_not_hold_is_a_mismatch(saved, dtype):
    with pytest.raises(Mismatch, match="'v': .*can't hold exactly"):
        round_trip({"v": saved}, like={"v": np.zeros((), dtype)})


def test_an_array_of_one_number_becomes_a_python_number_of_its_type():
    tree = {"i": np.int64(3), "f": np.float32(1.5), "b": np.bool_(True), "c": np.complex64(1j)}
    found = round_trip(tree, like={"i": 0, "f": 0.0, "b": False, "c": 0j})
    assert_same(found, {"i": 3, "f": 1.5, "b": True, "c": 1j})
    with pytest.raises(Mismatch, match="'i': saved as int64"):
        round_trip({"i": np.int64(3)}, like={"i": 0.0})


# Objects that answer for attributes as they like


class AttrDict(dict[str, Any]):
    """As many programs have it: a missing attribute is a KeyError."""

    __getattr__ = dict.__getitem__


jax.tree_util.register_pytree_with_keys(
    AttrDict,
    lambda found: ([(jax.tree_util.DictKey(k), x) for k, x in found.items()], tuple(found)),
    lambda names, items: AttrDict(zip(names, items, strict=True)),
)


class Raising:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"there is no {name}")


class Answering:
    """As a mock does."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: name


@dataclasses.dataclass
class Unset:
    """A field that is no child has no value, and the class says so in its own way."""

    weight: Any
    static: Any = dataclasses.field(init=False)

    def __getattr__(self, name: str) -> Any:
        if name == "static":
            raise KeyError(name)
        raise AttributeError(name)


jax.tree_util.register_dataclass(Unset, ["weight"], [])


def test_a_node_whose_attributes_raise_comes_back():
    tree = {"config": AttrDict(a=np.ones(2), b=AttrDict(c=1)), "step": 1}
    found = round_trip(tree, like=tree)["config"]
    assert (type(found), type(found.b), found.b.c) == (AttrDict, AttrDict, 1)
    assert found.a.tolist() == [1, 1]
    assert_same(round_trip(tree)["config"]["b"], {"c": 1})


class Plain(dict[str, Any]):
    """One that is no pytree."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("kind", [Raising, Answering, Plain])
def test_a_leaf_that_answers_for_any_attribute_is_refused(kind):
    odd = kind()
    with pytest.raises(InvalidTree, match=r"leaf 'x' is a .*, which can't be saved"):
        round_trip({"w": np.ones(2), "x": odd})
    for tree in ({"x": np.ones(2)}, {"x": 1}, {"w": 1, "x": jax.random.key(0)}):
        for options in ({}, {"dtype": "like"}):
            with pytest.raises(Mismatch, match="'x': the checkpoint has|'x': saved as"):
                round_trip(tree, like={**tree, "x": odd}, **options)


def test_a_static_field_that_raises_is_left_to_the_template():
    unset = Unset(np.ones(2))
    found = round_trip({"u": unset}, like={"u": unset})["u"]
    assert found.weight.tolist() == [1, 1]


# A checkpoint from a stranger


def sealed(body):
    text = json.dumps(body, separators=(",", ":")).encode()[:-1]
    return text + b',"digest":"' + shard_file.digest(text).encode() + b'"}\n'


def save_document(place, document):
    """A checkpoint without arrays whose tree is described by `document`."""
    ostraka.save(place, 0)
    store = MemoryStore(place.removeprefix("memory://"))
    body = json.loads(store.get("_METADATA"))
    del body["digest"]
    store.put("_METADATA", sealed({**body, "tree": document}))


def node(kind, where, **children):
    described = {kind: list(where), "keys": list(children)}
    described["items"] = [{"str": value} for value in children.values()]
    return described if kind != "dataclass" else {**described, "static": {}}


def test_functions_in_containers_of_an_old_checkpoint_are_those_of_the_template(place):
    kept = {"kept": "some.function", "structure": False, "items": []}
    save_document(place, {"dict": ["f", "n"], "items": [kept, {"int": 1}]})
    assert ostraka.restore(place, like={"f": len, "n": 0}) == {"f": len, "n": 1}
    with pytest.warns(PartialRestore, match="left out 1 leaf whose value is a function"):
        assert ostraka.restore(place) == {"n": 1}


def test_a_class_that_is_no_pytree_is_not_called(place, tmp_path):
    target = tmp_path / "pwned"
    document = node("dataclass", ("subprocess", "Popen"), args=f"touch {target}")
    save_document(place, document)
    assert ostraka.restore(place) == {"args": f"touch {target}"}
    assert not target.exists()
    Unregistered.made = 0
    save_document(place, node("dataclass", (__name__, "Unregistered"), x="1"))
    assert ostraka.restore(place) == {"x": "1"}
    assert dict(ostraka.open(place)) == {"x": "1"}
    assert Unregistered.made == 0


@pytest.mark.parametrize("kind", ["namedtuple", "node", "dataclass"])
@pytest.mark.parametrize(
    "where",
    [
        ("subprocess", "Popen"),
        ("os", "system"),
        ("os", "stat_result"),
        ("builtins", "eval"),
        ("builtins", "tuple"),
        ("no.such.module", "Thing"),
        ("", ""),
        ("builtins", "__import__"),
        ("builtins", "Exception.__subclasses__"),
    ],
)
def test_no_name_in_a_checkpoint_is_ever_called(place, kind, where):
    save_document(place, node(kind, where, a="x", b="y"))
    found = ostraka.restore(place)
    if kind == "namedtuple":
        assert tuple(found) == ("x", "y")
    else:
        assert found == {"a": "x", "b": "y"}


def test_opening_imports_nothing(place):
    """Not even through a loaded module that makes its attributes when they are asked for."""
    asked = []
    lazy = types.ModuleType("lazy_module_of_a_test")
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    sys.modules[lazy.__name__] = lazy

    def open_all(*names):
        for where in names:
            for kind in ("dataclass", "namedtuple", "node"):
                save_document(place, node(kind, where, a="x"))
                ostraka.open(place)
                ostraka.restore(place)

    open_all((__name__, "Nothing"))  # loads what Ostraka itself needs, if no test has before
    before = set(sys.modules)
    try:
        open_all(("antigravity", "x"), ("this", "s"), (lazy.__name__, "Thing"))
    finally:
        del sys.modules[lazy.__name__]
    assert asked == []
    assert set(sys.modules) <= before


def test_opening_a_strangers_checkpoint_starts_nothing(tmp_path):
    """In a fresh interpreter, with every import and every start of a program watched."""
    place = tmp_path / "checkpoint"
    ostraka.save(place, 0)
    body = json.loads((place / "_METADATA").read_bytes())
    del body["digest"]
    hostile = [
        node("dataclass", ("subprocess", "Popen"), args="true"),
        node("namedtuple", ("antigravity", "x"), a="1"),
        node("node", ("this", "s"), a="1"),
    ]
    tree = {"list": None, "items": hostile}
    (place / "_METADATA").write_bytes(sealed({**body, "tree": tree}))
    script = """
import sys
import ostraka
ostraka.open, ostraka.restore
events = []
sys.addaudithook(lambda event, args: events.append(event))
print(dict(ostraka.open(sys.argv[1])))
bad = {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.connect"}
assert not bad & set(events), bad & set(events)
assert "this" not in sys.modules and "antigravity" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(place)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'0/args': 'true', '1/a': '1', '2/a': '1'}\n"


@pytest.mark.parametrize(
    "document",
    [
        {"dict": ["a"], "items": []},
        {"dict": [], "items": [0]},
        {"dict": [["a"]], "items": [{"int": 1}]},
        {"int": []},
        {"bool": 5},
        {"str": 3},
        {"float": 1.5},
        {"complex": ["0x0p+0"]},
        {"bytes": "***"},
        {"list": None, "items": {"a": 1}},
        {"namedtuple": ["m"], "keys": [], "items": []},
        {"namedtuple": [["m"], {}], "keys": [], "items": []},
        [],
        5,
        -1,
        "text",
        True,
    ],
    ids=str,
)
def test_a_tree_that_makes_no_sense_is_damage(place, document):
    save_document(place, document)
    with pytest.raises(OstrakaError, match="_METADATA"):
        ostraka.open(place)
    with pytest.raises(OstrakaError, match="_METADATA"):
        ostraka.restore(place)


def test_a_tree_nested_without_end_is_damage(place):
    ostraka.save(place, 0)
    store = MemoryStore(place.removeprefix("memory://"))
    body = json.loads(store.get("_METADATA"))
    del body["digest"]
    text = json.dumps({**body, "tree": None}, separators=(",", ":")).encode()[:-1]
    deep = b'{"list":null,"items":[' * 50_000 + b"]}" * 50_000
    text = text.replace(b'"tree":null', b'"tree":' + deep)
    store.put("_METADATA", text + b',"digest":"' + shard_file.digest(text).encode() + b'"}\n')
    with pytest.raises(OstrakaError, match="_METADATA"):
        ostraka.open(place)


def test_a_deep_tree_of_ours_comes_back():
    tree: Any = 1
    for _ in range(100):
        tree = [tree]
    assert round_trip(tree) == tree


def test_encoding_is_json_and_decodes_without_jax():
    for value in (1, 10**40, 1.5, -0.0, 1j, "x", b"\x00", True, None):
        encoded = json_values.encode_scalar(value)
        again = json.loads(json.dumps(encoded, allow_nan=False))
        assert_same(json_values.decode_plain(again), value)
