"""Pauses of the collector of cycles, which outlive interrupts and forks."""

import gc
import subprocess
import sys
import threading

import pytest

from ostraka.common.threads import paused_gc


def test_collection_is_paused_and_comes_back():
    assert gc.isenabled()
    with paused_gc():
        with paused_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), paused_gc():
        raise ValueError("inside")
    assert gc.isenabled()


def test_collection_that_the_program_has_turned_off_stays_off():
    gc.disable()
    try:
        with paused_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collection_comes_back_when_the_last_of_several_threads_is_done():
    entered, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with paused_gc():
            entered.set()
            leave.wait(60)

    other = threading.Thread(target=pause)
    with paused_gc():
        other.start()
        entered.wait(60)
    assert not gc.isenabled()
    leave.set()
    other.join()
    assert gc.isenabled()


FORK_IN_A_PAUSE = """
import gc, os, threading
from ostraka.common.threads import paused_gc

entered, leave = threading.Event(), threading.Event()

def pause():
    with paused_gc():
        entered.set()
        leave.wait(60)

other = threading.Thread(target=pause)
other.start()
entered.wait(60)
with paused_gc():
    child = os.fork()
    found = [gc.isenabled()]
if child == 0:
    with paused_gc():
        found.append(gc.isenabled())
    found.append(gc.isenabled())
    os._exit(0 if found == [True, False, True] else 1)
leave.set()
other.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert found == [False] and gc.isenabled()
"""


def test_a_process_forked_in_a_pause_collects():
    """In a program of its own: JAX, which is loaded here, warns of forks."""
    subprocess.run([sys.executable, "-c", FORK_IN_A_PAUSE], check=True)


def test_collection_comes_back_after_a_pause_that_was_never_ended():
    pause = paused_gc()
    pause.__enter__()
    assert not gc.isenabled()
    del pause  # as if an interrupt had come before its end
    with paused_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
