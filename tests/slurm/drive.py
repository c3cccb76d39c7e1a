"""Run examples/slurm on a Slurm of one node, all of it on this machine (`make slurm`).

Three runs train the same two-process model:

- one is left alone,
- one is requeued in the middle (`scontrol requeue`), as a preemption does it,
- one has too little time, gets SIGTERM before the end of it, and requeues itself.

All three must end with the same bits. The daemons have private directories and ports of 127.0.0.1,
and end with this program.
"""

from __future__ import annotations

import argparse
import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import ostraka

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo")
STEPS = 300
_LONG_S = 600.0
_SETTINGS = """\
ClusterName=ostraka
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
KillWait=60
ReturnToService=2
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


class Failed(Exception):
    """Slurm did not do what was expected, with the reason."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the directory with all logs")
    given = parser.parse_args()
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])  # where Debian has daemons
    missing = [name for name in NEEDED if shutil.which(name, path=path) is None]
    if missing:
        print(
            f"make slurm: {', '.join(missing)} not found. On Debian and Ubuntu install them with\n"
            "  apt-get install slurm-wlm munge",
            file=sys.stderr,
        )
        return 2
    os.environ["PATH"] = path
    directory = Path(tempfile.mkdtemp(prefix="ostraka-slurm-"))
    try:
        with cluster(directory):
            drive(directory)
    except Failed as error:
        given.keep = True
        print(f"make slurm failed: {error}", file=sys.stderr)
        return 1
    finally:
        if given.keep:
            print(f"all logs are in {directory}")
        else:
            shutil.rmtree(directory)
    return 0


def drive(directory: Path) -> None:
    """Run the three jobs, and compare how they end."""
    version = ask("sinfo", "--version").strip()
    print(f"{version}, one node on 127.0.0.1; two tasks, {STEPS} steps each\n")

    alone = Job(directory, "alone", "--every=100")
    alone.wait_until("COMPLETED")
    alone.report()

    requeued = Job(directory, "requeued", "--every=1000", "--seconds-per-step=0.05")
    requeued.wait_for_line("step 100 of")
    ask("scontrol", "requeue", requeued.number)
    requeued.wait_until("PENDING")
    expect(requeued.restarts() == 1, f"1 restart, not {requeued.restarts()}")
    requeued.begin_soon()
    requeued.wait_until("COMPLETED")
    requeued.report()
    expect_resumed(requeued, times=1)

    limits = ("--time=2", "--signal=TERM@60")
    timed = Job(directory, "timed", "--every=1000", "--seconds-per-step=0.25", options=limits)
    timed.wait_until("COMPLETED", each=timed.begin_soon)
    timed.report()
    expect(timed.restarts() >= 1, "the time was not over")
    expect_resumed(timed, times=timed.restarts())

    reference = leaves_of(alone)
    for job in (requeued, timed):
        found = leaves_of(job)
        expect(found.keys() == reference.keys(), f"{job.name} has other leaves")
        differ = [path for path, data in found.items() if data != reference[path]]
        expect(not differ, f"{job.name} differs from the run that was left alone in {differ}")
    size = sum(map(len, reference.values()))
    print(f"all three end with the same {len(reference)} leaves, bit for bit ({size:,} bytes)")


