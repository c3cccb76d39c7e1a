"""Metrics of a step, as stored in the checkpoint's own metadata. No JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

RESERVED_KEY = "ostraka.manager"
"""The key in a checkpoint's metadata under which the manager stores its own data."""

NO_METRICS: Mapping[str, float] = MappingProxyType({})


def with_metrics(
    metadata: Mapping[str, Any] | None, metrics: Mapping[str, Any] | None, step: int
) -> dict[str, Any]:
    """The user's metadata, with the manager's own data added."""
    _check_dict("metadata", metadata, "")
    _check_dict("metrics", metrics, ", such as {'loss': 0.5}")
    user = dict(metadata or {})
    if RESERVED_KEY in user:
        raise ValueError(
            f"metadata has the key {RESERVED_KEY!r}, which is the manager's own; choose another"
        )
    kept = {name: _encode(name, value) for name, value in (metrics or {}).items()}
    return {**user, RESERVED_KEY: {"step": step, "metrics": kept}}


def metrics_in(user: Mapping[str, Any]) -> Mapping[str, float]:
    """The metrics in a checkpoint's metadata; what is not a number there is left out."""
    own: Any = user.get(RESERVED_KEY)
    metrics: Any = own.get("metrics") if isinstance(own, dict) else None
    if not isinstance(metrics, dict):
        return NO_METRICS
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
    return MappingProxyType(found)


def _check_dict(name: str, given: Any, example: str) -> None:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict{example}, not {given!r}")


def _encode(name: Any, value: Any) -> float | str:
    """A number as JSON; those that JSON lacks as text, so that a loss of NaN can be saved too."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a metric must be text, not {name!r}")
    # Text that looks like a number is probably a mistake; so is a complex number.
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    try:
        if isinstance(value, str | bytes | bytearray) or kind in ("c", "S", "U"):
            raise TypeError("not a real number")
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"metric {name!r} is too large for a float") from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} must be a number, not {value!r}") from error
    return number if math.isfinite(number) else repr(number)
