"""Numbers by name, for W&B, TensorBoard and other loggers of experiments."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from ostraka.common.record import OnRecord, Record


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a record by name, such as `save/blocked_s`.

    Args:
        record: A record of any operation.

    Returns:
        The numbers. Those of the whole run begin with `run/`, and are there if a manager made the
        record.

    Example:
        >>> manager = ostraka.Manager("runs/a", on_record=lambda record: log(scalars(record)))
    """
    name = record.operation
    found: dict[str, float] = {
        f"{name}/blocked_s": record.blocked_s,
        f"{name}/total_s": record.total_s,
        f"{name}/bytes": record.bytes,
        f"{name}/bytes_per_s": record.bytes_per_s,
        f"{name}/slowest_process_s": record.process_s.most,
        **{f"{name}/phase/{phase}_s": seconds for phase, seconds in record.phases.items()},
    }
    if record.differs is not None:
        found[f"{name}/differs"] = int(record.differs)
    if record.run is not None:
        found["run/lost_share"] = record.run.lost_share
        for reason, seconds in record.run.by_reason().items():
            found[f"run/lost/{reason}_s"] = seconds
    return found


def to_tensorboard(writer: Any) -> OnRecord:
    """Return a callback that writes the numbers of each record to TensorBoard.

    The x axis is the step. Without a manager, records have no step, and are numbered.

    Args:
        writer: A `SummaryWriter` of tensorboardX or PyTorch, or a writer of CLU.

    Returns:
        A function to pass as `on_record=`.

    Raises:
        TypeError: If `writer` can write no scalars.

    Example:
        >>> on_record = ostraka.metrics.to_tensorboard(SummaryWriter("logs"))
    """
    if not (hasattr(writer, "add_scalar") or hasattr(writer, "write_scalars")):
        raise TypeError(f"{writer!r:.80} is no writer of TensorBoard: it has no add_scalar")
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def write(record: Record) -> None:
        with lock:
            counts[record.operation] += 1
            step = counts[record.operation] if record.step is None else record.step
            found = scalars(record)
            if hasattr(writer, "write_scalars"):
                writer.write_scalars(step, found)
                return
            for name, value in found.items():
                writer.add_scalar(name, value, step)

    return write


def to_wandb(run: Any) -> OnRecord:
    """Return a callback that logs the numbers of each record to Weights & Biases.

    The numbers wait for your next `run.log`, so that W&B's step stays yours. Those with a step have
    `ostraka/step` as their x axis.

    Args:
        run: What `wandb.init` returned.

    Returns:
        A function to pass as `on_record=`.

    Raises:
        TypeError: If `run` can't log.

    Example:
        >>> manager = ostraka.Manager("runs/a", on_record=ostraka.metrics.to_wandb(wandb.init()))
    """
    if not callable(getattr(run, "log", None)):
        raise TypeError(f"{run!r:.80} is no run of W&B: it has no log")
    for operation in ("save", "restore", "mirror", "audit", "run"):
        run.define_metric(f"{operation}/*", step_metric="ostraka/step")

    def log(record: Record) -> None:
        step = {} if record.step is None else {"ostraka/step": record.step}
        run.log({**scalars(record), **step}, commit=False)

    return log
