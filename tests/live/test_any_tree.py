"""Any tree: a save refuses it, or every restore gives it back, with its aliases and commitment."""

import dataclasses
import enum
import re
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.errors import InvalidTree
from ostraka.storage import MemoryStore


class Pair(NamedTuple):
    left: Any
    right: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Config:
    weight: Any
    static: Any = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_pytree_with_keys_class
class Custom:
    def __init__(self, items: Any):
        self.items = items

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(self.items)], None

    @classmethod
    def tree_unflatten(cls, _: Any, items: Any) -> "Custom":
        return cls(list(items))


class Box(nnx.Module):
    """A module with whatever it is given; what is no NNX object is data."""

    def __init__(self, **parts: Any):
        for name, part in parts.items():
            is_object = isinstance(part, nnx.Pytree | nnx.Variable)
            setattr(self, name, part if is_object else nnx.data(part))


class Scale(nnx.Variable):
    pass


# Values

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

FLOATS = st.floats(width=32)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=4),
    st.binary(max_size=4),
)
SIMPLE_KEYS = st.one_of(
    st.text(max_size=3),
    st.integers(-3, 10**20),
    st.booleans(),
    st.floats(allow_nan=False),
    st.none(),
    st.binary(max_size=2),
    st.sampled_from(Colour),
    st.sampled_from([np.int8(1), np.float32(0.5), np.bool_(True), np.str_("s")]),
)
KEYS = st.one_of(
    SIMPLE_KEYS, st.tuples(SIMPLE_KEYS, SIMPLE_KEYS), st.frozensets(st.integers(), max_size=1)
)
NAMES = st.sampled_from(["a", "b", "kernel", "bias"])


def free(values: list[float]) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.float32))


ARRAYS: dict[str, Callable[[list[float]], Any]] = {
    "free": free,
    "bound": lambda values: jax.device_put(free(values), jax.devices()[3]),
    "sharded": lambda values: jax.device_put(
        np.resize(np.asarray([*values, 0], np.float32), (8, 2)), NamedSharding(MESH, P("x", "y"))
    ),
    "weak": lambda values: jnp.asarray(2.0) * len(values),
    "key": lambda values: jax.random.key(len(values)),
    "numpy": lambda values: np.asarray(values, np.float64),
    "fortran": lambda values: np.asfortranarray(np.resize(np.asarray([*values, 1.0]), (2, 3))),
    "number": lambda values: np.int16(len(values)),
    "bfloat16": lambda values: free(values).astype(jnp.bfloat16),
    "pinned": lambda values: jax.device_put(
        free(values), NamedSharding(MESH, P(), memory_kind="pinned_host")
    ),
}


