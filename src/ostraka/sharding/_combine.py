"""The kinds of rules, and how they are combined. No JAX."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ostraka._spec import MeshSpec, Partition
from ostraka.sharding._leaf import ShapedLeaf

SpecRules = Any
"""A function, a mapping of patterns, a tree of specs, one spec, "metadata", logical axes, a preset,
or several of them."""

Fill = Callable[[ShapedLeaf, Partition], Partition]
"""Given a leaf and its partition: the partition, with more dimensions cut."""


class _Joinable:
    """What `a | b` means: `combine(a, b)`."""

    __slots__ = ()

    def __or__(self, other: Any) -> Any:
        return combine(self, other)

    def __ror__(self, other: Any) -> Any:
        return combine(other, self)


class Preset(_Joinable, ABC):
    """A way to shard a model. `a | b` is both: `fsdp("data") | tensor_parallel("model")`."""

    __slots__ = ()

    order: int
    """Presets are applied in this order: those that go by names first."""

    @abstractmethod
    def axis_on(self, mesh: MeshSpec) -> str | None:
        """The mesh axis that it cuts along, if any. Raises InvalidSharding if it is missing."""

    @abstractmethod
    def filler(
        self, leaves: Sequence[ShapedLeaf], around: Sequence[ShapedLeaf], mesh: MeshSpec
    ) -> Fill:
        """A function that fills in the partitions of `leaves`; `around` are all leaves of the tree.

        Raises InvalidSharding if the preset can't be applied to these leaves on this mesh.
        """


def combine(*rules: SpecRules) -> SpecRules:
    """Several rules as one.

    Where a function, a mapping or variable metadata names a spec, that holds; for the other leaves
    the presets fill it in together: tensor parallelism first, then FSDP in what is left whole.

        combine({"embed/**": P()}, fsdp("data"), tensor_parallel("model"))
    """
    return combined(*rules)


def combined(*rules: SpecRules) -> Combined:
    """`combine`, with the type of its result."""
    explicit: list[Any] = []
    presets: list[Preset] = []
    for rule in rules:
        if isinstance(rule, Combined):
            explicit += rule.explicit
            presets += rule.presets
        elif isinstance(rule, Preset):
            presets.append(rule)
        else:
            explicit.append(rule)
    return Combined(tuple(explicit), tuple(sorted(presets, key=lambda preset: preset.order)))


@dataclass(frozen=True, slots=True)
class Combined(_Joinable):
    """Rules that name specs (the first match wins), and presets in the order they are applied."""

    explicit: tuple[Any, ...]
    presets: tuple[Preset, ...]


@dataclass(frozen=True, slots=True)
class Logical(_Joinable):
    """Use the logical axis names of NNX variables; `axes` maps them to axes of the mesh."""

    axes: Mapping[str, Any]


def logical(axes: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> SpecRules:
    """The annotations of NNX variables, their logical names mapped to mesh axes by `axes`.

    An axis of None leaves the dimension whole, a tuple cuts it along several. Names that are not in
    `axes` are axes of the mesh themselves. Variables without annotation stay whole, or are left
    to the rules that this is combined with.

        init(make_model, mesh, logical({"embed": None, "mlp": "model", "batch": ("data", "fsdp")}))
    """
    return Logical(dict(axes))


def is_plain(rules: SpecRules) -> bool:
    """Whether rules are presets and patterns with partitions, as `resolve_plain` takes them."""
    return isinstance(rules, Preset | Combined) and all(
        isinstance(rule, Mapping)
        and all(map(_is_partition, cast("Mapping[str, Any]", rule).values()))
        for rule in combined(rules).explicit
    )


def _is_partition(spec: Any) -> bool:
    return type(spec) is tuple and all(type(axes) is tuple for axes in cast("tuple[Any]", spec))
