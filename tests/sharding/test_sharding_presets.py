"""Tensor parallelism of models as others write them: by heads, hidden units and words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util
from jax.sharding import PartitionSpec as P

from ostraka.sharding import check, fsdp, spec_tree, tensor_parallel
from ostraka.sharding.leaves import ShapedLeaf
from ostraka.sharding.roles import find_cuts

Shapes = Mapping[str, tuple[int, ...]]


def cut_dimensions(shapes: Shapes, parts: int = 4, **names: Any) -> dict[str, int]:
    """By path, the dimension that is cut; those that stay whole are left out."""
    leaves = [ShapedLeaf(path, shape, 2, is_key=False) for path, shape in shapes.items()]
    cuts = find_cuts(leaves, **names)
    fitting = {
        path: next((cut.dimension for cut in found if not cut.units % parts), None)
        for path, found in cuts.items()
    }
    return {path: dimension for path, dimension in fitting.items() if dimension is not None}


def read_models() -> dict[str, dict[str, tuple[tuple[int, ...], int | None]]]:
    """By model and path: the shape of a layer, and the dimension that is to be cut."""
    models: dict[str, dict[str, tuple[tuple[int, ...], int | None]]] = {}
    for line in (Path(__file__).parents[1] / "data" / "layers.txt").read_text().splitlines():
        if line.startswith("["):
            models[line.strip("[]")] = {}
        elif line and not line.startswith("#"):
            path, shape, cut = line.split()
            sizes = tuple(int(size) for size in shape.split("x"))
            models[[*models][-1]][path] = sizes, None if cut == "-" else int(cut)
    return models


MODELS = read_models()


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_others(name: str):
    """Moments are cut as their parameters, and presets fit."""
    shapes = {path: shape for path, (shape, _) in MODELS[name].items()}
    expected = {path: cut for path, (_, cut) in MODELS[name].items() if cut is not None}
    assert cut_dimensions(shapes) == expected
    moments = ["opt_state/0/mu", "opt_state/0/nu"]
    found = cut_dimensions({f"{at}/{path}": s for at in moments for path, s in shapes.items()})
    assert found == {f"{at}/{path}": cut for at in moments for path, cut in expected.items()}
    tree = {path: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for path, shape in shapes.items()}
    nested = traverse_util.unflatten_dict(tree, sep="/")
    for sizes in ({"fsdp": 2, "tp": 4}, {"fsdp": 3, "tp": 5}):
        findings = check(nested, sizes, fsdp(min_size=16) | tensor_parallel())
        assert [found for found in findings if found.severity == "error"] == []


def specs_of(tree: Any, sizes: dict[str, int]) -> dict[str, P]:
    specs = spec_tree(tree, tensor_parallel(), mesh=sizes)
    return {
        jax.tree_util.keystr(keys, simple=True, separator="/").removesuffix("/value"): spec
        for keys, spec in jax.tree_util.tree_leaves_with_path(specs)
    }


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(x)))


class Block(nn.Module):
    """As in Flax's examples."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        return x + Mlp()(nn.LayerNorm()(x))


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        scan = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = scan(Block(), nn.Embed(512, 64)(words), None)
        return nn.Dense(512, name="logitdense")(x)


def test_a_transformer_of_linen_that_is_scanned():
    shapes = jax.eval_shape(Scanned().init, jax.random.key(0), jnp.ones((2, 8), int))
    found = specs_of(shapes, {"tp": 4})
    attention = "params/Block_0/MultiHeadDotProductAttention_0"
    for name in ("query", "key", "value"):
        assert found[f"{attention}/{name}/kernel"] == P(None, None, "tp", None)
        assert found[f"{attention}/{name}/bias"] == P(None, "tp", None)
    assert found[f"{attention}/out/kernel"] == P(None, "tp", None, None)
    assert found[f"{attention}/out/bias"] == P()
    # The outer of the two is made first, and has the first name.
    assert found["params/Block_0/Mlp_0/Dense_1/kernel"] == P(None, None, "tp")
    assert found["params/Block_0/Mlp_0/Dense_0/kernel"] == P(None, "tp", None)
    assert found["params/Embed_0/embedding"] == P("tp", None)
    assert found["params/logitdense/kernel"] == P(None, "tp")


def test_further_names():
    shapes = {"mine/kernel": (64, 128), "yours/kernel": (128, 64), "norm/scale": (128,)}
    assert cut_dimensions(shapes, column=["mine"], row=["yours"]) == {
        "mine/kernel": 1,
        "yours/kernel": 0,
    }
    tree = {"wq": np.ones((4, 6)), "embedding": np.ones((9, 8))}  # of sizes that do not divide
    specs = spec_tree(tree, tensor_parallel(), mesh={"tp": 4})
    assert specs == {"wq": P(), "embedding": P(None, "tp")}
    # What the caller says counts, whatever the name usually means.
    assert cut_dimensions({"up/kernel": (64, 64)}, row=["up"]) == {"up/kernel": 0}


def test_large_leaves_that_presets_leave_whole():
    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    tree: dict[str, Any] = {
        f"layers_{n}": {"k_proj": leaf(512, 2, 512), "q_proj": leaf(512, 4, 512), "odd": leaf(3, 5)}
        for n in range(3)
    }
    (finding,) = check(tree, {"tp": 4}, tensor_parallel())
    assert finding.severity == "warning"
    assert str(finding).startswith(
        "leaf 'layers_0/k_proj' (512, 2, 512) and 2 like it have 6,291,456 bytes, which the "
        "presets leave whole on each of 4 devices"
    )
    assert check(tree, {"tp": 4}, tensor_parallel() | fsdp("tp")) == []
    assert check(tree, {"tp": 2}, tensor_parallel()) == []
    whole = {"layers_*/k_proj": P(), "**": P()}
    assert check(tree, {"tp": 4}, whole) == []  # as was asked for
