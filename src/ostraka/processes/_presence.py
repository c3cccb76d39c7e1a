"""Which processes have ended: those whose operating system closed their connection.

JAX considers a process dead when its heartbeats have been missing for 100 s, and then ends all
others. Its client offers nothing faster. So every process keeps a connection to process 0, over
which it sends only its identity. When the process ends, its operating system closes the connection.
Process 0 sees that in a moment, without a message.

An open connection proves nothing, and no connection is required. If a port is blocked, or a whole
host vanishes, the roll calls of `processes.operation` find it out. A closed connection alone proves
nothing either, because proxies close idle ones. An active process notices that and connects again
at once. A process that has not done so after `_GRACE_S` has ended.

The port is open to everyone who reaches the interface of JAX's coordinator. Each process has its
own token, made from a secret of the run. So one token speaks for one process, and a second
connection with an overheard token does not end the first. Connections without a valid token are
limited in time and in number. `OSTRAKA_PRESENCE=off` in the environment of process 0 turns all this
off.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import threading
import time
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from ostraka.common.threads import after_fork

SWITCH = "OSTRAKA_PRESENCE"
"""The environment variable that turns connections off if it is "off"."""
_LOOPBACK = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
_CONNECT_WITHIN_S = 2.0
_GRACE_S = 1.0
_WAITING = 4096
"""How many connections may wait to be accepted. Linux has the same limit."""
_DIGITS = 10
_HELLO_BYTES = 32 + _DIGITS
"""The length of a hello: the token of a process, and its number."""
_HELLO_WITHIN_S = 5.0
"""A connection without a hello is closed after so long."""
_MOST_UNKNOWN = 16
"""The most connections from one address without a hello."""
_MOST_OF_A_PROCESS = 4
"""The most connections of one process."""
_PART_OF_FILES = 4
"""Process 0 uses at most this part of its limit of open files."""

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


@dataclass(slots=True)
class _Guest:
    """The state of one connection."""

    address: str
    since_s: float
    said: bytes = b""
    process: int | None = None
    """The number of its process, once the hello was received."""


class Door:
    """The listening socket of process 0, and the connections to it."""

    def __init__(self, host: str):
        """Listen on the interface with the address `host`. Raises OSError if that fails.

        `host` is the name by which the others reach this machine. It is the loopback if all
        processes are on this machine.
        """
        self._secret = os.urandom(16).hex()
        self._listener = _listen(host)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guests: dict[socket.socket, _Guest] = {}
        self._unknown: Counter[str] = Counter()
        """The number of connections without a hello, by address."""
        self._open: Counter[int] = Counter()
        """The number of connections of each process."""
        self._closed_s: dict[int, float] = {}
        """When the last connection of a process closed, unless it has another since."""
        self._looking = threading.Lock()
        self._most = os.sysconf("SC_OPEN_MAX") // _PART_OF_FILES

    @property
    def address(self) -> list[int | str]:
        """The port and the secret, for `Connection`."""
        return [self._listener.getsockname()[1], self._secret]

    def find_ended(self) -> set[int]:
        """Return the processes that were connected, and have not been for a moment."""
        with self._looking:
            for _ in range(2):  # What a new connection has said may be followed by its end.
                for key, _ in self._selector.select(0):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._read(key.fileobj)
            now_s = time.monotonic()
            for connection, guest in list(self._guests.items()):
                if guest.process is None and now_s - guest.since_s > _HELLO_WITHIN_S:
                    self._dismiss(connection)
            return {process for process, at_s in self._closed_s.items() if at_s <= now_s - _GRACE_S}

    def close(self) -> None:
        with self._looking:
            self._selector.close()
            for held in (self._listener, *self._guests):
                held.close()
            self._guests.clear()

    def _accept(self) -> None:
        with suppress(OSError):  # There is no other, for now.
            while True:
                connection, (address, *_) = self._listener.accept()
                if len(self._guests) >= self._most:
                    connection.close()
                    continue
                connection.setblocking(False)
                _sockets.add(connection)
                self._guests[connection] = _Guest(address, time.monotonic())
                self._unknown[address] += 1
                self._selector.register(connection, selectors.EVENT_READ)
                self._read(connection)
                if self._unknown[address] > _MOST_UNKNOWN:
                    self._dismiss(connection)

    def _read(self, connection: socket.socket) -> None:
        guest = self._guests[connection]
        try:
            data = connection.recv(_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._dismiss(connection)
        elif guest.process is None:
            guest.said += data[: _HELLO_BYTES - len(guest.said)]
            if len(guest.said) == _HELLO_BYTES:
                self._admit(connection, guest)

    def _admit(self, connection: socket.socket, guest: _Guest) -> None:
        number = guest.said[-_DIGITS:]
        process = int(number) if number.isdigit() else -1
        is_valid = process >= 0 and hmac.compare_digest(guest.said, _hello(self._secret, process))
        if not is_valid or self._open[process] >= _MOST_OF_A_PROCESS:
            self._dismiss(connection)
            return
        guest.process = process
        self._unknown[guest.address] -= 1
        self._open[process] += 1
        self._closed_s.pop(process, None)

    def _dismiss(self, connection: socket.socket) -> None:
        """Close a connection that is over or untrusted. It may have been closed before."""
        guest = self._guests.pop(connection, None)
        if guest is None:
            return
        if guest.process is None:
            self._unknown[guest.address] -= 1
        else:
            self._open[guest.process] -= 1
            if not self._open[guest.process]:
                self._closed_s[guest.process] = time.monotonic()
        self._unknown += Counter()  # drops what is zero, or addresses would pile up
        self._selector.unregister(connection)
        connection.close()


def _hello(secret: str, process: int) -> bytes:
    """Return the hello of a process: its token, which is valid only for it, and its number."""
    number = f"{process:0{_DIGITS}d}".encode()
    return blake2b(number, key=secret.encode(), digest_size=16).hexdigest().encode() + number


class Connection:
    """The connection of another process, which is open while the process lives."""

    def __init__(self, host: str, address: list[int | str], process: int):
        self._host = host.strip("[]")
        self._port = int(address[0])
        self._hello = _hello(str(address[1]), process)
        self._is_closed = False
        self._changing = threading.Lock()
        self._socket = self._connect()
        if self._socket is not None:
            # A daemon: it waits for as long as the program lives.
            threading.Thread(target=self._stay_connected, daemon=True).start()

    def close(self) -> None:
        with self._changing:
            self._is_closed = True
            if self._socket is not None:
                with suppress(OSError):  # It may be closed already. Whoever waits for it wakes up.
                    self._socket.shutdown(socket.SHUT_RDWR)
                self._socket.close()

    def _connect(self) -> socket.socket | None:
        """Return a socket, or None if process 0 can't be reached."""
        try:
            made = socket.create_connection((self._host, self._port), _CONNECT_WITHIN_S)
        except OSError:
            return None
        _sockets.add(made)
        made.settimeout(None)
        with suppress(OSError):  # Then it is closed, which is found when it is read from.
            made.sendall(self._hello)
        return made

    def _stay_connected(self) -> None:
        """Connect again whenever a proxy has closed the connection."""
        while self._socket is not None:
            with suppress(OSError):
                if self._socket.recv(1):
                    return  # It is not process 0 that answers: that never says a word.
            time.sleep(_GRACE_S / 5)  # Whoever closes it each time is not asked without end.
            with self._changing:
                self._socket.close()
                self._socket = None if self._is_closed else self._connect()


def _listen(host: str) -> socket.socket:
    host = host.strip("[]")
    found = socket.getaddrinfo(
        _LOOPBACK.get(host, host), 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    for number, (family, *_, address) in enumerate(found, 1):
        try:
            listener = socket.create_server((str(address[0]), 0), family=family, backlog=_WAITING)
        except OSError:  # A name may also have addresses that are not this machine's.
            if number == len(found):
                raise
        else:
            listener.setblocking(False)
            _sockets.add(listener)
            return listener
    raise OSError(f"{host} has no address")


def _close_after_fork() -> None:
    # A child that outlives its parent must not hold the parent's connection open.
    for held in list(_sockets):
        held.close()


after_fork(_close_after_fork)
