"""A case: a program of somebody else's parts, as a state to make and a step to repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import jax
import numpy as np

from world import cases

MODES = ("like", "abstract", "into", "none", "mesh")
"""How a state is brought back in a new process."""

Step = Callable[[Any, int], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Program:
    """What a case trains: `make` begins, `step` returns the next state and its loss."""

    make: Callable[[], Any]
    step: Step
    abstract: Callable[[], Any] | None = None
    """The template without arrays, where `nnx.eval_shape` of `make` can't make it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    package: str
    """As PyPI names it."""
    name: str
    shows: str
    """What it has that others have not."""
    build: Callable[[], Program]
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """Modes that make no sense here, each with its reason."""
    as_dicts: bool = False
    """Whether classes come back as dicts without a template, as they do if a static field of theirs
    can't be written."""
    mesh_tolerance: float = 1e-3
    """How far losses may be apart on another mesh, where sums are taken in another order."""

    @property
    def key(self) -> str:
        return f"{self.package}: {self.name}"


class Registry(list[Case]):
    """The cases of a module, in order."""

    def case(self, package: str, name: str, shows: str, **options: Any) -> Any:
        """Take a function that builds a program as a case."""

        def add(build: Callable[[], Program]) -> Callable[[], Program]:
            self.append(Case(package, name, shows, build, **options))
            return build

        return add


def shapes_of(tree: Any) -> Any:
    """The tree with shapes for its JAX arrays, where `make` can't be traced; numpy's stay."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.aval.weak_type)
            if isinstance(x, jax.Array)
            else x
        ),
        tree,
    )


def group_names() -> list[str]:
    return sorted(module.name for module in iter_modules(cases.__path__))


def load_group(name: str) -> list[Case]:
    """The cases of a module; whatever its packages raise if they are not there, or not usable."""
    found: list[Case] = import_module(f"world.cases.{name}").CASES
    keys = [case.key for case in found]
    assert len(set(keys)) == len(keys), f"two cases of {name} have the same name"
    return found


def numbers(i: int, *shape: int, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    """The numbers of step `i`: the same in every process."""
    return np.random.default_rng(1000 + i).uniform(low, high, shape).astype(np.float32)


def integers(i: int, *shape: int, below: int) -> np.ndarray:
    return np.random.default_rng(2000 + i).integers(0, below, shape, dtype=np.int32)
