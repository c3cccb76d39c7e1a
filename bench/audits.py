"""What audits cost: `python -m bench.audits`.

Three measurements, each in interleaved rounds: training steps of a small transformer with
`audit_every` of 1 and 10 and without; the speed of fingerprints beside that of plain reads and
copies of the same memory on all cores; and saves with `check_replicas=True` and without.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ostraka
from bench.machine import remove, settle
from ostraka.live.fingerprint import begin_fingerprints

CORES = os.cpu_count() or 1
WIDTH, LAYERS, VOCABULARY, LENGTH = 128, 4, 256, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", choices=("steps", "fingerprints", "replicas"), action="append")
    arguments = parser.parse_args()
    parts = {
        "steps": lambda: steps(arguments.rounds, arguments.tokens, arguments.scratch),
        "fingerprints": lambda: fingerprints(arguments.rounds, arguments.mib),
        "replicas": lambda: replicas(arguments.rounds, arguments.mib, arguments.scratch),
    }
    for name in arguments.only or parts:
        parts[name]()


def take_turns(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender, by round, after one round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            settle()
            seconds = run()
            if number:
                found[name].append(seconds)
    return found


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# A training step


def make_params(rng: np.random.Generator) -> Any:
    def matrix(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[0] ** -0.5)

    block = lambda: {  # noqa: E731
        **{name: matrix(WIDTH, WIDTH) for name in ("query", "key", "value", "out")},
        "up": matrix(WIDTH, 4 * WIDTH),
        "down": matrix(4 * WIDTH, WIDTH),
        "scale": jnp.ones(WIDTH),
    }
    return {"embed": matrix(VOCABULARY, WIDTH), "blocks": [block() for _ in range(LAYERS)]}


def loss_of(params: Any, tokens: Any) -> Any:
    x = params["embed"][tokens[:, :-1]]
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    for block in params["blocks"]:
        y = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * block["scale"]
        query, key, value = (y @ block[name] for name in ("query", "key", "value"))
        scores = jnp.where(mask, query @ key.swapaxes(1, 2) * WIDTH**-0.5, -1e9)
        x = x + jax.nn.softmax(scores) @ value @ block["out"]
        x = x + jax.nn.relu(x @ block["up"]) @ block["down"]
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def steps(rounds: int, tokens: int, scratch: Path) -> None:
    tx = optax.adam(1e-3)

    @jax.jit
    def train(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    rng = np.random.default_rng(0)
    batch = rng.integers(0, VOCABULARY, (tokens // LENGTH, LENGTH + 1))
    params = make_params(rng)
    state: dict[str, Any] = {"params": params, "opt_state": tx.init(params)}
    state_bytes = sum(one.nbytes for one in jax.tree.leaves(state))

    def contender(manager: ostraka.Manager) -> Callable[[], float]:
        at = 0

        def run() -> float:
            nonlocal at
            begun = time.perf_counter()
            for _ in range(20):
                at += 1
                found = train(state["params"], state["opt_state"], batch)
                state["params"], state["opt_state"], loss = found
                manager.save(at, state, audit={"loss": loss})
                loss.block_until_ready()
            return (time.perf_counter() - begun) / 20

        return run

    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        root, never = Path(directory), 10**9
        managers = {
            "without": ostraka.Manager(root / "0", every=never),
            "audit_every=10": ostraka.Manager(root / "10", every=never, audit_every=10),
            "audit_every=1": ostraka.Manager(root / "1", every=never, audit_every=1),
        }
        found = take_turns({name: contender(one) for name, one in managers.items()}, rounds)
        for one in managers.values():
            one.close()
    plain = found["without"]
    print(f"a step of {tokens:,} tokens with a state of {state_bytes / 1e6:.1f} MB:")
    for name, seconds in found.items():
        more = statistics.median(a / b - 1 for a, b in zip(seconds, plain, strict=True))
        print(f"  {name:15} {statistics.median(seconds) * 1e3:7.1f} ms  {more:+7.2%}", flush=True)


# The speed of fingerprints


def fingerprints(rounds: int, mib: int) -> None:
    count = mib // 16
    arrays = [jnp.full((2048, 2048), number, jnp.float32) for number in range(count)]
    halves = [array.astype(jnp.bfloat16) for array in arrays]
    views = [np.asarray(array).view(np.uint64).reshape(-1) for array in arrays]
    target = [np.empty_like(view) for view in views[:4]]
    pool = ThreadPoolExecutor(CORES)
    size = sum(array.nbytes for array in arrays)

    def copy(number: int) -> None:
        np.copyto(target[number % len(target)], views[number])

    contenders = {
        "fingerprints, float32": (size, lambda: begin_fingerprints(arrays).collect()),
        "fingerprints, bfloat16": (size // 2, lambda: begin_fingerprints(halves).collect()),
        "numpy sums": (size, lambda: list(pool.map(np.add.reduce, views))),
        "numpy copies": (size, lambda: list(pool.map(copy, range(count)))),
    }
    found = take_turns({k: lambda w=w: timed(w) for k, (_, w) in contenders.items()}, rounds)
    speeds = {k: contenders[k][0] / statistics.median(seconds) for k, seconds in found.items()}
    print(f"{mib} MiB in leaves of 16 MiB, {CORES} cores:")
    for name, speed in speeds.items():
        part = speed / speeds["numpy sums"]
        print(f"  {name:23} {speed / 1e9:6.2f} GB/s  {part:5.2f} of plain reads", flush=True)


# Saves that compare replicas


def replicas(rounds: int, mib: int, scratch: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("replica", "shard"))
    sharding = NamedSharding(mesh, PartitionSpec("shard"))
    rng = np.random.default_rng(0)
    tree = {
        f"leaf{number}": jax.device_put(rng.standard_normal((2048, 2048), np.float32), sharding)
        for number in range(mib // 16)
    }
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        path = Path(directory) / "checkpoint"

        def save(is_checked: bool) -> float:
            remove(path)
            settle()
            return timed(lambda: ostraka.save(path, tree, check_replicas=is_checked))

        contenders = {"without": lambda: save(False), "check_replicas": lambda: save(True)}
        found = take_turns(contenders, rounds)
    ratios = [a / b for a, b in zip(found["check_replicas"], found["without"], strict=True)]
    print(f"a save of {mib} MiB on {jax.device_count()} devices, two replicas of each shard:")
    for name, seconds in found.items():
        listed = " ".join(f"{one:.3f}" for one in seconds)
        print(f"  {name:15} {statistics.median(seconds):.3f} s  ({listed})")
    print(f"  ratio           {statistics.median(ratios):.3f}", flush=True)


if __name__ == "__main__":
    main()
