"""Trees: every container and value comes back as it was, and what can't be saved is named."""

import dataclasses
import datetime
import decimal
import enum
import json
import math
import re
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.errors import InvalidTree, Mismatch, OstrakaError, PartialRestore
from ostraka.layout import shard_file
from ostraka.storage import MemoryStore
from ostraka.testing import run_processes
from test_any_tree import describe


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
    MemoryStore(name).delete("")


def round_trip(tree, **options):
    name = f"tree-{uuid.uuid4().hex}"
    try:
        ostraka.save(f"memory://{name}", tree)
        return ostraka.restore(f"memory://{name}", **options)
    finally:
        MemoryStore(name).delete("")


def assert_same(a, b):
    """The same types, the same order of keys, the same bits."""
    assert describe(a) == describe(b)


# Containers and values, without a template and with one


CONTAINERS: list[Any] = [
    {},
    [None, [None], (None,)],
    {"a": {}, "b": [], "c": (), "d": OrderedDict(), "e": Empty(), "f": [[], [{}]]},
    {"z": 1, "a": 2, "m": 3},
    {3: "three", -1: "minus one", 0: "zero", 10**30: "large"},
    {"1": 1, 2: 2},
    {str(f): defaultdict(f, {True: 1, 2: jnp.ones(2)}) for f in (list, int, dict, None)},
    OrderedDict(b=1, a=OrderedDict(z=2, y=3)),
    [1, (2, [3, (4,)]), {"five": [5]}],
    Point(1, Point([2], None)),
    [State(1, Empty()), State(3)],
    {"list": [np.arange(3), {"deep": (np.float32(1.5), jnp.ones((2, 2)))}]},
    {7: Point(jnp.int32(1), np.zeros((0, 3))), "o": OrderedDict(b=np.ones(2), a=np.ones(4))},
]


def assert_comes_back(tree):
    assert_same(round_trip(tree), tree)
    assert_same(round_trip(tree, like=tree), tree)


def test_containers_keys_order_and_values_come_back():
    assert_comes_back([*CONTAINERS, VALUES])


# Registered classes


def test_dataclasses_come_back_with_their_static_fields():
    layer = Layer(np.arange(4.0), [1, None], name="mine", width=4)
    found, inner, nothing = round_trip([layer, Outer.Inner(1), Nothing()])
    assert [type(value) for value in (found, inner, nothing)] == [Layer, Outer.Inner, Nothing]
    assert (found.name, found.width, found.bias, inner.value) == ("mine", 4, [1, None], 1)
    np.testing.assert_array_equal(found.kernel, layer.kernel)


def test_a_dataclass_that_can_not_be_found_becomes_a_dict():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Local:
        a: Any
        b: Any

    found = round_trip([Local(1, np.arange(2))])
    assert_same(found, [{"a": 1, "b": np.arange(2)}])
    assert type(round_trip(Local(1, 2), like=Local(0, 0))) is Local


def test_a_namedtuple_that_can_not_be_found_or_has_changed_becomes_one_of_the_same_name(
    place, monkeypatch
):
    class Local(NamedTuple):
        alpha: Any
        beta: Any

    ostraka.save(place, [Local(1, [np.float32(2.5)]), Point(1, 2)])
    monkeypatch.setattr(sys.modules[__name__], "Point", WiderPoint)
    for found, name, fields, value in zip(
        ostraka.restore(place),
        ("Local", "Point"),
        (("alpha", "beta"), ("x", "y")),
        ((1, [np.float32(2.5)]), (1, 2)),
        strict=True,
    ):
        assert (type(found).__name__, found._fields, found) == (name, fields, value)


def test_other_nodes_become_dicts_or_come_back_by_template():
    assert_same(
        round_trip([Pair(1, [2]), Named({"b": 1, "a": 2})]), [{0: 1, 1: [2]}, {"b": 1, "a": 2}]
    )
    like = [Pair(0, [0], "wanted"), Named({"b": 0, "a": 0})]
    pair, named = round_trip([Pair(1, [2], "kept"), Named({"a": 1, "b": 2})], like=like)
    assert (type(pair), pair.first, pair.second, pair.note) == (Pair, 1, [2], "wanted")
    assert named.values == {"b": 2, "a": 1}


def test_a_template_may_use_other_containers_for_the_same_paths():
    found = round_trip({"a": [1, 2]}, like=OrderedDict(a=(0, 0)))
    assert_same(found, OrderedDict(a=(1, 2)))
    assert_same(round_trip(Point(1, 2), like={"y": 0, "x": 0}), {"y": 2, "x": 1})


# Values

