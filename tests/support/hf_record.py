"""The shapes that transformers gives the models of hf_cases, as recorded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORD = json.loads((Path(__file__).parents[1] / "data" / "hf_models.json").read_text())["models"]


def flatten(above: tuple[str, ...], node: Any) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Each parameter by itself, in each of the layers that the record has as "0-31"."""
    if isinstance(node, list):
        yield above, tuple(node)
        return
    for name, child in node.items():
        for single in expand(name):
            yield from flatten((*above, single), child)


def expand(name: str) -> list[str]:
    if not name[0].isdigit():
        return [name]
    first, _, last = name.partition("-")
    return [str(n) for n in range(int(first), int(last) + 1)] if last else name.split(",")
