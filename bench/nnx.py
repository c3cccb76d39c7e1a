"""What it costs to save an NNX model, beside its arrays in plain dicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

import ostraka
from bench.data import many_small
from bench.machine import remove
from bench.rounds import Options, Row, interleave, timed
from bench.state import Tree, check_same, make_tree

NAMES = ("down", "gate", "scale", "up")


class Layer(nnx.Module):
    """A few parameters, as the layers of a model have them."""

    def __init__(self, arrays: Tree):
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))


@dataclass(frozen=True, slots=True)
class Form:
    """The arrays in one of two forms, and the column of the table."""

    name: str
    tree: Any


def nnx_many(options: Options) -> list[Row]:
    """Save 1,000 small leaves as an NNX model, and the same arrays in plain dicts."""
    size = many_small(options.scale)
    title = f"save {size.leaves:,} leaves of {size.leaf_bytes // 2**10} KiB as an NNX model"
    row = Row("nnx_many", f"{title}, 8 devices", size.state_bytes)
    layers = _in_layers(make_tree(size))
    forms = [
        Form("ostraka", {"layers": nnx.List([Layer(layer) for layer in layers])}),
        Form("plain", {"layers": dict(enumerate(layers))}),
    ]
    want = _by_path(forms[1].tree)

    def turn(form: Form) -> float:
        path = options.scratch / form.name
        remove(path)
        try:
            elapsed_s, _ = timed(lambda: ostraka.save(path, form.tree))
            check_same(_by_path(ostraka.restore(path)), want, form.name)
        finally:
            remove(path)
        return elapsed_s

    # A round that does not count: what a first call loads is not what is compared.
    interleave(Row(row.id, row.title, row.state_bytes), forms, 1, turn)
    interleave(row, forms, options.rounds, turn)
    return [row]


def _in_layers(arrays: Tree) -> list[Tree]:
    leaves = list(arrays.values())
    starts = range(0, len(leaves), len(NAMES))
    return [dict(zip(NAMES, leaves[start:], strict=False)) for start in starts]


def _by_path(tree: Any) -> Tree:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
