"""Connections by which process 0 knows who has ended."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from ostraka import _presence
from ostraka._presence import Connection, Door

LONG_S = 60.0


@pytest.fixture
def door() -> Iterator[Door]:
    with closing(Door("localhost")) as door:
        yield door


def come(door: Door, process: int) -> Connection:
    at = door._listener.getsockname()[0]
    connection = Connection("localhost" if at == "::" else at, door.address, process)
    assert connection._socket is not None
    return connection


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("host", ["localhost", "[::1]", "node-0"])
def test_one_that_ends_is_known_at_once(host: str):
    """Processes that are all on one machine, by either protocol, and others."""
    try:
        door = Door(host)
    except OSError as error:
        pytest.skip(f"NOT TESTED HERE: {host}, which this machine lacks: {error}")
    connections = {process: come(door, process) for process in (1, 2, 12)}
    wait_until(lambda: len(door._at) + len(door.find_ended()) == 3)
    assert door.find_ended() == set()
    connections[12].close()
    wait_until(lambda: door.find_ended() == {12})
    connections[1].close()
    wait_until(lambda: door.find_ended() == {1, 12})
    # One that was started again is alive again.
    again = come(door, 12)
    wait_until(lambda: door.find_ended() == {1})
    again.close()
    wait_until(lambda: door.find_ended() == {1, 12})
    connections[2].close()
    door.close()


def test_what_lives_connects_again(door: Door):
    """Something on the way, such as a proxy, has closed a connection that was idle."""
    connection = come(door, 7)
    wait_until(lambda: not door.find_ended() and 7 in door._at)
    first = door._at[7]
    first.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: not door.find_ended() and door._at.get(7) not in (None, first))
    connection.close()
    wait_until(lambda: door.find_ended() == {7})


def test_one_that_was_gone_before_anybody_looked(door: Door):
    come(door, 3).close()
    wait_until(lambda: door.find_ended() == {3})


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"0" * 42, b"0" * 5000, b"token"],
    ids=["nothing", "a browser", "another token", "much", "a part"],
)
def test_strangers_are_nobody(door: Door, said: bytes):
    stranger = socket.create_connection(("localhost", int(door.address[0])))
    with_token = b"" if said != b"token" else str(door.address[1]).encode()[:31]
    stranger.sendall(with_token or said)
    come(door, 1).close()
    wait_until(lambda: door.find_ended() == {1})
    stranger.close()
    wait_until(lambda: not (door.find_ended() - {1}) and not door._said)


def test_only_a_part_of_the_files_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 8)
    door = Door("localhost")
    connections = [come(door, process) for process in range(4)]
    wait_until(lambda: len(door.find_ended()) + len(door._at) == 2)
    for connection in connections:
        connection.close()
    wait_until(lambda: door.find_ended() == {0, 1})
    door.close()


def test_where_nobody_can_be_reached(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_presence, "_CONNECT_WITHIN_S", 0.1)
    with socket.create_server(("localhost", 0)) as closed:
        port = closed.getsockname()[1]
    for host in ("localhost", "no-such-host.invalid"):
        connection = Connection(host, [port, "0" * 32], 1)
        assert connection._socket is None
        connection.close()


FORK = """
import os, sys, warnings
from ostraka._presence import Connection

connection = Connection("localhost", [int(sys.argv[1]), sys.argv[2]], 5)
read, write = os.pipe()
if not os.fork():
    os.close(write)
    os.read(read, 1)  # until it is told to end
    os._exit(0)
print("forked", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


def test_a_child_does_not_keep_its_parent_alive(door: Door):
    command = [sys.executable, "-c", FORK, *map(str, door.address)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "forked\n"
        wait_until(lambda: not door.find_ended() and 5 in door._at)
        process.kill()
        wait_until(lambda: door.find_ended() == {5})
