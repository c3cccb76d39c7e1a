"""Tensor parallelism of models as others write them: by heads, hidden units and words."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util
from jax.sharding import PartitionSpec as P

from ostraka.sharding import check, fsdp, spec_tree, tensor_parallel
from ostraka.sharding._roles import find_cuts
from ostraka.sharding.leaves import ShapedLeaf

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


# Paths and shapes as these models have them; the dimension that is cut is marked by its entry in
# the second tuple. The ones of tunix are its own annotations (the axis "tp").
MODELS: dict[str, dict[str, tuple[tuple[int, ...], int | None]]] = {
    "tunix gemma": {
        "embedder/input_embedding": ((256, 64), 0),
        "final_norm/scale": ((64,), None),
        "layers/0/attn/attn_vec_einsum/w": ((8, 16, 64), 0),
        "layers/0/attn/kv_einsum/w": ((2, 1, 64, 16), None),
        "layers/0/attn/q_einsum/w": ((8, 64, 16), 0),
        "layers/0/mlp/down_proj/kernel": ((512, 64), 0),
        "layers/0/mlp/gate_proj/kernel": ((64, 512), 1),
        "layers/0/mlp/up_proj/kernel": ((64, 512), 1),
        "layers/0/pre_attention_norm/scale": ((64,), None),
    },
    "gemma 3, transposed gates": {
        "layer_0/attn/kv_einsum/w": ((2, 4, 64, 16), 1),
        "layer_0/attn/_key_norm/scale": ((16,), None),
        "layer_0/mlp/gating_einsum": ((2, 512, 64), 1),
        "layer_0/mlp/linear": ((512, 64), 0),
        "layer_0/pre_ffw_norm/scale": ((64,), None),
    },
    "tunix qwen2, too few heads of keys": {
        "embedder/input_embedding": ((256, 64), 0),
        "layers/0/attn/k_bias": ((16,), None),
        "layers/0/attn/k_proj/w": ((64, 2, 8), None),
        "layers/0/attn/q_bias": ((64,), 0),
        "layers/0/attn/q_proj/w": ((64, 8, 8), 1),
        "layers/0/attn/o_proj/w": ((8, 8, 64), 0),
        "layers/0/input_layernorm/w": ((64,), None),
    },
    "bonsai umt5": {
        "encoder/block/0/layer/0/SelfAttention/q/kernel": ((64, 48), 1),
        "encoder/block/0/layer/0/SelfAttention/o/kernel": ((48, 64), 0),
        "encoder/block/0/layer/0/SelfAttention/relative_attention_bias/embedding": ((32, 8), 1),
        "encoder/block/0/layer/1/DenseReluDense/wi_0/kernel": ((64, 128), 1),
        "encoder/block/0/layer/1/DenseReluDense/wi_1/kernel": ((64, 128), 1),
        "encoder/block/0/layer/1/DenseReluDense/wo/kernel": ((128, 64), 0),
        "encoder/block/0/layer/1/layer_norm/scale": ((64,), None),
    },
    "bonsai qwen3_vl": {
        "visual/blocks/0/attn/proj/kernel": ((64, 64), 0),
        "visual/blocks/0/attn/qkv/kernel": ((64, 192), 1),
        "visual/blocks/0/mlp/linear_fc1/kernel": ((64, 256), 1),
        "visual/blocks/0/mlp/linear_fc2/kernel": ((256, 64), 0),
        "visual/blocks/0/norm1/scale": ((64,), None),
        "visual/merger/norm/scale": ((256,), None),
        "visual/merger/linear_fc2/kernel": ((256, 128), 0),
        "visual/patch_embed/proj/kernel": ((2, 16, 16, 3, 64), None),
    },
    "maxtext, layers along the second dimension": {
        "params/token_embedder/embedding": ((256, 64), 0),
        "params/decoder/decoder_norm/scale": ((64,), None),
        "params/decoder/layers/pre_self_attention_layer_norm/scale": ((64, 12), None),
        "params/decoder/layers/self_attention/query/kernel": ((64, 12, 8, 16), 2),
        "params/decoder/layers/self_attention/key/kernel": ((64, 12, 4, 16), 2),
        "params/decoder/layers/self_attention/out/kernel": ((8, 12, 16, 64), 0),
        "params/decoder/layers/mlp/wi_0/kernel": ((64, 12, 128), 2),
        "params/decoder/layers/mlp/wo/kernel": ((128, 12, 64), 0),
        "params/decoder/logits_dense/kernel": ((64, 256), 1),
    },
    "maxtext, experts": {
        "MoeBlock_0/gate/kernel": ((64, 8), None),
        "MoeBlock_0/wi_0": ((8, 64, 128), 2),
        "MoeBlock_0/wi_1": ((8, 64, 128), 2),
        "MoeBlock_0/wi_0_bias": ((8, 128), 1),
        "MoeBlock_0/wo": ((8, 128, 64), 1),
        "MoeBlock_0/wo_bias": ((8, 64), None),
        "norm/scale": ((64,), None),
    },
    "mixtral": {
        "layers/0/block_sparse_moe/gate/kernel": ((64, 8), None),
        "layers/0/block_sparse_moe/experts/0/w1/kernel": ((64, 128), 1),
        "layers/0/block_sparse_moe/experts/0/w2/kernel": ((128, 64), 0),
    },
    "hugging face gpt2": {
        "transformer/h/0/attn/c_attn/kernel": ((192, 64), 0),
        "transformer/h/0/attn/c_proj/kernel": ((64, 64), 1),
        "transformer/h/0/mlp/c_fc/kernel": ((256, 64), 0),
        "transformer/h/0/mlp/c_proj/kernel": ((64, 256), 1),
        "transformer/h/0/ln_1/scale": ((64,), None),
        "transformer/wte/embedding": ((256, 64), 0),
    },
    "gpt2 with inputs first": {
        "h/0/attn/c_attn/kernel": ((64, 192), 1),
        "h/0/attn/c_proj/kernel": ((64, 64), 0),
        "h/0/mlp/c_fc/kernel": ((64, 256), 1),
        "h/0/mlp/c_proj/kernel": ((256, 64), 0),
    },
    "hugging face bert": {
        "bert/encoder/layer/0/attention/self/query/kernel": ((64, 64), 1),
        "bert/encoder/layer/0/attention/output/dense/kernel": ((64, 64), 0),
        "bert/encoder/layer/0/intermediate/dense/kernel": ((64, 128), 1),
        "bert/encoder/layer/0/output/dense/kernel": ((128, 64), 0),
        "bert/pooler/dense/kernel": ((64, 64), None),
    },
    "gpt-neox": {
        "layers/0/attention/query_key_value/kernel": ((64, 192), 1),
        "layers/0/attention/dense/kernel": ((64, 64), 0),
        "layers/0/mlp/dense_h_to_4h/kernel": ((64, 256), 1),
        "layers/0/mlp/dense_4h_to_h/kernel": ((256, 64), 0),
    },
    "flat kernels with norms of heads": {
        "layers/0/self_attn/q_proj/kernel": ((64, 64), 1),
        "layers/0/self_attn/k_proj/kernel": ((64, 16), None),  # two heads of 8
        "layers/0/self_attn/o_proj/kernel": ((64, 64), 0),
        "layers/0/self_attn/k_norm/scale": ((8,), None),
        "layers/0/input_layernorm/scale": ((64,), None),
    },
    "deepseek": {
        "layers/0/attn/wq_a/kernel": ((64, 24), None),
        "layers/0/attn/wq_b/kernel": ((24, 8, 16), 1),
        "layers/0/attn/wkv_b/kernel": ((12, 8, 32), 1),
        "layers/0/attn/kv_norm/scale": ((12,), None),
        "layers/0/norm/scale": ((64,), None),
    },
    "stacked, heads of three dimensions": {
        "layers/norm/scale": ((3, 64), None),
        "layers/q_proj/kernel": ((3, 64, 8, 16), 2),
        "layers/o_proj/kernel": ((3, 8, 16, 64), 1),
        "embed/embedding": ((256, 64), 0),
    },
    "stacked, flat, by their biases": {
        "q_proj/kernel": ((3, 64, 128), 2),
        "q_proj/bias": ((3, 128), None),
    },
    "boxes of Linen": {
        "params/wi/kernel/value": ((64, 128), 1),
        "params/wo/kernel/value": ((128, 64), 0),
        "params/MoeBlock_0/wi_0/value": ((8, 64, 128), 2),
        "params/attention/value/kernel": ((64, 8, 16), 1),
    },
    "names that say nothing": {
        "params/Embed_0/embedding": ((256, 64), 0),
        "params/LayerNorm_0/scale": ((64,), None),
        "params/MlpBlock_0/Dense_0/kernel": ((64, 128), 1),
        "params/MlpBlock_0/Dense_1/kernel": ((128, 64), 0),
        "params/Attention_0/DenseGeneral_0/kernel": ((64, 8, 16), 1),
        "params/Attention_0/DenseGeneral_1/kernel": ((64, 8, 16), 1),
        "params/Attention_0/DenseGeneral_2/kernel": ((64, 8, 16), 1),
        "params/Attention_0/DenseGeneral_3/kernel": ((8, 16, 64), 0),
        "params/Dense_0/kernel": ((64, 256), 1),  # to the words
        "params/Conv_0/kernel": ((3, 3, 64, 64), None),
        "params/Conv_1/kernel": ((3, 3, 64, 64), None),
    },
    "names in another order than the layers": {
        "mlp/contract/kernel": ((128, 64), 0),
        "mlp/expand/kernel": ((64, 128), 1),
        "norm/scale": ((64,), None),
    },
    "a chain": {
        "Dense_0/kernel": ((64, 128), 1),
        "Dense_1/kernel": ((128, 64), 0),
        "Dense_2/kernel": ((64, 12), None),
    },
}


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


def test_boxes_of_linen():
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            boxed = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            x = nn.Dense(128, kernel_init=boxed, name="wi")(x)
            return nn.Dense(64, kernel_init=boxed, name="wo")(x)

    shapes = jax.eval_shape(Boxed().init, jax.random.key(0), jnp.ones((2, 64)))
    assert specs_of(shapes, {"tp": 4}) == {
        "params/wi/bias": P("tp"),
        "params/wi/kernel": P(None, "tp"),
        "params/wo/bias": P(),
        "params/wo/kernel": P("tp", None),
    }


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
