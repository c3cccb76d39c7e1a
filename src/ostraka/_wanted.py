"""What a restore was asked for, and what it comes to: which array goes where, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from ostraka._box import Box
from ostraka._capture import DtypeRule
from ostraka._nodes import Branch, Leaf
from ostraka._pattern import Patterns


@dataclass(frozen=True, slots=True)
class Destination:
    """Where an array leaf of the checkpoint goes."""

    number: int
    path: str
    kind: str
    """"jax", "key", "numpy", "scalar", or "python" for a Python number."""
    sharding: Any
    """For JAX arrays."""
    boxes: tuple[Box, ...]
    """What this process needs of it, each once."""
    cast: str | None = None
    """The dtype to cast it to, if that was asked for."""
    committed: bool = True
    """Whether JAX must leave it on its devices."""
    weak: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """A settled restore: what to read, what is known already, how to put it together."""

    tree: Branch | Leaf
    arrays: tuple[Destination, ...]
    values: Mapping[str, Any]
    copies: tuple[tuple[str, str], ...] = ()
    """Leaves that are the same as another one, and that one."""
    states: tuple[tuple[Any, Any], ...] = ()
    """Stateful objects of `like`, and the state that each gets at the end."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the caller said about a restore, besides `like`."""

    mesh: Mesh | None = None
    specs: Any = None
    strict: bool = True
    only: Patterns | None = None
    rename: Mapping[str, str] | None = None
    dtype: DtypeRule = None
    as_state: bool = False
    in_place: bool = False
    """What is not restored is not touched, rather than taken over from `like`."""
