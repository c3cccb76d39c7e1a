"""A small server with the conditions of Google Cloud Storage, for tests.

It is written from Google's public documentation of the XML API: objects with generations and
ETags, `x-goog-if-generation-match`, ranges, lists, multipart uploads, signed URLs (V4), bearer
tokens, and the errors of each. `If-Match` counts for requests that read, as Google says, and for no
others. Everything is held in memory. Paths that begin with `/-/`, which no bucket's can, control
the server: see `Controls`.

    python gcs_server.py PORT BUCKET KEY.json
"""

import base64
import hashlib
import json
import re
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

_LEAST_PART_BYTES = 5 << 20
_MOST_PARTS = 10_000
_LONGEST_S = 7 * 24 * 3600
"""The longest life of a signed URL."""
_NAMESPACE = "http://doc.s3.amazonaws.com/2006-03-01"
_SIGNED_HOST = "storage.googleapis.com"
_TEXTS = {
    "AccessDenied": "Access denied.",
    "AuthenticationRequired": "Authentication required.",
    "BadDigest": "The Content-MD5 you specified did not match what we received.",
    "EntityTooSmall": "Your proposed upload is smaller than the minimum object size.",
    "ExpiredToken": "The provided token has expired.",
    "InternalError": "We encountered an internal error. Please try again.",
    "InvalidArgument": "Invalid argument.",
    "InvalidPart": "One or more of the specified parts could not be found.",
    "InvalidPartOrder": "The list of parts was not in ascending order.",
    "InvalidRange": "The requested range cannot be satisfied.",
    "MalformedSecurityHeader": "Your request has a malformed header.",
    "MethodNotAllowed": "The specified method is not allowed against this resource.",
    "NoSuchBucket": "The specified bucket does not exist.",
    "NoSuchKey": "The specified key does not exist.",
    "NoSuchUpload": "The requested upload was not found.",
    "PreconditionFailed": "At least one of the pre-conditions you specified did not hold.",
    "ServiceUnavailable": "We encountered an internal error. Please try again.",
    "SignatureDoesNotMatch": "The request signature we calculated does not match the signature "
    "you provided. Check your Google secret key and signing method.",
    "SlowDown": "The object exceeded the rate limit for object mutation operations (create, "
    "update, and delete). Please reduce your request rate.",
}
_STATUS = {
    "AccessDenied": 403,
    "AuthenticationRequired": 401,
    "InternalError": 500,
    "InvalidRange": 416,
    "MethodNotAllowed": 405,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "PreconditionFailed": 412,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 429,
}
"""By code; 400 for the others."""
_FAULTS = {"429": "SlowDown", "500": "InternalError", "503": "ServiceUnavailable"}


class Refusal(Exception):
    """An answer that is an error of Google's."""

    def __init__(self, code: str, details: str = "", **headers: str):
        super().__init__(code)
        self.code = code
        self.details = details
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def body(self) -> bytes:
        details = f"<Details>{escape(self.details)}</Details>" if self.details else ""
        text = f"<Code>{self.code}</Code><Message>{_TEXTS[self.code]}</Message>{details}"
        return f"<?xml version='1.0' encoding='UTF-8'?><Error>{text}</Error>".encode()


@dataclass(frozen=True)
class Object:
    data: bytes
    generation: int
    e_tag: str
    changed_s: float


@dataclass
class Upload:
    key: str
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


