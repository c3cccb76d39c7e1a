"""Models by name and by config.json: published totals, optax's states.

What `transformers` builds is compared in test_planner_hf.py, for all families; what a real module
has in test_planner_rules.py.
"""

from math import prod
from pathlib import Path
from typing import Any

import optax
import pytest
from flax import nnx

from ostraka.families.catalog import MODELS
from ostraka.families.families import dtype_of, parameters_of
from ostraka.live.parse import parse
from ostraka.planner.state import (
    OPTIMIZERS,
    factored_shapes,
    optimizer_leaves,
)
from ostraka.tree.nodes import leaves_of

PUBLISHED = Path(__file__).parents[1] / "data" / "published_parameters.txt"
"""Counts that others publish, with where each is from."""


def test_totals_are_the_published_ones():
    lines = PUBLISHED.read_text().splitlines()
    published = [line.split()[:2] for line in lines if not line.startswith("#")]
    totals = {name: sum(prod(s) for _, s in parameters_of(MODELS[name])) for name in MODELS}
    # Only a rounded number is public: the paper has 174,600 million.
    assert round(totals.pop("gpt-3-175b") / 1e8) * 1e8 == 174_600e6
    assert totals == {name: int(count) for name, count in published}


def shapes(tree: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(leaf.path, tuple(leaf.value.shape)) for leaf in leaves_of(parse(tree))]


# Optimizers


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizers_have_the_state_of_optax(name: str, dtype: str):
    def make_both() -> Any:
        model = Wide(dtype, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, getattr(optax, name)(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(make_both)
    found = optimizer_leaves(name, shapes(model), dtype)
    assert [(path, shape, kept) for path, shape, kept, _ in found] == [
        (leaf.path, tuple(leaf.value.shape), leaf.value.dtype.name)
        for leaf in leaves_of(parse(optimizer))
    ]


class Wide(nnx.Module):
    """Shapes on both sides of what Adafactor factors, with equal dimensions and three of them."""

    def __init__(self, dtype: str, *, rngs: nnx.Rngs):
        self.wide = nnx.Linear(256, 512, param_dtype=dtype, rngs=rngs)
        self.tall = nnx.Linear(512, 128, param_dtype=dtype, rngs=rngs)
        self.square = nnx.Linear(256, 256, param_dtype=dtype, rngs=rngs)
        self.small = nnx.Linear(100, 300, param_dtype=dtype, rngs=rngs)
        self.heads = nnx.LinearGeneral(256, (4, 128), param_dtype=dtype, rngs=rngs)


def test_no_optimizer_has_no_state():
    assert optimizer_leaves("none", [("w", (4,))], "float32") == []
    with pytest.raises(ValueError, match=r"no optimizer 'adamm' \(did you mean 'adam"):
        optimizer_leaves("adamm", [], "float32")
    assert factored_shapes((4,)) == {"v": (4,), "v_col": (1,), "v_row": (1,)}


# Configs that can't be planned


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "4"}, "has '4' as its 'hidden_size'; it must be a positive integer, at"),
        ({"hidden_size": None}, "has null as its 'hidden_size'; it must be a positive integer"),
        ({"vocab_size": True}, "has true as its 'vocab_size'; it must be a positive integer"),
        ({"tie_word_embeddings": "no"}, "has 'no' as its 'tie_word_embeddings'; it must be true"),
        ({"hidden_size": 8}, "has 32 as its 'num_attention_heads', more than its 'hidden_size'"),
        ({"num_experts": -1}, "has -1 as its 'num_experts'; it must be an integer, zero or more"),
        ({"mlp_only_layers": 3}, "has 3 as its 'mlp_only_layers'; it must be a list of integers"),
        ({"mlp_only_layers": ["0"]}, "as its 'mlp_only_layers'; it must be a list of integers"),
        ({"model_type": None}, "the config has no 'model_type': give the config.json"),
        ({"model_type": "lama"}, r"family 'lama' \(did you mean 'llama'\?\); those that"),
        (
            {"model_type": "gemma3", "text_config": 4},
            "has 4 as its 'text_config'; it must be a JSON object",
        ),
    ],
)
def test_fields_that_make_no_sense(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        parameters_of({"model_type": "qwen3_moe", **fields})


def test_dtypes():
    assert dtype_of({}) == "float32"
    assert dtype_of({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert dtype_of({"dtype": "float16"}) == "float16"
    assert dtype_of({"text_config": {"torch_dtype": "bfloat16"}}) == "bfloat16"
