"""Rules give plain leaves what they give arrays of JAX, and a config what they give its model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import ostraka
from hf_decoder import make_decoder
from nnx_models import Block, Sharded
from ostraka import sharding
from ostraka.errors import InvalidSharding
from ostraka.families.catalog import MODELS
from ostraka.families.families import parameters_of
from ostraka.layout.spec import LeafSpec, MeshSpec, Partition
from ostraka.planner import Plan, plan
from ostraka.planner.rules import (
    _resolve_with_jax,  # pyright: ignore[reportPrivateUsage]
    read_rules,
    resolve_rules,
)
from ostraka.planner.sources import plan_source
from ostraka.planner.state import PlanOptions, mesh_of_sizes
from ostraka.sharding.rules import is_plain

SIZES = {"data": 4, "model": 2}
RULES: dict[str, Any] = {
    "dp": sharding.data_parallel(),
    "fsdp": sharding.fsdp("data", min_size=16),
    "tp": sharding.tensor_parallel("model", column=["first", "up"], row=["down"]),
    "fsdp+tp": sharding.fsdp("data", min_size=16)
    | sharding.tensor_parallel("model", column=["first", "up"], row=["down"]),
    "patterns": sharding.combine({"**/bias": (("data",),), "**": ()}),
    "patterns and a preset": sharding.combine({"**/kernel": (("model",),)}, sharding.fsdp("data")),
}


class Keys(nnx.Module):
    """An array of PRNG keys, large enough to be cut, were it not one of keys."""

    def __init__(self, rngs: nnx.Rngs):
        self.keys = nnx.Variable(jax.random.split(rngs.params(), 8192))
        self.first = nnx.Linear(64, 128, rngs=rngs)


TREES: dict[str, Callable[[], nnx.Module]] = {
    "block": lambda: Block(rngs=nnx.Rngs(0)),
    "sharded": lambda: Sharded(rngs=nnx.Rngs(0)),
    "keys": lambda: Keys(nnx.Rngs(0)),
}


def partitions_of(planned: Plan) -> dict[str, Partition]:
    return {leaf.spec.path: leaf.spec.partition for leaf in planned._write.leaves}


# `Sharded` has neither kernels nor biases for the patterns.
CASES = [
    (name, rules)
    for name in TREES
    for rules in RULES
    if (name, rules[:8]) != ("sharded", "patterns")
]


@pytest.mark.parametrize(("name", "rules"), CASES)
def test_plain_leaves_are_cut_as_those_of_a_tree(name: str, rules: str):
    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(TREES[name])
    leaves = [leaf.spec for leaf in plan(model, mesh=SIZES, specs=P())._write.leaves]
    assert is_plain(RULES[rules])
    partitions, findings = resolve_rules(leaves, mesh_of_sizes(SIZES), RULES[rules])
    planned = plan(model, mesh=SIZES, specs=RULES[rules])
    assert partitions == partitions_of(planned)
    assert findings == planned.findings
    if rules != "dp":
        assert any(partitions.values())


def leaves_of(name: str, dtype: str = "bfloat16") -> list[LeafSpec]:
    found = parameters_of(MODELS[name])
    return [LeafSpec(f"model/{path}", "jax", dtype, shape) for path, shape in found]


@pytest.mark.parametrize("rules", ["dp", "fsdp", "tp", "fsdp+tp"])
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama-3.2-1b", SIZES),
        ("mixtral-8x7b", {"data": 3, "tensor": 7}),
        ("pythia-70m", SIZES),
        ("pythia-70m", {"data": 3, "tensor": 7}),
    ],
)
def test_named_models_are_cut_with_and_without_jax(name: str, rules: str, mesh: dict[str, int]):
    target = mesh_of_sizes(mesh)
    leaves = leaves_of(name, "int4" if name == "mixtral-8x7b" else "bfloat16")
    found = read_rules(rules, target)
    resolved = resolve_rules(leaves, target, found)
    assert is_plain(found)
    assert resolved == _resolve_with_jax(leaves, target, found)
    assert resolved[1] or rules != "dp" or name == "pythia-70m"


def raised(resolve: Callable[..., Any], rules: Any, mesh: MeshSpec) -> str:
    with pytest.raises(InvalidSharding, match=".") as caught:
        resolve(leaves_of("pythia-70m"), mesh, rules)
    return str(caught.value)


@pytest.mark.parametrize(
    "rules",
    [
        sharding.fsdp("dta"),
        sharding.combine({"**": (("data",), ("data",))}),
        sharding.combine({"**": (("data",), (), ())}),
        sharding.combine({"**/kernel": ()}),
        sharding.combine({"**/kernal": (), "**": ()}),
        sharding.combine({"**/bias": (("x",),)}) | sharding.fsdp(),
    ],
    ids=["no such axis", "twice", "too long", "unmatched", "no such name", "axis of a pattern"],
)
def test_what_is_wrong_is_said_alike(rules: Any):
    mesh = mesh_of_sizes({"data": 3})
    assert raised(resolve_rules, rules, mesh) == raised(_resolve_with_jax, rules, mesh)


def test_rules_with_types_of_jax_are_settled_by_jax():
    mesh = mesh_of_sizes(SIZES)
    leaves = leaves_of("pythia-70m")
    functions = resolve_rules(leaves, mesh, lambda leaf: P("data") if leaf.ndim > 1 else P())
    patterns = {"**/kernel": P("data"), "**/embedding": ("data", None), "**": None}
    assert not is_plain(sharding.combine(patterns))
    assert functions == resolve_rules(leaves, mesh, sharding.combine(patterns))
    assert resolve_rules(leaves, mesh, P()) == resolve_rules(leaves, mesh, sharding.data_parallel())


def test_jax_sees_leaves_under_their_own_keys():
    mesh = mesh_of_sizes({"data": 2})
    paths = ("~", "~0", "a/~1", "~2__metadata__")
    leaves = [LeafSpec(path, "jax", "float32", (4, 4), 0) for path in paths]
    found = resolve_rules(leaves, mesh, lambda leaf: P("data"))[0]
    assert found == dict.fromkeys(paths, (("data",),))


# A config and its model


# So wide that Adafactor factors its moments; some kernels are square.
CONFIG = {
    "model_type": "qwen3",
    "attention_bias": True,
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


def decoder() -> nnx.Module:
    return make_decoder({**CONFIG, "rms_norm_eps": 1e-5, "rope_theta": 1e4}, has_head=False)


PATTERNS = {
    "**/k_proj/kernel": ["data", "model"],
    "**/kernel": [["model", "data"], None],
    "**/embedding": [None, "data"],
    "**": None,
}


def plan_config(directory: Path, rules: str, optimizer: str) -> Plan:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    options = PlanOptions(mesh=mesh_of_sizes(SIZES), hosts=1, rules=rules, optimizer=optimizer)
    return plan_source(str(directory / "config.json"), options)


def rules_in(directory: Path, rules: str) -> str:
    """The rules as `--rules` takes them."""
    if rules != "patterns":
        return rules
    (directory / "rules.json").write_text(json.dumps(PATTERNS))
    return str(directory / "rules.json")


@pytest.mark.parametrize(
    ("optimizer", "rules"),
    [
        ("adamw", "fsdp"),
        ("adamw", "tp"),
        ("adafactor", "fsdp+tp"),
        ("adafactor", "patterns"),
        ("lion", "fsdp+tp"),
        ("sgd", "fsdp"),
    ],
)
def test_a_config_is_cut_as_its_model(tmp_path: Path, optimizer: str, rules: str):
    named = rules_in(tmp_path, rules)
    by_config = plan_config(tmp_path, named, optimizer)
    by_model = plan(
        nnx.eval_shape(decoder),
        mesh=SIZES,
        specs=read_rules(named, mesh_of_sizes(SIZES)),
        optimizer=optimizer,
    )
    assert partitions_of(by_config) == partitions_of(by_model)
    assert by_config._write == by_model._write
    assert by_config.files == by_model.files
    assert by_config.parameters == by_model.parameters
    # But for the name of the module's class.
    assert abs(by_config.metadata_bytes - by_model.metadata_bytes) < 40


def test_factored_moments_are_cut_as_in_what_init_makes(tmp_path: Path):
    mesh = sharding.make_mesh({"data": 4, "model": 2})
    rules = read_rules("fsdp+tp", mesh_of_sizes(SIZES))
    transformation = optax.adafactor(1e-3)
    model, state = sharding.init(decoder, mesh, rules, transformation)
    ostraka.save(tmp_path / "c", {"model": model, "optimizer": state})
    planned = plan_config(tmp_path, "fsdp+tp", "adafactor")
    saved = plan(tmp_path / "c")
    assert partitions_of(planned) == partitions_of(saved)
    assert planned.files == saved.files
    assert partitions_of(saved)["optimizer/opt_state/0/v_row/embed_tokens/embedding"] == (
        ("data",),
    )


def test_rules_go_by_the_shape_that_a_leaf_had():
    """Neither the words of a key nor the processes that had a value of their own are cut."""
    own = LeafSpec("own", "jax", "float32", (8, 4096, 6), per_process=True)
    keys = LeafSpec("keys", "key", "uint32", (8192, 4), prng="rbg")
    partitions, _ = resolve_rules([own, keys], mesh_of_sizes({"data": 4}), sharding.fsdp("data"))
    assert partitions == {"own": (("data",),), "keys": ()}
    assert resolve_rules([keys], mesh_of_sizes({"data": 4}), P())[0] == {"keys": ()}
    huge = LeafSpec("huge", "jax", "int4", (1 << 27,))
    _, (finding,) = resolve_rules([huge], mesh_of_sizes(SIZES), sharding.data_parallel())
    assert f"has {jnp.dtype(jnp.int4).itemsize << 27:,} bytes" in finding.message
