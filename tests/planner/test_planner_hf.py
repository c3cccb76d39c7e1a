"""Every family and every built-in model against the shapes that `transformers` builds.

They are recorded in data/hf_models.json: record_hf_shapes.py wrote it, from the configs in
hf_cases.py. Where .venv-torch has transformers, or the Python that OSTRAKA_HF_PYTHON names, they
are recorded anew, and compared too.
"""

import json
import subprocess
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

from hf_cases import CASES
from hf_python import transformers_python
from hf_record import RECORD, flatten
from ostraka.families.catalog import MODELS
from ostraka.families.families import FAMILIES, parameters_of

TESTS = Path(__file__).parents[1]

Shapes = dict[str, tuple[int, ...]]


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_transformers(name: str):
    compare(name, RECORD[name])


def test_the_record_is_of_these_configs():
    """After a change to hf_cases.py, or to the built-in models, it must be recorded anew."""
    assert {name: model["config"] for name, model in RECORD.items()} == CASES
    assert set(MODELS) < set(CASES)
    assert {config["model_type"] for config in CASES.values()} == set(FAMILIES)


def test_what_a_config_leaves_out_is_what_it_would_say():
    """Published configs leave out what the config class has, those of Gemma 3 more than most."""
    full = MODELS["gemma-3-4b"]
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    assert parameters_of({**full, "text_config": sizes}) == parameters_of(full)


FEW = {
    config["model_type"]: name for name, config in CASES.items() if "no experts" not in name
}.values()
"""One of each family: to build all of them takes half a minute."""


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(CASES, marks=pytest.mark.soak)], ids=["few", "all"]
)
def test_transformers_itself(names: Iterable[str]):
    found = subprocess.run(
        [transformers_python(), TESTS / "support" / "record_hf_shapes.py"],
        input=json.dumps({name: CASES[name] for name in names}),
        capture_output=True,
        text=True,
        check=True,
    )
    for name, model in json.loads(found.stdout)["models"].items():
        compare(name, model)


def compare(name: str, model: Any) -> None:
    config = CASES[name]
    found = parameters_of(config)
    assert len(found) == len(dict(found))
    assert dict(found) == translate(model["shapes"], config["model_type"])
    assert sum(prod(shape) for _, shape in found) == model["total"]


# From the names and shapes of PyTorch to those of NNX


def translate(shapes: Any, kind: str) -> Shapes:
    return {
        "/".join(path): shape
        for names, torch_shape in flatten((), shapes)
        for path, shape in translate_one(names, torch_shape, kind)
    }


def translate_one(
    names: tuple[str, ...], shape: tuple[int, ...], kind: str
) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    path = [name for name in names if name not in ("model", "transformer", "gpt_neox", "weight")]
    if path[-2:-1] == ["experts"]:
        yield from translate_experts(path, shape, kind)
        return
    path = [RENAMED.get((kind, name), name) for name in path]
    if kind == "mixtral":
        path = ["block_sparse_moe" if name == "mlp" else name for name in path]
    module, _, last = path[-1].rpartition("_")
    if last in ("weight", "bias") and module:  # in_proj_weight, which is no module of its own
        path[-1:] = [module, *([last] if last == "bias" else [])]
    if path[-1] in ("bias", "probe"):
        yield path, shape
    elif path[-1] in EMBEDDINGS:
        yield [*path, "embedding"], shape
    elif len(shape) == 1:
        yield [*path, "scale"], shape
    elif len(shape) == 4:  # a convolution
        yield [*path, "kernel"], (shape[2], shape[3], shape[1], shape[0])
    else:
        is_in_out = path[-1] == "mm_input_projection" or (kind == "gpt2" and path[-1] != "lm_head")
        yield [*path, "kernel"], shape if is_in_out else shape[::-1]


def translate_experts(
    path: list[str], shape: tuple[int, ...], kind: str
) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """One array of (experts, out, in) for all, with two kernels in it, or one."""
    count, outputs, inputs = shape
    is_mixtral = kind == "mixtral"
    if path[-1] == "gate_up_proj":
        names, outputs = ["w1", "w3"] if is_mixtral else ["gate_proj", "up_proj"], outputs // 2
    else:
        names = ["w2"] if is_mixtral else ["down_proj"]
    above = [*path[:-3], "block_sparse_moe"] if is_mixtral else path[:-2]
    for name in names:
        yield [*above, "experts", name, "kernel"], (count, inputs, outputs)


EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "wpe", "position_embedding")
# `gate` alone, and `dense`, say too little to the sharding presets.
RENAMED = {
    ("mixtral", "gate"): "router",
    ("qwen2_moe", "gate"): "router",
    ("qwen3_moe", "gate"): "router",
    ("gpt_neox", "dense"): "out_proj",
}
