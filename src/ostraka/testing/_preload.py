"""Processes that start quickly, because they are forked from one that has imported JAX.

That process, the fork server, imports modules but starts neither a JAX backend nor a thread. On
request it forks, and its child becomes one of the processes of a `run_processes`. There are two
servers, so that processes differ as fresh interpreters do, for example in the order of sets of
strings.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_S = 0.01
_SERVERS = 2
_READ_AT_IMPORT = ("JAX_", "PYTHON", "LD_", "TF_", "OMP_", "OPENBLAS_", "MKL_", "MALLOC_", "GRPC_")
"""Prefixes of environment variables that matter when modules are imported, and not later."""


class ForkServers:
    """Forks processes of one environment."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]):
        self._env = _of_import(env)
        self._lock = threading.Lock()
        self._servers = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "ostraka.testing", "--preload", *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=dict(env),
            )
            for _ in range(_SERVERS)
        ]

    def suits(self, env: Mapping[str, str]) -> bool:
        """Return True if its modules would be the same in this environment."""
        return self._env == _of_import(env)

    def start(self, job_dir: Path, index: int, env: Mapping[str, str]) -> ForkedProcess:
        server = self._servers[index % _SERVERS]
        assert server.stdin is not None
        assert server.stdout is not None
        request = job_dir / f"request.{index}"
        request.write_bytes(pickle.dumps((job_dir, index, dict(env), os.getcwd())))
        with self._lock:
            server.stdin.write(os.fsencode(request))  # so short that it is read in one piece
            server.stdin.flush()
            answer = server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that preloads modules ended with {server.wait()}")
        return ForkedProcess(int(answer), job_dir / f"exit.{int(answer)}")

    def close(self) -> None:
        for server in self._servers:
            server.communicate()


class ForkedProcess:
    """A forked process, with the methods of a Popen."""

    def __init__(self, pid: int, exit_file: Path):
        self.pid = pid
        self.returncode: int | None = None
        self._exit_file = exit_file

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(FileNotFoundError):
                self.returncode = int(self._exit_file.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end_s is not None and time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def serve(modules: Sequence[str]) -> tuple[Path, int] | None:
    """Serve until the caller is gone. In each forked child, return the job that it is for."""
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # for what modules print
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that the children's collections leave these pages alone
    awake, wake = os.pipe()  # by which `select` hears of a child that ended
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, Path] = {}
    while True:
        readable, _, _ = select.select([requests, awake], [], [])
        if awake in readable:
            os.read(awake, 4096)
            _note_ended(children)
        if requests not in readable:
            continue
        request = os.read(requests, 1 << 16)
        if not request:
            return None
        job_dir, index, env, cwd = pickle.loads(Path(os.fsdecode(request)).read_bytes())
        child = os.fork()
        if not child:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
            for opened in (awake, wake, answers, requests):
                os.close(opened)
            _become(job_dir, index, env, cwd)
            return job_dir, index
        children[child] = job_dir
        os.write(answers, f"{child}\n".encode())


def _become(job_dir: Path, index: int, env: Mapping[str, str], cwd: str) -> None:
    """Set up a forked child like a fresh process."""
    os.setsid()
    for descriptor, file, flags in (
        (0, Path(os.devnull), os.O_RDONLY),
        (1, job_dir / f"stdout.{index}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, job_dir / f"stderr.{index}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(file, flags, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)


def _note_ended(children: dict[int, Path]) -> None:
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        job_dir = children.pop(child)
        with contextlib.suppress(FileNotFoundError):  # nobody asks any more
            partial = job_dir / f"partial-exit.{child}"
            partial.write_text(str(os.waitstatus_to_exitcode(status)))
            partial.rename(job_dir / f"exit.{child}")


def _of_import(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_IMPORT)}
