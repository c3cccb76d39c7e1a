"""Futures that handlers of one's own return from `async_save`."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Protocol, runtime_checkable

from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)


@runtime_checkable
class Future(Protocol):
    def result(self, timeout: float | None = None) -> Any: ...


class NoopFuture:
    """A future of something that is done."""

    def result(self, timeout: float | None = None) -> Any:
        return None


class CommitFuture:
    """A coroutine that runs in a thread of its own."""

    def __init__(self, coro: Any, *, name: str | None = None, **options: Any):
        self._errors: list[BaseException] = []
        self._value: Any = None

        def run() -> None:
            try:
                self._value = asyncio.run(_awaited(coro))
            except BaseException as error:
                self._errors.append(error)

        self._thread = threading.Thread(target=run, name=name)
        self._thread.start()

    def result(self, timeout: float | None = None) -> Any:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the commit has not ended after {timeout} s")
        if self._errors:
            raise self._errors[0]
        return self._value


async def _awaited(coroutine: Any) -> Any:
    return await coroutine


CommitFutureAwaitingContractedSignals = CommitFuture
