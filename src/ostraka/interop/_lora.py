"""Which kernel of a base an adapter belongs to, by the names that Flax NNX gives them. No JAX."""

from __future__ import annotations

from collections.abc import Iterator

from ostraka._nodes import ArrayNumber, leaves_of
from ostraka._pattern import Patterns, selects
from ostraka._source import Source
from ostraka._spec import is_floating
from ostraka.errors import Mismatch

_A, _B = "lora_a", "lora_b"
_MOMENTS = {"opt_state", "mu", "nu"}
"""Optimizers keep arrays of the same names as the parameters, below one of these."""


def find_adapters(
    base: Source, adapters: Source, only: Patterns | None
) -> dict[int, tuple[int, int]]:
    """By the number of each kernel that has one, the numbers of its adapter's two leaves.

    `only` says which leaves of the adapters count. What an optimizer keeps of them never does.
    Raises Mismatch for an adapter without a kernel, and for shapes that do not fit.
    """
    ours, theirs = numbers_by_path(base), numbers_by_path(adapters)
    differences: list[str] = []
    pairs: dict[int, tuple[int, int]] = {}
    for path in theirs:
        above, _, name = path.rpartition("/")
        if name not in (_A, _B) or not _MOMENTS.isdisjoint(above.split("/")):
            continue
        if only is not None and not selects(only, path):
            continue
        other = f"{above}/{_B if name == _A else _A}"
        kernel = next(filter(ours.__contains__, _kernels_of(above)), None)
        if other not in theirs:
            differences.append(f"{path!r} has no {other!r} beside it in {adapters.location}")
        elif kernel is None:
            names = " or ".join(map(repr, _kernels_of(above)))
            differences.append(f"{path!r} is the adapter of {names}, and {base.location} has none")
        elif name == _A:
            pair = (theirs[path], theirs[other])
            differences += _misfits(base, ours[kernel], adapters, pair)
            pairs[ours[kernel]] = pair
    if differences:
        raise Mismatch("the adapters do not fit the base", differences)
    return pairs


def _kernels_of(above: str) -> list[str]:
    """Where the kernel is: `nnx.LoRALinear` has it beside `lora`, `nnx.LoRA` in `base_module`."""
    module = above.removesuffix("/lora")
    return [f"{module}/kernel", f"{module}/base_module/kernel"]


def _misfits(base: Source, kernel: int, adapters: Source, pair: tuple[int, int]) -> Iterator[str]:
    leaf = base.saved.leaves[kernel]
    a, b = (adapters.saved.leaves[number] for number in pair)
    shapes = (leaf.shape, a.shape, b.shape)
    fit = all(len(shape) == 2 for shape in shapes) and a.shape[1] == b.shape[0]
    if not fit or (a.shape[0], b.shape[1]) != leaf.shape:
        yield (
            f"{leaf.path!r} has the shape {leaf.shape}, its adapter {a.shape} and {b.shape}: "
            "expected (rows, rank) and (rank, columns)"
        )
    for one in (leaf, a, b):
        if not is_floating(one.dtype):
            yield f"{one.path!r} is {one.dtype}; it must be floating-point"


def numbers_by_path(source: Source) -> dict[str, int]:
    """The numbers of a checkpoint's arrays; one that the tree has at several places has several."""
    return {
        leaf.path: leaf.value.number
        for leaf in leaves_of(source.tree)
        if isinstance(leaf.value, ArrayNumber)
    }
