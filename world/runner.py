"""Run the phases of every group, each in a process of its own, several groups at a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from world.case import MODES, Case
from world.phases import KILLED, MESH_DEVICES, PHASES, cases_of

ROOT = Path(__file__).parents[1]
_LIMIT_S = 900
_TAIL = 600


@dataclass(frozen=True, slots=True)
class Row:
    """How a case went: for each mode None (as it should), or what is wrong."""

    case: Case
    version: str
    problems: dict[str, str]
    """By phase; empty if all is well."""

    def mark(self, mode: str) -> str:
        if mode in self.case.left_out:
            return "–"
        if self.blame(mode):
            return "FAILED"
        return "as dicts" if mode == "none" and self.case.as_dicts else "same"

    def blame(self, mode: str) -> str | None:
        """What went wrong in this mode, or before it."""
        before = ("mesh_save", "mesh") if mode == "mesh" else ("reference", "save", mode)
        return next((self.problems[phase] for phase in before if phase in self.problems), None)


def run_groups(
    groups: dict[str, list[Case]], scratch: Path, *, jobs: int, told: Callable[[str], None]
) -> list[Row]:
    """The rows of all groups, in their order. Two groups never share a process."""
    # The largest first, so that the last one to end is small.
    order = sorted(groups, key=lambda name: -len(groups[name]))
    with ThreadPoolExecutor(jobs) as pool:
        futures = {
            name: pool.submit(_run_group, name, groups[name], scratch, told) for name in order
        }
        return [row for name in groups for row in futures[name].result()]


def _run_group(
    name: str, cases: list[Case], scratch: Path, told: Callable[[str], None]
) -> list[Row]:
    folder = scratch / name
    folder.mkdir(parents=True)
    began = time.monotonic()
    problems: list[dict[str, str]] = [{} for _ in cases]
    for phase in PHASES:
        ended = _run_process(name, phase, cases, folder)
        for number, _ in cases_of(phase, cases):
            problem = _outcome(folder / f"{number:03}" / f"{phase}.json", ended)
            if problem is not None and "reference" not in problems[number]:
                problems[number][phase] = problem
    failed = sum(map(bool, problems))
    told(f"{name}: {len(cases)} cases, {failed} failed, {time.monotonic() - began:.0f} s")
    if not any(problems):
        shutil.rmtree(folder)
    return [
        Row(case, _version(case.package), found)
        for case, found in zip(cases, problems, strict=True)
    ]


def _run_process(name: str, phase: str, cases: list[Case], folder: Path) -> str | None:
    """How the process ended, if not as it should."""
    wanted = [case.key for _, case in cases_of(phase, cases)]
    if not wanted:
        return None
    command = [sys.executable, "-m", "world.process", name, phase, str(folder)]
    log = folder / f"{phase}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(phase, folder.parent),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            process.communicate(json.dumps([case.key for case in cases]).encode(), _LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"the process did not end in {_LIMIT_S} s"
    expected = -signal.SIGKILL if phase in KILLED else 0
    if process.returncode == expected:
        return None
    return f"the process ended with {process.returncode}: {log.read_text('utf-8')[-_TAIL:]}"


def _environment(phase: str, scratch: Path) -> dict[str, str]:
    devices = MESH_DEVICES if phase in ("mesh_save", "mesh") else 1
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_COMPILATION_CACHE_DIR": str(scratch / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }


def _outcome(path: Path, ended: str | None) -> str | None:
    if not path.exists():
        return ended or "the process said nothing of this case"
    return " | ".join(json.loads(path.read_text("utf-8"))) or None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


def failures(rows: list[Row]) -> list[Row]:
    return [row for row in rows if any(row.blame(mode) for mode in MODES)]
