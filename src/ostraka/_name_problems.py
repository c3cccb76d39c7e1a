"""What does not correspond between names and rules, in few lines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ostraka._name_rules import Composition
from ostraka._rearrange import Shape
from ostraka.errors import Mismatch, count_of, name_few, nearest

_HINTS = (
    (".lora_", "it is a LoRA adapter, not a whole model: open it without names="),
    (".weight_scale", "it is quantized, and there are no rules for its scales"),
    (".qweight", "it is quantized, and there are no rules for that"),
    (".absmax", "it is quantized, and there are no rules for that"),
)


@dataclass(slots=True)
class Problems:
    """What is found while names are matched, as the lines of one error."""

    there: Mapping[str, Shape]
    noun: str
    giver: str
    unnamed: list[str] = field(default_factory=list[str])
    unused: list[str] = field(default_factory=list[str])
    lines: list[str] = field(default_factory=list[str])

    def check(self, subject: str) -> None:
        lines = dict.fromkeys([*self._of_unnamed(), *self._of_unused(), *self.lines])
        if lines:
            raise Mismatch(subject, list(lines))

    def _of_unnamed(self) -> Iterator[str]:
        if not self.unnamed:
            return
        for part, hint in _HINTS if self.noun == "tensor" else ():
            if any(part in name for name in self.unnamed):
                yield hint
                break
        few = name_few(self.unnamed)
        if len(self.unnamed) == len(self.there) and self.unused:
            first = self.unused[0]
            yield f"no rule names any {self.noun}, such as {few}; the first is for {first!r}"
            self.unused.clear()
            return
        yield (
            f"no {self.giver} names {count_of(len(self.unnamed), self.noun)} ({few}): give one, or "
            f"None to leave out what it matches"
        )

    def _of_unused(self) -> Iterator[str]:
        for pattern in self.unused[:5]:
            hint = nearest(pattern, list(self.there)[:10_000])
            yield f"the rule for {pattern!r} matches no {self.noun} that is left for it{hint}"
        if len(self.unused) > 5:
            yield f"{count_of(len(self.unused) - 5, 'rule')} more match nothing"


def find_twice(groups: Iterable[Sequence[Composition]]) -> Iterator[str]:
    """Tensors that two leaves would be, other than those of a group, which are put together."""
    first: dict[str, tuple[int, str]] = {}
    for number, group in enumerate(groups):
        for leaf in group:
            for name in leaf.tensors:
                found, path = first.setdefault(name, (number, leaf.path))
                if found != number:
                    yield f"leaves {path!r} and {leaf.path!r} would both be tensor {name!r}"


def find_nested(paths: Sequence[str]) -> Iterator[str]:
    """A path that is a leaf can't have leaves below it."""
    there = set(paths)
    for path in paths:
        above = path
        while "/" in above:
            above = above.rpartition("/")[0]
            if above in there:
                yield f"{above!r} would be a leaf, and hold the leaf {path!r}, too"
                break
