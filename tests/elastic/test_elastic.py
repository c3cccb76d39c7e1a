"""Global batches from logical shards, on one process."""

import copy
import gc
import itertools
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import grain
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ostraka
from elastic_data import mixed, row_digests
from ostraka.data import ElasticIterator
from ostraka.errors import InvalidSharding, InvalidTree, Mismatch
from runs import wait_until


class Pair(NamedTuple):
    x: int
    y: int


class Couple(NamedTuple):
    x: int
    y: int


class Numbers:
    """The least that an iterator over a shard of four has: every fourth number, up to an end."""

    def __init__(self, shard: int, end: int = 1000, change: Callable[[Any], Any] = lambda x: x):
        self.at, self.end, self.change = shard, end, change
        self.is_closed = False

    def __iter__(self) -> "Numbers":
        return self

    def __next__(self) -> Any:
        if self.at >= self.end:
            raise StopIteration
        self.at += 4
        return self.change({"n": self.at - 4, "row": np.full(4, self.at - 4, np.float32)})

    def get_state(self) -> Any:
        return {"at": self.at}

    def set_state(self, state: Any) -> None:
        self.at = state["at"]

    def close(self) -> None:
        self.is_closed = True


def elastic(change: Callable[[Any], Any] = lambda x: x, **given: Any) -> ElasticIterator:
    """Numbers from four shards, each changed."""
    make = given.pop("make_iterator", lambda shard: Numbers(shard, change=change))
    options: dict[str, Any] = {"shards": 4, "batch": 8} | given
    return ElasticIterator(make, **options)


def numbers(data: Any, count: int | None = None) -> list[list[int]]:
    return [np.asarray(batch["n"]).tolist() for batch in itertools.islice(data, count)]


def sharding(spec: P, **axes: int) -> NamedSharding:
    devices = np.array(jax.devices()[: int(np.prod([*axes.values()]))])
    return NamedSharding(jax.sharding.Mesh(devices.reshape(*axes.values()), (*axes,)), spec)


# Batches


@pytest.mark.parametrize(
    "where",
    [
        None,
        ({"data": 8}, P("data")),
        ({"data": 2, "model": 4}, P("data")),
        ({"data": 2, "model": 4}, P(("model", "data"))),
        ({"data": 8}, P()),
        ({"data": 8}, P(None)),
    ],
    ids=str,
)
def test_rows_are_those_of_the_shards_in_order(where: Any):
    with elastic(sharding=where) as data:
        batch = next(data)
        assert np.asarray(batch["n"]).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
        assert batch["row"].shape == (8, 4)
        assert (np.asarray(batch["row"])[:, 0] == np.asarray(batch["n"])).all()
        assert numbers(data, 1) == [[8, 12, 9, 13, 10, 14, 11, 15]]
    if where is None:
        assert isinstance(batch["n"].sharding, SingleDeviceSharding)
    else:
        axes, spec = where
        assert dict(batch["n"].sharding.mesh.shape) == axes
        assert batch["n"].sharding.spec == spec


def test_other_dimensions_may_be_split_too():
    data = elastic(lambda x: x["row"], sharding=sharding(P("a", "b"), a=2, b=2))
    batch = next(data)
    assert {shard.data.shape for shard in batch.addressable_shards} == {(4, 2)}
    assert np.asarray(batch)[:, 3].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_it_ends_when_a_shard_ends_and_drops_the_rest():
    ends = {0: 100, 1: 22, 2: 100, 3: 100}  # shard 1 has 1, 5, 9, 13, 17, 21
    data = elastic(make_iterator=lambda k: Numbers(k, ends[k]))
    assert len(numbers(data)) == 3
    assert list(data) == []
    state = data.get_state()
    assert state["position"] == 3
    data.set_state(state)
    assert list(data) == []


def test_python_numbers_and_64_bits_become_what_device_put_makes_of_them():
    with jax.enable_x64(True):
        wide = elastic()
    assert next(wide)["n"].dtype == np.int64
    assert next(elastic())["n"].dtype == np.int32


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.float16, ml_dtypes.bfloat16])
def test_dtypes_are_kept(dtype: Any):
    array, nothing = next(elastic(lambda x: (x["row"].astype(dtype), None)))
    assert array.dtype == dtype
    assert nothing is None


def made(make: Any, **changes: Any) -> ElasticIterator:
    """The examples that a function makes of numbers."""
    return elastic(lambda example: make(example["n"]), **changes)


