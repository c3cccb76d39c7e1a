"""`ostraka board`: a run directory, live in a browser. Read-only. No JAX.

The server is for one person. It listens on this machine unless told otherwise. Each request must
have the token, which only the printed address has, and must name this machine in its Host header,
so that no other site that the browser visits can reach it. A step is named by its path in the
document of the run, and nothing else can be named: no path from a request is ever opened.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from email.message import Message
from errno import EADDRINUSE
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from ostraka.errors import CheckpointNotFound, OstrakaError, describe, printable, store_error
from ostraka.report.feed import Feed
from ostraka.report.page import policy, render
from ostraka.report.run import RunReader
from ostraka.storage import PathLike, Store

if TYPE_CHECKING:
    from ostraka.common.progress import OnBytes
    from ostraka.report.measure import Progress
    from ostraka.report.schema import CheckpointDocument, RunDocument

_MOST_CONNECTIONS = 64
"""When one more comes, the oldest that has not given the token goes."""
_MOST_LISTENERS = 16
_MOST_READERS = 2
"""Requests that read arrays at the same time."""
_MOST_LINE = 8192
_MOST_HEADERS = 64
_REQUEST_S = 30.0
"""How long a connection may be silent."""
_HEARTBEAT_S = 5.0
"""How often a page hears that the board is there. It reconnects after three times as long."""
_LOOK_S = 1.0
"""How often to look if a listener has gone."""
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
"""An address of IPv6 in brackets, or another name, and a port."""
TOKEN = re.compile(r"[A-Za-z0-9_.~-]{16,200}")
"""A token can stand in an address as it is, and is too long to guess."""


class Refusal(Exception):
    """A request that gets another answer than the one it asked for."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


class _HasLeft(Exception):
    """Nobody waits for the answer any more."""


