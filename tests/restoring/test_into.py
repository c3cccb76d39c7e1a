"""`into=` updates the tree that the caller holds, whatever its containers are."""

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState

import ostraka
from ostraka.errors import Damaged, InvalidTree, Mismatch, PartialRestore
from ostraka.live.parse import is_key
from ostraka.testing import run_processes
from peaks import extra_bytes


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Point:
    x: Any
    y: Any


@jax.tree_util.register_pytree_with_keys_class
class Registry(MutableMapping[str, Any]):
    """A mapping of the program, which JAX knows by the same keys."""

    def __init__(self, **items: Any):
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def tree_flatten_with_keys(self) -> Any:
        pairs = [(jax.tree_util.DictKey(key), item) for key, item in self._items.items()]
        return pairs, tuple(self._items)

    @classmethod
    def tree_unflatten(cls, keys: Any, items: Any) -> "Registry":
        return cls(**dict(zip(keys, items, strict=True)))


def make(value: float) -> dict[str, Any]:
    """One of each container, with `value` in every leaf."""

    def array() -> jax.Array:
        return jnp.full(3, value)

    factory: defaultdict[str, Any] = defaultdict(list, {"a": array()})
    return {
        "array": array(),
        "key": jax.random.key(int(value)),
        "number": value,
        "host": np.full(2, value),
        "scalar": np.float32(value),
        "dict": {"deep": {"a": array()}},
        "ordered": OrderedDict(b=array(), a=array()),
        "factory": factory,
        "list": [array(), value, [array()]],
        "tuple": (array(), {"in tuple": array()}, [array()]),
        "pair": Pair(array(), Pair({"in pair": array()}, value)),
        "point": Point(array(), [array()]),
        "frozen": FrozenDict({"a": array()}),
        "registry": Registry(a=array(), b=(array(), [array()])),
        "variable": nnx.Param(array()),
        "state": nnx.State({"a": nnx.Param(array()), "b": {"c": nnx.Param(array())}}),
        "model": nnx.Dict(a=nnx.Param(array())),
        "none": None,
        "empty": {},
    }


MUTABLE = ("dict", "ordered", "factory", "list", "registry", "variable", "state", "model", "empty")


def mutables_of(tree: Any) -> list[Any]:
    """Every mutable container of `make`, also those in immutable ones."""
    return [
        tree,
        *(tree[name] for name in MUTABLE),
        tree["dict"]["deep"],
        tree["list"][2],
        tree["tuple"][1],
        tree["tuple"][2],
        tree["pair"].second.first,
        tree["point"].y,
        tree["registry"]["b"][1],
        tree["state"]["b"]["c"],
        tree["model"]["a"],
    ]


def numbers_of(tree: Any) -> set[float]:
    """Of keys the second of their two words, which is the seed."""
    found = [jax.random.key_data(x)[1] if is_key(x) else x for x in jax.tree.leaves(tree)]
    return {float(x) for leaf in found for x in np.ravel(np.asarray(leaf))}


def test_every_leaf_arrives_in_the_objects_that_the_caller_holds(tmp_path: Path):
    ostraka.save(tmp_path / "c", make(7.0))
    tree = make(1.0)
    before, keys = mutables_of(tree), list(tree["ordered"])
    assert ostraka.restore(tmp_path / "c", into=tree) is tree
    assert all(old is new for old, new in zip(before, mutables_of(tree), strict=True))
    assert numbers_of(tree) == {7.0}
    assert jax.tree.structure(tree) == jax.tree.structure(make(7.0))
    assert list(tree["ordered"]) == keys
    assert tree["factory"].default_factory is list
    assert (type(tree["number"]), type(tree["scalar"])) == (float, np.float32)
    assert isinstance(tree["host"], np.ndarray)
    assert type(tree["pair"]) is Pair


ROOTS: dict[str, Callable[[], Any]] = {
    "list": lambda: [jnp.zeros(2), (jnp.zeros(2),)],
    "ordered": lambda: OrderedDict(a=jnp.zeros(2)),
    "defaultdict": lambda: defaultdict(int, {"a": 0}),
    "mapping": lambda: Registry(a=jnp.zeros(2)),
    "tuple of mutable": lambda: ({"a": jnp.zeros(2)}, None, nnx.Param(jnp.zeros(2))),
    "pair of mutable": lambda: Pair([jnp.zeros(2)], {"a": 0}),
}


