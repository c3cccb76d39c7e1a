"""Processes that a program forks, such as data workers, take nothing of its saves along."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import ostraka
from programs import run_quietly

START = """
import multiprocessing, os, signal, sys, time, warnings
warnings.simplefilter("ignore")  # JAX warns of forks
import numpy as np
import ostraka
from ostraka.testing import FaultyStore

root = sys.argv[1]
tree = {"w": np.arange(1000.0)}

def work(pipe):
    pipe.send("at work")
    time.sleep(600)

def start_worker():
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(there,), daemon=True)
    worker.start()
    here.recv()
    return worker
"""


def run(body: str, root: Path) -> str:
    return run_quietly(START + body, root)


TERMINATE = """
worker = start_worker()
worker.terminate()
worker.join(100)
print(worker.exitcode)
"""


def test_a_worker_of_a_run_with_a_manager_can_be_terminated(tmp_path: Path):
    managers = """
first = ostraka.Manager(root + "/first")
second = ostraka.Manager(root + "/second")
"""
    end = """
start_worker()  # a daemon: it is terminated, and waited for, when the program ends
os.kill(os.getpid(), signal.SIGTERM)
print(first.reached_preemption(1), second.reached_preemption(1))
"""
    found = run(managers + TERMINATE + end, tmp_path)
    assert found == f"{-signal.SIGTERM}\nTrue True\n"


def test_the_handler_that_was_there_before_is_back_in_a_child(tmp_path: Path):
    body = """
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
manager = ostraka.Manager(root)
"""
    assert run(body + TERMINATE, tmp_path) == "7\n"


def test_a_child_does_not_write_with_its_parents_manager(tmp_path: Path):
    body = """
manager = ostraka.Manager(root)
manager.save(1, tree)
manager.wait()
if os.fork() == 0:
    for attempt in (lambda: manager.save(2, tree), lambda: manager.delete(1)):
        try:
            attempt()
        except ostraka.errors.StoreError as error:
            print(str(error).replace(str(os.getpid()), "CHILD"), flush=True)
    print(manager.steps(), flush=True)
    os._exit(0)
os.wait()
manager.save(3, tree)
manager.close()
print(manager.steps(), os.getpid())
"""
    *refused, seen, ended = run(body, tmp_path).splitlines()
    steps, process = ended.rsplit(" ", 1)
    said = (
        f"the manager of {tmp_path} writes in process {process} alone, and this is CHILD, forked "
        "from it; open one with read_only=True here, or save there"
    )
    assert refused == [said, said]
    assert (seen, steps) == ("[1]", "[1, 3]")


DIE_IN_A_SAVE = """
files = []

def fork(verb, name):
    if verb != "finish":
        return
    files.append(name)
    if name == files[0] and os.fork() == 0:
        print("forked", flush=True)  # by now it has let go of what its parent holds
        os.close(1)
        time.sleep(600)
    time.sleep(600)

manager = ostraka.Manager(FaultyStore(root, before=fork), on_preemption=False)
manager.save(1, tree)
time.sleep(600)
"""


@contextmanager
def dead_in_a_save(root: Path) -> Generator[None]:
    """A run that was killed in its first save, and whose forked child lives on."""
    with subprocess.Popen(
        [sys.executable, "-c", START + DIE_IN_A_SAVE, str(root)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"forked\n"
            process.kill()
            process.wait()
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_child_of_a_run_that_died_in_a_save_is_in_nobodys_way(tmp_path: Path):
    with dead_in_a_save(tmp_path):
        assert os.listdir(tmp_path / "step_00000001") != []
        with ostraka.Manager(tmp_path) as manager:
            assert {*os.listdir(tmp_path)} <= {"_RUN"}  # its leftovers are nobody's any more
            manager.save(1, {"w": 1})
            manager.wait()
            assert manager.restore() == {"w": 1}
