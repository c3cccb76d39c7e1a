"""Objects with a state of their own as leaves of a tree: data iterators, Grain's among them."""

import itertools
from pathlib import Path
from typing import Any, cast

import grain.python as grain
import jax.numpy as jnp
import numpy as np
import pytest

import ostraka
from ostraka.errors import InvalidTree, Mismatch
from ostraka.testing import run_processes
from places import Place


class Counter:
    """The least that such an object has."""

    def __init__(self, at: Any = 0):
        self.at = at
        self.sets = 0

    def get_state(self) -> Any:
        return self.at

    def set_state(self, state: Any) -> None:
        self.at = state
        self.sets += 1


def make_dataset() -> Any:
    return iter(grain.MapDataset.range(100).shuffle(seed=3).to_iter_dataset().batch(2))


def make_loader() -> Any:
    loader = grain.DataLoader(
        data_source=cast(Any, grain.RangeDataSource(0, 100, 1)),
        sampler=grain.IndexSampler(100, grain.NoSharding(), shuffle=True, num_epochs=2, seed=3),
        operations=[grain.Batch(2)],
        worker_count=0,
    )
    return iter(loader)


def take(iterator: Any, count: int) -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in itertools.islice(iterator, count)]


@pytest.mark.parametrize(
    "state",
    [{"at": 7, "deep": [1.5, None, {"x": "y"}]}, b"\x00\xff", 7, "seven", None, [1, 2]],
    ids=repr,
)
def test_a_state_goes_into_the_object_of_like(place: Place, state: Any):
    ostraka.save(place / "c", {"data": Counter(state), "x": jnp.ones(2)})
    counter = Counter()
    restored = ostraka.restore(place / "c", like={"data": counter, "x": jnp.zeros(2)})
    assert restored["data"] is counter
    assert counter.at == state
    assert type(counter.at) is type(state)
    assert counter.sets == 1


def test_the_state_at_the_call_is_saved(place: Place):
    state = {"at": 1}
    ostraka.save(place / "c", {"data": Counter(state)})
    state["at"] = 2
    assert ostraka.restore(place / "c")["data"] == {"at": 1}


def test_without_a_template_the_state_itself_comes_back(place: Place):
    ostraka.save(place / "c", {"data": Counter({"at": 7})})
    assert ostraka.restore(place / "c") == {"data": {"at": 7}}


def test_several_objects_each_get_their_own(place: Place):
    ostraka.save(place / "c", [Counter(1), {"more": Counter(2)}])
    like = [Counter(), {"more": Counter()}]
    ostraka.restore(place / "c", like=like)
    assert like[0].at == 1
    assert like[1]["more"].at == 2


def test_it_may_be_left_out(place: Place):
    ostraka.save(place / "c", {"data": Counter(1), "model": {"x": jnp.ones(2)}})
    assert list(ostraka.restore(place / "c", like={"model": {"x": jnp.zeros(2)}})) == ["model"]
    assert list(ostraka.restore(place / "c", only="model/**")) == ["model"]
    counter = Counter(5)
    like = {"data": counter, "model": {"x": jnp.zeros(2)}}
    ostraka.restore(place / "c", like=like, only="model/**")
    assert (counter.at, counter.sets) == (5, 0)


def test_nothing_is_set_if_anything_differs(place: Place):
    ostraka.save(place / "c", {"data": Counter(1), "x": jnp.ones(2)})
    counter = Counter(5)
    with pytest.raises(Mismatch, match=r"'x': saved with shape \(2,\), `like` has \(3,\)"):
        ostraka.restore(place / "c", like={"data": counter, "x": jnp.zeros(3)})
    assert (counter.at, counter.sets) == (5, 0)


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (object(), "get_state.. gives object, which is neither JSON nor bytes"),
        ({"at": (1, 2)}, "get_state.. gives values that JSON would change, such as tuples"),
        ({1: 2}, "get_state.. gives values that JSON would change"),
        ({"at": float("nan")}, "get_state.. gives dict, which is neither JSON nor bytes"),
        ({"at": np.int64(3)}, "get_state.. gives dict, which is neither JSON nor bytes"),
    ],
    ids=["object", "tuple", "int key", "nan", "numpy"],
)
def test_states_that_can_not_be_kept(place: Place, state: Any, match: str):
    with pytest.raises(InvalidTree, match=f"leaf 'data': {match}"):
        ostraka.save(place / "c", {"data": Counter(state)})
    assert not (place / "c").exists()