def test_roots_that_take_values(tmp_path: Path):
    for name, root in ROOTS.items():
        tree = root()
        ostraka.save(tmp_path / name, jax.tree.map(lambda x: x + 7, tree))
        assert ostraka.restore(tmp_path / name, into=tree) is tree, name
        assert numbers_of(tree) == {7}, name


def train_state() -> TrainState:
    params = {"w": jnp.ones(2)}
    return TrainState.create(apply_fn=jnp.sin, params=params, tx=optax.adam(0.1))


IMMUTABLE: list[tuple[Any, str]] = [
    (jnp.ones, "the tree itself"),
    (np.ones, "the tree itself"),
    (int, "the tree itself"),
    (lambda n: (jnp.ones(n), jnp.ones(n)), "leaf '0' and 1 more"),
    (lambda n: ({"a": jnp.ones(n)}, jnp.ones(n)), "leaf '1'"),
    (lambda n: Pair({"a": 1}, n), "leaf 'second'"),
    (lambda n: Point([1], n), "leaf 'y'"),
    (lambda n: FrozenDict({"a": jnp.ones(n)}), "leaf 'a'"),
    (lambda n: train_state(), "leaf 'step' and 1 more"),
    (lambda n: optax.adam(0.1).init({"w": jnp.ones(n)}), "leaf '0/count'"),
]


def test_leaves_without_a_mutable_container_are_refused(tmp_path: Path):
    # Nothing is read: there is no checkpoint.
    for make_root, where in IMMUTABLE:
        said = rf"into= can't change {where} in place: .*write state = ostraka.restore\(path, like="
        with pytest.raises(InvalidTree, match=said):
            ostraka.restore(tmp_path / "absent", into=make_root(2))


def test_a_refusal_changes_nothing_and_only_leaves_it_out(tmp_path: Path):
    ostraka.save(tmp_path / "c", ({"a": jnp.ones(2)}, jnp.ones(2)))
    tree: Any = ({"a": jnp.zeros(2)}, jnp.zeros(2))
    with pytest.raises(InvalidTree, match="leaf '1'"):
        ostraka.restore(tmp_path / "c", into=tree)
    assert numbers_of(tree) == {0}
    assert ostraka.restore(tmp_path / "c", into=tree, only="0/**") is tree
    assert numbers_of(tree[0]) == {1}
    assert numbers_of(tree[1]) == {0}


# Identity and memory


def test_one_dict_at_two_paths_stays_one(tmp_path: Path):
    shared = {"w": jnp.ones(2), "n": 3}
    ostraka.save(tmp_path / "c", {"a": shared, "b": [shared]})
    mine: dict[str, Any] = {"w": jnp.zeros(2), "n": 0}
    tree = {"a": mine, "b": [mine]}
    ostraka.restore(tmp_path / "c", into=tree)
    assert tree["a"] is tree["b"][0] is mine
    assert (mine["w"].tolist(), mine["n"]) == ([1, 1], 3)


