"""Checkpoints in buckets: faults on the way, what they cost in requests, and what is refused."""

import os
import random
import re
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import numpy as np
import obstore
import pytest
from click.testing import CliRunner
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from obstore.exceptions import GenericError
from obstore.store import LocalStore as ObstoreDirectory
from obstore.store import MemoryStore as ObstoreMemory
from obstore.store import S3Store

import ostraka
from figures import Figures
from gcs_server import Controls
from ostraka import Manager
from ostraka.cli import main
from ostraka.errors import (
    Busy,
    CheckpointNotFound,
    OstrakaError,
    SaveFailed,
    StoreError,
    UnsupportedFormat,
)
from ostraka.saving import place as _leftovers
from ostraka.saving.place import collect_garbage
from ostraka.storage import _claim, _cloud, open_store
from ostraka.testing import FaultyStore, ProcessesFailed, kill_when, run_processes
from proxies import Proxy, proxied
from servers import BUCKET, KEYS, Server

S3 = pytest.mark.parametrize("bucket", ["moto"], indirect=True)
"""For what is asked of S3 alone, whatever store the others use."""


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def sharded_tree(leaves: int, rows: int) -> dict[str, Any]:
    placed = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
    return {
        f"w{n}": jax.device_put(np.full((8, rows), n, np.float32), placed) for n in range(leaves)
    }


