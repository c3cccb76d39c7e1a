"""A repair from the live tree, by all processes of a run. With JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ostraka._capture import capture
from ostraka._coordinate import Operation, ProcessFailed
from ostraka._handle import wait_for_background
from ostraka._metadata import Metadata
from ostraka.errors import RepairFailed
from ostraka.integrity._live import LiveOrigin
from ostraka.integrity._repair_report import RepairReport

Run = Callable[[Operation, Callable[[Metadata], LiveOrigin]], RepairReport]


def repair_together(location: str, tree: Any, run: Run) -> RepairReport:
    """`run` the stages on every process, each with what it holds of the tree.

    Raises RepairFailed on all processes if one of them fails; that one raises its own error.
    """
    wait_for_background()
    operation = Operation(f"repair of {location}", own_errors=True)
    try:
        with operation:
            captured = capture(tree)

            def make_live(metadata: Metadata) -> LiveOrigin:
                return LiveOrigin(captured, metadata, operation.process, operation.count)

            return run(operation, make_live)
    except ProcessFailed as failure:
        operation.wait_until_left()  # Before another may have the place.
        raise RepairFailed(location, failure.process, failure.reason) from failure.__cause__
