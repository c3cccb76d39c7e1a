"""Which processes have ended, told by connections that their systems close.

JAX finds that a process is dead when its heartbeats have been missing for 100 s, and then ends all
others; nothing that its client offers tells it sooner. So every process keeps a connection to
process 0, over which it says who it is and nothing else. However the process ends, its system
closes the connection, and process 0 sees that in a moment, without a message.

An open connection proves nothing, and none is needed: where none can be made, because a port is
blocked, or if a whole host goes without a word, the roll calls of `_coordinate` find it out.
Nor does a closed one by itself: proxies close what is idle. A process that lives sees that, too,
and connects again at once; one that has not done so after `_GRACE_S` has ended.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
import weakref
from contextlib import suppress

from ostraka._lifetime import after_fork

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_CONNECT_WITHIN_S = 2.0
_GRACE_S = 1.0
_WAITING = 4096
"""How many connections may wait to be taken in; Linux has this limit itself."""
_DIGITS = 10
_HELLO_BYTES = 32 + _DIGITS
"""A token that process 0 has made, and the number of the process."""
_PART_OF_FILES = 4
"""Process 0 uses at most this part of the files that it may have open."""

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Door:
    """On process 0: where the others connect to."""

    def __init__(self, host: str):
        """Listen; raises OSError if that can't be done.

        `host` is what the others call this machine. As JAX's own service, it is open to all that
        reach this machine, unless the processes are all on it.
        """
        self._token = os.urandom(16).hex()
        self._listener = _listen(host)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._said: dict[socket.socket, bytes] = {}
        """What each connection has said so far."""
        self._at: dict[int, socket.socket] = {}
        self._closed_s: dict[int, float] = {}
        """When the connection of a process was found closed, unless it has made another since."""
        self._looking = threading.Lock()
        self._most = os.sysconf("SC_OPEN_MAX") // _PART_OF_FILES

    @property
    def address(self) -> list[int | str]:
        """For `connect`."""
        return [self._listener.getsockname()[1], self._token]

    def find_ended(self) -> set[int]:
        """The processes that were connected, and have not been for a moment."""
        with self._looking:
            for _ in range(3):  # A new connection may have its hello to read, and then its end.
                for key, _ in self._selector.select(0):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._read(key.fileobj)
            latest_s = time.monotonic() - _GRACE_S
            return {process for process, at_s in self._closed_s.items() if at_s <= latest_s}

    def close(self) -> None:
        with self._looking:
            self._selector.close()
            for held in (self._listener, *self._said):
                held.close()
            self._said.clear()

    def _accept(self) -> None:
        with suppress(OSError):  # There is no other, for now.
            while True:
                connection = self._listener.accept()[0]
                if len(self._said) >= self._most:
                    connection.close()
                    continue
                connection.setblocking(False)
                _sockets.add(connection)
                self._said[connection] = b""
                self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said = self._said[connection] = (self._said[connection] + data)[:_HELLO_BYTES]
        if data and len(said) < _HELLO_BYTES:
            return
        process = self._process_in(said)
        if data and process is not None:
            self._at[process] = connection
            self._closed_s.pop(process, None)
            return
        # It is over, or a stranger.
        if process is not None and self._at.get(process) is connection:
            del self._at[process]
            self._closed_s[process] = time.monotonic()
        self._selector.unregister(connection)
        del self._said[connection]
        connection.close()

    def _process_in(self, hello: bytes) -> int | None:
        token, number = hello[:-_DIGITS], hello[-_DIGITS:]
        return int(number) if token == self._token.encode() and number.isdigit() else None


class Connection:
    """On the others: tells process 0, by being open, that this process lives."""

    def __init__(self, host: str, address: list[int | str], process: int):
        self._host = host.strip("[]")
        self._port = int(address[0])
        self._hello = f"{address[1]}{process:0{_DIGITS}d}".encode()
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
        """None if process 0 can't be reached."""
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
        """Connect again whenever something on the way has closed the connection."""
        while self._socket is not None:
            with suppress(OSError):
                if self._socket.recv(1):
                    return  # It is not process 0 that answers: that never says a word.
            time.sleep(_GRACE_S / 5)  # Whoever closes it each time is not asked without end.
            with self._changing:
                self._socket.close()
                self._socket = None if self._is_closed else self._connect()


def _listen(host: str) -> socket.socket:
    if host in _LOOPBACK:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        address = host.strip("[]") if host != "localhost" else "127.0.0.1"
        listener = socket.create_server((address, 0), family=family, backlog=_WAITING)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_WAITING
        )
    else:
        listener = socket.create_server(("", 0), backlog=_WAITING)
    listener.setblocking(False)
    _sockets.add(listener)
    return listener


def _close_after_fork() -> None:
    # A child that outlives its parent must not hold the parent's connection open.
    for held in list(_sockets):
        held.close()


after_fork(_close_after_fork)
