"""Messages that people meet first: the cause, and what to do."""

import http.server
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka import Manager
from ostraka.cli import main

HF = "run `hf download meta-llama/Llama-3.1-8B --local-dir DIR` and pass DIR"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a checkpoint `c` that is sharded over `fsdp` and `tp`."""
    folder = tmp_path_factory.mktemp("messages")
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
    on_both = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("fsdp", "tp")))
    on_one = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("tp")))
    ostraka.save(folder / "c", {"w": on_both, "b": on_one})
    (folder / "copied").mkdir()
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "a URL of the hub": (
        lambda: ostraka.restore("hf://meta-llama/Llama-3.1-8B"),
        (
            "can't open hf://meta-llama/Llama-3.1-8B: Ostraka does not read from the Hugging Face "
            f"Hub; {HF}"
        ),
    ),
    "another name": (
        lambda: ostraka.restore("c", like={"w": jnp.ones((8, 8)), "bias": jnp.ones(8)}),
        "{here}/c: 'bias' is not in the checkpoint (it also has 'b')",
    ),
    "best of nothing": (
        lambda: Manager("runs").best(),
        "best() needs a metric: pass by=Best('loss', 'min'), or give the manager keep_best=",
    ),
    "only what is not there": (
        lambda: ostraka.restore("c", only="model/**"),
        (
            "can't place checkpoint {here}/c: only='model/**' matches no leaf of the checkpoint; "
            "top-level names are 'w', 'b'"
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(place: Path, name: str):
    call, expected = CALLS[name]
    with pytest.raises(
        (OSError, TypeError, ValueError), match=re.escape(expected.format(here=place))
    ):
        call()


def test_repair_speaks_of_the_command(place: Path):
    next(place.glob("c/shards-*/shard_00000.safetensors")).rename(place / "aside")
    try:
        said = CliRunner().invoke(main, ["repair", str(place / "c"), "--yes"])
    finally:
        (shards,) = place.glob("c/shards-*")
        (place / "aside").rename(shards / "shard_00000.safetensors")
    assert said.exit_code == 1
    assert (
        "pass --from OTHER_COPY, or call ostraka.repair(path, tree) in the program that has the "
        "model" in said.stdout
    )
    assert "sources=" not in said.stdout


class Hello(http.server.BaseHTTPRequestHandler):
    """A web server that is no object store."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_server_that_is_no_store(monkeypatch: pytest.MonkeyPatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for variable, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(variable, value)
        with pytest.raises(
            ostraka.errors.StoreError,
            match="^can't list s3://bucket/x: the server at this endpoint does not speak the API ",
        ):
            ostraka.save("s3://bucket/x", {"a": jnp.ones(2)})
        server.shutdown()
