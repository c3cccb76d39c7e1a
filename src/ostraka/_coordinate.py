"""Agree, report and commit across processes, on JAX's own coordination service.

This is the only module that knows the service's client, which JAX keeps private. With one process
every step happens here and now.

An operation goes through named stages. In each, every process posts what it has, or its error;
process 0 collects, decides, and posts the verdict that all wait for. The first error is the
verdict at once, without waiting for the rest. While an operation runs each process posts a pulse,
so that one which was killed or hangs is named after `DEAD_AFTER_S` rather than waited for.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

from ostraka._lifetime import Latch
from ostraka.errors import OstrakaError, describe

DEAD_AFTER_S = 30.0
"""A process whose pulse has stood still for this long no longer counts on."""
ARRIVE_WITHIN_S = 600.0
"""How long the others wait for a process that has not come to the operation at all."""

_PULSE_EVERY_S = 1.0
_LONGEST_LOOK_S = 1.0
_POLL_S = 0.02
_KEEP_OPERATIONS = 16
_KEEP_AT_MOST = 256
_VERDICT_WITHIN_S = 5.0

_numbers = itertools.count(1)
_ended: deque[str] = deque()
"""On process 0, the prefixes of operations that it has left, oldest first."""
_forgetting = threading.Lock()


class ProcessFailed(Exception):
    """Some process can't go on, so no process can."""

    def __init__(self, process: int, reason: str):
        self.process = process
        self.reason = reason
        super().__init__(f"process {process}: {reason}")


class _Client(Protocol):
    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
    def key_value_try_get(self, key: str) -> str: ...
    def key_value_delete(self, key: str) -> None: ...


def _service() -> tuple[int, int, _Client | None]:
    """This process's number, the number of processes, and the service's client."""
    import jax

    count = jax.process_count()
    if count == 1:
        return 0, 1, None
    from jax._src import distributed

    client: Any = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            f"JAX has {count} processes but no coordination service: call "
            "jax.distributed.initialize() first"
        )
    return jax.process_index(), count, client