def assert_same(found: Any, expected: Any) -> None:
    flat, structure = jax.tree.flatten(found)
    wanted, expected_structure = jax.tree.flatten(expected)
    assert structure == expected_structure
    for a, b in zip(flat, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def uploads_of(server: Server) -> list[str]:
    """The keys of the uploads that were begun and not completed."""
    client = server.client()
    if isinstance(client, Controls):
        return client.state()["uploads"]
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    return [upload["Key"] for upload in uploads]


@pytest.fixture
def proxy(
    bucket: str, servers: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Proxy]:
    """Between this program and the server of `bucket`, which is moto's or Google's."""
    server = servers("google" if bucket.startswith("gs:") else "moto")
    with proxied(int(server.endpoint.rpartition(":")[2])) as proxy:
        monkeypatch.setenv(server.variable, f"http://127.0.0.1:{proxy.port}")
        yield proxy


def recover_after(proxy: Proxy, faults: int) -> threading.Thread:
    """Let the proxy do no more harm once it has done so much."""

    def recover() -> None:
        while proxy.harmed.total() < faults:
            time.sleep(0.001)
        proxy.rate = 0.0

    recovery = threading.Thread(target=recover, daemon=True)
    recovery.start()
    return recovery


# What it costs


@S3
@pytest.mark.parametrize(("leaves", "rows"), [(2, 4), (2, 3 << 19), (3000, 1)])
def test_requests_are_as_planned(bucket: str, proxy: Proxy, leaves: int, rows: int):
    """For files that are one request, those that are uploaded in parts, and long headers."""
    tree = sharded_tree(leaves, rows)
    plan = ostraka.plan(tree)
    ostraka.save(bucket, tree)
    assert without_renewals(proxy.requests) == sum(plan.requests_by_process)
    assert without_renewals(proxy.requests) == 19 or rows > 4
    proxy.requests.clear()
    assert_same(ostraka.restore(bucket), tree)
    assert proxy.requests.total() == plan.restore().requests.most
    # Large ranges apart, a request for each file, and three for what is there.
    assert plan.restore().requests.most == 11 + (8 if rows == 3 << 19 else 0)
    proxy.requests.clear()
    ostraka.save(bucket, tree)
    assert without_renewals(proxy.requests) == sum(plan.requests_by_process) + 11


def test_what_is_read_first_comes_with_the_request_that_opens_a_file(bucket: str, proxy: Proxy):
    data = np.random.default_rng(0).bytes(1 << 20)
    store: Any = open_store(bucket)
    store.upload("file", memoryview(data))

    def read(reader: Any, start: int, stop: int) -> int:
        """Compares; returns how many requests that took."""
        before = proxy.requests.total()
        memory = bytearray(stop - start)
        assert reader.read_into(start, [memory]) == stop - start
        assert memory == data[start:stop]
        return proxy.requests.total() - before

    proxy.requests.clear()
    reader = store.open("file", 700_000)
    assert reader.size == len(data)
    assert read(reader, 0, 4096) + read(reader, 4096, 700_000) == 0
    assert proxy.requests == {"GET": 1}
    # Large ranges are not kept once they were read.
    assert [read(reader, *span) for span in [(0, 4096), (4096, 700_000)]] == [0, 1]
    assert read(reader, 700_000, 1 << 20) == 1
    reader.close()
    proxy.rate, proxy.faults = 1.0, ("cut answer",)
    reader = store.open("file", 700_000)
    proxy.rate = 0.0
    assert read(reader, 0, 4096) > 0  # asked for again
    assert read(reader, 4096, 700_000) == 0
    reader.close()


@S3
def test_requests_of_several_processes_and_parity_are_as_planned(bucket: str, proxy: Proxy):
    """One process reads nothing back; of two, each reads what it makes parity of."""
    tree = sharded_tree(2, 4)
    ostraka.save(f"{bucket}/alone", tree, parity=2)
    planned = ostraka.plan(tree, parity=2).requests_by_process
    assert without_renewals(proxy.requests) == sum(planned)
    proxy.requests.clear()
    results = run_processes(save_planned, bucket, processes=2, devices_per_process=2)
    plain, with_parity, read_back = results[0].value
    assert plain[1] < plain[0]  # The first one commits.
    assert read_back == 4  # a file of each device, by the other process
    assert without_renewals(proxy.requests, saves=2) == sum(plain) + sum(with_parity)


def save_planned(path: str) -> tuple[list[int], list[int], int]:
    tree = leaves_of(jax.make_mesh((jax.device_count(),), ("data",)))
    ostraka.save(f"{path}/plain", tree)
    ostraka.save(f"{path}/parity", tree, parity=1)
    planned = ostraka.plan(tree, parity=1)
    assert planned.parity is not None
    read_back = sum(map(len, planned.parity.table.groups))
    return ostraka.plan(tree).requests_by_process, planned.requests_by_process, read_back


def without_renewals(requests: Counter[str], saves: int = 1) -> int:
    """A save looks at its marker and renews it once; each time more is one because it lasted."""
    return requests.total() - 2 * (requests["HEAD"] - saves)


# Faults on the way


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_harm_on_the_way(bucket: str, proxy: Proxy, rate: float):
    outcomes, expected = [], None
    for number in range(6):
        tree = {"small": np.arange(number, number + 10), "large": np.full(3 << 20, number, "f4")}
        proxy.rate = rate
        try:
            ostraka.save(bucket, tree)
            outcomes.append("saved")
            expected = tree
        except OstrakaError as error:
            outcomes.append(type(error).__name__)
        with suppress(OstrakaError):
            ostraka.restore(bucket)
        proxy.rate = 0.0
        found = ostraka.restore(bucket)
        assert int(found["small"][0]) <= number
        assert_same(found["large"], np.full(3 << 20, int(found["small"][0]), np.float32))
        if outcomes[-1] == "saved":
            assert_same(found, expected)
    assert proxy.harmed
    assert outcomes.count("saved") >= 4, outcomes
    assert ostraka.verify(bucket).ok


# Refusals


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cloud, "_RETRY", {"max_retries": 0})
    _cloud._open_bucket.cache_clear()


@pytest.mark.parametrize("bucket", ["moto", "google"], indirect=True)
def test_there_is_no_such_bucket(bucket: str):
    path = f"{bucket.partition(':')[0]}://no-such-bucket/run"
    for call in (ostraka.restore, partial(ostraka.save, tree={"a": 1})):
        with pytest.raises(
            StoreError,
            match=f"can't list {path}.*: there is no such bucket; create it, or correct the path",
        ):
            call(path)


