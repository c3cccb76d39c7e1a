"""Check the arguments of `init`: likely mistakes get a message with the remedy."""

from __future__ import annotations

import inspect
from typing import Any

from ostraka.errors import InvalidTree

_NEEDED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


def check_function(model_fn: Any) -> None:
    """Raise InvalidTree if `model_fn` is not a function that can be called without arguments."""
    from flax import nnx

    kind = type(model_fn).__name__
    if isinstance(model_fn, nnx.Module | nnx.ModelAndOptimizer):
        raise InvalidTree(
            f"model_fn is a {kind} that is made already: give a function that makes it, such as "
            f"lambda: {kind}(…), or put this one onto the mesh with sharding.place"
        )
    if not callable(model_fn):
        raise InvalidTree(
            f"model_fn is a {kind}; it must be a function that makes the model, such as "
            "lambda: Model(rngs=nnx.Rngs(0))"
        )
    needed = _required(model_fn)
    if needed:
        name = getattr(model_fn, "__name__", "model_fn")
        given = ", ".join(f"{n}=nnx.Rngs(0)" if n == "rngs" else f"{n}=…" for n in needed)
        raise InvalidTree(
            f"model_fn is called without arguments, and {name} needs {', '.join(needed)}: give "
            f"lambda: {name}({given})"
        )


def _required(function: Any) -> list[str]:
    is_class = isinstance(function, type)
    try:
        # The signature of a Flax class is that of its metaclass, which takes anything.
        found = inspect.signature(function.__init__ if is_class else function)
    except (TypeError, ValueError):  # some builtins have no signature
        return []
    parameters = list(found.parameters.values())[is_class:]
    return [p.name for p in parameters if p.kind in _NEEDED and p.default is p.empty]


def check_optimizer(optimizer: Any) -> None:
    """Raise InvalidTree if `optimizer` is neither None nor an optax transformation."""
    from flax import nnx

    if optimizer is None:
        return
    if isinstance(optimizer, nnx.Optimizer):
        what, remedy = "an nnx.Optimizer", "give the optax transformation that it is made of"
    elif isinstance(optimizer, str):
        what, remedy = repr(optimizer), f"give the transformation, such as optax.{optimizer}(1e-3)"
    elif hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return
    elif callable(optimizer):
        name = getattr(optimizer, "__name__", "adamw")
        what, remedy = f"the function {name}", f"call it, as in optax.{name}(1e-3)"
    else:
        what, remedy = f"a {type(optimizer).__name__}", "give one, such as optax.adamw(1e-3)"
    raise InvalidTree(f"optimizer is {what}, and no optax transformation: {remedy}")
