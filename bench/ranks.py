"""Groups of processes that work as one, commanded over pipes; JAX and PyTorch groups alike.

A command is a line of JSON on a rank's stdin, its answer a line of JSON on its stdout. A timed
command answers with the moments at which it began and ended. All processes of a machine share one
monotonic clock, so a group's time runs from the first rank's beginning to the last rank's end, and
no barrier is part of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

RANKS = 4
ANSWER_S = 300.0

Command = dict[str, Any]


class Ranks:
    """Four processes that run one module."""

    def __init__(self, python: str, module: str, env: dict[str, str], setup: Command) -> None:
        self._silent = False
        self._log = Path(setup["scratch"]) / f"{module}.log"
        self._processes = [self._start(python, module, env, setup, i) for i in range(RANKS)]
        try:
            self.ask({"op": "hello"})
        except Exception:
            self.close()
            raise

    def _start(
        self, python: str, module: str, env: dict[str, str], setup: Command, rank: int
    ) -> subprocess.Popen[str]:
        with self._log.open("a") as log:
            return subprocess.Popen(
                [python, "-m", module, json.dumps({**setup, "rank": rank})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **env},
            )

    def ask(self, command: Command) -> list[Command]:
        """Send a command to all ranks and collect their answers; raises if one of them failed.

        Once a rank did not answer, the group is out of step and takes no more commands.
        """
        if self._silent:
            raise RuntimeError("a rank of the group fell silent before")
        for process in self._processes:
            _pipe(process.stdin).write(json.dumps(command) + "\n")
            _pipe(process.stdin).flush()
        deadline = time.monotonic() + ANSWER_S
        answers = [self._answer(rank, deadline) for rank in range(RANKS)]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RuntimeError(f"rank {rank}: {answer['error']}")
        return answers

    def time(self, command: Command) -> float:
        """Seconds from the first rank's beginning of a command to the last rank's end."""
        answers = self.ask(command)
        return max(a["stop"] for a in answers) - min(a["start"] for a in answers)

    def _answer(self, rank: int, deadline: float) -> Command:
        stdout = _pipe(self._processes[rank].stdout)
        ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
        line = stdout.readline() if ready else ""
        if not line:
            self._silent = True
            raise RuntimeError(f"rank {rank} does not answer; its log ends {self._log_tail()!r}")
        return json.loads(line)

    def _log_tail(self) -> str:
        lines = self._log.read_text().strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """End the ranks: by closing their pipes, and by force after a while."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                _pipe(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _pipe(stream: Any) -> TextIO:
    assert stream is not None
    return stream


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def serve(handlers: dict[str, Callable[[Command], Any]], timed: set[str]) -> None:
    """A rank's loop: answer each command until the pipe closes."""
    # Libraries may print; only answers may reach the pipe that the commander reads.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            start = time.monotonic()
            handlers[command["op"]](command)
            stop = time.monotonic()
            answer = {"start": start, "stop": stop} if command["op"] in timed else {"ok": True}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