@pytest.mark.parametrize("bucket", ["seaweed"], indirect=True)
def test_wrong_credentials(bucket: str, monkeypatch: pytest.MonkeyPatch):
    ostraka.save(f"{bucket}/c", {"a": 1})
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for call in (ostraka.restore, partial(ostraka.save, tree={"a": 1})):
        with pytest.raises(StoreError, match="does not know these credentials; check the key"):
            call(f"{bucket}/c")


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"<html>nothing here</html>", "does not speak the API of S3; check it"),
        (405, b"", "the server at this endpoint does not speak the API of S3"),
        (407, b"", "a proxy on the way asks for credentials; check HTTP_PROXY"),
        (400, b"<Error><Code>InvalidBucketName</Code></Error>", "there is no such bucket"),
        (400, b"<Error><Code>ExpiredToken</Code></Error>", "the credentials have expired"),
        (403, b"<Error><Code>AccessDenied</Code></Error>", "no permission; the credentials must"),
        (301, b"", "the bucket is in another region; set AWS_REGION"),
        (400, b"<Error><Code>Other</Code></Error>", "/c: status code: 400 .*<Code>Other</Code>"),
    ],
)
def test_what_a_server_refuses_has_its_remedy(
    status: int, body: bytes, message: str, monkeypatch: pytest.MonkeyPatch
):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        set_all(monkeypatch, KEYS | {"AWS_ENDPOINT_URL": endpoint})
        for ask in (ostraka.open, Manager, lambda path: ostraka.save(path, {"a": 1})):
            with pytest.raises(StoreError, match=message):
                ask(f"s3://{BUCKET}/c")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def patience(monkeypatch: pytest.MonkeyPatch, *, at_first_ms: int, later_ms: int) -> None:
    short = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=10)}
    later = {"retry_timeout": timedelta(milliseconds=later_ms), "backoff": short}
    monkeypatch.setattr(_cloud, "_RETRY", _cloud._RETRY | later)
    at_first = {"retry_timeout": timedelta(milliseconds=at_first_ms)}
    monkeypatch.setattr(_cloud, "_AT_FIRST", at_first)
    _cloud._open_bucket.cache_clear()


@pytest.mark.parametrize("host", ["127.0.0.1:9", "no-such-host.invalid"])
def test_a_store_that_never_answered_is_given_up_soon(host: str, monkeypatch: pytest.MonkeyPatch):
    set_all(monkeypatch, KEYS | {"AWS_ENDPOINT_URL": f"http://{host}"})
    patience(monkeypatch, at_first_ms=33, later_ms=60_000)
    save = partial(ostraka.save, tree={"a": 1})
    for ask in (ostraka.restore, ostraka.open, ostraka.verify, Manager, save):
        with pytest.raises(
            StoreError, match="can't be reached; check the endpoint and the network"
        ) as refused:
            ask(f"s3://{BUCKET}/c")
        assert "retry_timeout: 33ms" in str(refused.value.__cause__)


@S3
def test_a_store_that_has_answered_is_asked_for_longer(
    bucket: str, servers: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
):
    patience(monkeypatch, at_first_ms=33, later_ms=77)
    with proxied(int(servers("moto").endpoint.rpartition(":")[2])) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(CheckpointNotFound, match=f"{bucket}/c.*there is no such directory"):
            ostraka.open(f"{bucket}/c")
    with pytest.raises(StoreError, match="can't be reached; check the endpoint") as refused:
        ostraka.open(f"{bucket}/c")
    assert "retry_timeout: 77ms" in str(refused.value.__cause__)


@pytest.mark.parametrize("fault", ["error 503", "closed"])
def test_a_store_in_trouble_at_first_is_asked_for_longer(
    bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, fault: str
):
    patience(monkeypatch, at_first_ms=0, later_ms=60_000)
    proxy.faults, proxy.rate = (fault,), 1.0
    recovery = recover_after(proxy, 20)
    with pytest.raises(CheckpointNotFound, match="there is no such directory"):
        ostraka.open(f"{bucket}/c")
    recovery.join()
    proxy.rate = 1.0
    recovery = recover_after(proxy, 120)  # for many retries
    ostraka.save(f"{bucket}/c", {"a": np.arange(5)})
    recovery.join()
    assert_same(ostraka.restore(f"{bucket}/c"), {"a": np.arange(5)})


