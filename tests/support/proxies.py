"""A proxy between a program and a server, which does harm on the way."""

import random
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

FAULTS = ("error 500", "error 503", "slow", "cut answer", "cut request", "closed", "lost answer")


@dataclass
class Proxy:
    """Listens at `port`; `harmed` counts what it did."""

    port: int = 0
    rate: float = 0.0
    faults: Sequence[str] = FAULTS
    bytes_per_s: float | None = None
    harmed: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)


@contextmanager
def proxied(server_port: int, *, seed: int = 0) -> Generator[Proxy]:
    """One HTTP request at a time on each connection, as clients do it."""
    proxy = Proxy()
    choose = random.Random(seed)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", server_port)) as server:
                try:
                    while self._one_request(server):
                        pass
                except OSError:
                    pass

        def _one_request(self, server: socket.socket) -> bool:
            head, rest = _read_head(self.request)
            if not head:
                return False
            proxy.requests[head.split(b" ", 1)[0].decode()] += 1
            fault = choose.choice(proxy.faults) if choose.random() < proxy.rate else ""
            if fault:
                proxy.harmed[fault] += 1
            length = _length_of(head)
            if fault == "closed":
                return False
            if fault in ("error 500", "error 503"):
                _skip(self.request, length - len(rest))
                text = {"error 500": b"500 Internal Server Error", "error 503": b"503 Slow Down"}
                self.request.sendall(b"HTTP/1.1 " + text[fault] + b"\r\nContent-Length: 0\r\n\r\n")
                return True
            if fault == "slow":
                time.sleep(choose.uniform(0.2, 1.0))
            server.sendall(head)
            server.sendall(rest)
            left = length - len(rest)
            if fault == "cut request" and length:
                _pass_on(self.request, server, left // 2, None)
                return False
            _pass_on(self.request, server, left, proxy.bytes_per_s)
            answer, rest = _read_head(server)
            if fault == "lost answer" or not answer:
                return False
            length = 0 if head.startswith(b"HEAD") else _length_of(answer)
            self.request.sendall(answer)
            if fault == "cut answer" and length:
                self.request.sendall(rest[: length // 2])
                return False
            self.request.sendall(rest)
            if length < 0:
                _pass_chunks(server, self.request, rest)
            else:
                _pass_on(server, self.request, length - len(rest), proxy.bytes_per_s)
            return True

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as listener:
        proxy.port = listener.server_address[1]
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            listener.shutdown()


def _read_head(connection: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return b"", b""
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", rest


def _length_of(head: bytes) -> int:
    """-1 for a body in chunks."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
        if line.startswith(b"transfer-encoding:") and b"chunked" in line:
            return -1
    return 0


def _pass_on(
    source: socket.socket, target: socket.socket, nbytes: int, bytes_per_s: float | None
) -> None:
    while nbytes > 0:
        data = source.recv(min(nbytes, 1 << 18))
        if not data:
            raise OSError("the connection ended")
        if bytes_per_s:
            time.sleep(len(data) / bytes_per_s)
        target.sendall(data)
        nbytes -= len(data)


def _skip(source: socket.socket, nbytes: int) -> None:
    while nbytes > 0:
        data = source.recv(min(nbytes, 1 << 18))
        if not data:
            raise OSError("the connection ended")
        nbytes -= len(data)


def _pass_chunks(source: socket.socket, target: socket.socket, seen: bytes) -> None:
    end = seen[-8:]
    while not end.endswith(b"0\r\n\r\n"):
        data = source.recv(1 << 18)
        if not data:
            raise OSError("the connection ended")
        target.sendall(data)
        end = (end + data)[-8:]