@st.composite
def trees(draw: st.DrawFn) -> Any:
    make = st.sampled_from(sorted(ARRAYS))
    kinds = draw(st.lists(make, min_size=2, max_size=4))
    arrays = [ARRAYS[kind](draw(st.lists(FLOATS, max_size=3))) for kind in kinds]
    jax_arrays = [x for x in arrays if isinstance(x, jax.Array)] or [jnp.ones(2)]
    variables = [
        draw(st.sampled_from([nnx.Param, nnx.BatchStat, Scale]))(draw(st.sampled_from(jax_arrays)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    modules: list[Any] = []
    for _ in range(draw(st.integers(1, 3))):
        within = st.sampled_from([*variables, *modules, *jax_arrays])
        modules.append(Box(**draw(st.dictionaries(NAMES, within, min_size=1, max_size=3))))
    if draw(st.booleans()):
        modules[0].back = modules[-1]  # it may be a circle now

    objects = st.sampled_from([*arrays, *variables, *modules, nnx.state(modules[-1])])
    leaves = st.one_of(SCALARS, objects, objects)

    def containers(items: Any) -> Any:
        lists = st.lists(items, max_size=3)
        dicts = st.dictionaries(KEYS, items, max_size=3)
        # JAX sorts the keys of a FrozenDict, and it freezes the dicts in it.
        named = st.dictionaries(st.text(max_size=3), st.sampled_from(arrays), max_size=3)
        return st.one_of(
            lists,
            lists.map(tuple),
            dicts,
            dicts.map(OrderedDict),
            dicts.map(lambda x: defaultdict(list, x)),
            named.map(FrozenDict),
            st.builds(Pair, items, items),
            st.builds(Config, items, st.one_of(SCALARS, st.sampled_from(Colour), st.just(len))),
            st.lists(items, min_size=1, max_size=2).map(Custom),
        )

    return draw(st.recursive(leaves, containers, max_leaves=8)), variables


# What there is to a tree, in a form that can be compared


class Describer:
    """A tree as nested tuples; each object gets the number of its first place."""

    def __init__(self, *, as_dicts: bool):
        self._as_dicts = as_dicts
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []

    def _number(self, value: Any) -> tuple[int, bool]:
        self._alive.append(value)
        is_new = id(value) not in self._numbers
        return self._numbers.setdefault(id(value), len(self._numbers)), is_new

    def describe(self, value: Any) -> Any:
        if isinstance(value, nnx.Variable):
            return self._variable(value)
        if isinstance(value, nnx.State):
            return self._state("State", value.raw_mapping)
        if isinstance(value, nnx.Pytree):
            return self._module(value)
        if isinstance(value, jax.Array | np.ndarray):
            number, _ = self._number(value)
            return number, *describe_array(value)
        if isinstance(value, np.generic):
            return describe_array(value)
        return self._container(value)

    def _variable(self, value: Any) -> Any:
        if self._as_dicts:
            return self.describe(value.get_raw_value())
        number, is_new = self._number(value)
        return number, type(value), self.describe(value.get_raw_value()) if is_new else ...

    def _module(self, value: Any) -> Any:
        if self._as_dicts:
            return self._state("State", nnx.split(value)[1].raw_mapping)
        number, is_new = self._number(value)
        if not is_new:
            return number
        parts = {name: part for name, part in vars(value).items() if not name.startswith("_")}
        return (
            number,
            type(value),
            *((name, self.describe(part)) for name, part in sorted(parts.items())),
        )

    def _state(self, kind: str, entries: Any) -> Any:
        """A state, or what is nested in it, which is of dicts."""
        found = [
            (describe_plain(key), self._state("nested", x) if type(x) is dict else self.describe(x))
            for key, x in entries.items()
        ]
        return (dict, None, *found) if self._as_dicts else (kind, *found)

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict | FrozenDict):
            # JAX keeps a FrozenDict by its sorted keys.
            items = sorted(value.items()) if isinstance(value, FrozenDict) else value.items()
            pairs = [(describe_plain(key), self.describe(x)) for key, x in items]
            return type(value), getattr(value, "default_factory", None), *pairs
        if isinstance(value, list | tuple):
            return type(value), *map(self.describe, value)
        if isinstance(value, Config):
            if self._as_dicts and value.static is len:
                return dict, None, (describe_plain("weight"), self.describe(value.weight))
            return Config, self.describe(value.weight), describe_plain(value.static)
        if isinstance(value, Custom):
            items = [self.describe(x) for x in value.items]
            if self._as_dicts:
                return dict, None, *((describe_plain(i), x) for i, x in enumerate(items))
            return Custom, *items
        return describe_plain(value)


def describe_array(value: Any) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.shape, value.tobytes()
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    data = np.asarray(jax.random.key_data(value) if is_key else value)
    weak = bool(getattr(value, "weak_type", False))
    return str(value.dtype), data.shape, data.tobytes(), value.committed, weak, value.sharding


def describe_plain(value: Any) -> Any:
    """Exact: NaN is NaN, -0.0 is not 0.0, and True is not 1."""
    if isinstance(value, float):
        return float, np.float64(value).tobytes()
    if isinstance(value, complex):
        return complex, np.complex128(value).tobytes()
    if isinstance(value, tuple):
        return tuple, *map(describe_plain, value)
    return type(value), value


def describe(tree: Any) -> Any:
    return Describer(as_dicts=False).describe(tree)


def blank(variables: list[Any]) -> None:
    """Overwrite what a restore in place is to bring back."""
    for variable in variables:
        value = variable.get_raw_value()
        if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            variable.set_raw_value(value * 0)


# Dicts whose keys look alike are refused, and so are some keys and texts, and empty trees.
REFUSED = "two leaves have the path|has a key|has the key|there is nothing to save"


@pytest.mark.filterwarnings("ignore::ostraka.errors.PartialRestore")
@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    deadline=None,
)
@given(trees())
def test_a_save_refuses_it_or_every_restore_gives_it_back(drawn: tuple[Any, list[Any]]):
    name = uuid.uuid4().hex
    place = f"memory://{name}"
    tree, variables = drawn
    expected, as_dicts = describe(tree), Describer(as_dicts=True).describe(tree)
    try:
        ostraka.save(place, tree)
    except InvalidTree as error:
        if not re.search(REFUSED, str(error)):
            raise
        return
    assert ostraka.verify(place).ok
    assert describe(ostraka.restore(place, like=tree)) == expected
    assert Describer(as_dicts=True).describe(ostraka.restore(place)) == as_dicts
    blank(variables)
    try:
        restored = ostraka.restore(place, into=tree)
    except InvalidTree as error:
        # A root that can change takes every value.
        can_change = isinstance(tree, dict | list | nnx.Pytree | nnx.Variable | nnx.State)
        if can_change or not re.search("into= can't change (the tree itself|leaf) ", str(error)):
            raise
    else:
        assert restored is tree
        assert describe(tree) == expected
    MemoryStore(name).delete("")