HOLDERS: dict[str, tuple[Any, str]] = {
    "dict": (lambda value: {"w": value}, "b/w"),
    "list": (lambda value: [value], "b/0"),
    "variable": (nnx.Param, "b"),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_one_object_that_was_two_is_refused(tmp_path: Path, kind: str):
    hold, path = HOLDERS[kind]
    ostraka.save(tmp_path / "c", {"a": hold(jnp.ones(2)), "b": hold(jnp.full(2, 2.0))})
    mine = hold(jnp.zeros(2))
    said = f"'{path}': `into` has the same {kind} here as at '{path.replace('b', 'a')}'"
    with pytest.raises(Mismatch, match=said):
        ostraka.restore(tmp_path / "c", into={"a": mine, "b": mine})
    assert numbers_of(mine) == {0}
    ostraka.restore(tmp_path / "c", into={"a": mine, "b": mine}, only="b")
    assert numbers_of(mine) == {2}
    ostraka.restore(tmp_path / "c", into={"a": mine, "b": mine}, only="a")
    assert numbers_of(mine) == {1}


def test_old_arrays_are_freed(tmp_path: Path):
    ostraka.save(tmp_path / "c", make(1.0))
    tree = make(0.0)
    old = [weakref.ref(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    assert len(old) > 15
    ostraka.restore(tmp_path / "c", into=tree)
    assert not [leaf for leaf in old if leaf() is not None]


def make_large(layers: int, size: int) -> dict[str, Any]:
    arrays = [jnp.full((size,), float(n), jnp.float32) for n in range(layers)]
    half = layers // 2
    params = {str(n): array if n % 2 else nnx.Param(array) for n, array in enumerate(arrays[:half])}
    return {"params": params, "moments": ({"m": arrays[half:]},)}


def measure_restore(path: str, how: str, layers: int, size: int) -> int:
    state, small = make_large(layers, size), make_large(2, 4)
    ostraka.save(path, state)
    ostraka.save(path + "-small", small)  # what a first call loads is not what is measured
    ostraka.restore(path + "-small", into=small)
    kept: list[Any] = []
    given: Any = {how: state}
    return extra_bytes(lambda: kept.append(ostraka.restore(path, **given)))


def test_a_restore_in_place_never_holds_two_models(tmp_path: Path):
    """The peak of memory: what a restore adds to the state itself, in a process of its own."""
    layers, size = 32, 1 << 20  # 128 MiB in all
    state_bytes = layers * size * 4

    def run(how: str) -> int:
        path = str(tmp_path / "c")
        (result,) = run_processes(measure_restore, path, how, layers, size, processes=1)
        return result.value

    assert run("into") < 0.6 * state_bytes
    assert run("like") > 0.9 * state_bytes


# With other options


def test_keys_that_only_the_checkpoint_has(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"a": {"x": jnp.ones(2), "y": jnp.ones(2)}, "b": 1})
    tree: dict[str, Any] = {"a": {"x": jnp.zeros(2)}}
    with pytest.raises(Mismatch, match="'a/y' is in the checkpoint but not in `into`"):
        ostraka.restore(tmp_path / "c", into=tree)
    assert numbers_of(tree) == {0}
    with pytest.warns(PartialRestore, match="left out 1 leaf of the checkpoint"):
        ostraka.restore(tmp_path / "c", into=tree, strict=False)
    assert [*tree, *tree["a"]] == ["a", "x"]
    assert numbers_of(tree) == {1}


def test_leaves_that_the_checkpoint_lacks_keep_their_values(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"a": (jnp.ones(2),), "n": 1})
    tree: dict[str, Any] = {"a": (jnp.zeros(2), jnp.zeros(2)), "n": 0, "more": [0]}
    with pytest.warns(PartialRestore, match="kept 2 leaves .* does not have"):
        ostraka.restore(tmp_path / "c", into=tree, strict=False)
    assert [x.tolist() for x in tree["a"]] == [[1, 1], [0, 0]]
    assert (tree["n"], tree["more"]) == (1, [0])


def test_parts_and_renamed_paths(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"old": {"w": jnp.ones(2)}, "t": (1, 2), "n": 5})
    tree: dict[str, Any] = {"new": {"w": jnp.zeros(2)}, "t": (0, 0), "n": 0}
    inner, untouched = tree["new"], tree["t"]
    ostraka.restore(tmp_path / "c", into=tree, rename={"old": "new"}, only="!t/**")
    assert tree["new"] is inner
    assert inner["w"].tolist() == [1, 1]
    assert tree["n"] == 5
    assert tree["t"] is untouched


def test_abstract_leaves_become_arrays(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"w": jnp.ones((8, 2)), "t": (jnp.ones(2),)})
    tree: dict[str, Any] = jax.eval_shape(lambda: {"w": jnp.ones((8, 2)), "t": (jnp.ones(2),)})
    ostraka.restore(tmp_path / "c", into=tree, mesh={"x": 8}, specs=jax.P())
    assert numbers_of(tree) == {1}
    assert tree["w"].sharding.mesh.axis_names == ("x",)


def test_a_failure_says_that_the_tree_may_be_mixed_and_plain_values_come_last(tmp_path: Path):
    saved = {"step": 9, "a": jnp.ones(1 << 16), "b": jnp.ones(1 << 16)}
    ostraka.save(tmp_path / "c", saved, max_file_bytes=1 << 18)
    last = sorted((tmp_path / "c").glob("shards-*/*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-100])
    tree = {"step": 0, "a": jnp.zeros(1 << 16), "b": jnp.zeros(1 << 16)}
    with pytest.raises(Damaged, match="is damaged") as raised:
        ostraka.restore(tmp_path / "c", into=tree)
    assert any("may have been changed in part" in note for note in raised.value.__notes__)
    assert tree["step"] == 0  # a program that catches the error does not take it for restored
