"""Run one case in a process of its own: `python -m bench.case NAME OPTIONS_JSON RESULT_FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from bench.rounds import Options, Row

NAMES = (
    "save_large",
    "save_many",
    "restore_warm",
    "restore_cold",
    "restore_many",
    "restore_mesh",
    "nnx_many",
    "memory",
    "processes",
    "async_stall",
    "async_stall_many",
    "verify",
    "show",
)


def load(name: str) -> Callable[[Options], list[Row]]:
    """The function of a case; JAX is imported only for those that run in this process."""
    if name == "memory":
        from bench import memory

        return memory.save_memory
    if name == "processes":
        from bench import processes

        return processes.four_processes
    from bench import cases, contenders

    contenders.hush()
    if name == "nnx_many":
        from bench import nnx

        return nnx.nnx_many
    if name in ("verify", "show"):
        from bench import command

        return getattr(command, name)
    if name.startswith("async_stall"):
        from bench import stall

        return getattr(stall, name)
    return getattr(cases, name)


def main() -> None:
    """Run the case and leave its rows in a file: what the contenders print is theirs alone."""
    name, raw, result = sys.argv[1:]
    fields = json.loads(raw)
    options = Options(**{**fields, "scratch": Path(fields["scratch"])})
    rows = load(name)(options)
    Path(result).write_text(json.dumps([row.to_json() for row in rows]))


if __name__ == "__main__":
    main()
