"""A template whose leaves the checkpoint has fused: a rule of `names=` splits them."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import ostraka
from ostraka.errors import Mismatch


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
    rule: dict[str, Any] = {"transpose": True}
    rule["cut"] = {"axis": 1, "into": {"attn/q/kernel": 8, "attn/k/kernel": 4, "attn/v/kernel": 4}}
    found = ostraka.restore(tmp_path / "m.safetensors", like=like, names={"attn.qkv.weight": rule})
    kernels = [found["attn"].q, found["attn"].k, found["attn"].v]
    assert jnp.array_equal(jnp.concatenate([k.kernel[...] for k in kernels], 1), fused.T)
