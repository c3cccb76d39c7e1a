"""Checkpoints in buckets: faults on the way, what they cost in requests, and what is refused."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import obstore
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from obstore.store import MemoryStore as ObstoreMemory
from obstore.store import S3Store

import ostraka
from ostraka import Manager
from ostraka.errors import (
    Busy,
    CheckpointNotFound,
    OstrakaError,
    StoreError,
    UnsupportedFormat,
)
from ostraka.storage import open_store
from proxies import proxied
from servers import BUCKET, KEYS, Server


def mesh() -> Mesh:
    return jax.make_mesh((8,), ("data",))


def sharded_tree(leaves: int, rows: int) -> dict[str, Any]:
    placed = NamedSharding(mesh(), P("data"))
    return {
        f"w{n}": jax.device_put(np.full((8, rows), n, np.float32), placed) for n in range(leaves)
    }


def assert_same(found: Any, expected: Any) -> None:
    flat, structure = jax.tree.flatten(found)
    wanted, expected_structure = jax.tree.flatten(expected)
    assert structure == expected_structure
    for a, b in zip(flat, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def uploads_of(server: Server) -> list[Any]:
    return server.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])


# What it costs


def test_requests_of_a_thousand_leaves(
    servers: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
):
    server = servers("moto")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    tree = sharded_tree(1000, 4)
    with proxied(int(server.endpoint.rpartition(":")[2])) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        path = f"{server.url}/requests"
        ostraka.save(path, tree)
        saved = proxy.requests.total()
        proxy.requests.clear()
        assert_same(ostraka.restore(path), tree)
        restored = proxy.requests.total()
        proxy.requests.clear()
        ostraka.save(path, tree)
        again = proxy.requests.total()
    assert saved <= 40
    assert restored <= 40
    assert again <= 40
    print(f"save {saved}, restore {restored}, save again {again} requests")


# Faults on the way


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
def test_harm_on_the_way(
    servers: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch, rate: float
):
    server = servers("moto")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with proxied(int(server.endpoint.rpartition(":")[2]), seed=int(rate * 100)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        path = f"{server.url}/harm-{rate}"
        outcomes = []
        for number in range(6):
            tree = {
                "small": np.arange(number, number + 10),
                "large": np.full(3 << 20, number, np.float32),
            }
            proxy.rate = rate
            try:
                ostraka.save(path, tree)
                outcomes.append("saved")
                expected = tree
            except OstrakaError as error:
                outcomes.append(type(error).__name__)
            try:
                found = ostraka.restore(path)
            except OstrakaError as error:
                outcomes.append(type(error).__name__)
            proxy.rate = 0.0
            found = ostraka.restore(path)
            assert int(found["small"][0]) <= number
            assert_same(found["large"], np.full(3 << 20, int(found["small"][0]), np.float32))
            if outcomes[-1] == "saved":
                assert_same(found, expected)
        assert proxy.harmed or rate < 0.05
        assert outcomes.count("saved") >= 4, outcomes
        assert ostraka.verify(path).ok
