"""Run a function in several real JAX processes: the caller's side."""

import contextlib
import glob
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from ostraka.testing._child import MAIN_ALIAS, POLL_S, ChildReport, FunctionName, Job, loading

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_TAIL_LINES = 40
_STACK_LINES = 200
_STACK_DUMP_S = 10.0
_OUTERMOST = ("in _run_module_as_main\n", "...\n")
"""The end of a dump of stacks: the main thread, or where the dump became too long."""
# Settings of the caller's own cluster, which would leak into the children's.
_DROPPED_VARIABLES = (
    "JAX_COORDINATOR_BIND_ADDRESS",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_NUM_CPU_DEVICES",
    "JAX_PARTITION_INDEX",
    "JAX_SLICE_INDEX",
)


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """The result of one process.

    A process that was killed before its function ended has neither `value` nor `error`.
    """

    process: int
    """The number of the process."""
    exit_code: int
    """Negative if a signal ended the process (-9: SIGKILL)."""
    value: Any
    """The value that the function returned."""
    error: str | None
    """"TypeName: message" if the function raised, or why there is no value."""
    traceback: str | None
    stdout: str
    stderr: str
    duration_s: float
    """The time from the start of the process to its end."""


class ProcessesFailed(Exception):
    """Some of the processes failed, or did not end in time.

    The message names each process with its state, its error and the end of its output. It has the
    Python stacks of processes that had to be killed. `results` holds the results of all processes.
    """

    def __init__(self, message: str, results: list[ProcessResult] | None = None) -> None:
        super().__init__(message)
        self.results: list[ProcessResult] = results or []


@dataclass(slots=True)
class _Child:
    """The parent's view of one process."""

    index: int
    popen: subprocess.Popen[bytes]
    started_s: float
    duration_s: float = 0.0
    """0 while it is running."""
    report: ChildReport | None = None
    failed_at_s: float | None = None
    killed: bool = False
    stacks: str = ""


def run_processes(
    function: Callable[..., Any] | str,
    *args: Any,
    processes: int = 2,
    devices_per_process: int = 1,
    timeout_s: float = 240.0,
    env: Mapping[str, str] | None = None,
    heartbeat_timeout_s: int = 100,
    check: bool = True,
    grace_s: float = 20.0,
    distributed: bool | None = None,
    on_start: Callable[[list[subprocess.Popen[bytes]]], None] | None = None,
) -> list[ProcessResult]:
    """Call a function in several new JAX processes and return their results.

    Each process is a fresh interpreter on this machine with its own CPU devices. None of them
    outlives this call. A process whose function raised ends with exit code 1, or with the code of a
    SystemExit, and does not wait for the others. Only process 0 gives the others 10 s to end,
    because JAX aborts them once process 0 is gone.

    Args:
        function: A module-level function, or its name as "package.module:name". It may live in a
            test file or in the script being run. Each process loads its file again, after
            `jax.distributed.initialize`.
        *args: Arguments of the function. They are pickled, as is the value that it returns.
        processes: The number of processes.
        devices_per_process: The number of CPU devices of each process.
        timeout_s: Kill all processes after this time, and raise.
        env: More environment variables, such as `{"JAX_ENABLE_RECOVERABILITY": "1"}`.
        heartbeat_timeout_s: JAX aborts the other processes so long after one died.
        check: Raise if a process raises or ends with another exit code than 0. Without it the
            results say so, and the survivors of a failure run on.
        grace_s: With `check`, kill the processes that still run so long after the first failure.
        distributed: Initialize `jax.distributed`; default: if there are several processes.
        on_start: Called with the started processes, in this thread; see `kill_when`.

    Returns:
        A result for each process, in order.

    Raises:
        ProcessesFailed: A process failed and `check` is set, or one did not end in time.
        TypeError: Another process can't find the function, or an argument can't be pickled.

    Example:
        >>> [r.value for r in run_processes("os:getenv", "JAX_PLATFORMS")]
        ['cpu', 'cpu']
    """
    if loading.is_set():
        raise ProcessesFailed(
            "run_processes was called by a file that one of its own processes was loading, which "
            'would go on forever. Put the call under `if __name__ == "__main__":`.'
        )
    if processes < 1:
        raise ValueError(f"processes must be at least 1, not {processes}.")
    if devices_per_process < 1:
        raise ValueError(f"devices_per_process must be at least 1, not {devices_per_process}.")
    located = _locate(function)
    arguments = pickle.dumps(args)
    child_env = _child_environment(env or {}, devices_per_process)
    with contextlib.ExitStack() as stack:
        port = None
        if processes > 1 if distributed is None else distributed:
            port = stack.enter_context(_reserve_port()).getsockname()[1]
        job = Job(located, processes, port, heartbeat_timeout_s, int(timeout_s) + 1)
        job_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ostraka-")))
        (job_dir / "job").write_bytes(pickle.dumps(job))
        (job_dir / "arguments").write_bytes(arguments)
        children: list[_Child] = []
        try:
            for index in range(processes):
                children.append(_start(job_dir, index, child_env))
            if on_start is not None:
                on_start([child.popen for child in children])
            reason = _supervise(
                children, job_dir, timeout_s=timeout_s, grace_s=grace_s if check else None
            )
        finally:
            for child in children:
                if not child.duration_s:  # else its number may be another program's by now
                    _kill_group(child.popen)
        results = [_collect(child, job_dir) for child in children]
    if reason or (check and any(r.exit_code or r.error for r in results)):
        raise ProcessesFailed(_describe_failure(located, children, results, reason), results)
    return results


