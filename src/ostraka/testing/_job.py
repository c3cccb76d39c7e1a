"""What the caller of `run_processes` and its processes tell each other, through files."""

import threading
from dataclasses import dataclass

MAIN_ALIAS = "__mp_main__"  # the name multiprocessing gives to a re-imported __main__
POLL_S = 0.01
loading = threading.Event()  # set in a child while it loads the function's file


@dataclass(frozen=True, slots=True)
class Target:
    """Where a child finds the function; `file` is None when only the name is known."""

    module: str
    name: str
    file: str | None
    package: str | None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True, slots=True)
class Job:
    """What every child needs to know, pickled into the job's directory."""

    target: Target
    processes: int
    port: int | None  # None: no jax.distributed
    heartbeat_timeout_s: int
    init_timeout_s: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a child says about its call, pickled into `returned.N` or `raised.N`."""

    value: bytes | None
    error: str | None
    traceback: str | None
    time_s: float
