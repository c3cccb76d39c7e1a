"""An iterator over global batches that does not depend on the number of processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

from jax.sharding import Mesh, PartitionSpec, Sharding

from ostraka.data._prepare import Preparation, Source, copy_state
from ostraka.data._rounds import Group
from ostraka.data._rows import plan_rows
from ostraka.errors import InvalidTree, Mismatch
from ostraka.tree.json_tree import decode_state, encode_state
from ostraka.tree.json_values import class_name

_VERSION = 1
_SUBJECT = "can't set the state of the ElasticIterator"
_REMEDIES = {
    "version": "install the newest ostraka",
    "shards": "make it with as many shards as the saved one",
    "batch": "make it with the saved batch size, or call set_state with another `batch` in the "
    "state, and the batches after it have other rows",
}


class ElasticIterator:
    """Global batches from K logical shards of the data, in the same order on any cluster.

    Each global batch takes `batch / shards` examples from every shard. The rows of shard 0 come
    first. A process runs the iterators of the shards whose rows its devices hold. A shard that
    several processes need is run by each of them.

    Put the iterator into the tree that you save. The checkpoint has one state per logical shard,
    taken after the last batch that you got. A restore on any number of processes and any mesh goes
    on with the next batch.

    A batch has the structure of an example. Its leaves are `jax.Array`s with a first dimension of
    `batch` rows. Without `jax_enable_x64`, 64-bit numbers become 32-bit ones, as in
    `jax.device_put`. Examples that are left when a shard ends do not fill a batch and are dropped:
    the iterator ends on all processes at the same batch.

    Every process must make its iterators in the same order, and take as many batches from each.

    Args:
        make_iterator: Returns the iterator, or the iterable, over the examples of a logical shard,
            given its number. The iterator needs `get_state` and `set_state`, as those of Grain
            have. An example is a pytree of numpy arrays and numbers. All examples have the same
            structure, shapes and dtypes. An example may use the memory of the one before.
        shards: The number of logical shards. Keep it for the whole run. It limits the number of
            processes that can share the work, so choose a multiple of all that you may use.
        batch: The rows of a global batch, a multiple of `shards`.
        sharding: Where the rows go: a NamedSharding, or `(mesh, spec)`. None is one device.
        prefetch: How many global batches to prepare in a thread before you ask for them.

    Raises:
        ValueError: If `shards` does not divide `batch`, or `prefetch` is not at least 1.
        InvalidSharding: If the rows can't be split as the sharding asks.
        InvalidTree: If an iterator has no `get_state` and `set_state`.

    Example:
        >>> data = ElasticIterator(make_iterator, shards=64, batch=512, sharding=sharding)
        >>> state = {"model": model, "data": data}
        >>> manager.restore(like=state)
        >>> for batch in data:
        ...     train_step(model, batch)
    """

    def __init__(
        self,
        make_iterator: Callable[[int], Any],
        *,
        shards: int,
        batch: int,
        sharding: Sharding | tuple[Mesh | Mapping[str, int], PartitionSpec] | None = None,
        prefetch: int = 2,
    ):
        if type(prefetch) is not int or prefetch < 1:
            raise ValueError(f"prefetch must be a number of at least 1, not {prefetch!r:.80}")
        self._plan = plan_rows(shards, batch, sharding)
        self._prefetch = prefetch
        iterators = _make_iterators(make_iterator, self._plan.runs)
        self._source = Source(self._plan, iterators)
        self._group = None if self._plan.is_local else Group(self._plan.processes)
        self._position = 0
        self._states: Mapping[int, Any] = self._source.states()
        self.get_state()  # which refuses what could not be saved
        self._preparation: Preparation | None = None
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._is_closed:
            raise ValueError("the ElasticIterator is closed: make a new one")
        if self._preparation is None:
            rounds = None if self._group is None else self._group.restart()
            self._preparation = Preparation(
                self._source, rounds, ahead=self._prefetch, position=self._position
            )
            weakref.finalize(self, self._preparation.stop).atexit = False
        batch = self._preparation.take()
        if batch is None:
            raise StopIteration
        self._position += 1
        self._states = batch.states
        return batch.arrays

    def get_state(self) -> dict[str, Any]:
        """Return this process's part of the state after the last batch.

        It has the states of the shards that no process with a lower number runs. One process alone
        has all of them. A save joins the parts of all processes, see `join_states`.

        Returns:
            A dict for JSON: `version`, `shards`, `batch`, `position` (the number of batches so
            far), and `states` by the number of the shard.
        """
        return {
            "version": _VERSION,
            "shards": self._plan.shards,
            "batch": self._plan.batch,
            "position": self._position,
            "states": {
                str(shard): encode_state(f"shard {shard}", state)
                for shard, state in self._states.items()
            },
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch at which a state was taken. Every process must call it.

        Args:
            state: The joined state of any number of processes. It may be a part if that has all
                shards that this process runs.

        Raises:
            Mismatch: If the state is of another number of shards or another batch size, or lacks
                a shard.

        Example:
            >>> data.set_state(ostraka.restore("runs/7", only="data")["data"])
        """
        if self._is_closed:
            raise ValueError("the ElasticIterator is closed: make a new one")
        states = self._check_state(state)
        self._stop()
        try:
            for shard, iterator in self._source.iterators.items():
                # A copy, since an iterator may go on to change what it is given.
                iterator.set_state(copy_state(shard, states[shard]))
        except BaseException:
            self._is_closed = True  # Some shards are elsewhere than others.
            raise
        self._position = state["position"]
        self._states = {shard: states[shard] for shard in states if shard in self._plan.saves}

    def _check_state(self, state: Any) -> Mapping[int, Any]:
        """Return the states of the shards that this process runs.

        Raises Mismatch, before anything has changed.
        """
        names = ("version", "shards", "batch", "position", "states")
        if not isinstance(state, Mapping) or any(name not in state for name in names):
            raise Mismatch(
                _SUBJECT,
                ["it is the state of something else: was another iterator saved at this path?"],
            )
        given = cast("Mapping[str, Any]", state)
        found = [given[name] for name in names[:3]]
        for name, value, own in zip(names, found, (_VERSION, *self._size), strict=False):
            if value != own:
                problem = f"it has {name}={value}, this iterator has {name}={own}"
                raise Mismatch(_SUBJECT, [f"{problem}: {_REMEDIES[name]}"])
        states: Mapping[str, Any] = given["states"]
        missing = [shard for shard in self._plan.runs if str(shard) not in states]
        if missing:
            problem = f"it lacks shard {missing[0]}, which this process runs"
            remedy = "join the parts of all processes with ElasticIterator.join_states"
            raise Mismatch(_SUBJECT, [f"{problem}: {remedy}"])
        return {
            shard: copy_state(shard, decode_state(states[str(shard)])) for shard in self._plan.runs
        }

    @property
    def _size(self) -> tuple[int, int]:
        return self._plan.shards, self._plan.batch

    @staticmethod
    def join_states(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of all shards, from the parts of all processes in order.

        `ostraka.save` calls it, so you need it only if you keep states elsewhere.

        Args:
            parts: What `get_state` returned on each process, after the same batch.

        Returns:
            A state for `set_state` on any number of processes.

        Raises:
            InvalidTree: If the parts do not belong together.
        """
        first = parts[0]
        states: dict[str, Any] = {}
        for process, part in enumerate(parts):
            for name in ("version", "shards", "batch", "position"):
                if part[name] != first[name]:
                    raise InvalidTree(
                        f"the ElasticIterator of process {process} has {name} {part[name]}, that "
                        f"of process 0 has {first[name]}: save after the same batch on all"
                    )
            for shard, state in part["states"].items():
                if states.setdefault(shard, state) != state:
                    raise InvalidTree(
                        f"several processes, one of them process {process}, have another state for "
                        f"shard {shard} of an ElasticIterator: give it a sharding over all "
                        "processes, or make_iterator a different part of the data on each"
                    )
        missing = first["shards"] - len(states)
        if missing:
            raise InvalidTree(
                f"the states of {missing} of {first['shards']} shards of an ElasticIterator are "
                "on no process that saves: save on all processes"
            )
        return {**first, "states": {key: states[key] for key in sorted(states, key=int)}}

    def close(self) -> None:
        """End the threads, and close the iterators of the shards. The state can still be saved."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop()
        for iterator in self._source.iterators.values():
            close = getattr(iterator, "close", None)
            if callable(close):
                close()

    def _stop(self) -> None:
        """End what is being prepared, and wait until no thread uses the iterators."""
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.stop()
            preparation.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        shards, batch = self._size
        return f"<ElasticIterator: {shards} shards, {batch} rows, after batch {self._position}>"


def _make_iterators(make_iterator: Callable[[int], Any], shards: Sequence[int]) -> dict[int, Any]:
    """Return the iterator of each shard. Raises InvalidTree if one has no state."""
    made: dict[int, Any] = {}
    seen: dict[int, int] = {}
    for shard in shards:
        found = make_iterator(shard)
        name = ".".join(class_name(type(found)))
        try:
            iterator = made[shard] = iter(found)
        except TypeError:
            raise InvalidTree(
                f"make_iterator({shard}) returned a {name}, which can't be iterated: return the "
                "iterator over the examples of the shard"
            ) from None
        for method in ("get_state", "set_state"):
            if not callable(getattr(iterator, method, None)):
                raise InvalidTree(
                    f"make_iterator({shard}) returned a {name}, whose iterator has no {method}, so "
                    "its position can't be saved: return one of Grain's, or wrap it in a class "
                    "with __next__, get_state and set_state"
                )
        if seen.setdefault(id(iterator), shard) != shard:
            raise InvalidTree(
                f"make_iterator returned the same iterator for the shards {seen[id(iterator)]} and "
                f"{shard}: each shard needs its own, over its own examples"
            )
    return made