@pytest.mark.parametrize("path", ["az://container/run", "abfs://container/run"])
def test_what_is_missing_is_named_as_that_store_calls_it(
    path: str, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    told = "no credentials were found; set AZURE_STORAGE_ACCOUNT_NAME"
    with pytest.raises(StoreError, match=told) as refused:
        ostraka.open(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("fault", ["error 503", "cut answer", "closed"])
def test_a_server_in_trouble_is_no_damage(
    bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, no_retries: None, fault: str
):
    monkeypatch.setattr("ostraka.storage._object._RETRY_FOR_S", 0.0)
    ostraka.save(f"{bucket}/c", {"a": np.arange(100_000)})
    opened = ostraka.open(f"{bucket}/c")
    proxy.faults, proxy.rate = (fault,), 1.0
    with pytest.raises(StoreError, match="can't read .*(try again later|can't be reached)"):
        opened["a"][:]
    proxy.rate = 0.0
    np.testing.assert_array_equal(opened["a"][:], np.arange(100_000))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://key:secret@bucket/run", "credentials and endpoints come from the environment"),
        ("s3://bucket/run?region=x", "credentials and endpoints come from the environment"),
        ("s3:///run", "names no bucket; expected s3://bucket/prefix"),
        ("s3://bucket/ru\nn", "has a control character in it"),
        ("s3://bucket/ru\0n", "has a control character in it"),
        ("s3://bucket/run//7", "a part of it is empty, '.' or '..'"),
        ("s3://bucket/./run", "a part of it is empty, '.' or '..'"),
        ("az://bucket/run/../7", "a part of it is empty, '.' or '..'"),
        ("s3://bucket/run\\7", "has a backslash, which some stores take for '/'"),
        ("s3://bucket/run#7", "without ?, # or @"),
    ],
)
def test_what_is_no_path(path: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        ostraka.save(path, {"a": 1})


@pytest.mark.parametrize(
    "path",
    [
        "s3://key:hunter2@bucket/run",
        "s3://bucket/ru\nn?password=hunter2",
        "https://key:hunter2@bucket/run",
        "http://hunter2@bucket/run",
        Path("s3://key:hunter2@bucket/run"),
        "https://bucket.s3.amazonaws.com/run?X-Amz-Signature=hunter2",
        Path("https://bucket.s3.amazonaws.com/run?X-Amz-Signature=hunter2"),
        "https://account.blob.core.windows.net/bucket/run?sv=2024&sig=hunter2",
        Path("az://bucket/run?sig=hunter2"),
    ],
)
def test_a_secret_in_a_path_is_not_repeated(path: str | Path):
    for call in (partial(ostraka.save, tree={"a": 1}), ostraka.restore, ostraka.open):
        with pytest.raises((ValueError, UnsupportedFormat), match="bucket") as refused:
            call(path)
        assert "hunter2" not in "".join(traceback.format_exception(refused.value))


def test_a_secret_of_the_environment_is_not_repeated(monkeypatch: pytest.MonkeyPatch):
    """What obstore says of a request has its URL, and is shown as the cause of our error."""
    monkeypatch.setattr(_cloud, "_AT_FIRST", {"retry_timeout": timedelta(seconds=0.1)})
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    secret = {"AWS_SECRET_ACCESS_KEY": "hunter2-of-at-least-sixteen"}
    endpoint = {"AWS_ENDPOINT_URL": f"http://user:hunter2@127.0.0.1:{port}"}
    set_all(monkeypatch, KEYS | secret | endpoint)
    with pytest.raises(StoreError, match="can't be reached") as refused:
        ostraka.open("s3://bucket/run")
    assert "127.0.0.1" in str(refused.value.__cause__)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))
    assert "hunter2" not in str(StoreError("said hunter2-of-at-least-sixteen"))


@pytest.mark.parametrize(
    ("path", "variable", "endpoint"),
    [
        ("s3://bucket/run", "AWS_ENDPOINT_URL", "user:hunter2@host:9000"),
        ("s3://bucket/run", "AWS_ENDPOINT_URL", "http://user:hunter2@host:port"),
        ("s3://bucket/run", "AWS_ENDPOINT_URL", "x"),
        ("gs://bucket/run", "GOOGLE_BASE_URL", "localhost:9000"),
    ],
)
def test_an_endpoint_that_is_no_url(
    monkeypatch: pytest.MonkeyPatch, path: str, variable: str, endpoint: str
):
    monkeypatch.setenv(variable, endpoint)
    with pytest.raises(StoreError, match="is no URL such as https://host:9000") as refused:
        ostraka.open(path)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))