VALUES = [0, -1, 2**53, 2**53 + 1, -(2**64), 10**400, 7**9000, True, False]
VALUES += [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan]
VALUES += [0j, complex(-0.0, math.inf), complex(math.nan, -0.0)]
VALUES += ["", "naïve 漢字 🜲", '\x00\n"\\', "\ud800", b"", bytes(range(256)), None]


@pytest.mark.parametrize(
    "value",
    [7, "text", np.arange(6).reshape(2, 3), np.float16(2.5), jnp.arange(3), jax.random.key(7)],
    ids=["int", "text", "numpy", "scalar", "jax", "key"],
)
def test_a_tree_may_be_one_value(value):
    assert_comes_back(value)


# Paths

ODD_KEYS = ["/", "~", "", "a/b", "a~1b", "~0", "~1", ".", "..", "é", "漢字", "🜲", " ", "\n", '"']
ODD_KEYS += ["\\", "\x00", "__metadata__", "items", "dict", "list", "int", "a" * 300]


def test_all_odd_keys_fit_in_one_dict(place):
    tree = {key: np.full(2, number) for number, key in enumerate(ODD_KEYS)}
    nested = {key: {**tree, "list": [1, {key: np.float32(2)}]} for key in ODD_KEYS}
    ostraka.save(place, nested)
    assert_same(ostraka.restore(place), nested)
    assert_same(ostraka.restore(place, like=nested), nested)
    assert ostraka.verify(place).ok
    assert len(ostraka.open(place)) == len(ODD_KEYS) * (len(ODD_KEYS) + 1)


def test_paths_name_the_leaves(place):
    ostraka.save(place, {"a/b": {"~": 1}, "l": [np.ones(2), {"x": 2}], 5: Point(3, 4), "": 6})
    checkpoint = ostraka.open(place)
    assert list(checkpoint) == ["a~1b/~0", "l/0", "l/1/x", "5/x", "5/y", "~"]
    assert (checkpoint["a~1b/~0"], checkpoint["5/y"]) == (1, 4)


# What can't be saved


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


class Dict(dict):
    pass


def deleted(array):
    array.delete()
    return array


def donated():
    array = jnp.arange(1024.0)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    return array


def deep(levels):
    tree: Any = jnp.ones(1)
    for _ in range(levels):
        tree = {"k": tree}
    return tree


def circle():
    tree: dict[str, Any] = {}
    tree["a"] = [tree]
    return tree


def unreduced():
    mesh = jax.make_mesh((8,), ("x",))
    with jax.set_mesh(mesh):
        array = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(None, "x")))
        other = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("x", None)))
        spec = P(None, None, unreduced=frozenset({"x"}))
        return jax.jit(lambda a, b: jnp.einsum("ab,bc->ac", a, b, out_sharding=spec))(array, other)


def on_odd_axes():
    mesh = jax.make_mesh((1, 2), (1, "1"), devices=jax.devices()[:2])  # pyright: ignore
    return jax.device_put(jnp.ones(2), NamedSharding(mesh, P("1")))


class Mine(np.ndarray):
    pass


ABSTRACT = jax.ShapeDtypeStruct((2,), np.float32)
DELETED = "has been deleted or donated"
SAME_PATH = "two leaves have the path '{}': keys such as 0 and '0'"
WRONG_LEAVES = {
    "is a builtins.object": object(),
    "is a builtins.set": {1, 2},
    "is a builtins.range": range(3),
    "is a datetime.date": datetime.date(2020, 1, 1),
    "is a decimal.Decimal": decimal.Decimal(1),
    "is a builtins.bytearray": bytearray(b"x"),
    "is a test_tree.Unregistered": Unregistered(),
    "is a test_tree.Dict": Dict(a=1),
    "is a test_tree.Colour": Colour.RED,
    "is a test_tree.Text": Text("x"),
    "is a collections.Counter": Counter("xy"),
    "has the dtype |S5": np.array([b"bytes"]),
    "has the dtype object": np.array([None, 1]),
    "has the dtype datetime64[D]": np.array(["2020-01-01"], "datetime64[D]"),
    "has the dtype <U4": np.str_("text"),
    "has the dtype float128": np.zeros(2, np.longdouble),
    "has the dtype [('x', '<f4')]": np.zeros(2, [("x", "f4")]),
}


@pytest.mark.parametrize("said", WRONG_LEAVES)
def test_a_leaf_that_can_not_be_saved_is_named(said):
    message = f"leaf 'a/1/b' {said}, which can't be saved"
    with pytest.raises(InvalidTree, match=re.escape(message)):
        round_trip({"a": [0, {"b": WRONG_LEAVES[said]}]})