@dataclass
class Bucket:
    """The objects of a bucket, in one lock: each request is one event."""

    name: str
    objects: dict[str, Object] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    generation: int = 0
    writes_per_s: float = 0.0
    """How often an object may be changed; 0 for as often as you like."""
    most_listed: int = 1000
    """The most entries of a page of a list. Google may return fewer than it was asked for."""
    changed: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, key: str, headers: Any, query: dict[str, str]) -> Object:
        there = self.objects.get(key)
        if there is None or query.get("generation", str(there.generation)) != str(there.generation):
            raise Refusal("NoSuchKey", f"No such object: {self.name}/{key}")
        if headers.get("If-Match", there.e_tag) not in (there.e_tag, "*"):
            raise Refusal("PreconditionFailed", "If-Match")
        self._expect_generation(key, headers)
        return there

    def write(self, key: str, data: bytes, e_tag: str, headers: Any) -> Object:
        self._expect_generation(key, headers)
        self._expect_rate(key)
        now_s = time.time()
        self.generation = max(self.generation + 1, int(now_s * 1e6))
        made = self.objects[key] = Object(data, self.generation, e_tag, now_s)
        return made

    def delete(self, key: str, headers: Any, query: dict[str, str]) -> None:
        there = self.objects.get(key)
        self._expect_generation(key, headers)
        if there is None or query.get("generation", str(there.generation)) != str(there.generation):
            raise Refusal("NoSuchKey", f"No such object: {self.name}/{key}")
        self._expect_rate(key)
        del self.objects[key]

    def complete(self, upload_id: str, key: str, body: bytes, headers: Any) -> Object:
        upload = self.upload(upload_id, key)
        named: list[tuple[int, str]] = []
        for part in _elements(body, "Part"):
            found = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in part}
            named.append((int(found["PartNumber"]), found["ETag"].strip('"')))
        numbers = [number for number, _ in named]
        if not named:
            raise Refusal("InvalidArgument", "no parts")
        if numbers != sorted(set(numbers)):
            raise Refusal("InvalidPartOrder")
        pieces: list[bytes] = []
        for number, e_tag in named:
            stored = upload.parts.get(number)
            if stored is None or stored[0].strip('"') != e_tag:
                raise Refusal("InvalidPart", f"part {number}")
            if number != numbers[-1] and len(stored[1]) < _LEAST_PART_BYTES:
                raise Refusal("EntityTooSmall", f"part {number}")
            pieces.append(stored[1])
        # Not a digest of the content, as Google says of objects that were uploaded in parts.
        e_tag = f'"{_md5("".join(e_tag for _, e_tag in named).encode())}-{len(named)}"'
        made = self.write(key, b"".join(pieces), e_tag, headers)
        del self.uploads[upload_id]
        return made

    def upload(self, upload_id: str, key: str) -> Upload:
        upload = self.uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise Refusal("NoSuchUpload")
        return upload

    def list(self, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        most = min(int(query.get("max-keys", "1000")), self.most_listed)
        found: dict[str, Object | None] = {}
        """By key, or by a prefix that several keys have in common."""
        for key in sorted(key for key in self.objects if key.startswith(prefix)):
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if end < 0 else key[: end + len(delimiter)]
            if name > after and not (end >= 0 and after.startswith(name)):
                found[name] = self.objects[key] if end < 0 else None
        page = dict(list(found.items())[:most])
        text = [f"<?xml version='1.0' encoding='UTF-8'?><ListBucketResult xmlns='{_NAMESPACE}'>"]
        text.append(f"<Name>{self.name}</Name><Prefix>{escape(prefix)}</Prefix>")
        text.append(f"<KeyCount>{len(page)}</KeyCount><MaxKeys>{most}</MaxKeys>")
        text.append(f"<IsTruncated>{str(len(page) < len(found)).lower()}</IsTruncated>")
        if len(page) < len(found):
            token = escape(list(page)[-1])
            text.append(f"<NextContinuationToken>{token}</NextContinuationToken>")
        for name, there in page.items():
            if there is None:
                prefixes = f"<Prefix>{escape(name)}</Prefix>"
                text.append(f"<CommonPrefixes>{prefixes}</CommonPrefixes>")
                continue
            changed = datetime.fromtimestamp(there.changed_s, UTC).isoformat("T", "milliseconds")
            text.append(
                f"<Contents><Key>{escape(name)}</Key><Generation>{there.generation}</Generation>"
                f"<MetaGeneration>1</MetaGeneration><LastModified>{changed.replace('+00:00', 'Z')}"
                f"</LastModified><ETag>{escape(there.e_tag)}</ETag><Size>{len(there.data)}</Size>"
                "</Contents>"
            )
        return ("".join(text) + "</ListBucketResult>").encode()

    def _expect_generation(self, key: str, headers: Any) -> None:
        wanted = headers.get("x-goog-if-generation-match")
        there = self.objects.get(key)
        if wanted is not None and int(wanted) != (0 if there is None else there.generation):
            raise Refusal("PreconditionFailed", "x-goog-if-generation-match")

    def _expect_rate(self, key: str) -> None:
        now_s = time.monotonic()
        if self.writes_per_s and now_s - self.changed.get(key, -1e9) < 1 / self.writes_per_s:
            raise Refusal("SlowDown", f"{self.name}/{key}")
        self.changed[key] = now_s


@dataclass(frozen=True)
class PublicKey:
    """Of the one account that there is."""

    email: str
    modulus: int
    exponent: int

    def signed(self, text: bytes, signature: bytes) -> bool:
        """Return True if a signature is RSASSA-PKCS1-v1_5 with SHA-256 of a text by this key."""
        size = (self.modulus.bit_length() + 7) // 8
        found = pow(int.from_bytes(signature), self.exponent, self.modulus).to_bytes(size)
        info = bytes.fromhex("3031300d060960864801650304020105000420")
        end = b"\0" + info + hashlib.sha256(text).digest()
        return found == b"\0\1" + b"\xff" * (size - len(end) - 2) + end


def serve(port: int, bucket: Bucket, key: PublicKey) -> None:
    """Serve until the process ends."""
    faults: list[str] = []
    counted: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            query = dict(parse_qsl(parts.query, keep_blank_values=True))
            try:
                with bucket.lock:
                    if parts.path.startswith("/-/"):
                        return self._send(200, _control(parts.path[3:], query))
                    counted[self.command] = counted.get(self.command, 0) + 1
                    if faults:
                        raise Refusal(faults.pop(0))
                _authenticate(key, self.command, self.path, self.headers)
                name, _, object_key = unquote(parts.path)[1:].partition("/")
                if name != bucket.name:
                    raise Refusal("NoSuchBucket")
                with bucket.lock:
                    answer = self._answer(object_key, query, body)
                self._send(*answer)
            except Refusal as refusal:
                status = _STATUS.get(refusal.code, 400)
                kind = {"Content-Type": "application/xml; charset=UTF-8"}
                self._send(status, refusal.body(), {**kind, **refusal.headers})

        def do_GET(self) -> None:
            self._handle()

        def do_HEAD(self) -> None:
            self._handle()

        def do_PUT(self) -> None:
            self._handle()

        def do_POST(self) -> None:
            self._handle()

        def do_DELETE(self) -> None:
            self._handle()

        def _answer(self, key: str, query: dict[str, str], body: bytes) -> Any:
            headers = self.headers
            if not key:
                if self.command != "GET":
                    raise Refusal("MethodNotAllowed")
                return 200, bucket.list(query)
            if self.command in ("GET", "HEAD"):
                return _read(bucket.read(key, headers, query), headers)
            if self.command == "DELETE":
                if "uploadId" in query:
                    bucket.upload(query["uploadId"], key)
                    del bucket.uploads[query["uploadId"]]
                else:
                    bucket.delete(key, headers, query)
                return 204, b""
            if self.command == "PUT" and "uploadId" in query:
                number = int(query["partNumber"])
                if not 1 <= number <= _MOST_PARTS:
                    raise Refusal("InvalidArgument", "partNumber")
                e_tag = f'"{_md5(body)}"'
                bucket.upload(query["uploadId"], key).parts[number] = (e_tag, body)
                return 200, b"", {"ETag": e_tag}
            if self.command == "PUT":
                made = bucket.write(key, body, f'"{_md5(body)}"', headers)
                return 200, b"", _meta(made)
            if "uploads" in query:
                upload_id = hashlib.sha256(f"{key}{time.time_ns()}".encode()).hexdigest()
                bucket.uploads[upload_id] = Upload(key)
                names = f"<Key>{escape(key)}</Key><UploadId>{upload_id}</UploadId>"
                return 200, _result("InitiateMultipartUpload", names)
            if "uploadId" in query:
                made = bucket.complete(query["uploadId"], key, body, headers)
                names = f"<Key>{escape(key)}</Key><ETag>{escape(made.e_tag)}</ETag>"
                return 200, _result("CompleteMultipartUpload", names), _meta(made)
            raise Refusal("InvalidArgument")

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            if headers is None or "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    def _control(verb: str, query: dict[str, str]) -> bytes:
        if verb == "fail":
            faults.extend([_FAULTS[query["status"]]] * int(query["times"]))
        if verb == "limit":
            bucket.writes_per_s = float(query["writes_per_s"])
            bucket.most_listed = int(query["most_listed"])
        state = {
            "uploads": [upload.key for upload in bucket.uploads.values()],
            "faults": len(faults),
            "requests": counted,
            "generations": {name: there.generation for name, there in bucket.objects.items()},
        }
        return json.dumps(state).encode()

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    Server(("127.0.0.1", port), Handler).serve_forever()


class Controls:
    """How a test looks at the server, and has it fail."""

    def __init__(self, endpoint: str):
        self._endpoint = endpoint

    def state(self) -> dict[str, Any]:
        """The incomplete uploads, the faults to come, the requests so far, the generations."""
        return self._ask("state")

    def fail(self, status: int, times: int) -> None:
        """Answer the next requests with an error, whatever they are."""
        self._ask("fail", status=status, times=times)

    def limit(self, *, writes_per_s: float = 0.0, most_listed: int = 1000) -> None:
        """Set how often an object may be changed, 0 for no limit, and the size of a list's page."""
        self._ask("limit", writes_per_s=writes_per_s, most_listed=most_listed)

    def _ask(self, verb: str, **query: Any) -> dict[str, Any]:
        url = f"{self._endpoint}/-/{verb}?{urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)


def _read(there: Object, headers: Any) -> Any:
    size = len(there.data)
    if headers.get("If-None-Match") in (there.e_tag, "*"):
        return 304, b"", _meta(there)
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range", ""))
    if asked is None or asked.groups() == ("", ""):
        return 200, there.data, {**_meta(there), "Content-Length": str(size)}
    first, last = asked.groups()
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= stop:
        raise Refusal("InvalidRange", Content_Range=f"bytes */{size}")
    ranged = {
        "Content-Range": f"bytes {start}-{stop - 1}/{size}",
        "Content-Length": str(stop - start),
    }
    return 206, there.data[start:stop], {**_meta(there), **ranged}


def _meta(there: Object) -> dict[str, str]:
    return {
        "ETag": there.e_tag,
        "Last-Modified": formatdate(there.changed_s, usegmt=True),
        "x-goog-generation": str(there.generation),
        "x-goog-metageneration": "1",
        "x-goog-stored-content-length": str(len(there.data)),
    }


def _authenticate(key: PublicKey, method: str, path: str, headers: Any) -> None:
    """Raise Refusal for a request that is neither signed nor has a token of the account."""
    parts = urlsplit(path)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if "X-Goog-Signature" not in query:
        kind, _, token = headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not token:
            raise Refusal("AuthenticationRequired")
        if not _is_token(key, token):
            raise Refusal("AuthenticationRequired", "invalid token")
        return
    if query["X-Goog-SignedHeaders"] != "host":
        raise Refusal("MalformedSecurityHeader", "only host can be signed here")
    for name in headers:
        if name.lower().startswith(("x-goog-", "x-amz-")):
            raise Refusal("MalformedSecurityHeader", f"{name} is not among the signed headers")
    begun = datetime.strptime(query["X-Goog-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    lifetime_s = int(query["X-Goog-Expires"])
    if lifetime_s > _LONGEST_S:
        raise Refusal("InvalidArgument", "X-Goog-Expires")
    signature = bytes.fromhex(query.pop("X-Goog-Signature"))
    named = "&".join(f"{quote(n, safe='')}={quote(v, safe='')}" for n, v in sorted(query.items()))
    request = f"{method}\n{parts.path}\n{named}\nhost:{_SIGNED_HOST}\n\nhost\nUNSIGNED-PAYLOAD"
    email, _, scope = query["X-Goog-Credential"].partition("/")
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = f"{query['X-Goog-Algorithm']}\n{query['X-Goog-Date']}\n{scope}\n{digest}"
    if email != key.email or not key.signed(text.encode(), signature):
        raise Refusal("SignatureDoesNotMatch")
    if time.time() > begun.timestamp() + lifetime_s:
        raise Refusal("ExpiredToken", "Request signature expired")


def _is_token(key: PublicKey, token: str) -> bool:
    """Return True for a JSON web token that the account has signed, and that has not expired."""
    try:
        head, claims, signature = token.split(".")
        stated = json.loads(_decoded(claims))
        is_signed = key.signed(f"{head}.{claims}".encode(), _decoded(signature))
    except ValueError:
        return False
    return is_signed and stated["iss"] == key.email and stated["exp"] > time.time()


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _elements(body: bytes, name: str) -> list[Any]:
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise Refusal("InvalidArgument", str(error)) from error
    return [child for child in root if child.tag.rpartition("}")[2] == name]


def _result(name: str, inside: str) -> bytes:
    text = f"<{name}Result xmlns='{_NAMESPACE}'>{inside}</{name}Result>"
    return f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode()


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        serve(int(sys.argv[1]), Bucket(sys.argv[2]), PublicKey(**json.load(file)))
