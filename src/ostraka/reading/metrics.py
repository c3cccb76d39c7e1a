"""The metrics of a step, in its metadata and in the file that `annotate` adds. No JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from ostraka.errors import Damaged, Problem
from ostraka.layout.file_names import ADDED_NAME
from ostraka.storage import Store

RESERVED_KEY = "ostraka.manager"
"""The key in a checkpoint's metadata under which the manager stores its own data."""

NO_METRICS: Mapping[str, float] = MappingProxyType({})
_MOST_ADDED_BYTES = 1 << 20


def metrics_in(user: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the metrics in a checkpoint's metadata, without values that are not numbers."""
    own: Any = user.get(RESERVED_KEY)
    metrics: Any = own.get("metrics") if isinstance(own, dict) else None
    if not isinstance(metrics, dict):
        return NO_METRICS
    found: dict[str, float] = {}
    for name, value in metrics.items():
        with suppress(TypeError, ValueError, OverflowError):
            found[name] = float(value)
    return MappingProxyType(found)


def read_added(place: Store, save_id: str | None) -> Mapping[str, float]:
    """Return the metrics that were added to a checkpoint after its commit.

    A step that was saved again has another id, and the metrics of its predecessor do not count.
    """
    try:
        document = json.loads(place.get(ADDED_NAME, _MOST_ADDED_BYTES))
    except FileNotFoundError:
        return NO_METRICS
    except (ValueError, RecursionError) as error:
        raise Damaged(place.location, [Problem(ADDED_NAME, f"it is no JSON: {error}")]) from error
    if not isinstance(document, dict) or document.get("save") != save_id:
        return NO_METRICS
    return metrics_in({RESERVED_KEY: document})
