"""A text file for the textfile collector of Prometheus' node_exporter."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from ostraka.common.record import OnRecord, Record
from ostraka.metrics._numbers import KINDS, numbers_of

_UNITS = {"s": "_seconds", "By": "", "1": ""}


def to_prometheus(
    path: str | os.PathLike[str], labels: Mapping[str, str] | None = None
) -> OnRecord:
    """Return a callback that keeps a text file of all numbers so far, replaced atomically.

    Args:
        path: The file, in the directory of node_exporter's textfile collector. It ends with
            `.prom`.
        labels: Labels of all numbers, such as `{"run": "a"}`.

    Returns:
        A function to pass as `on_record=`.

    Raises:
        ValueError: If the name does not end with `.prom`.
        ModuleNotFoundError: If `prometheus_client` is not installed (extra `metrics`).

    Example:
        >>> on_record = ostraka.metrics.to_prometheus("/var/lib/node_exporter/train.prom")
    """
    from prometheus_client import CollectorRegistry, Counter, Gauge, write_to_textfile

    target = os.path.abspath(path)
    if not target.endswith(".prom"):
        raise ValueError(f"{target} must end with .prom: node_exporter reads no other files")
    fixed = dict(labels or {})
    registry = CollectorRegistry()
    found: dict[str, Any] = {}
    for kind in KINDS:
        name = f"ostraka_{kind.name}{_UNITS[kind.unit]}"
        make: Any = Counter if kind.is_counter else Gauge
        found[kind.name] = make(name, kind.about, [*kind.labels, *fixed], registry=registry)
    lock = threading.Lock()

    def write(record: Record) -> None:
        with lock:
            for kind, value, labels in numbers_of(record):
                given = {**labels, **fixed}
                metric = found[kind.name].labels(**given) if given else found[kind.name]
                (metric.inc if kind.is_counter else metric.set)(value)
            write_to_textfile(target, registry)

    return write
