"""What a reader of a page has already: a program, a model, a checkpoint of last week."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

import ostraka
from hf_decoder import Decoder
from hf_files import save_for_hugging_face

Names = dict[str, Any]


def write_llama(path: Path) -> Names:
    """A small Llama in float32, in one file. Returns its configuration."""
    tensors = save_for_hugging_face(path)
    for file in (*path.glob("model-*"), path / "model.safetensors.index.json"):
        file.unlink()
    rng = np.random.default_rng(0)
    floats = {name: rng.normal(size=x.shape).astype("float32") for name, x in tensors.items()}
    save_file(floats, path / "model.safetensors")
    return json.loads((path / "config.json").read_text())


def downloaded(names: Names) -> None:
    config = write_llama(Path("llama-3.1-8b")) | {"rms_norm_eps": 1e-5, "rope_theta": 1e4}

    def make(config: Names, rngs: nnx.Rngs) -> Decoder:
        return Decoder(config, has_head=True, rngs=rngs)

    names |= {"MyLlama": make, "config": config}


def copied(names: Names) -> None:
    write_llama(Path("llama"))


def planned(names: Names) -> None:
    mesh = ostraka.sharding.make_mesh({"data": 8})
    specs = ostraka.sharding.fsdp("data", min_size=1)
    tree = {"w": np.ones((1024, 8), "f")}
    ostraka.save("runs/step_100", ostraka.sharding.place(tree, mesh, specs))
    Path("train.py").write_text(
        "from flax import nnx\n\n\n"
        "def make_state():\n    return nnx.Linear(64, 64, rngs=nnx.Rngs(0))\n"
    )


def logged(names: Names) -> None:
    """A program that ends with an error unless Ostraka's messages reach the log."""
    Path("train.py").write_text(
        "import logging\n\nimport numpy\n\nimport ostraka\n\n"
        "ostraka.save('runs/train', {'w': numpy.ones(8)})\n"
        "assert logging.getLogger('ostraka').isEnabledFor(logging.INFO)\n"
        "assert logging.getLogger().handlers\n"
    )


def old_file(names: Names) -> None:
    import equinox

    model = equinox.nn.MLP(8, 8, width_size=16, depth=2, key=jax.random.key(5))
    equinox.tree_serialise_leaves("model.eqx", model)


def weights(names: Names) -> None:
    rng = np.random.default_rng(0)
    shapes = {"fc1.weight": (32, 16), "fc1.bias": (32,), "fc2.weight": (4, 32), "fc2.bias": (4,)}
    tensors = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    save_file(tensors, "net.safetensors")


HAS: dict[str, Callable[[Names], None]] = {
    "docs/from/equinox.md": old_file,
    "docs/from/pytorch.md": weights,
    "docs/howto/convert-and-merge.md": copied,
    "docs/howto/hugging-face.md": downloaded,
    "docs/howto/logging.md": logged,
    "docs/howto/plan.md": planned,
}
"""By page. Each changes the current directory, and the names that the page's Python sees."""
IN_TORCH = """
import torch
from safetensors.torch import load_file


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(16, 32)
        self.fc2 = torch.nn.Linear(32, 4)


net = Net()
torch.save(load_file("net.safetensors"), "net.pt")
"""
"""The same in PyTorch: a module, and its weights in the file `net.pt`."""