@pytest.mark.parametrize("size", [0, 3, 1024, 1025, 5000])
@pytest.mark.parametrize("form", ["whole", "view", "strided", "swapped"])
def test_rows_of_any_size_and_layout(size: int, form: str):
    def make(number: int) -> Any:
        row = np.arange(number, number + 2 * size, dtype=np.int32).reshape(2, size)
        if form == "swapped":
            return row.astype(">i4")
        return {"whole": row, "view": row[:1], "strided": row.T[::2]}[form]

    order = [0, 4, 1, 5, 2, 6, 3, 7]
    for where in (None, ({"data": 8}, P("data"))):
        found = next(made(make, sharding=where))
        expected = np.stack([make(number) for number in order]).astype(np.int32)
        assert found.dtype == np.int32
        assert found.shape == expected.shape
        assert (np.asarray(found) == expected).all()


@pytest.mark.parametrize("shape", [(), (3,), (2000,)])
def test_an_example_may_use_the_memory_of_the_one_before(shape: tuple[int, ...]):
    memory = np.zeros(shape, np.int32)
    example = {"x": memory, "y": [memory[..., None]]}

    def make(number: int) -> Any:
        memory[...] = number
        return example

    with made(make, batch=16) as data:
        batches = [next(data) for _ in range(5)]
    plain = numbers(elastic(batch=16), 5)
    for batch, expected in zip(batches, plain, strict=True):
        for leaf in (batch["x"], batch["y"][0]):
            assert leaf.reshape(16, -1)[:, 0].tolist() == expected
            assert leaf.reshape(16, -1)[:, -1].tolist() == expected


@pytest.mark.parametrize("where", [None, ({"data": 8}, P()), ({"data": 8}, P("data"))], ids=str)
def test_a_batch_may_be_donated(where: Any):
    """JAX may share its memory with us, and the devices theirs with each other."""
    data = elastic(lambda example: example["row"], sharding=where)
    step = jax.jit(lambda rows: rows + 1, donate_argnums=0)
    found = [np.asarray(step(next(data)))[:, 0].tolist() for _ in range(3)]
    expected = numbers(elastic(), 3)
    assert found == [[number + 1 for number in batch] for batch in expected]


# States


def test_the_state_is_that_of_the_batches_taken_not_of_those_prepared():
    data = elastic(prefetch=5)
    taken = numbers(data, 3)
    wait_until(lambda: len(cast(Any, data)._preparation._prepared) == 5)
    state = data.get_state()
    assert state["position"] == 3
    assert {key: value["json"]["at"] for key, value in state["states"].items()} == {
        str(shard): shard + 4 * 6 for shard in range(4)
    }
    expected = numbers(data, 4)
    other = elastic(sharding=({"data": 8}, P("data")))
    numbers(other, 7)
    other.set_state(state)
    assert numbers(other, 4) == expected
    assert taken == numbers(elastic(), 3)


def test_a_state_that_the_iterator_goes_on_to_change_is_kept():
    class Shared(Numbers):
        def __init__(self, *given: Any):
            super().__init__(*given)
            self.state = {"deep": [{"at": self.at}]}

        def get_state(self) -> Any:
            self.state["deep"][0]["at"] = self.at
            return self.state

        def set_state(self, state: Any) -> None:
            self.at = state["deep"][0]["at"]

    data = elastic(make_iterator=Shared)
    numbers(data, 2)
    state = data.get_state()
    expected = numbers(data, 3)
    data.set_state(state)
    assert numbers(data, 3) == expected


class Live(Numbers):
    """Its state is one object, which it changes. Given another, it goes on to change that."""

    kind: Any = dict

    def __init__(self, shard: int):
        self.state: Any = self.kind()
        super().__init__(shard)

    @property
    def at(self) -> int:
        return self.state["at"]

    @at.setter
    def at(self, at: int) -> None:
        self.state["at"] = at

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


class LiveInOrder(Live):
    kind = OrderedDict


class LiveCounts(Live):
    kind = Counter


@pytest.mark.parametrize("kind", [Live, LiveInOrder, LiveCounts])
def test_a_state_that_is_a_live_object(kind: Any):
    data = elastic(make_iterator=kind, prefetch=3)
    expected = numbers(elastic(), 9)
    assert numbers(data, 2) == expected[:2]
    state = data.get_state()
    kept = copy.deepcopy(state)
    assert numbers(data, 3) == expected[2:5]
    later = data.get_state()
    for _ in range(2):
        data.set_state(state)
        assert numbers(data, 4) == expected[2:6]
    assert state == kept
    assert {key: value["json"]["at"] for key, value in state["states"].items()} == {
        str(shard): shard + 4 * 4 for shard in range(4)
    }
    data.set_state(later)
    assert data.get_state() == later
    assert numbers(data, 2) == expected[5:7]


