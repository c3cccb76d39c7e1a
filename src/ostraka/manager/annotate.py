"""Add metrics to a committed step, or pin it, from any process. No JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ostraka.errors import CheckpointNotFound, PathInTheWay
from ostraka.formats.ostraka.source import open_ostraka
from ostraka.layout.file_names import ADDED_NAME, PIN_NAME
from ostraka.manager.steps import metrics_as_json
from ostraka.reading.locate import locate
from ostraka.reading.metrics import read_added
from ostraka.storage import PathLike, claimed


def annotate(
    path: PathLike, *, metrics: Mapping[str, Any] | None = None, pinned: bool | None = None
) -> None:
    """Add metrics to a committed checkpoint, or exempt it from retention.

    Call it from a process that evaluates steps while another one trains. The Manager of the run
    takes the metrics into account from its next save on: `keep_best`, `keep_if` and `best` can then
    mean the best by evaluation. The checkpoint itself does not change. Metrics with the same name
    are replaced. If the step is saved again, they no longer count.

    Args:
        path: A checkpoint, `runs/7` for step 7 of `runs`, or `runs` for its newest step.
        metrics: Numbers by name.
        pinned: True exempts the step from retention, in later runs too. False ends that. None
            leaves it as it is.

    Raises:
        CheckpointNotFound: There is no such checkpoint. Perhaps the run has deleted it meanwhile.
        PathInTheWay: Another library wrote the checkpoint.
        TypeError: A metric is not a number.

    Example:
        >>> for step in ostraka.Manager("runs/a", read_only=True).watch():
        ...     loss = evaluate(f"runs/a/{step}")
        ...     ostraka.annotate(f"runs/a/{step}", metrics={"eval_loss": loss})
    """
    given: Any = metrics
    if not isinstance(given, Mapping | None):
        raise TypeError(f"metrics must be a dict, such as {{'loss': 0.5}}, not {given!r:.80}")
    if pinned not in (True, False, None) or type(pinned) is int:
        raise TypeError(f"pinned must be True, False or None, not {pinned!r:.80}")
    numbers = metrics_as_json(metrics or {})
    if not numbers and pinned is None:
        raise ValueError("annotate has nothing to do; pass metrics= or pinned=")
    place = locate(path)
    if not place.exists():
        raise CheckpointNotFound(f"there is no checkpoint at {place.location}")
    # Retention claims a step before it deletes it: nothing is added to one that is going.
    with claimed(place, wait=True):
        source = open_ostraka(place)
        if source is None:
            raise PathInTheWay(
                f"{place.location} was not written by Ostraka, which annotates only its own "
                "checkpoints; no Manager deletes it"
            )
        if numbers:
            save_id = source.saved.id
            known = metrics_as_json(read_added(place, save_id))
            document = {"save": save_id, "metrics": {**known, **numbers}}
            place.put(ADDED_NAME, json.dumps(document).encode())
        if pinned:
            place.put(PIN_NAME, b"")
        elif pinned is False:
            place.delete(PIN_NAME)
        place.sync("")
