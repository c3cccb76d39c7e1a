"""Connections by which process 0 knows who has ended."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any, cast

import pytest

from ostraka.processes import _presence
from ostraka.processes._presence import Connection, Door
from ostraka.processes.service import Connections
from runs import LONG_S, wait_until


@pytest.fixture(autouse=True)
def grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose connection has closed is soon known to have ended."""
    monkeypatch.setattr(_presence, "_GRACE_S", 0.2)


@pytest.fixture
def door() -> Iterator[Door]:
    with closing(Door("localhost")) as door:
        yield door


def come(door: Door, process: int) -> Connection:
    connection = Connection(door._listener.getsockname()[0], door.address, process)
    assert connection._socket is not None
    return connection


def connected(door: Door) -> set[int]:
    return {process for process, count in door._open.items() if count}


@pytest.mark.parametrize("host", ["localhost", "[::1]", "127.0.0.2"])
def test_one_that_ends_is_known_at_once(host: str):
    """Processes that are all on one machine, by either protocol, and at another interface."""
    try:
        door = Door(host)
    except OSError as error:
        pytest.skip(f"NOT TESTED HERE: {host}, which this machine lacks: {error}")
    with closing(door):
        connections = {process: come(door, process) for process in (1, 2, 12)}
        wait_until(lambda: not door.find_ended() and len(connected(door)) == 3)
        connections[12].close()
        wait_until(lambda: door.find_ended() == {12})
        connections[1].close()
        wait_until(lambda: door.find_ended() == {1, 12})
        # One that was started again is alive again.
        connections[12] = come(door, 12)
        wait_until(lambda: door.find_ended() == {1})
        connections[12].close()
        wait_until(lambda: door.find_ended() == {1, 12})
        come(door, 3).close()  # before anybody looked
        wait_until(lambda: door.find_ended() == {1, 3, 12})
        connections[2].close()


def test_what_lives_connects_again(door: Door):
    """Something on the way, such as a proxy, has closed a connection that was idle."""
    connection = come(door, 7)
    wait_until(lambda: not door.find_ended() and 7 in connected(door))
    (first,) = door._guests
    first.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: not door.find_ended() and {first} != {*door._guests} != set())
    connection.close()
    wait_until(lambda: door.find_ended() == {7})


def test_strangers_are_nobody(door: Door):
    token = str(door.address[1]).encode()
    sayings = [b"", b"GET / HTTP/1.1\r\n\r\n", b"0" * 42, b"0" * 5000, token[:31]]
    for process, said in enumerate(sayings, 1):
        with socket.create_connection(("localhost", int(door.address[0]))) as stranger:
            stranger.sendall(said)
            come(door, process).close()
            ended = set(range(1, process + 1))
            wait_until(lambda ended=ended: door.find_ended() == ended)
        wait_until(lambda ended=ended: door.find_ended() == ended and not door._guests)


Call = Callable[[], socket.socket]


@pytest.fixture
def call(door: Door) -> Iterator[Call]:
    """Connects to the door, as anybody can."""
    with ExitStack() as stack:

        def call() -> socket.socket:
            made = socket.create_connection(door._listener.getsockname()[:2])
            return stack.enter_context(made)

        yield call


def is_closed_by(door: Door, connection: socket.socket) -> bool:
    """Whether the door ends a connection; it does so when somebody looks."""
    connection.settimeout(0.05)
    for _ in range(round(LONG_S / 0.05)):
        assert door.find_ended() == set()
        with suppress(TimeoutError):
            return connection.recv(1) == b""
    return False


def test_who_says_nothing_is_sent_away(door: Door, call: Call, monkeypatch: pytest.MonkeyPatch):
    silent = call()
    wait_until(lambda: not door.find_ended() and len(door._guests) == 1)
    monkeypatch.setattr(_presence, "_HELLO_WITHIN_S", 0.0)
    assert is_closed_by(door, silent)
    assert not door._unknown


def test_strangers_of_one_address_are_few(door: Door, call: Call):
    strangers = [call() for _ in range(3 * _presence._MOST_UNKNOWN)]
    assert is_closed_by(door, strangers[-1])
    assert len(door._guests) == _presence._MOST_UNKNOWN
    # Those who say who they are come in all the same.
    connections = [come(door, process) for process in range(1, 40)]
    wait_until(lambda: not door.find_ended() and len(connected(door)) == 39)
    for connection in connections:
        connection.close()


def test_no_process_speaks_for_another(door: Door, call: Call):
    """Its token is good for its own number only, and a second use does not end the first."""
    connection = come(door, 1)
    wait_until(lambda: not door.find_ended() and connected(door) == {1})
    overheard = connection._hello
    liar = call()
    liar.sendall(overheard[:32] + b"0000000002")
    assert is_closed_by(door, liar)
    twin = call()
    twin.sendall(overheard)
    wait_until(lambda: not door.find_ended() and door._open[1] == 2)
    twin.close()
    wait_until(lambda: not door.find_ended() and door._open[1] == 1)
    time.sleep(2 * _presence._GRACE_S)
    assert door.find_ended() == set()
    for _ in range(2 * _presence._MOST_OF_A_PROCESS):
        call().sendall(overheard)
    wait_until(lambda: not door.find_ended() and door._open[1] <= _presence._MOST_OF_A_PROCESS)
    connection.close()


def test_only_the_coordinators_interface_is_open():
    with closing(Door("127.0.0.2")) as door:
        port = int(door.address[0])
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port))
        socket.create_connection(("127.0.0.2", port)).close()
    with closing(Door("0.0.0.0")) as door:
        assert door._listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(OSError, match="not known|resolution"):
        Door("no-such-host.invalid")
    # An address of another machine, from the range that is kept for documents.
    with pytest.raises(OSError, match="assign"):
        Door("192.0.2.1")


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch):
    connections = Connections(cast(Any, None), "localhost")
    monkeypatch.setenv("OSTRAKA_PRESENCE", "off")
    assert connections.open() is None
    assert connections.find_ended() == set()
    monkeypatch.delenv("OSTRAKA_PRESENCE")
    assert connections.open() is not None
    connections.close()


def test_only_a_part_of_the_files_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 8)
    with closing(Door("localhost")) as door:
        connections = [come(door, process) for process in range(4)]
        wait_until(lambda: len(door.find_ended()) + len(connected(door)) == 2)
        for connection in connections:
            connection.close()
        wait_until(lambda: door.find_ended() == {0, 1})


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
from ostraka.processes._presence import Connection

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
        wait_until(lambda: not door.find_ended() and 5 in connected(door))
        process.kill()
        wait_until(lambda: door.find_ended() == {5})