def test_a_live_state_after_a_batch_that_failed():
    class Failing(Live):
        def __next__(self) -> Any:
            if self.at == 2 + 4 * 5:
                raise OSError("the disk is gone")
            return super().__next__()

    data = elastic(make_iterator=Failing)
    numbers(data, 2)
    state = data.get_state()
    kept = copy.deepcopy(state)
    for _ in range(2):
        data.set_state(state)
        with pytest.raises(OSError, match="the disk is gone"):
            next(data)
        assert data.get_state() == kept


def test_save_and_restore_while_it_goes_on(tmp_path: Path):
    data = elastic()
    numbers(data, 3)
    with ostraka.Manager(tmp_path) as manager:
        manager.save(3, {"data": data, "w": jax.numpy.ones(3)})
        expected = numbers(data, 5)  # while the save is under way
        manager.wait()
        other = elastic(sharding=({"data": 2, "model": 4}, P("data")), prefetch=1)
        found = manager.restore(like={"data": other, "w": jax.numpy.zeros(3)})
    assert found["data"] is other
    assert numbers(other, 5) == expected
    whole = ostraka.restore(tmp_path)["data"]
    assert (whole["shards"], whole["batch"], whole["position"]) == (4, 8, 3)
    assert sorted(whole["states"]) == ["0", "1", "2", "3"]


def make_mixed(shard: int) -> Any:
    return mixed(shard, 4, 400)


def make_loader(shard: int) -> Any:
    source: Any = grain.sources.RangeDataSource(shard, 200, 4)
    sampler = grain.samplers.IndexSampler(len(source), shuffle=True, num_epochs=2, seed=3)
    return grain.DataLoader(data_source=source, sampler=sampler, worker_count=0)


def make_prefetched(shard: int) -> Any:
    return grain.MapDataset.range(200)[shard::4].shuffle(seed=1).repeat(2).batch(5)