def test_a_profile_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match="profile 'nobody' in Amazon's files.*correct AWS_PROFILE"):
        ostraka.open("s3://bucket/run")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "ostraka.storage._cloud", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "ostraka.storage._object", raising=False)
    with pytest.raises(UnsupportedFormat, match="pip install obstore boto3"):
        ostraka.save("s3://bucket/run", {"a": 1})


def test_after_a_fork(bucket: str):
    ostraka.save(f"{bucket}/c", {"a": 1})
    with pytest.warns(RuntimeWarning):  # JAX's own word on forks
        child = os.fork()
    if not child:
        try:
            ostraka.restore(f"{bucket}/c")
        except StoreError as error:
            os._exit(7 if "not survive a fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# Paths


def test_a_store_of_obstore_is_a_path(servers: Callable[[str], Server], tmp_path: Path):
    store = given_store(servers("moto"), "given/below")
    ostraka.save(store, {"a": np.arange(5)})
    assert_same(ostraka.restore(store), {"a": np.arange(5)})
    assert open_store(store).location == f"s3://{BUCKET}/given/below"
    assert "_METADATA" in [file["path"] for file in obstore.list(store).collect()]
    ostraka.copy(store, tmp_path / "copy")
    assert ostraka.plan(store).total_bytes == ostraka.plan(tmp_path / "copy").total_bytes


def given_store(server: Server, prefix: str, bucket: str = BUCKET) -> S3Store:
    return S3Store(
        bucket,
        prefix=prefix,
        endpoint=server.endpoint,
        access_key_id="testing",
        secret_access_key="testing",
        region="us-east-1",
        client_options={"allow_http": True},
    )


def test_a_given_store_is_not_looked_for_on_another_server(
    servers: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
):
    """The name of a given store leads to another server, where there is a step of that name."""
    set_all(monkeypatch, dict(servers("seaweed").environment))
    ostraka.save(f"s3://{BUCKET}/elsewhere/step_7", {"on": "the other server"})
    for path in ("elsewhere/7", "elsewhere"):
        with pytest.raises(CheckpointNotFound, match="there is no such directory$"):
            ostraka.restore(given_store(servers("moto"), path))


def test_given_stores_of_one_name_on_two_servers(servers: Callable[[str], Server]):
    here, there = (given_store(servers(kind), "one-name") for kind in ("moto", "seaweed"))
    tree = {"a": np.arange(100_000)}
    ostraka.save(here, tree)
    assert ostraka.convert(here, there, to="ostraka").arrays == 1
    open_store(there).delete("")
    ostraka.copy(here, there)
    assert_same(ostraka.restore(there), tree)
    shard = next(f.name for f in open_store(here).files("") if f.name.endswith(".safetensors"))
    data = open_store(here).get(shard)
    open_store(here).put(shard, data[:-1] + bytes([data[-1] ^ 1]))
    assert ostraka.repair(here, sources=there).repaired
    assert_same(ostraka.restore(here), tree)


def test_two_memories_of_obstore():
    here, there, merged = ObstoreMemory(), ObstoreMemory(), ObstoreMemory()
    ostraka.save(here, {"a": np.arange(5.0)})
    ostraka.copy(here, there)
    ostraka.merge([here, there], merged)
    assert_same(ostraka.restore(merged), {"a": np.arange(5.0)})
    root, mirror = ObstoreMemory(), ObstoreMemory()
    with Manager(root, mirror=mirror, keep=2) as manager:
        for step in range(4):
            manager.save(step, {"a": np.full(3, step)})
        manager.wait()
        assert manager.steps() == [2, 3]
    assert Manager(mirror, read_only=True).latest() == 3
    assert_same(Manager(root).restore(), {"a": np.full(3, 3)})


def test_a_directory_of_obstore_is_a_path(tmp_path: Path):
    store = ObstoreDirectory(tmp_path / "a b%20", mkdir=True)
    with Manager(store, keep=1) as manager:
        for step in (1, 2):
            manager.save(step, {"a": np.full(3, step)})
    assert Manager(tmp_path / "a b%20", read_only=True).steps() == [2]
    assert_same(ostraka.restore(store), {"a": np.full(3, 2)})


@pytest.mark.parametrize(
    ("settings", "signs"),
    [
        ({}, False),
        ({"AWS_ENDPOINT_URL": "https://store.example"}, False),
        ({"AWS_ENDPOINT_URL": "http://store.example"}, True),
        ({"AWS_UNSIGNED_PAYLOAD": "false"}, True),
    ],
)
def test_what_tls_protects_is_not_signed(
    settings: dict[str, str], signs: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    set_all(monkeypatch, KEYS | settings)
    store: Any = open_store("s3://bucket/run")
    assert store._contact.lasting.config.get("unsigned_payload", "false") == str(not signs).lower()


def test_profiles_of_amazons_tools(
    servers: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [*KEYS, "AWS_ENDPOINT_URL"]:
        monkeypatch.delenv(name, raising=False)
    server = servers("seaweed")
    files = {
        "credentials": "[training]\naws_access_key_id = testing\naws_secret_access_key = testing\n",
        "config": f"[profile training]\nregion = us-east-1\nendpoint_url = {server.endpoint}\n",
    }
    names = {"credentials": "AWS_SHARED_CREDENTIALS_FILE", "config": "AWS_CONFIG_FILE"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(names[name], str(tmp_path / name))
    monkeypatch.setenv("AWS_PROFILE", "training")
    ostraka.save(f"s3://{BUCKET}/profile", {"a": 1})
    assert ostraka.restore(f"s3://{BUCKET}/profile") == {"a": 1}


# Several writers, and dead ones


def save_beside_another(path: str, rounds: int, number: int) -> list[str]:
    """Save at the same moment as the other process, `rounds` times."""
    outcomes = []
    for turn in range(rounds):
        meet(f"{path}/meet/{turn}", number)
        try:
            ostraka.save(f"{path}/c", {"by": number, "turn": turn, "a": np.full(500, number)})
            outcomes.append("saved")
        except (Busy, SaveFailed) as error:
            outcomes.append(type(error).__name__)
        meet(f"{path}/end/{turn}", number)
        if outcomes[-1] == "saved":
            found = ostraka.restore(f"{path}/c")
            assert found["turn"] == turn
            assert_same(found["a"], np.full(500, found["by"]))
        meet(f"{path}/read/{turn}", number)
    return outcomes


def meet(place: str, number: int) -> None:
    store = open_store(place)
    store.put(str(number), b"")
    end_s = time.monotonic() + 120
    while len(store.list()) < 2:
        assert time.monotonic() < end_s
        time.sleep(0.005)


@pytest.mark.parametrize(
    "bucket", ["moto", pytest.param("google", marks=pytest.mark.buckets)], indirect=True
)
@pytest.mark.parametrize("rounds", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_two_runs_save_to_one_path(bucket: str, rounds: int, figures: Figures):
    outcomes: dict[int, list[str]] = {}

    def run(number: int) -> None:
        (result,) = run_processes(
            save_beside_another, bucket, rounds, number, processes=1, timeout_s=1500
        )
        outcomes[number] = result.value

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = list(zip(outcomes[0], outcomes[1], strict=True))
    assert len(pairs) == rounds
    assert all("saved" in pair for pair in pairs), pairs
    figures.add("rounds of two runs that save to one path", rounds)


def save_forever(path: str) -> None:
    tree = {"large": np.ones(6 << 20, np.float32), "other": np.zeros(6 << 20, np.float32)}

    def never_finish(verb: str, name: str) -> None:
        if verb == "finish":
            Path(os.environ["OSTRAKA_TEST_MARK"]).touch()
            time.sleep(1000)

    ostraka.save(FaultyStore(path, before=never_finish), tree)


@pytest.mark.parametrize("bucket", ["moto", "google"], indirect=True)
def test_a_killed_save_leaves_nothing_behind(
    bucket: str,
    servers: Callable[[str], Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    path = f"{bucket}/c"
    before = {"large": np.arange(10)}
    ostraka.save(path, before)
    mark = tmp_path / "about to finish"
    with pytest.raises(ProcessesFailed, match="SIGKILL"):
        run_processes(
            save_forever,
            path,
            processes=1,
            env={"OSTRAKA_TEST_MARK": str(mark)},
            on_start=kill_when(0, appears=mark),
        )
    prefix = path.partition(f"{BUCKET}/")[2]
    is_googles = path.startswith("gs:")
    server = servers("google" if is_googles else "moto")
    assert [key for key in uploads_of(server) if key.startswith(prefix)]
    assert_same(ostraka.restore(path), before)
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 2.0)
    after = {"large": np.arange(20)}
    ostraka.save(path, after)
    assert_same(ostraka.restore(path), after)
    assert sorted(name.split("-")[0] for name in open_store(path).list()) == ["_METADATA", "shards"]
    # Google's need a rule of the bucket.
    assert bool([key for key in uploads_of(server) if key.startswith(prefix)]) == is_googles


@S3
def test_credentials_that_may_not_discard_uploads(bucket: str, monkeypatch: pytest.MonkeyPatch):
    """A save that is committed has not failed, and gc goes on."""
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", -1.0)
    prefix = f"{bucket.rpartition('/')[2]}/c"
    store = open_store(S3Store(BUCKET, prefix=prefix, client_options={"allow_http": True}))
    for attempt in (lambda: ostraka.save(store, {"a": 1}), lambda: collect_garbage(store)):
        store.touch(f"_CLAIM-{'0' * 32}", create=True)  # of a dead save
        with monkeypatch.context() as patch:
            # The store has its endpoint already; boto3, which discards uploads, looks for it now.
            patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
            patch.setenv("AWS_MAX_ATTEMPTS", "1")
            with pytest.raises(StoreError, match="can't discard uploads to s3://"):
                store.discard_uploads()
            attempt()
    assert ostraka.restore(store) == {"a": 1}


def test_garbage_is_left_while_its_writer_may_come_back(
    bucket: str, monkeypatch: pytest.MonkeyPatch
):
    store = open_store(f"{bucket}/c")
    store.put("shards-0123456789abcdef/shard_00000.safetensors", b"left")
    assert collect_garbage(store)[0] == []
    assert store.list() == ["shards-0123456789abcdef"]
    monkeypatch.setattr(_leftovers, "GONE_AFTER_S", -5.0)
    assert collect_garbage(store)[0] == ["shards-0123456789abcdef"]
    assert store.list() == []


@pytest.mark.parametrize("bucket", ["moto", "seaweed", "google"], indirect=True)
def test_nothing_is_left_of_a_step_that_was_deleted(bucket: str):
    """SeaweedFS lists the directories of deleted objects for a while."""
    with Manager(bucket) as manager:
        for step in range(2):
            manager.save(step, {"a": np.arange(5)})
        manager.wait()
        manager.delete(0)
        assert _leftovers.find_leftovers(open_store(f"{bucket}/step_00000000")) == []
    assert "nothing was left behind" in CliRunner().invoke(main, ["gc", bucket]).output


def test_an_answer_that_is_lost_for_good(bucket: str, monkeypatch: pytest.MonkeyPatch):
    """The store may still do what it was asked: what a commit would need is not deleted."""
    path = f"{bucket}/c"
    ostraka.save(path, {"a": 1})

    def lost(*args: Any, **options: Any) -> Any:
        if str(args[1]).endswith("_METADATA"):
            raise GenericError("HTTP error: error sending request")
        return put(*args, **options)

    put = obstore.put
    monkeypatch.setattr(obstore, "put", lost)
    with pytest.raises(SaveFailed, match="can't be reached"):
        ostraka.save(path, {"a": np.arange(5)})
    monkeypatch.setattr(obstore, "put", put)
    shards = [name for name in open_store(path).list() if name.startswith("shards-")]
    assert len(shards) == 1
    assert ostraka.restore(path) == {"a": 1}
    ostraka.save(path, {"a": 2})
    assert ostraka.restore(path) == {"a": 2}
    assert [name for name in open_store(path).list() if name.startswith("shards-")] == []


def test_versions_of_a_bucket_that_keeps_old_ones(servers: Callable[[str], Server]):
    """A list does not have the number that the answer to a look has."""
    client, name = servers("moto").client(), "ostraka-tests-versions"
    client.create_bucket(Bucket=name)
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    store = open_store(given_store(servers("moto"), "place", name))
    store.put("note", b"1")
    (seen,) = store.files("note")
    assert store.look("note") == seen
    store.put("note", b"2", replaces=seen.version)
    with pytest.raises(Busy, match="another save has replaced"):
        store.delete("note", version=seen.version)
    assert store.get("note") == b"2"


# Several processes


def leaves_of(mesh_of: Mesh) -> dict[str, Any]:
    def make(shape: tuple[int, ...], spec: P, first: int) -> jax.Array:
        whole = np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)
        return jax.make_array_from_callback(
            shape, NamedSharding(mesh_of, spec), lambda index: whole[index]
        )

    return {
        "rows": make((16, 40_000), P("data"), 0),
        "columns": make((24, 16), P(None, "data"), 5),
        "whole": make((7,), P(), 9),
    }


def save_leaves(path: str) -> None:
    ostraka.save(path, leaves_of(jax.make_mesh((jax.device_count(),), ("data",))))


def restore_leaves(path: str) -> list[str]:
    expected = leaves_of(jax.make_mesh((jax.device_count(),), ("data",)))
    found = ostraka.restore(path, like=expected)
    wrong = []
    for name, array in expected.items():
        pairs = zip(array.addressable_shards, found[name].addressable_shards, strict=True)
        if not all(np.array_equal(np.asarray(a.data), np.asarray(b.data)) for a, b in pairs):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    "bucket",
    ["seaweed", "azurite", pytest.param("google", marks=pytest.mark.buckets)],
    indirect=True,
)
def test_four_processes_save_and_others_restore(bucket: str):
    path = f"{bucket}/c"
    run_processes(save_leaves, path, processes=4, devices_per_process=2)
    assert ostraka.verify(path).ok
    results = run_processes(restore_leaves, path, processes=2, devices_per_process=2)
    assert [*(result.value for result in results), restore_leaves(path)] == [[]] * 3


def save_number(path: str, number: int, mark: str) -> None:
    _claim.DEAD_AFTER_S, _claim.RENEW_EVERY_S = 3.0, 0.5
    placed = NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), P("data"))
    array = jax.make_array_from_callback(
        (8, 1 << 19), placed, lambda index: np.full((8, 1 << 19), number, np.float32)[index]
    )
    if jax.process_index() == 0:
        Path(mark).touch()
    ostraka.save(path, {"a": array, "number": number})


@pytest.mark.soak
@pytest.mark.parametrize("bucket", ["seaweed"], indirect=True)
def test_kill_any_process_of_four(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: Figures
):
    """With -9, at any moment: the old or the new checkpoint is whole, the next save cleans up."""
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 3.0)
    path, rng, tally = f"{bucket}/c", random.Random(0), Counter[str]()
    before = 0
    ostraka.save(path, {"a": np.zeros((8, 1 << 19), np.float32), "number": 0})
    for number in range(1, int(os.environ.get("OSTRAKA_TEST_KILLS", "40")) + 1):
        mark = tmp_path / str(number)
        run_processes(
            save_number,
            path,
            number,
            str(mark),
            processes=4,
            devices_per_process=2,
            heartbeat_timeout_s=10,
            check=False,
            on_start=kill_when(rng.randrange(4), appears=mark, after_s=rng.uniform(0, 0.5)),
        )
        found = ostraka.restore(path)
        assert found["number"] in (before, number)
        assert_same(found["a"], np.full((8, 1 << 19), found["number"], np.float32))
        tally["new" if found["number"] == number else "old"] += 1
        figures.add("processes of four killed while saving to a bucket")
        before = -number
        ostraka.save(path, {"a": np.full((8, 1 << 19), before, np.float32), "number": before})
        names = [n for n in open_store(path).list() if open_store(path).files(n)]
        assert sorted(name.split("-")[0] for name in names) == ["_METADATA", "shards"]
    assert tally["old"], tally