class Operation:
    """One save or restore that all processes do together. Use as a context manager.

    An exception inside becomes ProcessFailed on every process; with `own_errors` a process that
    raised one of Ostraka's own raises just that. It must be entered by every process, in the same
    order among operations, before anything that may fail on one process alone.
    """

    def __init__(self, name: str, *, alone: bool = False, own_errors: bool = False):
        process, count, client = (0, 1, None) if alone else _service()
        self.process = process
        self.count = count
        self._name = name
        self._own_errors = own_errors
        self._client = client
        self._verdict: ProcessFailed | None = None
        self._deciding = threading.Lock()
        self._is_decided = False
        """On process 0: the last stage has its answer, which nothing may contradict any more."""
        self._closed = Latch()
        self._threads: list[threading.Thread] = []
        self._prefix = ""
        if client is not None:
            self._prefix = f"ostraka/{next(_numbers)}"

    def __enter__(self) -> Self:
        try:
            if self._client is not None:
                self._start(self._pulse)
                if self.process == 0:
                    self._forget_old(self._client)
                    self._start(self._watch)
        except BaseException:
            # Nobody else will, and a pulse that goes on would have the others wait for ever.
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._closed.is_set():
            return
        failure = None
        if error is not None and not isinstance(error, ProcessFailed) and self._client is not None:
            failure = self._report(error)
        self._closed.set()
        for thread in self._threads:
            if thread.ident is not None:  # else the system had none left
                thread.join()
        if self.process == 0 and self._client is not None:
            _ended.append(self._prefix)
        keep = self._own_errors and isinstance(error, OstrakaError)
        if failure is not None and isinstance(error, Exception) and not keep:
            raise failure from error

    def _report(self, error: BaseException) -> ProcessFailed:
        """Tell the others; returns the verdict, which may be another process's earlier error."""
        mine = ProcessFailed(self.process, describe(error))
        if self._verdict is None:
            with suppress(Exception):  # The service may have gone: not in the place of the error.
                if self.process == 0:
                    self._post_verdict(mine)
                else:
                    self._set(f"error/{self.process}", json.dumps(mine.reason))
        deadline = time.monotonic() + _VERDICT_WITHIN_S
        while self._verdict is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self._verdict or mine

    def exchange(
        self,
        stage: str,
        payload: Any,
        decide: Callable[[list[Any]], Any],
        *,
        timeout_s: float | None = None,
        is_last: bool = False,
    ) -> Any:
        """Give `payload` (JSON) to process 0, and return what its `decide` makes of all of them.

        `decide` runs on process 0 only. Raises ProcessFailed on every process if any process failed
        or `decide` raised; on process 0 the error of `decide` is the cause. What was decided in the
        last stage holds for all, even if a process fails before it has heard of it.
        """
        if self._client is None:
            self.check()
            return decide([payload])
        self._set(f"{stage}/post/{self.process}", json.dumps(payload))
        if self.process == 0:
            payloads = self._collect(stage, timeout_s)
            return self._decide(stage, payloads, decide, is_last)
        return self._await_answer(stage)

    def give_up(self, reason: str) -> None:
        """From any thread: have this operation fail on all processes, unless it is decided."""
        mine = ProcessFailed(self.process, reason)
        if self._client is None:
            self._verdict = self._verdict or mine
        elif self.process != 0:
            self._set(f"error/{self.process}", json.dumps(reason))
        else:
            with self._deciding:
                if self._verdict is None and not self._is_decided:
                    self._post_verdict(mine)

    def check(self) -> None:
        """Raise ProcessFailed if this operation has failed on any process."""
        if self._verdict is not None:
            raise self._verdict

    def wait_until_left(self) -> None:
        """On process 0, after the end: wait a little for the others to be done with it as well."""
        if self._client is None:
            return
        deadline = time.monotonic() + _VERDICT_WITHIN_S
        with suppress(Exception):  # The service itself may be what failed.
            while time.monotonic() < deadline:
                pulses = self._list("pulse")
                if all(value == "done" for _, value in pulses):
                    return
                time.sleep(_POLL_S)

    # Process 0

    def _decide(
        self, stage: str, payloads: list[Any], decide: Callable[[list[Any]], Any], is_last: bool
    ) -> Any:
        # Under the lock, so that the watch can't fail an operation that is being committed.
        with self._deciding:
            self.check()
            try:
                answer = decide(payloads)
            except ProcessFailed as failure:
                self._post_verdict(failure)
                raise
            except Exception as error:
                failure = ProcessFailed(0, describe(error))
                self._post_verdict(failure)
                raise failure from error
            self._is_decided = is_last
            self._set(f"{stage}/answer", json.dumps(answer))
            return answer

    def _collect(self, stage: str, timeout_s: float | None) -> list[Any]:
        limit = ARRIVE_WITHIN_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        while True:
            self.check()
            posted = self._posts(stage)
            if len(posted) == self.count:
                self.check()
                return [posted[p] for p in range(self.count)]
            if time.monotonic() > deadline:
                # Those that have a pulse are at work, which may take as long as it takes.
                arrived = {int(key.rsplit("/", 1)[1]) for key, _ in self._list("pulse")}
                for late in sorted(set(range(self.count)) - arrived):
                    failure = ProcessFailed(
                        late, f"it did not come to the {self._name} in {limit:g} s"
                    )
                    self._post_verdict(failure)
                    raise failure
            time.sleep(_POLL_S / 10)

    def _posts(self, stage: str) -> dict[int, Any]:
        return {
            int(key.rsplit("/", 1)[1]): json.loads(value)
            for key, value in self._list(f"{stage}/post")
        }

    def _watch(self) -> None:
        """Turn the first error, or a pulse that has stopped, into the verdict."""
        seen: dict[int, tuple[str, float]] = {}
        looked_at_s = time.monotonic()
        awake_s = 0.0
        while not self._closed.wait(_POLL_S * 5):
            # While this process stood still, perhaps the whole machine, it could not hear others.
            now_s = time.monotonic()
            awake_s += min(now_s - looked_at_s, _LONGEST_LOOK_S)
            looked_at_s = now_s
            with self._deciding:
                if self._verdict is not None or self._is_decided or self._closed.is_set():
                    return
                failure = self._first_failure(seen, awake_s)
                if failure is not None:
                    self._post_verdict(failure)
                    return

    def _first_failure(
        self, seen: dict[int, tuple[str, float]], awake_s: float
    ) -> ProcessFailed | None:
        for key, value in self._list("error"):
            return ProcessFailed(int(key.rsplit("/", 1)[1]), json.loads(value))
        for key, value in self._list("pulse"):
            process = int(key.rsplit("/", 1)[1])
            if seen.get(process, ("", 0.0))[0] != value:
                seen[process] = (value, awake_s)
            elif value != "done" and awake_s - seen[process][1] > DEAD_AFTER_S:
                return ProcessFailed(
                    process,
                    f"it has not been heard of for {DEAD_AFTER_S:g} s; it was killed, or its host "
                    "is gone",
                )
        return None

    def _post_verdict(self, failure: ProcessFailed) -> None:
        self._verdict = failure
        self._set("verdict", json.dumps([failure.process, failure.reason]))

    def _forget_old(self, client: _Client) -> None:
        """Delete what operations left with the service, but not of one that others are still in.

        One that some process never leaves, because it died, is deleted in the end all the same.
        """
        with _forgetting:
            while len(_ended) > _KEEP_OPERATIONS:
                pulses = client.key_value_dir_get(f"{_ended[0]}/pulse/")
                # A process without a pulse has not come yet, and must find how it ended.
                is_over = [value for _, value in pulses] == ["done"] * self.count
                if not is_over and len(_ended) < _KEEP_AT_MOST:
                    return
                client.key_value_delete(f"{_ended.popleft()}/")

    # Every process

    def _await_answer(self, stage: str) -> Any:
        # Process 0 is always there: the service lives in it, and JAX ends all others when it dies.
        assert self._client is not None
        while True:
            self.check()
            try:
                text = self._client.blocking_key_value_get(f"{self._prefix}/{stage}/answer", 250)
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            else:
                return json.loads(text)

    def _pulse(self) -> None:
        """Say that this process is alive, and hear what process 0 decided."""
        beat = 0
        since = 0.0
        while True:
            if time.monotonic() - since >= _PULSE_EVERY_S:
                beat += 1
                since = time.monotonic()
                self._set(f"pulse/{self.process}", str(beat))
            if self.process != 0 and self._verdict is None:
                text = self._try_get("verdict")
                if text is not None:
                    self._verdict = ProcessFailed(*json.loads(text))
            if self._closed.wait(_POLL_S * 5):
                self._set(f"pulse/{self.process}", "done")
                return

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            # What the service's client says further down is about itself.
            said = (str(error).splitlines() or [""])[0]
            reason = f"the coordination service can't be reached ({type(error).__name__}: {said})"
            self._verdict = self._verdict or ProcessFailed(self.process, reason)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(
            target=self._guarded, args=(work,), name=f"ostraka{work.__name__}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _set(self, key: str, value: str) -> None:
        assert self._client is not None
        self._client.key_value_set(f"{self._prefix}/{key}", value, allow_overwrite=True)

    def _list(self, key: str) -> list[tuple[str, str]]:
        assert self._client is not None
        return self._client.key_value_dir_get(f"{self._prefix}/{key}/")

    def _try_get(self, key: str) -> str | None:
        assert self._client is not None
        try:
            return self._client.key_value_try_get(f"{self._prefix}/{key}")
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
