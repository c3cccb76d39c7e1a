"""The one command: `python -m bench`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.bars import NAMES as COLUMNS
from bench.bars import judge
from bench.case import NAMES
from bench.machine import describe, remove
from bench.report import show, write_results
from bench.rounds import Options, Row

ROOT = Path(__file__).resolve().parent.parent
CASE_S = 900


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (5)")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the states (1.0)")
    parser.add_argument(
        "--only",
        action="append",
        choices=NAMES,
        metavar="CASE",
        help=f"run this case alone; may be repeated: {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path(os.environ.get("OSTRAKA_BENCH_SCRATCH", ROOT / "bench" / "scratch")),
        help="where checkpoints are written (bench/scratch, or $OSTRAKA_BENCH_SCRATCH)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "bench" / "results",
        help="where results.json, results.md and results.png go (bench/results)",
    )
    parser.add_argument(
        "--torch-python",
        type=Path,
        default=ROOT / ".venv-torch" / "bin" / "python",
        help="a Python that has torch (.venv-torch/bin/python)",
    )
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch DCP out")
    return parser.parse_args()


def main() -> int:
    """Run the cases one after the other, then write and print what came of them."""
    arguments = parse()
    # Ended from outside, a run still ends its case and removes its checkpoints.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    # A folder of its own, so that two runs at once don't delete each other's checkpoints.
    scratch = Path(tempfile.mkdtemp(prefix="run-", dir=arguments.scratch.resolve()))
    options = Options(arguments.scale, arguments.rounds, scratch, find_torch(arguments))
    names = [name for name in NAMES if name in (arguments.only or NAMES)]
    start = time.monotonic()
    try:
        rows = [row for name in names for row in run_case(name, options)]
    finally:
        remove(scratch)
    took_s = round(time.monotonic() - start)
    run = {
        "machine": describe(arguments.scratch),
        "options": {"scale": options.scale, "rounds": options.rounds, "took_s": took_s},
    }
    write_results(arguments.results, rows, run)
    print_rows(rows)
    print(f"\n{took_s} s; results in {arguments.results}")
    return 0


def find_torch(arguments: argparse.Namespace) -> str | None:
    """The Python for the PyTorch rows, or a loud word about its absence."""
    python: Path = arguments.torch_python
    if arguments.no_torch or python.exists():
        return None if arguments.no_torch else str(python.absolute())
    print(f"*** {python} IS NOT THERE: THE PYTORCH ROWS ARE SKIPPED ***", file=sys.stderr)
    return None


def run_case(name: str, options: Options) -> list[Row]:
    """Run a case in a fresh process, so that none inherits another's memory, threads or caches."""
    print(f"{name} …", file=sys.stderr, flush=True)
    start = time.monotonic()
    fields: dict[str, Any] = {**asdict(options), "scratch": str(options.scratch)}
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [sys.executable, "-m", "bench.case", name, json.dumps(fields), result.name]
        ending = run_to_end(command, env)
        if ending:
            failed = Row(name, f"{name}: failed", 0)
            failed.note(f"*** {name} FAILED: {ending} ***")
            return [failed]
        print(f"    {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        return [Row(**fields) for fields in json.loads(Path(result.name).read_text())]


def run_to_end(command: list[str], env: dict[str, str]) -> str:
    """Run a command; says what went wrong, if anything. No process that it started outlives it."""
    process = subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(timeout=CASE_S)
    except subprocess.TimeoutExpired:
        return f"no end after {CASE_S} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"exit code {code}" if code else ""


def print_rows(rows: list[Row]) -> None:
    """The medians and verdicts, for the terminal."""
    verdicts = judge(rows)
    for row in rows:
        print(f"\n{row.title}")
        for name, words in COLUMNS.items():
            if name in row.values:
                print(f"  {words:22} {show(row, name):>12}")
        for verdict in (v for v in verdicts if v.row == row.id):
            word = {True: "met", False: "NOT MET", None: "-"}[verdict.met]
            print(f"  {word:8} {verdict.bar}: {verdict.ratio}")


if __name__ == "__main__":
    sys.exit(main())