class Job:
    """A job of `examples/slurm/train.sbatch`, submitted as a user does it."""

    def __init__(self, directory: Path, name: str, *args: str, options: Sequence[str] = ()):
        self.name = name
        self.log = directory / f"{name}.log"
        self.path = directory / "runs" / name
        self._shortened = "0"
        """The restart whose wait was shortened last."""
        command = ["sbatch", "--parsable", f"--output={self.log}", *options, "train.sbatch"]
        steps = f"--steps={STEPS}"
        self.number = ask(*command, str(self.path), steps, *args, cwd=EXAMPLE).strip()

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def fields(self) -> dict[str, str]:
        shown = ask("scontrol", "show", "job", self.number)
        return dict(pair.split("=", 1) for pair in shown.split() if "=" in pair)

    def restarts(self) -> int:
        return int(self.fields()["Restarts"])

    def begin_soon(self) -> None:
        """Shorten the two minutes that Slurm lets a requeued job wait.

        Not to nothing: a job that begins while its node still ends it is killed by Slurm ("Job
        credential revoked").
        """
        fields = self.fields()
        if fields["JobState"] == "PENDING" and fields["Restarts"] != self._shortened:
            self._shortened = fields["Restarts"]
            ask("scontrol", "update", f"JobId={self.number}", "StartTime=now+15")

    def wait_for_line(self, start: str) -> None:
        self._wait(lambda: start in self.text(), f"a line {start!r}")

    def wait_until(self, state: str, each: Callable[[], None] = lambda: None) -> None:
        def reached() -> bool:
            each()
            return self.fields()["JobState"] == state

        self._wait(reached, f"the state {state}")

    def _wait(self, reached: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + _LONG_S
        while not reached():
            state = self.fields()["JobState"]
            if state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
                raise Failed(f"{self.name} is {state} before {what}:\n{self.text()}")
            if time.monotonic() > end_s:
                raise Failed(f"{self.name} is {state}, still without {what}:\n{self.text()}")
            time.sleep(0.5)

    def report(self) -> None:
        fields = self.fields()
        print(f"== {self.name}: {fields['JobState']}, {fields['Restarts']} restarts")
        print(re.sub(r"(?m)^(step \d+ of .*|\[Gloo\].*)\n", "", self.text()))


def expect_resumed(job: Job, *, times: int) -> None:
    """Each restart must begin at the step that the run before it has saved last."""
    saved = re.findall(r"being preempted \(SIGTERM\): step (\d+) is saved", job.text())
    resumed = re.findall(r"resumed from step (\d+) of", job.text())
    expect(len(saved) == times, f"{job.name} saved when preempted {len(saved)} times, not {times}")
    expect(saved == resumed, f"{job.name} saved the steps {saved}, and resumed at {resumed}")


def leaves_of(job: Job) -> dict[str, bytes]:
    """The bytes of all leaves of the last step, by path."""
    opened: Any = ostraka.open(job.path / f"step_{STEPS:08}")
    return {path: np.asarray(opened[path][...]).tobytes() for path in opened}


@contextmanager
def cluster(directory: Path) -> Generator[None]:
    """Run the daemons in the foreground, as children."""
    for name in ("state", "spool"):
        (directory / name).mkdir()
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    settings = directory / "slurm.conf"
    settings.write_text(
        _SETTINGS.format(
            directory=directory,
            user=getpass.getuser(),
            cpus=os.cpu_count(),
            controller_port=free_port(),
            node_port=free_port(),
        )
    )
    os.environ["SLURM_CONF"] = str(settings)
    os.environ["PYTHON"] = sys.executable
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("XLA_FLAGS", None)  # one device for each task
    munged = ["munged", "--foreground", "--force", f"--socket={directory}/munge.socket"]
    munged += [f"--key-file={key}", f"--pid-file={directory}/munge.pid"]
    munged += [f"--seed-file={directory}/munge.seed", f"--log-file={directory}/munge.log"]
    with ExitStack() as stack:
        for program in (munged, ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", "localhost"]):
            stack.enter_context(running(program, directory / f"{program[0]}.out"))
            if program is munged:
                wait_for((directory / "munge.socket").exists, "munged's socket", directory)
        wait_for(lambda: "idle" in ask("sinfo", "-h", "-o", "%T", check=False), "a node", directory)
        yield


@contextmanager
def running(program: Sequence[str], log: Path) -> Generator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(program, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(reached: Callable[[], bool], what: str, directory: Path) -> None:
    end_s = time.monotonic() + 60
    while not reached():
        if time.monotonic() > end_s:
            said = "".join(
                f"{log.name}: {log.read_text()[-1000:]}" for log in directory.glob("*.out")
            )
            raise Failed(f"there is no {what} after 60 s:\n{said}")
        time.sleep(0.2)


def ask(*command: str, cwd: Path | None = None, check: bool = True) -> str:
    done = subprocess.run(
        command, check=False, cwd=cwd, capture_output=True, text=True, timeout=120
    )
    if check and done.returncode:
        raise Failed(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Failed(what)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
