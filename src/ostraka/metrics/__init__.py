"""Records of saves, restores, mirror copies and audits as numbers for other tools.

Each function returns a callback to pass as `on_record=`. On several processes, pass it on process 0
alone: a record has the bytes of all of them.

    >>> manager = ostraka.Manager("runs/a", on_record=ostraka.metrics.to_prometheus("a.prom"))
"""

from ostraka.metrics._loggers import scalars as scalars
from ostraka.metrics._loggers import to_tensorboard as to_tensorboard
from ostraka.metrics._loggers import to_wandb as to_wandb
from ostraka.metrics._opentelemetry import to_opentelemetry as to_opentelemetry
from ostraka.metrics._prometheus import to_prometheus as to_prometheus

__all__ = ["scalars", "to_opentelemetry", "to_prometheus", "to_tensorboard", "to_wandb"]
