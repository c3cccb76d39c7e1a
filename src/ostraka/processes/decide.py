"""Decisions of process 0 for all processes. One process alone decides without messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ostraka import errors
from ostraka.processes.operation import Operation, ProcessFailed

_SHARED_ERRORS: tuple[type[errors.OstrakaError], ...] = (
    errors.Busy,
    errors.CheckpointNotFound,
    errors.PathInTheWay,
    errors.StoreError,
    errors.UnsupportedFormat,
)
"""Errors that every process can raise alike, since they need only their message."""


def decide_together(what: str, decide: Callable[[], Any]) -> Any:
    """Return on every process what `decide` returns on process 0 (JSON).

    Every process must call this, in the same order. If `decide` raises, all raise.
    """
    return agree(what, None, lambda _: decide())


def check_alike(described: list[dict[str, str]]) -> None:
    """Raise ProcessFailed for the first process whose arguments differ from process 0."""
    first = described[0]
    for process, found in enumerate(described):
        for name, value in first.items():
            if found[name] != value:
                raise ProcessFailed(
                    process,
                    f"it has {name}={found[name]} while process 0 has {name}={value}; all must "
                    "give the same",
                )


def agree(
    what: str,
    payload: Any,
    decide: Callable[[list[Any]], Any],
    *,
    timeout_s: float | None = None,
) -> Any:
    """Return what `decide` on process 0 returns for the payloads (JSON) of all processes.

    Raises OstrakaError if a process does not take part within `timeout_s`.
    """

    def answer(payloads: list[Any]) -> Any:
        try:
            return {"answer": decide(payloads)}
        except _SHARED_ERRORS as error:
            if operation.count == 1:
                raise
            # A subclass may need more than its message.
            kind = next(kind for kind in _SHARED_ERRORS if isinstance(error, kind))
            return {"error": kind.__name__, "message": str(error)}

    try:
        with Operation(what) as operation:
            answered = operation.exchange(
                "decide", payload, answer, timeout_s=timeout_s, is_last=True
            )
    except ProcessFailed as failure:
        if isinstance(failure.__cause__, Exception):
            raise failure.__cause__ from None
        raise errors.OstrakaError(f"{what} failed on {failure}") from None
    if "error" in answered:
        kinds = {kind.__name__: kind for kind in _SHARED_ERRORS}
        raise kinds[answered["error"]](answered["message"])
    return answered["answer"]
