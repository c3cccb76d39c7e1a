"""Futures that custom handlers return from `async_save`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol, runtime_checkable

from ostraka.compat.orbax._files import await_result
from ostraka.compat.orbax._names import absent


@runtime_checkable
class Future(Protocol):
    def result(self, timeout: float | None = None) -> Any: ...


class NoopFuture:
    """A future that is done."""

    def cancel(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> Any:
        return None


class CommitFuture:
    """A coroutine that runs in a thread of its own."""

    def __init__(self, coro: Any, *, name: str | None = None, **options: Any):
        thread = ThreadPoolExecutor(1, name or "")
        self._work = thread.submit(await_result, coro)
        thread.shutdown(wait=False)

    def result(self, timeout: float | None = None) -> Any:
        if wait([self._work], timeout).not_done:
            raise TimeoutError(f"the commit has not ended after {timeout} s")
        return self._work.result()


CommitFutureAwaitingContractedSignals = CommitFuture


ChainedFuture = absent("future.ChainedFuture", "return a list of futures")


class AsyncResponse:
    """Work in the background. `result` waits for it."""

    def __init__(self, wait: Callable[[float | None], Any]):
        self._wait = wait
        self._result: list[Any] = []
        self._lock = threading.Lock()

    def result(self, timeout: float | None = None) -> Any:
        with self._lock:
            if not self._result:
                self._result.append(self._wait(timeout))
            return self._result[0]