REFUSED = {
    "leaf 'a/b' is a .*MaskedArray": lambda: {"a": {"b": np.ma.masked_array([1.0], mask=[True])}},
    "leaf 'a' is a test_tree.Mine": lambda: {"a": np.zeros(2).view(Mine)},
    "leaf 'a' is a numpy.*recarray": lambda: {"a": np.zeros(2).view(np.recarray)},
    "leaf 'a' has 64 dimensions": lambda: {"a": np.zeros((1,) * 64)},
    "leaf 'a' is on a mesh with the axis 1": lambda: {"a": on_odd_axes()},
    "leaf 'a' has the spec .*unreduced": lambda: {"a": unreduced()},
    f"leaf 'a/0' {DELETED}": lambda: {"a": [deleted(jnp.arange(3))]},
    f"leaf 'rng' {DELETED}": lambda: {"rng": deleted(jax.random.key(0))},
    f"leaf 'params' {DELETED}: .* step": lambda: {"params": donated()},
    "leaf 'x/0' is abstract .*it has no values to save": lambda: {"x": [ABSTRACT]},
    "leaf 'kernel' is abstract": lambda: nnx.eval_shape(
        lambda: nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    ),
    "the class int itself at 'a'": lambda: {"a": int},
    r"the class Linear itself at '\.'": lambda: nnx.Linear,
    "defaultdict at 'a' has the default_factory .*dict": lambda: {"a": defaultdict(lambda: 1)},
    SAME_PATH.format("0"): lambda: {0: np.arange(2), "0": np.arange(3)},
    SAME_PATH.format("a/-1"): lambda: {"a": {-1: 1, "-1": 2}},
    SAME_PATH.format("1/0"): lambda: {1: [np.arange(2)], "1": [3]},
    r"the container at '\.' has the key frozenset": lambda: {frozenset(): 1},
    "the container at 'a' has the key .*surrogates not allowed": lambda: {"a": {"\ud800": 1}},
    "the container at 'a' has a key, which can't be written": lambda: {"a": {10**5000: 1}},
    "more than 200 containers deep at 'k/k/k": lambda: deep(330),
    "does one of them contain itself": circle,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_could_not_come_back_is_refused_at_once(tmp_path, message):
    tree = REFUSED[message]()
    for save in (ostraka.save, ostraka.save_async):
        with pytest.raises(InvalidTree, match=message) as caught:
            save(tmp_path / "c", tree)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_key_of_another_type_is_named_with_its_path():
    for key in (Text("x"), object(), len, (1, (2, frozenset())), np.datetime64(1, "s")):
        with pytest.raises(InvalidTree, match="the container at 'a/0' has the key .* keys must be"):
            round_trip({"a": [{key: 1}]})


def test_a_tracer_is_named():
    for value in (jnp.ones(2), jax.random.key(0), nnx.Param(jnp.ones(2))):
        with pytest.raises(InvalidTree, match="leaf 'x' is a traced value: call save outside of"):
            nnx.jit(lambda x: round_trip({"x": x}) and None)(value)


class Size(str, enum.Enum):  # noqa: UP042
    LARGE = "large"


KEYS = [1.5, float("-inf"), None, (), (1, ("a/b", None)), b"k", True, 1j, 10**30, Colour.RED]
KEYS += [np.int64(3), np.float32(0.1), np.bool_(False), np.str_("x"), Size.LARGE]
KEYS += [(Colour.RED, np.int8(1))]


def test_keys_of_any_plain_kind_come_back():
    tree = [
        {"a": {key: np.arange(2)}, "b": OrderedDict([(key, 1)]), "c": FrozenDict({key: 1})}
        for key in KEYS
    ]
    for restored in (round_trip(tree), round_trip(tree, like=tree)):
        for key, found in zip(KEYS, restored, strict=True):
            assert [type(part) for part in found.values()] == [dict, OrderedDict, FrozenDict], key
            for part in found.values():
                assert_same([*part], [key])


def test_members_of_enums_that_are_not_loaded_stay_apart():
    kinds: list[Any] = [enum.Enum(name, {"ONE": 1}) for name in ("First", "Second")]
    found = round_trip({"a": {kind["ONE"]: kind.__name__ for kind in kinds}})
    assert found == {"a": {"First.ONE": "First", "Second.ONE": "Second"}}


def test_a_tree_that_can_not_be_saved_leaves_the_old_one(tmp_path):
    ostraka.save(tmp_path / "old", {"a": 1})
    with pytest.raises(InvalidTree, match="leaf 'bad'"):
        ostraka.save(tmp_path / "old", {"good": np.arange(3), "bad": object()})
    assert ostraka.restore(tmp_path / "old") == {"a": 1}


# Numbers and arrays of one number


HELD = [
    (3, np.int32),
    (2**31, np.int64),
    (1.5, np.float16),
    (math.nan, np.float32),
    (-0.0, np.float32),
    (True, np.bool_),
    (1j, np.complex64),
    (2**60, np.float64),
]
NOT_HELD = [
    (-1, np.uint32),
    (0.1, np.float32),
    (math.inf, np.int64),
    (1e300, np.float32),
    (2**70, np.int64),
    (2**53 + 1, np.float64),
]


def test_a_number_becomes_an_array_that_holds_it_exactly():
    saved = [[number, number] for number, _ in HELD]
    like = [[np.zeros((), dtype), dtype(0)] for _, dtype in HELD]
    expected = [[np.array(number, dtype), dtype(number)] for number, dtype in HELD]
    assert_same(round_trip(saved, like=like), expected)


def test_a_number_that_the_array_can_not_hold_is_a_mismatch():
    saved = [number for number, _ in NOT_HELD]
    with pytest.raises(Mismatch, match="for 6 reasons") as caught:
        round_trip(saved, like=[np.zeros((), dtype) for _, dtype in NOT_HELD])
    for place, (line, number) in enumerate(zip(caught.value.differences, saved, strict=True)):
        assert re.match(rf"'{place}': .*can't hold exactly", line), number


def test_an_array_of_one_number_becomes_a_python_number_of_its_type():
    tree = {"i": np.int64(3), "f": np.float32(1.5), "b": np.bool_(True), "c": np.complex64(1j)}
    found = round_trip(tree, like={"i": 0, "f": 0.0, "b": False, "c": 0j})
    assert_same(found, {"i": 3, "f": 1.5, "b": True, "c": 1j})


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
    for tree in ({"x": np.ones(2)}, {"x": 1}, {"x": jax.random.key(0)}):
        with pytest.raises(Mismatch, match="'x': the checkpoint has|'x': saved as"):
            round_trip(tree, like={"x": odd}, dtype="like")


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


CALLABLES = [("subprocess", "Popen"), ("os", "system"), ("os", "stat_result"), ("", "")]
CALLABLES += [("builtins", "eval"), ("builtins", "tuple"), ("builtins", "__import__")]
CALLABLES += [("no.such.module", "Thing"), ("builtins", "Exception.__subclasses__")]
CALLABLES += [(__name__, "Unregistered"), ("antigravity", "x"), ("this", "s")]
LAZY = "lazy_module_of_a_test"


def hostile():
    return [
        node(kind, where, args=f"touch {where}")
        for where in [*CALLABLES, (LAZY, "Thing")]
        for kind in ("namedtuple", "node", "dataclass")
    ]


def test_no_name_in_a_checkpoint_is_ever_called(place, monkeypatch):
    """Not even through a loaded module that makes its attributes when they are asked for."""
    asked = []
    lazy = types.ModuleType(LAZY)
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, LAZY, lazy)
    monkeypatch.setattr(Unregistered, "made", 0)
    save_document(place, {"list": None, "items": hostile()})
    texts = [f"touch {where}" for where in [*CALLABLES, (LAZY, "Thing")]]
    found = ostraka.restore(place)
    assert [tuple(named) for named in found[::3]] == [(text,) for text in texts]
    for others in (found[1::3], found[2::3]):
        assert others == [{"args": text} for text in texts]
    assert list(dict(ostraka.open(place)).values()) == [text for text in texts for _ in range(3)]
    assert (asked, Unregistered.made) == ([], 0)
    assert not {"antigravity", "this"} & sys.modules.keys()


def events_of_opening(path):
    events = []
    sys.addaudithook(lambda event, args: events.append(event))
    ostraka.open(path)
    started = {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn"}
    return {*events} & {*started, "socket.connect"}, {"this", "antigravity"} & sys.modules.keys()


def test_opening_a_strangers_checkpoint_starts_nothing(tmp_path):
    """In a process of its own, with every import and every start of a program watched."""
    ostraka.save(tmp_path, 0)
    body = json.loads((tmp_path / "_METADATA").read_bytes())
    del body["digest"]
    tree = {"list": None, "items": hostile()}
    (tmp_path / "_METADATA").write_bytes(sealed({**body, "tree": tree}))
    (result,) = run_processes(events_of_opening, str(tmp_path), processes=1, devices_per_process=8)
    assert result.value == (set(), set())


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
