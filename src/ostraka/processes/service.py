"""JAX's coordination service: a key-value store that lives in process 0.

Only this module uses the service's client, which is private to JAX.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ostraka.processes._presence import SWITCH, Connection, Door

_KEEP_OPERATIONS = 16
_KEEP_AT_MOST = 256
_NO_LIMIT_MS = 2**31 - 1
_A_MOMENT_S = 0.001


class Connections:
    """The connections to process 0, which show it when a process ends: see `_presence`."""

    def __init__(self, client: Any, host: str):
        self.client = client
        self._host = host
        self._door: Door | None = None
        self.is_told = False
        """On process 0: True if the others know where to connect, or can't connect."""
        self._connection: Connection | None = None

    def open(self) -> Any:
        """On process 0: let others connect. Return the address, or None if they can't connect."""
        if os.environ.get(SWITCH) == "off":
            return None
        if self._door is None:
            try:
                self._door = Door(self._host)
            except OSError:
                return None
        return self._door.address

    def connect(self, address: Any, process: int) -> None:
        """On other processes: connect to process 0, which then knows when this one ends."""
        self._connection = Connection(self._host, address, process)

    def close(self) -> None:
        for held in (self._door, self._connection):
            if held is not None:
                held.close()
        self._door = self._connection = None

    def find_ended(self) -> set[int]:
        """On process 0: return the processes that have ended. This makes no call."""
        return set() if self._door is None else self._door.find_ended()


@dataclass(slots=True)
class Member:
    """One process of the service, and its operations."""

    process: int
    count: int
    client: Any
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers of operations: all processes begin them in the same order."""
    ended: deque[str] = field(default_factory=deque[str])
    """On process 0: the prefixes of operations that it has left, oldest first."""
    prefix: str = "ostraka"
    connections: Connections | None = None

    def begin_operation(self) -> Keys:
        return Keys(self.client, f"{self.prefix}/{next(self.numbers)}")

    def aside(self, name: str) -> Member:
        """Return the same process for operations with numbers of their own.

        So a thread can have its own operations, in any order with those of the program.
        """
        prefix = f"{self.prefix}/{name}"
        return replace(self, numbers=itertools.count(1), ended=deque[str](), prefix=prefix)

    def forget_old(self) -> None:
        """On process 0: delete the keys of old operations that all processes have left.

        Keys of an operation that a dead process never leaves are deleted in the end, too.
        """
        while len(self.ended) > _KEEP_OPERATIONS:
            oldest = self.ended.popleft()  # so that no other thread has it
            if len(self.ended) < _KEEP_AT_MOST and not Keys(self.client, oldest).have_all_left(
                _A_MOMENT_S
            ):
                self.ended.appendleft(oldest)
                return
            self.client.key_value_delete(f"{oldest}/")


ALONE = Member(0, 1, None)
_this = Member(0, 1, None)


def this_member() -> Member:
    """Return this process, as JAX knows it."""
    import jax

    count = jax.process_count()
    if count == 1:
        return ALONE
    from jax._src import distributed

    client: Any = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            f"JAX has {count} processes but no coordination service: call "
            "jax.distributed.initialize() first"
        )
    _this.process, _this.count, _this.client = jax.process_index(), count, client
    if _this.connections is None or _this.connections.client is not client:
        if _this.connections is not None:
            _this.connections.close()  # JAX was initialized again.
        host = str(distributed.global_state.coordinator_address).rpartition(":")[0]
        _this.connections = Connections(client, host)
    return _this


class Keys:
    """The keys of one operation, with JSON values. Each method is one call of the service."""

    def __init__(self, client: Any, prefix: str):
        self._client = client
        self.prefix = prefix

    def set(self, key: str, value: Any) -> None:
        self._client.key_value_set(f"{self.prefix}/{key}", json.dumps(value), allow_overwrite=True)

    def create(self, key: str, value: Any) -> bool:
        """Set a key unless it exists. Return True if it was set."""
        try:
            self._client.key_value_set(f"{self.prefix}/{key}", json.dumps(value))
        except Exception as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def wait_for(self, key: str, timeout_ms: int = _NO_LIMIT_MS) -> Any:
        """Return the value of a key, as soon as it is set."""
        text = self._client.blocking_key_value_get(f"{self.prefix}/{key}", timeout_ms)
        return json.loads(text)

    def by_process(self, key: str) -> dict[int, Any]:
        """Return the value of each process below `key`."""
        found = self._client.key_value_dir_get(f"{self.prefix}/{key}/")
        return {int(name.rsplit("/", 1)[1]): json.loads(value) for name, value in found}

    def count_up(self, key: str) -> int:
        """Return how often this key was counted up, this time included."""
        return self._client.key_value_increment(f"{self.prefix}/{key}", 1)

    def leave(self, count: int) -> None:
        """Note that one of `count` processes has left the operation."""
        if self.count_up("left") == count:
            self.set("all_left", True)

    def have_all_left(self, within_s: float) -> bool:
        """Return True if all leave the operation within so many seconds."""
        try:
            self.wait_for("all_left", int(within_s * 1000))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return False
            raise
        return True
