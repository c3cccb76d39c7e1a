"""Prepare global batches ahead, in a thread, with the states after each."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ostraka.data._rounds import Post, Rounds
from ostraka.data._rows import RowPlan
from ostraka.data._stack import Stacker
from ostraka.errors import OstrakaError, describe
from ostraka.tree.json_tree import decode_state, encode_state

_END_WITHIN_S = 5.0
"""How long the end of the program waits for a thread."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A prepared batch."""

    arrays: Any
    states: Mapping[int, Any]
    """By shard that this process saves: its state after this batch."""


class Source:
    """The iterators of this process's shards."""

    def __init__(self, plan: RowPlan, iterators: Mapping[int, Any]):
        self.plan = plan
        self.iterators = iterators
        self._stacker = Stacker(plan)

    def next_batch(self) -> Batch | None:
        """Return the next batch, or None if a shard has ended."""
        try:
            arrays = self._stacker.stack(self._rows())
        except _Ended:
            return None
        return Batch(arrays, self.states())

    def _rows(self) -> Iterator[tuple[int, Any]]:
        count = self.plan.rows_per_shard
        for shard, iterator in self.iterators.items():
            try:
                for _ in range(count):
                    yield shard, next(iterator)
            except StopIteration:
                raise _Ended from None
            except Exception as error:
                error.add_note(f"It was raised by the iterator of shard {shard}.")
                raise

    def states(self) -> dict[int, Any]:
        """Return the state of each shard that this process saves, safe from later changes."""
        saves = self.plan.saves
        return {
            shard: copy_state(shard, iterator.get_state())
            for shard, iterator in self.iterators.items()
            if shard in saves
        }

    @property
    def examples(self) -> str:
        """The structure of the examples, or nothing before the first."""
        return str(self._stacker.spec or "")


class _Ended(Exception):
    """Raised if a shard has no more examples."""


_IMMUTABLE = frozenset((int, str, float, bool, bytes, type(None)))


def copy_state(shard: int, state: Any) -> Any:
    """Return the state of a shard, safe from later changes. `deepcopy` takes four times as long."""
    try:
        return _copied(state)
    except _OtherClass:  # As a save keeps it, which may refuse it.
        return decode_state(encode_state(f"shard {shard}", state))


class _OtherClass(Exception):
    """Raised for an OrderedDict and its like."""


def _copied(state: Any) -> Any:
    kind = type(state)
    if kind in _IMMUTABLE:
        return state
    if kind is dict:
        return {key: _copied(value) for key, value in state.items()}
    if kind is list:
        return [_copied(value) for value in state]
    if kind is tuple:
        return tuple(map(_copied, state))
    if isinstance(state, dict | list | tuple):
        raise _OtherClass
    return state


class Preparation:
    """Batches that a thread prepares, up to `ahead` of those that were taken.

    With `rounds`, a second thread has the other processes confirm them: see `_rounds`. The threads
    keep this object alive, and nothing else.
    """

    def __init__(self, source: Source, rounds: Rounds | None, *, ahead: int, position: int):
        self._source = source
        self._rounds = rounds
        self._ahead = ahead
        self._position = position
        self._changed = threading.Condition()
        self._prepared: deque[Batch] = deque()
        self._taken = 0
        self._is_over = False
        """True if this process can't prepare another batch, for the error or at the end."""
        self._error: BaseException | None = None
        self._confirmed = 0
        """How many batches all processes have."""
        self._is_final = False
        """True if they will not have more."""
        self._common_error: BaseException | None = None
        self._is_stopped = False
        self._threads = [threading.Thread(target=self._prepare, name="ostraka-data", daemon=True)]
        if rounds is not None:
            confirm = threading.Thread(
                target=self._confirm, args=(rounds,), name="ostraka-data-rounds", daemon=True
            )
            self._threads.append(confirm)
        for thread in self._threads:
            thread.start()
        _running.add(self)

    def take(self) -> Batch | None:
        """Return the next batch, once all processes have it. None at the end of the data."""
        with self._changed:
            while self._taken == self._confirmed and not self._is_final:
                self._changed.wait()
            if self._taken < self._confirmed:
                self._taken += 1
                self._changed.notify_all()
                return self._prepared.popleft()
        if self._common_error is not None:
            raise self._common_error
        return None

    def stop(self) -> None:
        """Have the threads end soon."""
        with self._changed:
            self._is_stopped = True
            self._prepared.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until no thread uses the iterators any more."""
        self._threads[0].join()

    def join_all(self, timeout_s: float) -> None:
        """Wait until the threads have ended, at most so long for each."""
        for thread in self._threads:
            thread.join(timeout_s)

    # In threads

    def _prepare(self) -> None:
        while True:
            with self._changed:
                while self._count - self._taken >= self._ahead and not self._is_stopped:
                    self._changed.wait()
                if self._is_stopped:
                    return
            try:
                batch, error = self._source.next_batch(), None
            except BaseException as raised:
                batch, error = None, raised
            with self._changed:
                if self._is_stopped:
                    return
                if batch is not None:
                    self._prepared.append(batch)
                self._is_over, self._error = batch is None, error
                if self._rounds is None:
                    self._confirmed, self._is_final = self._count, self._is_over
                    self._common_error = error
                self._changed.notify_all()
                if self._is_over:
                    return
            del batch

    @property
    def _count(self) -> int:
        """How many batches this process has prepared."""
        return self._taken + len(self._prepared)

    def _confirm(self, rounds: Rounds) -> None:
        try:
            while not self._is_final:
                post = self._next_post()
                answer = None if post is None else rounds.confirm(post, self._is_wanted)
                if answer is None:
                    return
                with self._changed:
                    self._confirmed, self._is_final = answer.batches, answer.is_over
                    if answer.error is not None:
                        is_mine = self._error is not None and self._count == answer.batches
                        at = self._position + answer.batches
                        self._common_error = (
                            self._error
                            if is_mine
                            else OstrakaError(
                                f"no process has batch {at} of the data, because {answer.error}"
                            )
                        )
                    self._changed.notify_all()
        except Exception as error:  # The service has gone.
            with self._changed:
                self._is_final, self._common_error = True, error
                self._changed.notify_all()

    def _next_post(self) -> Post | None:
        """Wait until it is time for a round. Return what this process has."""
        with self._changed:
            while not (
                self._is_stopped
                or (
                    (self._count > self._confirmed or self._is_over)
                    and self._confirmed - self._taken <= self._ahead // 2
                )
            ):
                self._changed.wait()
            if self._is_stopped:
                return None
            plan = self._source.plan
            alike = {
                "shards": str(plan.shards),
                "batch": str(plan.batch),
                "position": str(self._position),
                "examples": self._source.examples,
            }
            error = None if self._error is None else describe(self._error)
            return Post(self._count, self._is_over, error, alike)

    def _is_wanted(self) -> bool:
        return not self._is_stopped


_running: weakref.WeakSet[Preparation] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the threads before the modules go that they use."""
    running = list(_running)
    for preparation in running:
        preparation.stop()
    for preparation in running:
        preparation.join_all(_END_WITHIN_S)
