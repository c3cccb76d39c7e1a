"""The state that optax's optimizers have for a model, as plain data. No JAX.

Paths, shapes and dtypes are those of `nnx.Optimizer(model, optax.<name>(rate), wrt=nnx.Param)`; a
test compares with the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ostraka.errors import nearest

OptimizerLeaf = tuple[str, tuple[int, ...], str, str | None]
"""Path, shape, dtype, and the path of the parameter that it belongs to."""

OPTIMIZERS = ("adam", "adamw", "sgd", "adafactor", "lion", "none")
_MOMENTS = {"adam": ("mu", "nu"), "adamw": ("mu", "nu"), "lion": ("mu",)}
_FACTORED_FROM = 128
"""Adafactor keeps rows and columns where both have at least this size."""


def optimizer_leaves(
    name: str, parameters: Sequence[tuple[str, tuple[int, ...]]], dtype: str
) -> list[OptimizerLeaf]:
    """The leaves below `optimizer/`, in the order of `nnx.State`; none for "none"."""
    if name not in OPTIMIZERS:
        raise ValueError(
            f"there is no optimizer {name!r}{nearest(name, OPTIMIZERS)}; those there are: "
            f"{', '.join(OPTIMIZERS)}"
        )
    if name == "none":
        return []
    step: OptimizerLeaf = ("step", (), "uint32", None)
    if name == "sgd":
        return [step]
    count: OptimizerLeaf = ("opt_state/0/count", (), "int32", None)
    if name == "adafactor":
        return [count, *_factored(parameters, dtype), step]
    moments = [
        (f"opt_state/0/{moment}/{path}", shape, dtype, path)
        for moment in _MOMENTS[name]
        for path, shape in parameters
    ]
    return [count, *moments, step]


def _factored(
    parameters: Sequence[tuple[str, tuple[int, ...]]], dtype: str
) -> Iterator[OptimizerLeaf]:
    shapes = {path: factored_shapes(shape) for path, shape in parameters}
    for moment in ("v", "v_col", "v_row"):
        for path, _ in parameters:
            yield f"opt_state/0/{moment}/{path}", shapes[path][moment], dtype, path


def factored_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """What Adafactor keeps of a parameter: the mean squares of rows and columns, or of all."""
    by_size = sorted(range(len(shape)), key=lambda dimension: shape[dimension])
    if len(shape) < 2 or shape[by_size[-2]] < _FACTORED_FROM:
        return {"v": shape, "v_col": (1,), "v_row": (1,)}
    second, first = by_size[-2:]
    return {
        "v": (1,),
        "v_col": tuple(n for d, n in enumerate(shape) if d != second),
        "v_row": tuple(n for d, n in enumerate(shape) if d != first),
    }