def test_an_object_where_something_else_was_saved(place: Place):
    ostraka.save(place / "c", {"data": 7, "x": jnp.ones(2)})
    with pytest.raises(Mismatch, match="'data': the checkpoint has the int '7'"):
        ostraka.restore(place / "c", like={"data": Counter(), "x": jnp.ones(2)})
    with pytest.raises(Mismatch, match=r"'x': the checkpoint has an array float32\[2\]"):
        ostraka.restore(place / "c", like={"data": 0, "x": Counter()})


def test_something_else_where_an_object_was_saved(place: Place):
    ostraka.save(place / "c", {"data": Counter(1)})
    with pytest.raises(Mismatch, match="the state of an object, .* which has no set_state"):
        ostraka.restore(place / "c", like={"data": 0})


# Grain


@pytest.mark.parametrize("make", [make_dataset, make_loader])
def test_grain_goes_on_where_it_was(place: Place, make: Any):
    iterator = make()
    take(iterator, 3)
    ostraka.save(place / "c", {"data": iterator, "step": 3})
    expected = take(iterator, 60)
    assert len(expected) >= 40
    fresh = make()
    restored = ostraka.restore(place / "c", like={"data": fresh, "step": 0})
    assert restored["data"] is fresh
    assert take(fresh, 60) == expected


def test_grain_goes_back_in_the_same_object(place: Place):
    iterator = make_dataset()
    take(iterator, 3)
    ostraka.save(place / "c", {"data": iterator})
    first = take(iterator, 5)
    ostraka.restore(place / "c", like={"data": iterator})
    assert take(iterator, 5) == first


def test_a_dataset_without_a_position_can_not_be_saved(place: Place):
    """The dataset instead of its iterator: a mistake that is easily made."""
    with pytest.raises(InvalidTree, match="leaf 'data' is a grain.*, which can't be saved"):
        ostraka.save(place / "c", {"data": grain.MapDataset.range(10)})


# Several processes


def save_positions(path: str) -> list[list[int]]:
    """Every process reads its own part of the data, and is elsewhere in it."""
    import jax

    me = jax.process_index()
    iterator = iter(grain.MapDataset.range(100)[me :: jax.process_count()].to_iter_dataset())
    take(iterator, 2 + 3 * me)
    ostraka.save(path, {"data": iterator, "own": Counter({"process": me})})
    return take(iterator, 4)


def restore_positions(path: str) -> tuple[Any, list[list[int]]]:
    import jax

    me = jax.process_index()
    iterator = iter(grain.MapDataset.range(100)[me :: jax.process_count()].to_iter_dataset())
    counter = Counter()
    ostraka.restore(path, like={"data": iterator, "own": counter})
    plain = ostraka.restore(path)["own"]
    assert plain == counter.at
    return counter.at, take(iterator, 4)


def test_each_process_has_its_own_position(place: Place):
    path = str(place / "c")
    expected = [r.value for r in run_processes(save_positions, path, processes=2)]
    assert expected[0] != expected[1]
    found = [r.value for r in run_processes(restore_positions, path, processes=2)]
    assert found == [({"process": n}, expected[n]) for n in range(2)]
    # This process is alone.
    counter = Counter(5)
    match = (
        "'own': each of the 2 processes that saved it had a state of its own; this run has 1: "
        "restore with as many, or leave it out with only='!own' and set its position yourself"
    )
    with pytest.raises(Mismatch, match=match):
        ostraka.restore(path, like={"data": make_dataset(), "own": counter})
    assert counter.sets == 0


def save_equal_states(path: str) -> None:
    ostraka.save(path, {"data": Counter({"at": 7}), "x": np.ones(2)})


def restore_equal_states(path: str) -> Any:
    counter = Counter()
    ostraka.restore(path, like={"data": counter})
    return counter.at


def test_equal_states_fit_any_number_of_processes(tmp_path: Path):
    path = str(tmp_path / "c")
    run_processes(save_equal_states, path, processes=3)
    assert [r.value for r in run_processes(restore_equal_states, path, processes=2)] == [
        {"at": 7}
    ] * 2
    assert restore_equal_states(path) == {"at": 7}
    assert ostraka.restore(path)["data"] == {"at": 7}
