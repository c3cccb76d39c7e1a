"""A template whose leaves the checkpoint has fused: the message names the rule that cuts them."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import ostraka
from ostraka._fused import hint_at_fused
from ostraka.errors import Mismatch


def hint(wanted: dict[str, Any], saved: dict[str, Any]) -> str:
    return "".join(hint_at_fused(wanted, saved))


def test_the_rule_is_named_with_its_sizes():
    wanted = {
        **{f"l/{n}/attn/{name}/kernel": (8, 8) for n in range(2) for name in ("out", "q", "extra")},
        **{f"l/{n}/attn/{name}/kernel": (8, 2) for n in range(2) for name in ("v", "k")},
    }
    saved = {f"l/{n}/attn/{name}/kernel": (8, 12) for n in range(2) for name in ("qkv_proj",)}
    saved |= {f"l/{n}/attn/out/kernel": (8, 8) for n in range(2)}
    assert hint(wanted, saved) == (
        "'l/0/attn/qkv_proj/kernel' of the checkpoint has as many elements as 'l/0/attn/q/kernel', "
        "'l/0/attn/k/kernel' and 'l/0/attn/v/kernel' of `like` together: if it is those, have it "
        'cut apart, with a rule of names= such as {"cut": {"axis": 1, "into": '
        '{"l/{n}/attn/q/kernel": 8, "l/{n}/attn/k/kernel": 2, "l/{n}/attn/v/kernel": 2}}, …}'
    )


@pytest.mark.parametrize(
    ("wanted", "saved", "part"),
    [
        # beside each other, without a name below
        (
            {"e/gate": (4, 8, 6), "e/up": (4, 8, 6)},
            {"e/gate_up": (4, 8, 12)},
            '"cut": {"axis": 2, "into": {"e/gate": 6, "e/up": 6}}',
        ),
        # one more level of names
        (
            {"a/self/q/kernel": (4, 4), "a/self/k/kernel": (4, 2)},
            {"a/qkv/kernel": (4, 6)},
            '"cut": {"axis": 1, "into": {"a/self/q/kernel": 4, "a/self/k/kernel": 2}}',
        ),
        # under the name of the first
        (
            {"a/q/kernel": (4, 4), "a/k/kernel": (4, 2)},
            {"a/q/kernel": (4, 6)},
            '"into": {"a/q/kernel": 4, "a/k/kernel": 2}',
        ),
        # heads: which axis is not known
        (
            {f"a/{name}/kernel": (8, 2, 4) for name in ("key", "out", "query", "value")},
            {"a/c_attn/kernel": (8, 24), "a/c_proj/kernel": (8, 8)},
            '"into": {"a/query/kernel": …, "a/key/kernel": …, "a/value/kernel": …}}, …}, where',
        ),
    ],
)
def test_what_may_be_fused(wanted: dict[str, Any], saved: dict[str, Any], part: str):
    assert part in hint(wanted, saved)


@pytest.mark.parametrize(
    ("wanted", "saved"),
    [
        ({"a/q/kernel": (4, 4), "a/k/kernel": (4, 2)}, {"a/qkv/kernel": (4, 7)}),
        ({"a/q/kernel": (4, 4)}, {"a/qkv/kernel": (4, 4)}),
        ({"a/q/kernel": (4, 4), "a/k/bias": (4, 2)}, {"a/qkv/kernel": (4, 6)}),
        ({"a/q": (0, 4), "a/k": (0, 2)}, {"a/qkv": (0, 6)}),
        ({}, {"a": ()}),
        # another width, and more layers or an optimizer
        ({"l/0/kernel": (4, 4), "l/1/kernel": (4, 4)}, {"l/0/kernel": (4, 8)}),
        (
            {"params/bias": (4,), "opt/mu/bias": (4,), "opt/nu/bias": (4,)},
            {"params/bias": (8,), "params/x": (8,)},
        ),
        ({"a": (2,), "b": (4,)}, {"c": (6,)}),
    ],
)
def test_what_is_not(wanted: dict[str, Any], saved: dict[str, Any]):
    expected = "" if len(wanted) != 2 or "a" not in wanted else '"into": {"a": 2, "b": 4}'
    assert expected in hint(wanted, saved)
    assert bool(hint(wanted, saved)) == bool(expected)


def test_many_leaves_take_no_time_to_look_at():
    """Ten thousand that differ: the search is bounded, and says nothing."""
    wanted = {f"l/{n}/q{m}/kernel": (7, m + 1) for n in range(1000) for m in range(10)}
    saved = {f"l/{n}/fused/kernel": (7, 1 << 20) for n in range(1000)}
    assert hint(wanted, saved) == ""


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.q = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(8, 4, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(8, 4, use_bias=False, rngs=rngs)


def test_a_model_whose_file_has_them_fused(tmp_path: Path):
    """The message, and then what it says."""
    fused = np.arange(128, dtype=np.float32).reshape(16, 8)
    save_file({"attn.qkv.weight": fused}, tmp_path / "m.safetensors")
    like = {"attn": nnx.eval_shape(lambda: Attention(nnx.Rngs(0)))}
    with pytest.raises(Mismatch, match="or which leaves it is cut into"):
        ostraka.restore(tmp_path / "m.safetensors", like=like)
    rule: dict[str, Any] = {"path": "attn/qkv/kernel", "transpose": True}
    sizes = '{"attn/q/kernel": 8, "attn/k/kernel": 4, "attn/v/kernel": 4}'
    said = f'with a rule of names= such as {{"cut": {{"axis": 1, "into": {sizes}}}, …}}'
    with pytest.raises(Mismatch, match=re.escape(said)) as caught:
        ostraka.restore(tmp_path / "m.safetensors", like=like, names={"attn.qkv.weight": rule})
    assert said in caught.value.differences[0]
    del rule["path"]
    rule["cut"] = {
        "axis": 1,
        "into": {"attn/q/kernel": 8, "attn/k/kernel": 4, "attn/v/kernel": 4},
    }
    found = ostraka.restore(tmp_path / "m.safetensors", like=like, names={"attn.qkv.weight": rule})
    kernels = [found["attn"].q, found["attn"].k, found["attn"].v]
    assert jnp.array_equal(jnp.concatenate([k.kernel[...] for k in kernels], 1), fused.T)
