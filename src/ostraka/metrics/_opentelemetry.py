"""Metrics of OpenTelemetry."""

from __future__ import annotations

from typing import Any

from ostraka._version import __version__
from ostraka.common.record import OnRecord, Record
from ostraka.metrics._numbers import KINDS, numbers_of


def to_opentelemetry(meter: Any = None) -> OnRecord:
    """Return a callback that gives all numbers to OpenTelemetry.

    Args:
        meter: A meter. Default: one named `ostraka`, of the provider that the program has set.

    Returns:
        A function to pass as `on_record=`.

    Raises:
        ModuleNotFoundError: If `meter` is None and `opentelemetry-api` is not installed (extra
            `metrics`).

    Example:
        >>> manager = ostraka.Manager("runs/a", on_record=ostraka.metrics.to_opentelemetry())
    """
    if meter is None:
        from opentelemetry import metrics

        meter = metrics.get_meter("ostraka", __version__)
    instruments: dict[str, Any] = {}
    for kind in KINDS:
        make = meter.create_counter if kind.is_counter else meter.create_gauge
        instruments[kind.name] = make(f"ostraka.{kind.name}", kind.unit, kind.about)

    def tell(record: Record) -> None:
        for kind, value, labels in numbers_of(record):
            instrument = instruments[kind.name]
            (instrument.add if kind.is_counter else instrument.set)(value, dict(labels))

    return tell