class Board:
    """Serves one run directory. `url` has the token. `serve` returns after `close`.

    Raises StoreError if it can't listen on `host` and `port`.
    """

    def __init__(self, path: PathLike, *, host: str, port: int, token: str | None = None):
        self.token = token or secrets.token_urlsafe(32)
        self._reader = RunReader(path)
        self.feed = Feed(self._reader)
        self.location = self._reader.root.location
        self.listeners = threading.BoundedSemaphore(_MOST_LISTENERS)
        self._readers = threading.BoundedSemaphore(_MOST_READERS)
        self._names = _names_of(host)
        self._is_address = is_loopback_address if is_loopback(host) else _is_address
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            if error.errno == EADDRINUSE:
                error.strerror = "the port is in use; choose another, or 0 for a free one"
            raise store_error("listen on", f"{host}:{port}", error) from error
        self.port = self._server.server_port
        shown = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
        shown = f"[{shown}]" if ":" in shown else shown
        self.url = f"http://{shown}:{self.port}/?token={self.token}"
        live = {"token": self.token, "path": self.location}
        title = f"{printable(self.location)} – ostraka"
        self.page = render({"title": title, "at": time.time(), "documents": [], "live": live})

    def serve(self) -> None:
        """Answer requests until `close`, or Ctrl-C."""
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self.feed.close()
            self._server.server_close()

    def close(self) -> None:
        """End `serve`, which runs in another thread."""
        self.feed.close()
        self._server.shutdown()

    # What may be asked

    def check(self, headers: Message[str, str], query: Mapping[str, str]) -> None:
        """Refuse a request from another site, or without the token."""
        host = ", ".join(headers.get_all("Host", []))
        if not self._is_own(host):
            raise Refusal(403, f"this board answers to its own address only, not to {host!r:.80}")
        origin = ", ".join(headers.get_all("Origin", [f"http://{host}"]))
        site = headers.get("Sec-Fetch-Site")
        mode = headers.get("Sec-Fetch-Mode")
        if origin not in (f"http://{host}", f"https://{host}"):
            raise Refusal(403, f"a page from {origin!r:.80} may not read this board")
        if site not in (None, "same-origin", "none") and mode != "navigate":
            raise Refusal(403, "a page from another site may not read this board")
        given = headers.get("X-Ostraka-Token", "") or query.get("token", "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode()):
            raise Refusal(403, "the token is missing or wrong; open the address that was printed")

    def _is_own(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        name = "" if found is None else found[1] or found[2]
        return name.lower() in self._names or self._is_address(name)

    def answer(self, path: str, query: Mapping[str, str], watched: Progress) -> Any:
        """The JSON of a request. Raises Refusal, OstrakaError or KeyError.

        `watched` ends long work when nobody waits for it any more.
        """
        if path == "/api/run":
            return self.feed.look()
        if path == "/api/checkpoint":
            from ostraka.report.checkpoint import describe_checkpoint

            place = self._step(query, "path")
            # A board reads the values of one array at a time, when somebody looks at it.
            return self._read(lambda: describe_checkpoint(place, values=False))
        if path == "/api/verify":
            from ostraka.report.checkpoint import describe_checkpoint

            name = self._name_of(query, "path")

            def verify() -> CheckpointDocument:
                place = self._reader.root.at(name)
                return describe_checkpoint(place, values=False, verified=True, progress=watched)

            return self._read(lambda: self.feed.check(name, verify))
        if path == "/api/leaf":
            from ostraka.report.checkpoint import describe_leaf_at

            place, leaf = self._step(query, "path"), query.get("leaf", "")
            return self._read(lambda: describe_leaf_at(place, leaf))
        if path == "/api/compare":
            from ostraka.report.comparison import describe_comparison

            a, b = self._step(query, "a"), self._step(query, "b")
            return self._read(lambda: describe_comparison(a, b))
        raise Refusal(404, f"this board has no page {path!r:.80}")

    def _step(self, query: Mapping[str, str], name: str) -> Store:
        return self._reader.root.at(self._name_of(query, name))

    def _name_of(self, query: Mapping[str, str], name: str) -> str:
        """The directory of a step that a request names by its path or by its directory."""
        wanted, root = query.get(name, ""), self._reader.root
        found = _find(wanted, self.feed.latest()) or _find(wanted, self.feed.look())
        if found is None:
            raise Refusal(404, f"{wanted!r:.200} is no step of {self.location}")
        if root.store.is_link(found):
            raise Refusal(403, f"{found} is a link, and a board shows nothing behind links")
        return found

    def _read(self, work: Callable[[], Any]) -> Any:
        with self._readers:
            return work()


def _find(wanted: str, run: RunDocument | None) -> str | None:
    """The directory of a step that is in a document."""
    for row in () if run is None else run["steps"]:
        name = row["path"].rpartition("/")[2]
        if wanted in (row["path"], name):
            return name
    return None


def _names_of(host: str) -> frozenset[str]:
    """The names that a browser may call this machine by."""
    names = {"localhost", host}
    if not is_loopback(host):
        names |= {socket.gethostname(), socket.getfqdn()}
    return frozenset(name.lower() for name in names if name)


def _is_address(name: str) -> bool:
    # A site that lures a browser here does so by a name of its own, never by an address.
    with suppress(ValueError):
        ip_address(name)
        return True
    return False


def is_loopback(host: str) -> bool:
    """True if only programs on this machine can reach a host."""
    return host == "localhost" or is_loopback_address(host)


def is_loopback_address(name: str) -> bool:
    """True for addresses such as 127.0.0.1 and ::1."""
    with suppress(ValueError):
        return ip_address(name).is_loopback
    return False


class _Server(ThreadingHTTPServer):
    """A thread for each connection, and no more of them than `_MOST_CONNECTIONS`.

    Whoever opens connections and says nothing, or says it slowly, must not keep out others.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], board: Board):
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.board = board
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        """Connections without a request that had the token, the oldest first."""
        self._guests = 0
        """How many are being answered since their request had the token."""
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        oldest = None
        with self._lock:
            if self._guests + len(self._strangers) >= _MOST_CONNECTIONS:
                oldest = next(iter(self._strangers), request)
                self._strangers.pop(oldest, None)
            if oldest is not request:
                self._strangers[request] = None
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # Its thread reads the end, and closes it.
        if oldest is request:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._strangers.pop(request, None)

    @contextmanager
    def answering(self, connection: socket.socket) -> Generator[None]:
        """Keep a connection whose request had the token until it is answered."""
        with self._lock:
            self._strangers.pop(connection, None)
            self._guests += 1
        try:
            yield
        finally:
            with self._lock:
                self._guests -= 1
                self._strangers[connection] = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # A browser that has left. All other errors are answers.


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _REQUEST_S
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    raw_requestline: bytes

    def version_string(self) -> str:
        return "ostraka"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def parse_request(self) -> bool:
        if len(self.raw_requestline) > _MOST_LINE:
            self.requestline, self.request_version, self.command = "", "HTTP/1.1", "GET"
            self.close_connection = True
            self._send_json(414, {"error": "the address of the request is too long"})
            return False
        if not super().parse_request():
            return False
        if len(self.headers) > _MOST_HEADERS:
            self.close_connection = True
            self._send_json(431, {"error": "the request has too many headers"})
            return False
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what the server itself refuses: a wrong request line, or another method."""
        self.close_connection = True
        self.command = getattr(self, "command", None) or "GET"
        self.request_version = "HTTP/1.1"
        if code == 501:
            code, message = 405, "a board answers GET and HEAD only"
        self._send_json(int(code), {"error": message or "the request is not understood"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        # A GET has no body. Bytes that come as one would be taken for the next request.
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True
        board = self.server.board
        try:
            if not self.path.startswith("/"):
                raise Refusal(400, "the address of a request begins with /")
            address = urlsplit(self.path)
            query = {name: texts[0] for name, texts in parse_qs(address.query).items()}
            if address.path == "/favicon.ico":
                self._send(204, "image/x-icon", b"")
                return
            board.check(self.headers, query)
            with self.server.answering(self.connection):
                if address.path == "/":
                    self._send(200, "text/html; charset=utf-8", board.page.encode())
                elif address.path == "/api/events":
                    self._send_events()
                else:
                    self._send_json(200, board.answer(address.path, query, self._watched))
        except Refusal as refusal:
            self._send_json(refusal.status, {"error": str(refusal)})
        except (CheckpointNotFound, FileNotFoundError) as error:
            self._send_json(404, {"error": describe(error)})
        except KeyError as error:
            self._send_json(404, {"error": str(error.args[0] if error.args else error)})
        except OstrakaError as error:
            self._send_json(422, {"error": str(error)})
        except (_HasLeft, ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            self._send_json(500, {"error": describe(error)})

    @contextmanager
    def _watched(self, what: str, total_bytes: int) -> Generator[OnBytes]:
        """Progress of work that ends when the browser has left."""

        def on_bytes(done: int, total: int) -> None:
            if _has_left(self.connection):
                raise _HasLeft

        yield on_bytes

    def _send_json(self, status: int, document: Any) -> None:
        data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
        self._send(status, "application/json", data)

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self._begin(status, kind)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Security-Policy": f"{policy(is_live=True)}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "X-Frame-Options": "DENY",
        }.items():
            self.send_header(name, value)

    # Server-Sent Events

    def _send_events(self) -> None:
        board = self.server.board
        if not board.listeners.acquire(blocking=False):
            raise Refusal(503, f"{_MOST_LISTENERS} pages show this board already; close one")
        try:
            self.close_connection = True
            self._begin(200, "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(b"retry: 1000\n\n")
            with board.feed.listening(), suppress(OSError):
                self._follow(board.feed)
        finally:
            board.listeners.release()

    def _follow(self, feed: Feed) -> None:
        seen, sent_s = 0, time.monotonic()
        while not feed.is_closed:
            update = feed.wait(seen, _LOOK_S)
            if update is not None:
                self.wfile.write(update.event(seen))
                seen, sent_s = update.number, time.monotonic()
            elif _has_left(self.connection):
                return
            elif time.monotonic() - sent_s > _HEARTBEAT_S:
                self.wfile.write(b"event: beat\ndata: 1\n\n")
                sent_s = time.monotonic()


def _has_left(connection: socket.socket) -> bool:
    """True if the other end has closed a connection on which it has nothing more to say."""
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable) and not connection.recv(1, socket.MSG_PEEK)
