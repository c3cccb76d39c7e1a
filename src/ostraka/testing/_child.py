"""The child's side of `run_processes`, and the files by which both sides talk."""

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

POLL_S = 0.01
MAIN_ALIAS = "__mp_main__"  # the name multiprocessing gives to a re-imported __main__
loading = threading.Event()  # set in a child while it loads the function's file

# JAX aborts every process as soon as process 0 is gone. When the function fails on all of
# them, process 0 stays this long, so that the others come to report their own errors.
_COORDINATOR_LINGER_S = 10.0
# All have returned by then: who does not come to the end may just not have had its turn.
_JAX_SHUTDOWN_TIMEOUT_S = 100


@dataclass(frozen=True, slots=True)
class FunctionName:
    """Where a child finds the function. `file` is None if only the name is known."""

    module: str
    name: str
    file: str | None
    package: str | None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True, slots=True)
class Job:
    """The settings of all children, pickled into the job's directory."""

    function: FunctionName
    processes: int
    port: int | None  # None: no jax.distributed
    heartbeat_timeout_s: int
    init_timeout_s: int


@dataclass(frozen=True, slots=True)
class ChildReport:
    """The result of a child's call, pickled into `returned.N` or `raised.N`."""

    value: bytes | None
    error: str | None
    traceback: str | None
    time_s: float
    exit_code: int


def main(arguments: list[str]) -> int:
    """Be one of the processes of a `run_processes`, or the one that they are forked from."""
    if arguments[0] == "--preload":
        # It ends when its requests end. Not with its parent, as those do that it forks: the kernel
        # takes the thread that has started it for that, which may be gone long before.
        parent_pid = os.getpid()
        forked_for = _serve(arguments[1:])
        if forked_for is None:
            return 0
        job_dir, index = forked_for
        sys.argv[1:] = [str(job_dir), str(index), str(parent_pid)]
    else:
        job_dir, index, parent_pid = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    _die_with_parent(parent_pid)
    job: Job = pickle.loads((job_dir / "job").read_bytes())
    faulthandler.enable()
    stacks = (job_dir / f"stacks.{index}").open("wb")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    report = _call(job, job_dir, index)
    kind = "raised" if report.error else "returned"
    partial = job_dir / f"partial.{index}"
    partial.write_bytes(pickle.dumps(report))
    partial.rename(job_dir / f"{kind}.{index}")
    if report.error or (job.port is not None and not _all_returned(job_dir, job.processes)):
        _leave_at_once(job, job_dir, index, report.exit_code)
    if job.port is not None:
        import jax

        jax.distributed.shutdown()
    return 0


def _call(job: Job, job_dir: Path, index: int) -> ChildReport:
    value = error = trace = None
    exit_code = 0
    try:
        if job.port is not None:
            import jax

            address = f"127.0.0.1:{job.port}"
            initialize: Callable[..., None] = jax.distributed.initialize
            initialize(
                address,
                job.processes,
                index,
                coordinator_bind_address=address,
                cluster_detection_method="deactivate",  # else Slurm and others have a say
                initialization_timeout=job.init_timeout_s,
                heartbeat_timeout_seconds=job.heartbeat_timeout_s,
                shutdown_timeout_seconds=_JAX_SHUTDOWN_TIMEOUT_S,
            )
        # Only now: the function's file and its arguments may hold JAX arrays, and JAX can't be
        # initialized once there are any.
        loading.set()
        function = _load(job.function)
        loading.clear()
        args = pickle.loads((job_dir / "arguments").read_bytes())
        value = _pickle_value(function(*args))
        # These processes skip the end of a program, where a save would be waited for.
        background: Any = sys.modules.get("ostraka.saving.background")
        if background is not None:
            background.wait_for_background()
    except BaseException as exception:
        error = f"{type(exception).__name__}: {exception}"
        code = exception.code if isinstance(exception, SystemExit) else 1
        exit_code = code if isinstance(code, int) else 0 if code is None else 1
        trace = traceback.format_exc()
        sys.stderr.write(trace)
    return ChildReport(value, error, trace, time.time(), exit_code)


def _load(target: FunctionName) -> Callable[..., Any]:
    if target.module == "__main__":
        module = _load_file(target, MAIN_ALIAS)
        sys.modules["__main__"] = module  # pickled arguments name their classes so
    elif target.file is None or _import_finds(target.module, target.file):
        module = importlib.import_module(target.module)
    else:
        module = _load_file(target, target.module)
    return attrgetter(target.name)(module)


def _import_finds(name: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    origin = None if spec is None else spec.origin
    return origin is not None and os.path.realpath(origin) == os.path.realpath(file)


def _load_file(target: FunctionName, name: str) -> ModuleType:
    assert target.file is not None
    spec = importlib.util.spec_from_file_location(name, target.file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{target.file} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    if target.package is not None and target.package != spec.parent:
        module.__package__ = target.package  # for relative imports in `python -m package.module`
        module.__spec__ = None
    # pickle imports the parents of a dotted name, and pytest may have made that name up.
    above, directory = name.rpartition(".")[0], Path(target.file).parent
    while above:
        if above not in sys.modules:
            sys.modules[above] = ModuleType(above)
            sys.modules[above].__path__ = [str(directory)]
        above, directory = above.rpartition(".")[0], directory.parent
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _pickle_value(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as exception:
        raise TypeError(
            f"The function returned a {type(value).__name__} that can't be pickled "
            f"({exception}). Return plain values or numpy arrays."
        ) from exception


def _all_returned(job_dir: Path, processes: int) -> bool:
    """Wait until every process has returned, raised or died. Return True if all returned."""
    ends = ("returned", "raised", "ended")
    for index in range(processes):
        while not any((job_dir / f"{end}.{index}").exists() for end in ends):
            time.sleep(POLL_S)
    return all((job_dir / f"returned.{index}").exists() for index in range(processes))


def _leave_at_once(job: Job, job_dir: Path, index: int, exit_code: int) -> None:
    """End without JAX's shutdown, a barrier at which a failed process would be waited for."""
    if job.port is not None and index == 0:
        deadline = time.monotonic() + (_COORDINATOR_LINGER_S if exit_code else float("inf"))
        for other in range(1, job.processes):
            while not (job_dir / f"ended.{other}").exists() and time.monotonic() < deadline:
                time.sleep(POLL_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _die_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it has died before the call above
        os._exit(1)


# The process that others are forked from. It imports modules but starts neither a JAX backend nor a
# thread.


def _serve(modules: Sequence[str]) -> tuple[Path, int] | None:
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
        with suppress(FileNotFoundError):  # nobody asks any more
            partial = job_dir / f"partial-exit.{child}"
            partial.write_text(str(os.waitstatus_to_exitcode(status)))
            partial.rename(job_dir / f"exit.{child}")