@pytest.mark.parametrize("make", [make_mixed, make_loader, make_prefetched])
def test_grain_goes_on_at_any_batch_and_on_any_mesh(tmp_path: Path, make: Any):
    """Filters, two ways of packing, a mix, loaders whose state is bytes."""
    given: dict[str, Any] = {"shards": 4, "batch": 8}
    with ElasticIterator(make, **given) as data:
        expected = [row_digests(batch) for batch in data]
    assert len(expected) > 8
    for at in (0, 1, len(expected) // 2, len(expected)):
        with ElasticIterator(make, **given) as data:
            for _ in range(at):
                next(data)
            ostraka.save(tmp_path / "c", data)
        with ElasticIterator(make, **given, sharding=({"x": 4, "y": 2}, P("x"))) as other:
            ostraka.restore(tmp_path / "c", like=other)
            assert [row_digests(batch) for batch in other] == expected[at:]


def test_parts_of_several_processes_join_into_one_state():
    whole = elastic().get_state()
    parts = [{**whole, "states": {str(k): whole["states"][str(k)]}} for k in (2, 0, 3, 1)]
    assert ElasticIterator.join_states(parts) == whole
    odd = {**whole, "states": {"0": {"json": {"at": 8}}}}
    for given, match in (
        ([whole, {**whole, "position": 9}], "process 1 has position 9, that of process 0 has 0"),
        (parts[:3], "the states of 1 of 4 shards .* on no process that saves"),
        ([whole, odd], "process 1, have another state for shard 0"),
    ):
        with pytest.raises(InvalidTree, match=match):
            ElasticIterator.join_states(given)


# Errors


class Loader:
    """As a DataLoader of PyTorch: its iterator has no position to save."""

    def __iter__(self) -> Any:
        return iter([np.ones(2)] * 100)


class Odd(Numbers):
    def get_state(self) -> Any:
        return object()


SHARED = Numbers(0)
SPLIT = ({"data": 8}, P("data"))


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        (
            {"batch": 10},
            ValueError,
            "10 rows can't take as many from each of 4 shards: make batch a",
        ),
        ({"shards": 0}, ValueError, "shards must be a number of at least 1, not 0"),
        ({"batch": 8.0}, ValueError, "batch must be a number of at least 1, not 8.0"),
        ({"prefetch": 0}, ValueError, "prefetch must be a number of at least 1, not 0"),
        (
            {"batch": 4, "sharding": SPLIT},
            InvalidSharding,
            r"4 rows can't be split evenly by .*'data'.* over the mesh .*: make batch a mul",
        ),
        ({"sharding": "data"}, InvalidSharding, "must be a NamedSharding, .mesh, spec., or None"),
        (
            {"make_iterator": lambda k: [k]},
            InvalidTree,
            "returned a builtins.list, whose iterator has",
        ),
        (
            {"make_iterator": lambda k: k},
            InvalidTree,
            r"make_iterator\(0\) returned a builtins.int, ",
        ),
        (
            {"make_iterator": lambda k: Loader()},
            InvalidTree,
            r"returned a .*Loader, whose iterator has no get_state, so its position",
        ),
        (
            {"make_iterator": lambda k: SHARED},
            InvalidTree,
            "the same iterator for the shards 0 and 1: each shard needs its own",
        ),
        (
            {"make_iterator": Odd},
            InvalidTree,
            "'shard 0': get_state.. gives object, which is neither",
        ),
    ],
    ids=range(11),
)
def test_arguments_that_do_not_fit(changes: Any, kind: Any, match: str):
    with pytest.raises(kind, match=match):
        elastic(**changes)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x: {**x, "more": 1}, "an example of shard 2 has PyTreeDef.*more"),
        (
            lambda x: {**x, "row": x["row"][:3]},
            r"shard 2 has float32\[3\] at 'row', .* float32\[4\]",
        ),
        (lambda x: {**x, "n": 1.5}, r"shard 2 has float64\[\] at 'n', .* int64\[\]: all examples"),
    ],
    ids=["structure", "shape", "dtype"],
)
def test_examples_that_differ_are_found_at_their_batch(change: Any, match: str):
    data = elastic(lambda x: change(x) if x["n"] == 2 + 4 * 5 else x, prefetch=4)
    assert len(numbers(data, 2)) == 2
    for _ in range(2):
        with pytest.raises(InvalidTree, match=match):
            next(data)
    assert data.get_state()["position"] == 2


EXAMPLES: list[Any] = [
    1,
    None,
    [1],
    (1,),
    {"a": 1},
    {"a": 1, "b": 1},
    {"a": None, "b": 1},
    {"a": [1]},
    {"a": {"b": 1}},
    [1, None],
    OrderedDict(a=1),
    defaultdict(int, a=1),
    Pair(1, 1),
    Couple(1, 1),
    (1, 1),
]


@pytest.mark.parametrize("first", [example for example in EXAMPLES if example is not None])
def test_every_difference_of_structure_is_found(first: Any):
    match = r"an example of shard 0 has PyTreeDef.*, while the first .* has PyTreeDef"
    for other in EXAMPLES:
        data = made(lambda at, other=other: first if at < 8 else other)
        next(data)
        if jax.tree.structure(first) == jax.tree.structure(other):
            next(data)
            continue
        with pytest.raises(InvalidTree, match=match):
            next(data)


@pytest.mark.parametrize("is_masked", [lambda at: True, lambda at: at == 9], ids=["all", "one"])
def test_a_mask_is_not_dropped(is_masked: Any):
    def make(number: int) -> Any:
        row = np.full(3, number)
        return {"x": np.ma.masked_array(row, row > 2) if is_masked(number) else row}

    match = "leaf 'x' of an example is a MaskedArray, whose mask would be lost: call its filled"
    with pytest.raises(InvalidTree, match=match):
        list(made(make))


class Tensor:
    """As a tensor of PyTorch: its dtype is no numpy dtype, and numpy can't convert all of them."""

    dtype = "torch.float32"

    def __init__(self, values: Any):
        self.values = values

    def __array__(self, *given: Any, **named: Any) -> Any:
        if self.values is None:
            raise TypeError("unsupported ScalarType BFloat16")
        return self.values


def test_tensors_of_others_are_converted_by_numpy():
    expected = [batch["row"] for batch in itertools.islice(elastic(), 3)]
    found = itertools.islice(elastic(lambda x: Tensor(x["row"])), 3)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


