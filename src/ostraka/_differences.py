"""How a template and a checkpoint differ, in few lines with the likely cause first. No JAX.

A forgotten optimizer or a wrong top-level name makes hundreds of leaves differ: a whole subtree is
one line, and so are leaves that differ in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostraka._name_families import FAMILIES
from ostraka._nodes import ROOT
from ostraka._pattern import names_on
from ostraka.errors import count_of, name_few, nearest

_NAMED_ONE_BY_ONE = 3


@dataclass(slots=True)
class Differences:
    """What is found while a template is compared with a checkpoint."""

    missing: list[str] = field(default_factory=list[str])
    """Leaves of the template that the checkpoint does not have."""
    unexpected: list[str] = field(default_factory=list[str])
    """Leaves of the checkpoint that the template does not have."""
    of_leaves: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Leaves that both have, and what is wrong with each."""
    general: list[str] = field(default_factory=list[str])
    """Whole sentences."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.of_leaves or self.general)

    def lines(self, wanted: Sequence[str], saved: Sequence[str]) -> list[str]:
        """All of it, given the paths of all leaves of the template and of the checkpoint."""
        cause = list(_likely_cause(self.missing, wanted, saved))
        named = sorted(_counted(saved).keys() - _counted(wanted))
        lines = [
            f"{text} is not in the checkpoint{nearest(name, named)}"
            for name, text in _subtrees([] if cause else self.missing, wanted, saved)
        ]
        lines += [f"{path!r}: {text}" for path, text in _alike(self.of_leaves)]
        lines += [
            f"{text} is in the checkpoint but not in `like`"
            for _, text in _subtrees(self.unexpected, saved, wanted)
        ]
        return [*cause, *self.general, *lines]


def _alike(of_leaves: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """A line for each leaf, or for all that differ in the same way."""
    by_text: dict[str, list[str]] = {}
    for path, text in of_leaves:
        by_text.setdefault(text, []).append(path)
    for text, paths in by_text.items():
        if len(paths) <= _NAMED_ONE_BY_ONE:
            yield from ((path, text) for path in paths)
        else:
            yield paths[0], f"{text} (and so {len(paths) - 1:,} more, such as {paths[1]!r})"


def _subtrees(
    paths: Sequence[str], everything: Collection[str], others: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Names, and how they are shown: the largest subtrees that only this side has."""
    there, here, elsewhere = _counted(everything), _counted(paths), _counted(others)

    def is_whole(name: str) -> bool:
        return here[name] == there[name] > 1 and name not in elsewhere

    for name in dict.fromkeys(next(filter(is_whole, names_on(path)), path) for path in paths):
        yield name, f"{name!r} ({count_of(here[name], 'leaf')})" if is_whole(name) else repr(name)


def _counted(paths: Collection[str]) -> Counter[str]:
    """How many leaves are at or below each name."""
    return Counter(name for path in paths for name in names_on(path))


def _likely_cause(
    missing: Sequence[str], wanted: Sequence[str], saved: Sequence[str]
) -> Iterator[str]:
    """A template that is one level too low or too high."""
    if not missing or ROOT in wanted or ROOT in saved:
        return
    there = set(saved)
    for name in dict.fromkeys(path.split("/")[0] for path in saved):
        if all(f"{name}/{path}" in there for path in missing):
            yield (
                f"`like` looks like what was saved under {name!r}: pass like={{{name!r}: …}}, and "
                f"take [{name!r}] of the result"
            )
            return
    name = missing[0].split("/")[0]
    below = [path.removeprefix(f"{name}/") for path in missing]
    if all(path != short and short in there for path, short in zip(missing, below, strict=True)):
        yield (
            f"the checkpoint has at its top what `like` has under {name!r}: pass what is under "
            f"{name!r} itself"
        )


def hint_at_names(config: Any) -> str:
    """What to do if `like` does not have the names that tensors have in files."""
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    if isinstance(kind, str) and kind in FAMILIES:
        return (
            "the checkpoint has tensors under the names of Hugging Face: pass names='hf' to have "
            f"those of a {kind} model, or names= with rules of your own, which may cut a tensor "
            "into several leaves"
        )
    return (
        "the checkpoint has tensors under the names of their files: pass names= with rules that "
        "say which leaf each is, or which leaves it is cut into"
    )


def show_tolerated(by_kind: Mapping[str, Sequence[str]]) -> str:
    """What was let pass, in one sentence; a kind is such as "kept {} of no use"."""
    return "; ".join(
        f"{kind.format(count_of(len(paths), 'leaf'))} ({name_few(paths)})"
        for kind, paths in by_kind.items()
    )