def kill_when(
    process: int,
    *,
    appears: str | os.PathLike[str] | None = None,
    after_s: float = 0.0,
    signal_number: int = signal.SIGKILL,
) -> Callable[[list[subprocess.Popen[bytes]]], None]:
    """Return an `on_start` that kills one process when a file appears.

    Nothing happens if the process ends before.

    Args:
        process: The number of the process.
        appears: A path or a glob pattern (`**` crosses directories), looked for every few
            milliseconds. Without it the time counts from the start of the processes.
        after_s: How many seconds after that to kill.
        signal_number: The signal to send.

    Returns:
        A function for `run_processes(…, on_start=…)`.

    Example:
        >>> kill = kill_when(1, appears=root / "**/*.safetensors")
        >>> results = run_processes(save, root, check=False, on_start=kill)
        >>> assert results[1].exit_code == -9
    """
    pattern = None if appears is None else os.fspath(appears)

    def watch(popen: subprocess.Popen[bytes]) -> None:
        while pattern is not None and not glob.glob(pattern, recursive=True):
            if popen.returncode is not None:
                return
            time.sleep(0.002)
        time.sleep(after_s)
        popen.send_signal(signal_number)

    def start(popens: list[subprocess.Popen[bytes]]) -> None:
        threading.Thread(target=watch, args=(popens[process],), daemon=True).start()

    return start


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now.

    Returns:
        The number of the port. Another program may take it at any time.
    """
    with _reserve_port() as reservation:
        return reservation.getsockname()[1]


def _reserve_port() -> socket.socket:
    """Bind a free port, in a way that lets JAX's coordinator listen on it meanwhile.

    The coordinator sets SO_REUSEPORT: if two jobs came to choose one port, both would bind it
    without an error and take each other's processes. While this socket stays open the kernel
    offers the port to nobody else, and as it does not listen it gets no connections.
    """
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation


def _locate(function: Callable[..., Any] | str) -> FunctionName:
    if isinstance(function, str):
        module_name, colon, name = function.partition(":")
        if not (module_name and colon and name):
            raise ValueError(f'function must read "package.module:name", not {function!r}.')
        return FunctionName(module_name, name, None, None)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name = getattr(function, "__qualname__", "")
    found: object = None
    with contextlib.suppress(AttributeError):
        found = attrgetter(name)(module)
    if module is None or found is not function:
        raise TypeError(
            f"{function!r} can't be found again by another process as the attribute {name!r} of "
            "a module. Pass a function defined at the top level of a file, and its data as "
            "arguments."
        )
    file = getattr(module, "__file__", None)
    if file is None and module.__name__ == "__main__":
        raise TypeError(f"{function!r} was defined interactively: other processes can't load it.")
    path = None if file is None else os.path.abspath(file)
    return FunctionName(module.__name__, name, path, getattr(module, "__package__", None))


def _child_environment(extra: Mapping[str, str], devices: int) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key not in _DROPPED_VARIABLES}
    # Unbuffered, so that what a killed process has printed is not lost.
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    env |= extra
    if any(key.lower().endswith("_proxy") for key in env):
        env.setdefault("no_grpc_proxy", "127.0.0.1")  # gRPC would ask the proxy for the coordinator
    paths = [os.path.abspath(entry) for entry in sys.path]
    if "PYTHONPATH" in extra:
        paths.insert(0, extra["PYTHONPATH"])
    env["PYTHONPATH"] = os.pathsep.join(paths)
    flags = env.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if flag.partition("=")[0] != _DEVICE_COUNT_FLAG]
    env["XLA_FLAGS"] = " ".join([*flags, f"{_DEVICE_COUNT_FLAG}={devices}"])
    return env


# Processes that start quickly, because they are forked from one that has imported JAX. There are
# two such servers, so that processes differ as fresh interpreters do, for example in the order of
# sets of strings.

_SERVERS = 2
_READ_AT_IMPORT = ("JAX_", "PYTHON", "LD_", "TF_", "OMP_", "OPENBLAS_", "MKL_", "MALLOC_", "GRPC_")
"""Prefixes of environment variables that matter when modules are imported, and not later."""


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


def _of_import(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_IMPORT)}


_preloading: list[tuple[str, ...]] = []
"""The modules of each `preloaded` that lasts."""
_fork_servers: dict[tuple[str, ...], ForkServers] = {}
_starting_servers = threading.Lock()


@contextlib.contextmanager
def preloaded(*modules: str) -> Generator[None]:
    """Let `run_processes` fork its processes from some that have imported these modules.

    Importing JAX and Flax takes seconds in each process, which is most of the time of a short test.
    The forked processes are as good as fresh ones: they are forked before JAX has a backend or a
    thread. Processes start afresh all the same if `env` has variables that matter at an import
    (`JAX_…`, `PYTHON…` and others), or if `sys.path` has changed.

    Args:
        *modules: The modules to import. They must not start threads. Inside this block, a block
            without modules makes processes start afresh.

    Yields:
        None. The processes that preload end with the block.

    Example:
        >>> @pytest.fixture(scope="session", autouse=True)
        ... def _preloaded():
        ...     with ostraka.testing.preloaded("jax", "flax.nnx", "optax"):
        ...         yield
    """
    _preloading.append(modules)
    try:
        yield
    finally:
        _preloading.remove(modules)
        if modules not in _preloading and modules in _fork_servers:
            _fork_servers.pop(modules).close()


def _start(job_dir: Path, index: int, env: dict[str, str]) -> _Child:
    started_s = time.monotonic()
    modules = _preloading[-1] if _preloading else ()
    if modules:
        with _starting_servers:
            if modules not in _fork_servers:
                _fork_servers[modules] = ForkServers(modules, env)
        if _fork_servers[modules].suits(env):
            forked: Any = _fork_servers[modules].start(job_dir, index, env)
            return _Child(index, forked, started_s)
    # Files, not pipes: a pipe that nobody empties would stop the process.
    out, err = job_dir / f"stdout.{index}", job_dir / f"stderr.{index}"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "ostraka.testing", job_dir, str(index), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=env,
            start_new_session=True,
        )
    return _Child(index, popen, started_s)


def _supervise(
    children: list[_Child], job_dir: Path, *, timeout_s: float, grace_s: float | None
) -> str | None:
    """Wait for all to end. Kill them when that takes too long, and return why."""
    deadline = time.monotonic() + timeout_s
    reason = f"did not end within {timeout_s:g} s"
    running = list(children)
    while running:
        for child in [child for child in running if child.popen.poll() is not None]:
            running.remove(child)
            _note_end(child, job_dir)
            if child.failed_at_s is not None and grace_s is not None:
                if time.monotonic() + grace_s < deadline:
                    deadline = time.monotonic() + grace_s
                    reason = f"still ran {grace_s:g} s after the first failure"
                grace_s = None
        if running and time.monotonic() > deadline:
            _dump_stacks(running, job_dir)
            for child in running:
                child.killed = True
                _kill_group(child.popen)
                _note_end(child, job_dir)
            return reason
        time.sleep(POLL_S)
    return None


def _note_end(child: _Child, job_dir: Path) -> None:
    _kill_group(child.popen)  # what the process itself has started ends with it
    child.duration_s = time.monotonic() - child.started_s
    for kind in ("returned", "raised"):
        with contextlib.suppress(FileNotFoundError):
            child.report = pickle.loads((job_dir / f"{kind}.{child.index}").read_bytes())
    report = child.report
    if child.popen.returncode != 0 or report is None or report.error:
        # The cause of it all is the first one to fail, not the first one to be gone.
        child.failed_at_s = report.time_s if report and report.error else time.time()
    (job_dir / f"ended.{child.index}").touch()


def _kill_group(popen: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()


def _dump_stacks(children: list[_Child], job_dir: Path) -> None:
    """Have each child write its Python stacks, which takes a moment, and read them."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.popen.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + _STACK_DUMP_S
    for child in children:
        path = job_dir / f"stacks.{child.index}"
        while time.monotonic() < deadline and not child.stacks.endswith(_OUTERMOST):
            is_over = child.popen.poll() is not None
            with contextlib.suppress(FileNotFoundError):
                child.stacks = path.read_text(errors="replace")
            if is_over:
                break
            time.sleep(0.05)


