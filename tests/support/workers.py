"""What the processes of `run_processes` do in its own tests. Importing it takes no time."""

import os
import subprocess
import sys
import time
from pathlib import Path


class Odd(Exception):
    pass


def fail_everywhere():
    """Process 0 fails first, the other so much later that JAX would end it were 0 gone."""
    import jax

    from ostraka.testing import _child

    if jax.process_index() == 0:
        _child._COORDINATOR_LINGER_S = 100.0  # the other may be slow to come to its own error
    else:
        wait_for(Path(sys.argv[1], "raised.0"))
        time.sleep(1.0)
    raise Odd(f"no luck on {jax.process_index()}")


def run_alone(what: str, *args):
    """For runs with `distributed=False`, which need no JAX and start at once."""
    if what == "raise":
        raise Odd(*args)
    if what == "exit":
        sys.exit(3)
    if what == "leave":
        os._exit(*args)
    if what == "lambda":
        return lambda: 0
    if what == "many lines":
        print("\n".join(f"line {n}" for n in range(1000)))
        raise Odd(*args)
    if what == "environment":
        return [os.environ.get(name) for name in args]
    if what == "jax":
        return "jax" in sys.modules
    if what == "grandchild":
        return subprocess.Popen(["sleep", "1000"]).pid
    return what


def hang(*marks: str):
    """Once a mark is there, this process has printed its line and hangs."""
    print("about to hang")
    for mark in marks:
        write_at_once(Path(mark), str(os.getpid()))
    time.sleep(1000)


def hang_and_mark(folder: str):
    hang(f"{folder}/{os.getpid()}")


def hang_unless_named(name: str):
    """Of two processes one makes the file first and fails, once the other hangs."""
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        hang(f"{name}.hangs")
    wait_for(Path(f"{name}.hangs"))
    raise Odd("the other hangs")


def wait_for(mark: Path) -> None:
    while not mark.exists():
        time.sleep(0.01)


def write_at_once(file: Path, text: str) -> None:
    """A file that is there has all of its text."""
    partial = file.with_name(f"{file.name}.partial{os.getpid()}")
    partial.write_text(text)
    partial.rename(file)


def outlive_the_other(name: str):
    """Process 1 waits to be killed; process 0 sees it gone, and fails."""
    import jax

    if jax.process_index() == 1:
        hang(name)
    wait_for(Path(name))
    assert wait_until_gone(int(Path(name).read_text()))
    raise Odd("no luck on 0")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)
