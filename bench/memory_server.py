"""As much of S3 as the contenders of `bench.buckets` need, from memory.

For comparing clients where the server costs next to nothing. It checks no signatures, makes no
digests and writes no disk. `python -m bench.memory_server PORT`.
"""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.servers import BUCKET, KEYS, Server, free_port

_STARTS_IN_S = 60
_numbers = itertools.count(1)


class _Object:
    """What was put in one go or in parts, one after the other."""

    def __init__(self, parts: list[memoryview]):
        self.parts = parts
        self.size = sum(map(len, parts))
        self.tag = f'"{next(_numbers):032x}"'
        self.changed = time.gmtime()

    def cut(self, start: int, stop: int) -> Iterator[memoryview]:
        for part in self.parts:
            if start < len(part) and stop > 0:
                yield part[max(start, 0) : stop]
            start, stop = start - len(part), stop - len(part)


_objects: dict[str, _Object] = {}
_uploads: dict[str, dict[int, memoryview]] = {}
_lock = threading.Lock()
Answer = tuple[str, dict[str, str], list[Any]]


def _put(key: str, query: dict[str, list[str]], asked: dict[str, str], body: Any) -> Answer:
    if "uploadId" in query:
        _uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
        return "200 OK", {"ETag": f'"{len(body):032x}"'}, []
    with _lock:
        there = _objects.get(key)
        is_refused = ("if-none-match" in asked and there is not None) or (
            "if-match" in asked and (there is None or asked["if-match"] != there.tag)
        )
        if is_refused:
            return (
                "412 Precondition Failed",
                {},
                [b"<Error><Code>PreconditionFailed</Code></Error>"],
            )
        made = _objects[key] = _Object([body])
    return "200 OK", {"ETag": made.tag}, []


def _post(key: str, query: dict[str, list[str]], body: Any) -> Answer:
    if "uploads" in query:
        upload = f"upload{next(_numbers)}"
        _uploads[upload] = {}
        text = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
        return _xml("InitiateMultipartUploadResult", text)
    if "uploadId" in query:
        parts = _uploads.pop(query["uploadId"][0])
        made = _objects[key] = _Object([parts[number] for number in sorted(parts)])
        return _xml("CompleteMultipartUploadResult", f"<ETag>{escape(made.tag)}</ETag>")
    for name in re.findall(r"<Key>(.*?)</Key>", bytes(body).decode()):
        _objects.pop(name, None)
    return _xml("DeleteResult", "")


def _get(key: str, asked: dict[str, str]) -> Answer:
    found = _objects.get(key)
    if found is None:
        return "404 Not Found", {}, [b"<Error><Code>NoSuchKey</Code></Error>"]
    changed = time.strftime("%a, %d %b %Y %H:%M:%S GMT", found.changed)
    headers = {"ETag": found.tag, "Last-Modified": changed, "Accept-Ranges": "bytes"}
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", asked.get("range", ""))
    if wanted is None:
        return "200 OK", headers, [*found.cut(0, found.size)]
    start = int(wanted[1])
    stop = min(int(wanted[2]) + 1, found.size) if wanted[2] else found.size
    if start >= found.size:
        return "416 Range Not Satisfiable", {}, [b"<Error><Code>InvalidRange</Code></Error>"]
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{found.size}"
    return "206 Partial Content", headers, [*found.cut(start, stop)]


def _list(query: dict[str, list[str]]) -> Answer:
    prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
    lines: list[str] = []
    below: set[str] = set()
    for key, found in sorted(dict(_objects).items()):
        rest = key[len(prefix) :]
        if not key.startswith(prefix):
            continue
        if delimiter and delimiter in rest:
            below.add(prefix + rest.split(delimiter)[0] + delimiter)
            continue
        changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", found.changed)
        lines.append(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{changed}</LastModified>"
            f"<ETag>{escape(found.tag)}</ETag><Size>{found.size}</Size></Contents>"
        )
    names = (
        f"<CommonPrefixes><Prefix>{escape(n)}</Prefix></CommonPrefixes>" for n in sorted(below)
    )
    head = f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
    return _xml("ListBucketResult", head + "".join(lines) + "".join(names))


def _xml(name: str, text: str) -> Answer:
    return "200 OK", {}, [f'<?xml version="1.0" encoding="UTF-8"?><{name}>{text}</{name}>'.encode()]


def _answer(method: str, target: str, asked: dict[str, str], body: Any) -> Answer:
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    key = unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
    if method == "PUT" and key:
        return _put(key, query, asked, body)
    if method == "POST":
        return _post(key, query, body)
    if method == "DELETE":
        _objects.pop(key, None)
        return "204 No Content", {}, []
    if not key:
        return _xml("ListMultipartUploadsResult", "") if "uploads" in query else _list(query)
    return _get(key, asked)


def _serve(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream: Any = connection.makefile("rb", buffering=64 << 10)
    while line := stream.readline():
        method, target, _ = line.decode().split(" ", 2)
        asked: dict[str, str] = {}
        while (header := stream.readline().strip()) and b":" in header:
            name, value = header.decode().split(":", 1)
            asked[name.lower()] = value.strip()
        if "100-continue" in asked.get("expect", "").lower():
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = memoryview(bytearray(int(asked.get("content-length", 0))))
        filled = 0
        while filled < len(body):
            count = stream.readinto(body[filled:])
            if not count:
                return  # The client has gone.
            filled += count
        status, headers, pieces = _answer(method, target, asked, body)
        length = sum(map(len, pieces))
        lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())]
        if not status.startswith("204"):
            lines.append(f"Content-Length: {length}")
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        if method != "HEAD":
            for piece in pieces:
                connection.sendall(piece)


def _serve_quietly(connection: socket.socket) -> None:
    try:
        _serve(connection)
    except OSError:
        pass  # The client has gone.
    finally:
        connection.close()


def main() -> None:
    with socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=256) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve_quietly, args=(connection,), daemon=True).start()


@contextmanager
def memory_server() -> Generator[Server]:
    """Such a server in a process of its own."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "bench.memory_server", str(port)])
    try:
        end_s = time.monotonic() + _STARTS_IN_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError("bench.memory_server did not start")
            time.sleep(0.05)
        endpoint = f"http://127.0.0.1:{port}"
        variable = "AWS_ENDPOINT_URL"
        environment = {**KEYS, variable: endpoint}
        yield Server(environment, f"s3://{BUCKET}", endpoint, variable, lambda: None)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
