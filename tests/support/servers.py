"""Object stores on this machine, for tests.

moto and SeaweedFS have S3's conditions, Azurite has Azure's, and `gcs_server.py` has Google's.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

import gcs_server
from gcs_server import Controls

BUCKET = "ostraka-tests"
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_ROOT = Path(__file__).parents[2]
_STARTS_IN_S = 120
# Known to all: those of the emulator.
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@dataclass(frozen=True)
class Server:
    """One that runs: what programs need in their environment, and a path that it serves."""

    environment: Mapping[str, str]
    url: str
    endpoint: str
    variable: str
    """The variable of the environment that has the endpoint."""
    client: Callable[[], Any]
    """An independent client of the same store; of Google's, what controls the server."""


@contextmanager
def moto(directory: Path) -> Generator[Server]:
    port = free_port()
    program = [sys.executable, __file__, str(port)]
    with _running(program, directory / "moto.log", port):
        yield _s3_server(port)


@contextmanager
def seaweed(directory: Path) -> Generator[Server]:
    with ExitStack() as stack:
        for attempt in range(3):
            port = _seaweed_port()
            program = _seaweed_program(directory, f"weed{attempt}", port)
            try:
                stack.enter_context(_running(program, directory / "weed.log", port))
            except RuntimeError:  # Another program may have taken one of the ports meanwhile.
                if attempt == 2:
                    raise
            else:
                yield _s3_server(port)
                return


def _seaweed_program(directory: Path, name: str, port: int) -> list[str]:
    settings = directory / "s3.json"
    credentials = [{"accessKey": "testing", "secretKey": "testing"}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "tests", "credentials": credentials, "actions": actions}
    settings.write_text(json.dumps({"identities": [identity]}))
    data = directory / name
    data.mkdir()
    ports = {name: _seaweed_port() for name in ("master.port", "volume.port", "filer.port")}
    return [
        _program("weed"),
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-s3",
        f"-s3.port={port}",
        f"-s3.config={settings}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=1024",
        "-volume.max=64",
        *(f"-{name}={value}" for name, value in ports.items()),
    ]


@contextmanager
def azurite(directory: Path) -> Generator[Server]:
    port = free_port()
    program = [
        _azurite_program(),
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
        "--disableTelemetry",
        "--skipApiVersionCheck",
        "-s",
        "-l",
        str(directory / "azurite"),
    ]
    with _running(program, directory / "azurite.log", port):
        endpoint = f"http://127.0.0.1:{port}/{_AZURE_ACCOUNT}"
        environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": _AZURE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _AZURE_KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
        }
        _create_azure_container(endpoint)
        yield Server(
            environment, f"az://{BUCKET}", endpoint, "AZURE_STORAGE_ENDPOINT", lambda: None
        )


@contextmanager
def google(directory: Path) -> Generator[Server]:
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    account, key = directory / "account.json", directory / "key.json"
    _write_google_account(account, key)
    program = [sys.executable, gcs_server.__file__, str(port), BUCKET, str(key)]
    with _running(program, directory / "google.log", port):
        variable, controls = "GOOGLE_BASE_URL", Controls(endpoint)
        environment = {"GOOGLE_SERVICE_ACCOUNT": str(account), variable: endpoint}
        yield Server(environment, f"gs://{BUCKET}", endpoint, variable, lambda: controls)


KINDS = {"moto": moto, "seaweed": seaweed, "azurite": azurite, "google": google}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _seaweed_port() -> int:
    """SeaweedFS also listens at each port plus 10,000."""
    while True:
        port = free_port()
        if port < 55_000:
            return port


def _s3_server(port: int) -> Server:
    endpoint = f"http://127.0.0.1:{port}"

    def client() -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
        )

    _until(lambda: client().create_bucket(Bucket=BUCKET))
    variable = "AWS_ENDPOINT_URL"
    return Server({**KEYS, variable: endpoint}, f"s3://{BUCKET}", endpoint, variable, client)


def _program(name: str) -> str:
    found = Path(sys.executable).parent / name
    if not found.exists():
        pytest.skip(f"NOT TESTED HERE: {name}, which is not installed; `make venv` installs it")
    return str(found)


def _azurite_program() -> str:
    found = _ROOT / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
    if not found.exists():
        pytest.skip("NOT TESTED HERE: Azure. `make azurite` installs Azurite, with npm")
    return str(found)


def _create_azure_container(endpoint: str) -> None:
    import base64
    import hashlib
    import hmac
    from email.utils import formatdate

    path = f"/{_AZURE_ACCOUNT}/{BUCKET}"
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = "\n".join(f"{key}:{value}" for key, value in sorted(headers.items()))
    kind = "application/octet-stream"
    text = f"PUT\n\n\n\n\n{kind}\n\n\n\n\n\n\n{lines}\n/{_AZURE_ACCOUNT}{path}\nrestype:container"
    digest = hmac.new(base64.b64decode(_AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Content-Type"] = kind
    headers["Authorization"] = f"SharedKey {_AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(
        f"{endpoint}/{BUCKET}?restype=container", method="PUT", headers=headers, data=b""
    )
    _until(lambda: urllib.request.urlopen(request, timeout=10).close())


def _write_google_account(account: Path, key: Path) -> None:
    """Write the file of a service account, and what the server needs to know of its key."""
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    email = "tests@ostraka.iam.gserviceaccount.com"
    named = {"type": "service_account", "private_key_id": "1", "client_email": email}
    account.write_text(json.dumps({**named, "private_key": pem}))
    public = private.public_key().public_numbers()
    key.write_text(json.dumps({"email": email, "modulus": public.n, "exponent": public.e}))


@contextmanager
def _running(program: list[str], log: Path, port: int) -> Generator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            program,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HOME": str(log.parent)},
            start_new_session=True,
        )
    try:
        end_s = time.monotonic() + _STARTS_IN_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"{program[0]} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until(do: Callable[[], Any]) -> None:
    """A server may listen before it is ready."""
    end_s = time.monotonic() + _STARTS_IN_S
    while True:
        try:
            do()
            return
        except Exception:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.2)


def _serve_moto(port: int) -> None:
    """Run moto, which does not look at the end of signed URLs, in front of it what does."""
    from moto.moto_server import werkzeug_app
    from werkzeug.serving import run_simple

    app = werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app)

    def refuse_expired(environ: Any, start: Any) -> Any:
        query = dict(parse_qsl(environ.get("QUERY_STRING", "")))
        if "X-Amz-Expires" in query:
            begun = datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
            if datetime.now(UTC) > begun + timedelta(seconds=int(query["X-Amz-Expires"])):
                start("403 Forbidden", [("Content-Type", "application/xml")])
                return [b"<Error><Code>AccessDenied</Code><Message>Request has expired"]
        return app(environ, start)

    handler = werkzeug_app.MotoRequestHandler
    run_simple("127.0.0.1", port, refuse_expired, threaded=True, request_handler=handler)


if __name__ == "__main__":
    _serve_moto(int(sys.argv[1]))
