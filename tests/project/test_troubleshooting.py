"""docs/troubleshooting.md quotes messages: here each of them is made to appear."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.serialization import msgpack_serialize
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from xxhash import xxh3_128_hexdigest

import ostraka
from ostraka.errors import SaveFailed
from ostraka.storage._refusals import refusal
from ostraka.testing import ProcessesFailed, run_processes

PAGE = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text("utf-8")
Trigger = Callable[[], object]


def save_runs() -> None:
    mesh = ostraka.sharding.make_mesh({"fsdp": 4, "tp": 2})

    def put(array: Any, *axes: str) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, P(*axes)))

    params = {"kernel": put(jnp.ones((1024, 512), jnp.bfloat16), "fsdp", "tp")}
    params["bias"] = put(jnp.zeros(512), "tp")
    state = {"params": params, "rng": jax.random.key(0), "step": jnp.asarray(100)}
    ostraka.save("runs/step_100", state)


def shard() -> Path:
    return min(Path("runs/step_100").glob("shards-*/shard_00003.safetensors"))


def restoring(path: str = "runs/step_100", **options: Any) -> Trigger:
    """What restores one of the runs with options."""

    def trigger() -> None:
        save_runs()
        ostraka.restore(path, **options)

    return trigger


def template_that_differs() -> None:
    save_runs()
    wrong = {"kernal": jnp.zeros((1024, 512), jnp.bfloat16), "bias": jnp.zeros(256, jnp.bfloat16)}
    like = {"params": wrong, "optimizer": {"mu": wrong, "nu": wrong}}
    ostraka.restore("runs/step_100", like=like)


def too_few_devices() -> None:
    ostraka.sharding.make_mesh({"fsdp": 8, "tp": 2})


def repo_id() -> None:
    ostraka.restore("meta-llama/Llama-3.1-8B")


def msgpack_file() -> None:
    Path("old").mkdir()
    Path("old/checkpoint_100").write_bytes(msgpack_serialize({"w": np.ones(2)}))
    ostraka.restore("old")


def other_files() -> None:
    Path("runs/notes").mkdir(parents=True)
    Path("runs/notes/todo.txt").write_text("evaluate")
    ostraka.save("runs/notes", {"w": jnp.ones(2)})


def lost_shard() -> None:
    save_runs()
    shard().unlink()
    ostraka.restore("runs/step_100")


def changed_byte() -> None:
    save_runs()
    data = bytearray(shard().read_bytes())
    data[5000] ^= 1
    shard().write_bytes(data)
    ostraka.restore("runs/step_100")


def parity_used() -> None:
    ostraka.save("runs/step_100", {"w": jnp.ones((8, 8))}, parity=1)
    min(Path("runs/step_100").glob("shards-*/shard_*")).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ostraka.restore("runs/step_100")


def newer_version() -> None:
    save_runs()
    metadata = Path("runs/step_100/_METADATA")
    text = metadata.read_bytes()[:-46].replace(b'"version":1', b'"version":9')
    metadata.write_bytes(text + b',"digest":"%s"}\n' % xxh3_128_hexdigest(text).encode())
    ostraka.restore("runs/step_100")


def two_managers() -> None:
    with ostraka.Manager("runs", keep=1):
        ostraka.Manager("runs", keep=1)


def lower_step() -> None:
    with ostraka.Manager("runs") as manager:
        manager.save(200, {"w": jnp.ones(2)})
        manager.save(100, {"w": jnp.ones(2)})


def orbax_keyword() -> None:
    options: dict[str, Any] = {"max_to_keep": 3}
    ostraka.Manager("runs", **options)


def train_state() -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    made = TrainState.create(apply_fn=model.__call__, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
    with ostraka.Manager("runs") as manager:
        manager.resume(made)


def function_in_tree() -> None:
    ostraka.save("runs/a", {"params": jnp.ones(2), "optimizer": optax.adam(1e-3).init})


def inside_jit() -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        ostraka.save("runs/a", {"x": x})
        return x

    step(jnp.ones(2))


def not_strict() -> None:
    ostraka.save("runs/a", {"w": jnp.ones(2)})
    like = {"w": jnp.ones(2), "head": jnp.ones(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ostraka.restore("runs/a", like=like, strict=False)


def folded_url() -> None:
    ostraka.save(Path("s3://bucket/runs"), {"w": jnp.ones(2)})


def no_credentials() -> None:
    said = "error sending request for url (http://169.254.169.254/latest/api/token)"
    raise refusal("read", "s3://bucket/runs/_METADATA", RuntimeError(said))


def other_region() -> None:
    said = "Received redirect: 301 Moved Permanently, PermanentRedirect"
    raise refusal("read", "s3://bucket/runs/_METADATA", RuntimeError(said))


def no_step() -> None:
    with ostraka.Manager("runs") as manager:
        manager.restore()


def save_on_two(path: str) -> None:
    """Runs on two processes, with different trees."""
    more = {"ema": np.ones(2)} if jax.process_index() else {}
    ostraka.save(path, {"w": np.ones(2), **more})


def different_trees() -> None:
    path = str(Path("runs/step_100").absolute())
    with pytest.raises(ProcessesFailed, match="SaveFailed") as failed:
        run_processes(save_on_two, path, processes=2, devices_per_process=1)
    (error,) = {result.error for result in failed.value.results}  # the same on both
    raise SaveFailed(path, 1, str(error).partition("on process 1: ")[2])


TRIGGERS: list[Trigger] = [
    *(template_that_differs, too_few_devices, repo_id, msgpack_file),
    restoring(mesh={"data": 8}),
    restoring("runs/step_10"),
    restoring(only="param/**"),
    *(not_strict, newer_version, lost_shard, changed_byte, parity_used),
    *(other_files, function_in_tree, inside_jit, no_step, different_trees, two_managers),
    *(lower_step, orbax_keyword, train_state, folded_url, no_credentials, other_region),
]


def quoted() -> list[str]:
    """The messages of the page."""
    return re.findall(r"^```text\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("trigger", TRIGGERS, ids=lambda trigger: trigger.__name__)
def test_the_page_quotes_the_message(
    trigger: Trigger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((Exception, Warning), match=".") as raised:
        trigger()
    message = str(raised.value).replace(str(tmp_path), "/home/me")
    message = re.sub("shards-[0-9a-f]{16}", "shards-5dd324aae6ba37ae", message)
    assert f"{type(raised.value).__name__}: {message}" in quoted()


def test_every_message_of_the_page_is_checked():
    assert len(quoted()) == len(set(quoted())) == len(TRIGGERS)
