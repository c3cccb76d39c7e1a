"""Run a command while its processes are stopped for moments, at random: `make shake`.

A test that is right only if nobody is late passes a thousand times and fails in the one run that
counts. Here somebody is always late.
"""

import argparse
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--every", type=float, default=0.25, help="seconds, on average")
    parser.add_argument("--longest", type=float, default=1.5, help="seconds that one is stopped")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    print(f"stopping processes at random, --seed {options.seed}", flush=True)
    chance = random.Random(options.seed)
    with subprocess.Popen(options.command) as process:
        while process.poll() is None:
            time.sleep(options.every * 2 * chance.random())
            # Mostly short, at times long.
            seconds = options.longest * chance.random() ** 2
            _stop_one(psutil.Process(process.pid), chance, seconds)
        return process.returncode


def _stop_one(root: psutil.Process, chance: random.Random, seconds: float) -> None:
    with suppress(psutil.NoSuchProcess):
        running = [child for child in root.children(recursive=True) if _is_running(child)]
        if running:
            # The program waits for its threads when it ends: nothing stays stopped.
            threading.Thread(target=_stop, args=(chance.choice(running), seconds)).start()


def _is_running(process: psutil.Process) -> bool:
    """Whether it may be stopped: one that a test has stopped itself must stay so."""
    with suppress(psutil.NoSuchProcess):
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return False


def _stop(process: psutil.Process, seconds: float) -> None:
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        try:
            time.sleep(seconds)
        finally:
            process.resume()


if __name__ == "__main__":
    sys.exit(main())
