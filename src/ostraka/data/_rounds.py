"""How processes agree on the number of batches that all of them have.

A process may hand a batch out once every process has its rows. So each one posts how many it has
prepared, and the last to post publishes the least of these numbers. A round like this takes three
calls of the coordination service from each process, and five from the last. It happens in a thread
while earlier batches are being used, and confirms all batches that are prepared by then.

The end of the data, or the error of a process, is a part of the same answer. So all processes end,
or raise, at the same batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ostraka.common.record import logger
from ostraka.processes.operation import name_processes
from ostraka.processes.service import Keys, this_member

_LOOK_EVERY_S = 0.5
"""How often a waiting process looks whether it is still wanted.

The end of the program waits so long. Python ends a thread that comes back from JAX's client later,
and then the client aborts the process.
"""
_WARN_AFTER_S = 60

_counts: Counter[tuple[int, str]] = Counter()
"""By service and name of a group: the number of groups so far, the same on all processes."""


@dataclass(frozen=True, slots=True)
class Post:
    """What a process knows when it comes to a round."""

    batches: int
    """How many it has prepared."""
    is_over: bool
    """True if it can't prepare another."""
    error: str | None
    """Why, unless its data has ended."""
    alike: dict[str, str]
    """What must be the same on all processes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What holds for all processes."""

    batches: int
    is_over: bool
    error: str | None
    """The process that failed, and why."""


class Group:
    """The processes that share an iterator. All must make it in the same order among its kind."""

    def __init__(self, processes: Sequence[int]):
        member = this_member()
        self._me = member.process
        self._processes = processes
        name = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
        _counts[id(member.client), name] += 1
        self._client = member.client
        self._prefix = f"ostraka/data/{name}/{_counts[id(member.client), name]}"
        self._generation = 0

    def restart(self) -> Rounds:
        """Begin to count anew, as all processes do. Answers to earlier rounds are void."""
        self._generation += 1
        before = f"{self._prefix}/{self._generation - 1}/"
        keys = Keys(self._client, f"{self._prefix}/{self._generation}")
        return Rounds(keys, self._me, self._processes, before, self._client)


class Rounds:
    """The rounds of one run through the data."""

    def __init__(self, keys: Keys, me: int, processes: Sequence[int], before: str, client: Any):
        self._keys = keys
        self._me = me
        self._processes = processes
        self._before = before
        """The prefix of keys that nobody needs once all have come to the next round."""
        self._client = client
        self._number = 0

    def confirm(self, post: Post, is_wanted: Callable[[], bool]) -> Answer | None:
        """Return what all processes have, once all have posted. None if it is no longer wanted."""
        keys, number = self._keys, self._number
        self._number += 1
        said = [post.batches, post.is_over, post.error, post.alike]
        keys.set(f"{number}/post/{self._me}", said)
        if keys.count_up(f"{number}/count") == len(self._processes):
            posts = {p: Post(*said) for p, said in keys.by_process(f"{number}/post").items()}
            answer = _decide(posts)
            keys.set(f"{number}/answer", [answer.batches, answer.is_over, answer.error])
            # All have posted here, so all have the answers of the rounds before.
            self._client.key_value_delete(self._before)
            self._tell_old(number)
            return answer
        waited_s = 0.0
        while is_wanted():
            try:
                found = keys.wait_for(f"{number}/answer", int(_LOOK_EVERY_S * 1000))
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            else:
                self._tell_old(number)
                return Answer(*found)
            waited_s += _LOOK_EVERY_S
            if waited_s == _WARN_AFTER_S:
                self._warn(number)
        return None

    def _tell_old(self, number: int) -> None:
        self._before = f"{self._keys.prefix}/{number}/"

    def _warn(self, number: int) -> None:
        posted = self._keys.by_process(f"{number}/post")
        missing = [process for process in self._processes if process not in posted]
        if missing:
            logger.warning(
                "process %d has waited %d s for the next batch of %s: every process must take as "
                "many batches from an ElasticIterator",
                self._me,
                _WARN_AFTER_S,
                name_processes(missing),
            )


def _decide(posts: dict[int, Post]) -> Answer:
    first = min(posts)
    for process, post in sorted(posts.items()):
        for name, value in posts[first].alike.items():
            found = post.alike.get(name, "")
            if found and value and found != value:
                return Answer(
                    0,
                    True,
                    f"process {process} has {name} {found}, while process {first} has {value}; "
                    "all must have the same",
                )
    batches = min(post.batches for post in posts.values())
    over = {p: post for p, post in posts.items() if post.is_over and post.batches == batches}
    failed = [process for process in sorted(over) if over[process].error is not None]
    error = f"process {failed[0]}: {over[failed[0]].error}" if failed else None
    return Answer(batches, bool(over), error)