def _collect(child: _Child, job_dir: Path) -> ProcessResult:
    value: Any = None
    report = child.report
    error = report.error if report else None
    if report and report.value is not None:
        sys.modules.setdefault(MAIN_ALIAS, sys.modules["__main__"])
        try:
            value = pickle.loads(report.value)
        except Exception as exception:
            error = (
                f"{type(exception).__name__}: what the function returned can't be unpickled: "
                f"{exception}"
            )
    elif report is None and child.popen.returncode == 0:
        error = "The process ended with exit code 0 before the function returned."
    return ProcessResult(
        process=child.index,
        exit_code=child.popen.returncode,
        value=value,
        error=error,
        traceback=report.traceback if report else None,
        stdout=(job_dir / f"stdout.{child.index}").read_text(errors="replace"),
        stderr=(job_dir / f"stderr.{child.index}").read_text(errors="replace"),
        duration_s=child.duration_s,
    )


def _describe_failure(
    function: FunctionName, children: list[_Child], results: list[ProcessResult], reason: str | None
) -> str:
    both = list(zip(children, results, strict=True))
    states = [_describe_state(child, result) for child, result in both]
    failed = [c for c, r in both if r.error or (c.failed_at_s is not None and not c.killed)]
    killed = [str(child.index) for child in children if child.killed]
    lines: list[str] = []
    if failed:
        first = min(failed, key=_rank_as_cause).index
        lines.append(f"{function}: process {first} {states[first]}")
    if killed:
        plural = "es" if len(killed) > 1 else ""
        lines.append(f"{function}: process{plural} {', '.join(killed)} {reason}.")
    for (child, result), state in zip(both, states, strict=True):
        lines += ["", f"--- process {child.index} of {len(children)} {state}"]
        for title, text in (("stdout", result.stdout), ("stderr", result.stderr)):
            printed = text.splitlines()
            if len(printed) > _TAIL_LINES:
                title = f"{title} (the last {_TAIL_LINES} lines of {len(printed)})"
            lines += _indent(title, printed[-_TAIL_LINES:])
        lines += _indent("stacks", child.stacks.splitlines()[:_STACK_LINES])
    return "\n".join(lines)


def _rank_as_cause(child: _Child) -> tuple[bool, float]:
    # A signal comes from outside, and the others' errors follow from it. Only SIGABRT may be
    # JAX's own reaction to another process's failure.
    code = child.popen.returncode
    by_signal = code < 0 and code != -signal.SIGABRT
    return (not by_signal, child.failed_at_s or time.time())


def _describe_state(child: _Child, result: ProcessResult) -> str:
    if result.error:
        return f"failed: {result.error}"
    if child.killed:
        did = "returned, but" if child.report else "was still running and"
        return f"{did} had to be killed after {child.duration_s:.1f} s"
    when = "after" if child.report else "before"
    if result.exit_code < 0:
        name = signal.Signals(-result.exit_code).name
        return f"was ended by {name} {when} the function returned"
    if result.exit_code > 0:
        return f"ended with exit code {result.exit_code} {when} the function returned"
    return f"returned after {child.duration_s:.1f} s"


def _indent(title: str, lines: list[str]) -> list[str]:
    return [f"  {title}:", *(f"    {line}" for line in lines)] if lines else []
