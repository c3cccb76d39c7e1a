"""Objects with a state of their own as leaves of a tree: data iterators, Grain's among them."""

import itertools
from pathlib import Path
from typing import Any, cast

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ostraka
from ostraka.errors import InvalidTree, Mismatch
from ostraka.testing import run_processes


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
    [
        {"at": 7, "deep": [1.5, None, {"x": "y"}]},
        b"\x00\xff",
        7,
        "seven",
        None,
        [1, 2],
        {"at": (1, 2)},
        {1: 2, "b": b"bytes"},
        {"at": np.int64(3)},
        {"at": float("inf")},
    ],
    ids=repr,
)
def test_a_state_goes_into_the_object_of_like(tmp_path: Path, state: Any):
    ostraka.save(tmp_path / "c", {"data": Counter(state), "x": jnp.ones(2)})
    counter = Counter()
    restored = ostraka.restore(tmp_path / "c", like={"data": counter, "x": jnp.zeros(2)})
    assert restored["data"] is counter
    assert counter.at == state
    assert type(counter.at) is type(state)
    assert counter.sets == 1


def test_the_state_at_the_call_is_saved_and_comes_back_alone(tmp_path: Path):
    state = {"at": 1}
    ostraka.save(tmp_path / "c", [Counter(state), {"more": Counter(2)}])
    state["at"] = 2
    assert ostraka.restore(tmp_path / "c") == [{"at": 1}, {"more": 2}]
    like = [Counter(), {"more": Counter()}]
    ostraka.restore(tmp_path / "c", like=like)
    into = [Counter(), {"more": Counter()}]
    ostraka.restore(tmp_path / "c", into=into)
    for found in (like, into):
        assert (found[0].at, found[1]["more"].at) == ({"at": 1}, 2)


def test_it_may_be_left_out(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"data": Counter(1), "model": {"x": jnp.ones(2)}})
    assert list(ostraka.restore(tmp_path / "c", like={"model": {"x": jnp.zeros(2)}})) == ["model"]
    assert list(ostraka.restore(tmp_path / "c", only="model/**")) == ["model"]
    counter = Counter(5)
    like = {"data": counter, "model": {"x": jnp.zeros(2)}}
    ostraka.restore(tmp_path / "c", like=like, only="model/**")
    assert (counter.at, counter.sets) == (5, 0)


def test_nothing_is_set_if_anything_differs(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"data": Counter(1), "x": jnp.ones(2)})
    counter = Counter(5)
    with pytest.raises(Mismatch, match=r"'x': saved with shape \(2,\), `like` has \(3,\)"):
        ostraka.restore(tmp_path / "c", like={"data": counter, "x": jnp.zeros(3)})
    assert (counter.at, counter.sets) == (5, 0)


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (object(), "get_state.. gives object, which is neither JSON nor bytes"),
        ({"at": {1, 2}}, "get_state.. gives dict, which is neither JSON nor bytes"),
        ({"at": np.ones(3)}, "get_state.. gives dict, which is neither JSON nor bytes"),
    ],
    ids=["object", "set", "array"],
)
def test_states_that_can_not_be_kept(tmp_path: Path, state: Any, match: str):
    with pytest.raises(InvalidTree, match=f"leaf 'data': {match}"):
        ostraka.save(tmp_path / "c", {"data": Counter(state)})
    assert not (tmp_path / "c").exists()


# Grain


@pytest.mark.parametrize("make", [make_dataset, make_loader])
def test_grain_goes_on_where_it_was(tmp_path: Path, make: Any):
    iterator = make()
    take(iterator, 3)
    ostraka.save(tmp_path / "c", {"data": iterator, "step": 3})
    expected = take(iterator, 60)
    assert len(expected) >= 40
    fresh = make()
    restored = ostraka.restore(tmp_path / "c", like={"data": fresh, "step": 0})
    assert restored["data"] is fresh
    assert take(fresh, 60) == expected
    ostraka.restore(tmp_path / "c", like={"data": iterator, "step": 0})
    assert take(iterator, 5) == expected[:5]


def test_a_dataset_without_a_position_can_not_be_saved(tmp_path: Path):
    """The dataset instead of its iterator: a mistake that is easily made."""
    with pytest.raises(InvalidTree, match="leaf 'data' is a grain.*, which can't be saved"):
        ostraka.save(tmp_path / "c", {"data": grain.MapDataset.range(10)})


# Several processes


def part_of_this_process() -> Any:
    me, count = jax.process_index(), jax.process_count()
    return iter(grain.MapDataset.range(100)[me::count].to_iter_dataset())


def save_and_restore_positions(path: str, equal: str) -> tuple[list[list[int]], Any]:
    """Every process reads its own part of the data, and is elsewhere in it."""
    iterator, own = part_of_this_process(), {"process": jax.process_index()}
    take(iterator, 2 + 3 * jax.process_index())
    ostraka.save(path, {"data": iterator, "own": Counter(own)})
    ostraka.save(equal, {"data": Counter({"at": 7}), "x": np.ones(2)})
    expected = take(iterator, 4)
    like = {"data": part_of_this_process(), "own": Counter()}
    ostraka.restore(path, like=like)
    assert ostraka.restore(path)["own"] == like["own"].at == own
    assert take(like["data"], 4) == expected
    return expected, own


def test_each_process_has_its_own_position(tmp_path: Path):
    path, equal = str(tmp_path / "c"), str(tmp_path / "equal")
    results = run_processes(save_and_restore_positions, path, equal, processes=2)
    assert results[0].value[0] != results[1].value[0]
    assert [result.value[1] for result in results] == [{"process": 0}, {"process": 1}]
    # This process is alone.
    counter = Counter(5)
    match = (
        "'own': each of the 2 processes that saved it had a state of its own; this run has 1: "
        "restore with as many, or leave it out with only='!own' and set its position yourself; "
        "for data that fits any number of processes, use ostraka.data.ElasticIterator"
    )
    with pytest.raises(Mismatch, match=match):
        ostraka.restore(path, like={"data": make_dataset(), "own": counter})
    assert counter.sets == 0
    # Equal states fit any number of processes.
    ostraka.restore(equal, like={"data": counter})
    assert counter.at == {"at": 7}
    assert ostraka.restore(equal)["data"] == {"at": 7}