NO_ARRAY = "leaf 'deep/1' .* which JAX has no arrays for: turn it"
NO_NUMPY = (
    r"leaf 'deep/1' of an example is a \w+, which numpy can't convert \(.+\): turn it into num"
)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: "text", NO_ARRAY),
        (lambda: b"bytes", NO_ARRAY),
        (lambda: np.array(["a"]), NO_ARRAY),
        (lambda: np.array([object()]), NO_ARRAY),
        (lambda: Tensor(None), NO_NUMPY),
        (lambda: jax.random.key(0), NO_NUMPY),
    ],
    ids=range(6),
)
def test_what_is_no_number_is_refused(make: Any, match: str):
    with pytest.raises(InvalidTree, match=match):
        next(elastic(lambda x: {"deep": [x["n"], make()]}))
    with pytest.raises(InvalidTree, match=match.replace("deep/1", r"\.")):
        next(elastic(lambda x: make()))


def test_a_sharding_that_only_some_leaves_fit():
    data = elastic(sharding=sharding(P("a", "b"), a=2, b=2))
    with pytest.raises(InvalidSharding, match=r"leaf 'n' of the batch has the shape \(8,\), which"):
        next(data)


def test_an_error_of_an_iterator_comes_at_its_batch():
    def fail(example: Any) -> Any:
        if example["n"] == 1 + 4 * 4:
            raise OSError("the disk is gone")
        return example

    data = elastic(fail, prefetch=4)
    assert len(numbers(data, 2)) == 2
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(data)
    assert caught.value.__notes__ == ["It was raised by the iterator of shard 1."]


def without(state: Any, shard: str) -> Any:
    return {**state, "states": {k: v for k, v in state["states"].items() if k != shard}}


@pytest.mark.parametrize(
    ("changes", "change", "match"),
    [
        (
            {"shards": 2},
            lambda state: state,
            "has shards=4, this iterator has shards=2: make it with as many shards",
        ),
        (
            {"batch": 4},
            lambda state: state,
            "has batch=8, this iterator has batch=4: make it with the saved batch size",
        ),
        ({}, lambda state: without(state, "2"), "it lacks shard 2, which this process runs: join"),
        ({}, lambda state: {"next_index": 3}, "it is the state of something else: was another it"),
        ({}, lambda state: b"bytes", "it is the state of something else"),
        ({}, lambda state: None, "it is the state of something else"),
    ],
    ids=range(6),
)
def test_a_state_that_does_not_fit_is_refused(changes: Any, change: Any, match: str):
    data = elastic()
    numbers(data, 1)
    other = elastic(**changes)
    with pytest.raises(Mismatch, match=match):
        other.set_state(change(data.get_state()))
    assert other.get_state()["position"] == 0


def test_another_batch_size_on_request():
    data = elastic()
    numbers(data, 1)
    other = elastic(batch=4)
    other.set_state({**data.get_state(), "batch": 4})
    assert numbers(other, 1) == [[8, 9, 10, 11]]


# Threads


def threads_of_data() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ostraka-data")]


def test_no_more_than_prefetch_batches_are_prepared():
    made = {shard: Numbers(shard) for shard in range(4)}
    before = set(threads_of_data())
    data = elastic(make_iterator=made.__getitem__, prefetch=3)
    assert before.issuperset(threads_of_data())
    numbers(data, 1)
    wait_until(lambda: made[3].at == 3 + 4 * 2 * 4)
    threading.Event().wait(0.1)
    assert made[3].at == 3 + 4 * 2 * 4
    data.close()


def test_close_ends_the_thread_and_closes_the_iterators():
    made = {shard: Numbers(shard) for shard in range(4)}
    before = set(threads_of_data())  # Those of other tests may take a moment to end.
    with elastic(make_iterator=made.__getitem__) as data:
        numbers(data, 2)
        assert len(set(threads_of_data()) - before) == 1
    assert before.issuperset(threads_of_data())
    assert all(iterator.is_closed for iterator in made.values())
    assert data.get_state()["position"] == 2
    data.close()
    for use in (lambda: next(data), lambda: data.set_state(data.get_state())):
        with pytest.raises(ValueError, match="is closed: make a new one"):
            use()


def test_the_thread_ends_when_nobody_has_the_iterator():
    before = set(threads_of_data())
    data = elastic()
    numbers(data, 2)
    (thread,) = set(threads_of_data()) - before
    reference = weakref.ref(data)
    del data
    gc.collect()
    assert reference() is None
    thread.join(60)
    assert not thread.is_alive()
