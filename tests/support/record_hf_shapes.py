"""What `transformers` builds from configs: the names and shapes of all parameters, as JSON.

This runs in an environment with torch and transformers, and no more than that. It reads configs by
name on stdin and writes the record to stdout; models are made on the meta device, without memory:

    .venv/bin/python tests/support/hf_cases.py > configs.json
    PYTHON tests/support/record_hf_shapes.py < configs.json > tests/data/hf_models.json

Layers that are alike are written once, `{"layers": {"0-31": {"mlp": …}}}`, or "0,2" for the even
ones of three; and a module that has but a weight is written as its shape.
"""

import copy
import json
import sys
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def record(configs: dict[str, dict[str, Any]]) -> str:
    """One line for a model, so that a change can be read."""
    lines = [
        f"{json.dumps(name)}:{json.dumps(build(config), separators=(',', ':'))}"
        for name, config in configs.items()
    ]
    models = ",\n".join(lines)
    return f'{{"transformers": "{transformers.__version__}", "models": {{\n{models}\n}}}}\n'


def build(config: dict[str, Any]) -> dict[str, Any]:
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**copy.deepcopy(config))  # which it would change
        )
    shapes: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        *above, last = name.split(".")
        node = shapes
        for part in above:
            node = node.setdefault(part, {})
        node[last] = list(parameter.shape)
    return {
        "config": config,
        "total": sum(parameter.numel() for parameter in model.parameters()),
        "shapes": fold(shapes),
    }


def fold(node: Any) -> Any:
    """Numbered children that are equal become one, named for all their numbers."""
    if not isinstance(node, dict):
        return node
    if list(node) == ["weight"]:
        return node["weight"]
    folded: dict[str, Any] = {}
    alike: dict[str, list[int]] = {}
    for name, child in node.items():
        if name.isdigit():
            alike.setdefault(json.dumps(fold(child)), []).append(int(name))
        else:
            folded[name] = fold(child)
    return folded | {ranges(numbers): json.loads(child) for child, numbers in alike.items()}


def ranges(numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.stdout.write(record(json.load(sys.stdin)))
