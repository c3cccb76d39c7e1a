"""Leaves of a template that a checkpoint has fused into one, found by their sizes. Pure.

Nothing is decided by this: it is for the message of a restore that fails anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice
from math import prod

Shape = tuple[int, ...]

_MOST_LOOKED_AT = 32
_MOST_NEAR = 50
_MOST_TRIED = 10
_MOST_PARTS = 5
_USUALLY_FUSED = (
    *("q", "k", "v", "wq", "wk", "wv", "query", "key", "value"),
    *("gate", "up", "w1", "w3"),
)


def hint_at_fused(wanted: Mapping[str, Shape], saved: Mapping[str, Shape]) -> Iterator[str]:
    """What to do if an array of a checkpoint is several leaves of a template; at most one line.

    Both are shapes by path.
    """
    missing = {path: shape for path, shape in wanted.items() if saved.get(path) != shape}
    others = [path for path, shape in saved.items() if wanted.get(path) != shape]
    for path in others[:_MOST_LOOKED_AT] if len(missing) > 1 else ():
        parts = _parts_of(path, saved[path], missing)
        if parts:
            *first, last = map(repr, parts)
            yield (
                f"{path!r} of the checkpoint has as many elements as {', '.join(first)} and {last} "
                "of `like` together: if it is those, have it cut apart, with a rule of names= such "
                f"as {_rule(saved[path], {part: missing[part] for part in parts})}"
            )
            return


def _parts_of(path: str, shape: Shape, missing: Mapping[str, Shape]) -> Sequence[str]:
    """Leaves near a path that have as many elements together; none if there are no such."""
    names = path.split("/")
    for above in range(1, min(4, len(names) + 1)):
        prefix = "".join(f"{name}/" for name in names[: len(names) - above])
        near = (
            other
            for other in missing
            if other.startswith(prefix)
            and (prefix or other.count("/") == path.count("/"))
            and (above == 1 or other.endswith(f"/{names[-1]}"))
            and 0 < prod(missing[other]) < prod(shape)
        )
        siblings = list(islice(near, _MOST_NEAR))
        siblings.sort(key=lambda other: _rank(other.removeprefix(prefix).split("/")))
        for count in range(2, _MOST_PARTS + 1):
            for found in combinations(siblings[:_MOST_TRIED], count):
                is_all = sum(prod(missing[other]) for other in found) == prod(shape)
                # What the template has under the same name must be one of the parts.
                is_own = path in found or path not in missing
                if is_all and is_own and _differ_in_a_name(found):
                    return found
    return ()


def _differ_in_a_name(paths: Sequence[str]) -> bool:
    """Whether paths are the same but for one name, which is no number, as those of layers are."""
    names = [path.split("/") for path in paths]
    if len({len(one) for one in names}) > 1:
        return False
    differing = [column for column in zip(*names, strict=True) if len({*column}) > 1]
    return len(differing) == 1 and not any(name.isdecimal() for name in differing[0])


def _rank(names: Sequence[str]) -> int:
    """Names of what is usually fused first, in the order in which it is."""
    first = names[-2:][0].removesuffix("_proj").removesuffix("_attn")
    order = len(_USUALLY_FUSED)
    return _USUALLY_FUSED.index(first) if first in _USUALLY_FUSED else order


def _rule(shape: Shape, parts: Mapping[str, Shape]) -> str:
    """A rule that cuts an array into parts, as far as shapes tell which."""
    numbered = {_with_placeholder(path): part for path, part in parts.items()}
    for axis in range(len(shape)):
        rest = (shape[:axis], shape[axis + 1 :])
        if all((part[:axis], part[axis + 1 :]) == rest for part in parts.values()):
            into = json.dumps({path: part[axis] for path, part in numbered.items()})
            return f'{{"cut": {{"axis": {axis}, "into": {into}}}, …}}'
    into = ", ".join(f"{json.dumps(path)}: …" for path in numbered)
    return (
        f'{{"split": …, "cut": {{"axis": …, "into": {{{into}}}}}, …}}, where split makes axes of '
        "the heads"
    )


def _with_placeholder(path: str) -> str:
    """The first number in a path as the placeholder that a rule has for it."""
    names = path.split("/")
    at = next((number for number, name in enumerate(names) if name.isdecimal()), None)
    return path if at is None else "/".join([*names[:at], "{n}", *names[at + 1 :]])
