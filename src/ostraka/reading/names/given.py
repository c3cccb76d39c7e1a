"""The argument `names=` as `Names`: a family, rules, a file of rules, a function.

| `names=` | means |
| --- | --- |
| `"hf"` | the family of the `model_type` in `config.json` |
| `"llama"` | that family |
| a mapping | rules: patterns of names to paths, to forms, or to None to leave tensors out |
| the path of a JSON file | the same, in a file |
| a function | from a name and a shape to a path, a form, or None |
| a list of these, but for functions | the rules of all: the first match decides |

A form is a mapping with a `path` and any of these, which apply in this order:

| key | value |
| --- | --- |
| `transpose` | true, or the order of the axes |
| `split` | `{axis: sizes}` |
| `cut` | in the place of `path`: `{"axis": 1, "into": {path: size, …}}`, or a list of paths |
| `merge` | `{axis: sizes}`, for axes of the leaf |
| `stack` | placeholders that number the parts of a leaf. A function returns the numbers |
| `tensor` | only from a function that receives leaves: the tensor that is cut into this leaf |
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ostraka.errors import NotACheckpoint, nearest
from ostraka.families.families import FAMILIES, HEAD, is_tied
from ostraka.reading.names.rules import (
    AS_IT_IS,
    TRANSPOSED,
    Form,
    Match,
    Names,
    Rule,
    TensorCut,
    placeholders,
)

Rules = str | os.PathLike[str] | Mapping[str, Any] | Names
NamesLike = Rules | list[Rules] | tuple[Rules, ...] | Callable[[str, tuple[int, ...]], Any]

_FORM_KEYS = ("path", "transpose", "split", "cut", "merge", "stack")
_CUT_EXAMPLE = '{"axis": 0, "into": {"q/kernel": 64, "k/kernel": 16}}'
_MOST_FILE_BYTES = 16 << 20


def read_names(names: NamesLike, config: Mapping[str, Any] | None = None) -> Names:
    """The argument `names=` as rules. `config` is the model's config.json, if there is one.

    Raises ValueError, a sentence that names the rule and its fault.
    """
    if isinstance(names, Names):
        return names
    if isinstance(names, Mapping):
        return _of_mapping(names, "names=")
    if isinstance(names, str | os.PathLike):
        return _of_text(os.fspath(names), config)
    if callable(names):
        return _of_function(names)
    parts: Any = names
    if isinstance(parts, list | tuple) and parts:
        return _in_turn([read_names(part, config) for part in cast("Sequence[Any]", parts)])
    raise ValueError(
        "names= takes 'hf', the name of a family, rules, the path of a JSON file of rules, a list "
        f"of these or a function, not {type(names).__name__}"
    )


def _in_turn(parts: Sequence[Names]) -> Names:
    """The rules of all. Those of a family come last, since they need not all match."""
    if any(part.function is not None for part in parts):
        raise ValueError("names= takes a function alone, not in a list")
    families = [part for part in parts if part.required == 0]
    if families and (len(families) > 1 or families[0] is not parts[-1]):
        raise ValueError("names= takes a list of rules, and at its end one family or 'hf'")
    rules = tuple(rule for part in parts for rule in part.rules)
    required = sum(len(part.rules) for part in parts if part.required is None)
    given = " and ".join(part.given for part in parts)
    return replace(parts[-1], given=given, rules=rules, required=required)


def _of_text(text: str, config: Mapping[str, Any] | None) -> Names:
    known = ", ".join(FAMILIES)
    if text == "hf":
        kind = (config or {}).get("model_type")
        if not isinstance(kind, str):
            raise ValueError(
                "names='hf' needs the model_type of a config.json, and there is none: give the "
                f"family, such as names='llama', or rules of your own; families are {known}"
            )
        if kind not in FAMILIES:
            raise ValueError(
                f"names='hf': config.json has the model_type {kind!r}, for which there are no "
                f"built-in rules: give rules of your own, or the family that has the same names "
                f"of tensors; families are {known}"
            )
        return family_names(kind, config, f"names='hf' ({kind})")
    if text in FAMILIES:
        return family_names(text, config, f"names={text!r}")
    if not os.path.exists(text):
        raise ValueError(
            f"names={text!r} is neither a family{nearest(text, list(FAMILIES))} nor a file of "
            f"rules; families are {known}, and 'hf' takes the one of config.json"
        )
    return _of_mapping(_load(text), f"names={text!r}")


def family_names(kind: str, config: Mapping[str, Any] | None, given: str) -> Names:
    """The names of a family, and of the model that a config describes, if it is known.

    The head of a tied model is made of its embedding, where a tree has one.
    """
    family = FAMILIES[kind]
    try:
        tied = is_tied(kind, config or {})
    except ValueError as error:
        raise NotACheckpoint(f"{given}: {error}") from error
    rules = [
        Rule(row.tensor, row.path, Form(row.axes), ("e",) if "{e}" in row.tensor else ())
        for row in family.rows
    ]
    rules += [Rule(tensor, None) for tensor in family.ignored]
    return Names(
        given,
        tuple(dict.fromkeys(rules)),
        required=0,
        prefixes=family.prefixes,
        stand_ins=(Rule(family.embedding, HEAD, TRANSPOSED),) if tied else (),
        optional=frozenset({HEAD}) if tied else frozenset(),
    )


def _load(path: str) -> Mapping[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"it has {twice!r} twice")
        return found

    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _MOST_FILE_BYTES:
            raise ValueError(f"it is no file of at most {_MOST_FILE_BYTES:,} bytes")
        with open(path, encoding="utf-8") as file:
            rules = json.load(file, object_pairs_hook=unique)
        if not isinstance(rules, dict):
            raise ValueError("it has no JSON object at its top")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"names={path!r} can't be read as rules: {error}") from error
    return cast("dict[str, Any]", rules)


def _of_mapping(rules: Mapping[str, Any], given: str) -> Names:
    if not rules:
        raise ValueError(f"{given} has no rules")
    return Names(given, tuple(_rule(pattern, value) for pattern, value in rules.items()))


def _rule(pattern: Any, value: Any) -> Rule:
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"names= has a rule for {pattern!r}, which is no name of a tensor")
    what = f"names=, the rule for {pattern!r}:"
    if value is None:
        return Rule(pattern, None)
    path, form, stack = _parse(what, value)
    numbering = cast("list[Any]", [*stack] if isinstance(stack, list | tuple) else [stack])
    open_names = placeholders(pattern)
    if not all(isinstance(name, str) and name in open_names for name in numbering):
        raise ValueError(f"{what} stack has {stack!r}, which must be placeholders of the name")
    rule = Rule(pattern, path, form, tuple(numbering))
    for one in rule.paths:
        in_path = placeholders(one)
        for name in in_path:
            if name not in open_names:
                raise ValueError(f"{what} the path has {{{name}}}, which the name has not")
        for name in open_names:
            if (name in in_path) == (name in numbering):
                both = "both in the path and in stack" if name in in_path else "not in the path"
                raise ValueError(
                    f"{what} {{{name}}} is {both}: a part of a name goes into the path, or it "
                    "numbers the parts of a stack"
                )
    return rule


def _parse(what: str, value: Any, *, keys: Sequence[str] = _FORM_KEYS) -> tuple[Any, Form, Any]:
    """The path, the form and the stack of a rule. No path if it cuts."""
    if isinstance(value, str):
        return _checked_path(what, value), AS_IT_IS, ()
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{what} it must be a path, a mapping with a path or a cut, or None, not {value!r}"
        )
    given = cast("Mapping[Any, Any]", value)
    for key in given:
        if key not in keys:
            hint = nearest(str(key), keys)
            raise ValueError(f"{what} it has {key!r}{hint}; it may have {', '.join(keys)}")
    cut = _cut(what, given["cut"]) if "cut" in given else None
    if cut is not None and "path" in given:
        raise ValueError(
            f"{what} it has both path and cut; a tensor becomes the one leaf at path, or those "
            "that cut has in its into"
        )
    path = _checked_path(what, given.get("path")) if cut is None else None
    split = _sizes_by_axis(what, "split", given.get("split"))
    merge = _sizes_by_axis(what, "merge", given.get("merge"))
    form = Form(_axes(what, given.get("transpose", False)), split, merge, cut)
    return path, form, given.get("stack", ())


def _cut(what: str, value: Any) -> TensorCut:
    if not isinstance(value, Mapping) or {*cast("Any", value)} != {"axis", "into"}:
        raise ValueError(
            f"{what} cut must have an axis and what it is cut into, such as {_CUT_EXAMPLE}, "
            f"not {value!r}"
        )
    given = cast("Mapping[str, Any]", value)
    axis, into = given["axis"], given["into"]
    if type(axis) is not int or axis < 0:
        raise ValueError(f"{what} the axis of cut must be a number such as 0 or 1, not {axis!r}")
    sizes = tuple(cast("Mapping[Any, Any]", into).values()) if isinstance(into, Mapping) else None
    is_list = isinstance(into, Mapping | Sequence) and not isinstance(into, str)
    paths = tuple(cast("Sequence[Any]", into)) if is_list else ()
    if not paths:
        raise ValueError(
            f"{what} the into of cut must have leaves and their sizes, such as {_CUT_EXAMPLE}, or "
            f"be a list of leaves that get one position each, not {into!r}"
        )
    for number, path in enumerate(paths):
        if _checked_path(what, path) in paths[:number]:
            raise ValueError(f"{what} cut has {path!r} twice in its into")
    for path, size in zip(paths, sizes or (), strict=sizes is not None):
        if type(size) is not int or (size < 1 and size != -1):
            raise ValueError(
                f"{what} cut has {size!r} for {path!r}, which must be its size along the axis, or "
                "-1 for what is left"
            )
    if sizes is not None and sizes.count(-1) > 1:
        raise ValueError(f"{what} cut has the size -1 for more than one leaf")
    return TensorCut(axis, paths, sizes)


def _checked_path(what: str, path: Any) -> str:
    if not isinstance(path, str) or not path or not all(path.split("/")):
        raise ValueError(f"{what} its path must be one such as 'layers/{{n}}/kernel', not {path!r}")
    return path


def _axes(what: str, value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return "reversed" if value else None
    if _are_integers(value):
        return tuple(value)
    raise ValueError(
        f"{what} transpose must be true, false, or the order of the axes such as [1, 0], "
        f"not {value!r}"
    )


def _sizes_by_axis(what: str, key: str, value: Any) -> dict[int, tuple[int, ...]] | None:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{what} {key} must be such as {{1: [8, -1]}}, not {value!r}")
    found: dict[int, tuple[int, ...]] = {}
    for axis, sizes in cast("Mapping[Any, Any]", value or {}).items():
        number: Any = int(axis) if isinstance(axis, str) and axis.isdecimal() else axis
        is_fine = type(number) is int and number >= 0 and _are_integers(sizes) and len(sizes) > 1
        if not is_fine or [*sizes].count(-1) > 1 or any(n < 1 and n != -1 for n in sizes):
            raise ValueError(
                f"{what} {key} must be such as {{1: [8, -1]}}: an axis, and sizes of which one may "
                f"be -1, not {value!r}"
            )
        found[number] = tuple(sizes)
    return None if value is None else found


def _are_integers(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(type(item) is int for item in cast("Sequence[Any]", value))


def _of_function(function: Callable[[str, tuple[int, ...]], Any]) -> Names:
    called = getattr(function, "__qualname__", type(function).__name__)

    def find(name: str, shape: tuple[int, ...]) -> tuple[Match, ...]:
        value = function(name, shape)
        if value is None:
            return (Match(None),)
        what = f"names=, what {called} gives for {name!r}:"
        path, form, stack = _parse(what, value, keys=(*_FORM_KEYS, "tensor"))
        index = (stack,) if type(stack) is int else stack
        if not _are_integers(index) or any(number < 0 for number in index):
            raise ValueError(f"{what} stack must be the number of a part, not {stack!r}")
        if isinstance(value, Mapping) and "tensor" in value:
            tensor = cast("Mapping[str, Any]", value)["tensor"]
            return (_part_of(what, name, tensor, form, index),)
        paths = (path,) if form.cut is None else form.cut.paths
        at = tuple(index)
        return tuple(Match(one, form, at, part=part) for part, one in enumerate(paths))

    return Names(f"names={called}", function=find)


def _part_of(what: str, path: str, tensor: Any, form: Form, index: Sequence[int]) -> Match:
    """The answer of a function for a leaf: its tensor, and how that is cut."""
    if not isinstance(tensor, str) or not tensor or placeholders(tensor):
        raise ValueError(f"{what} tensor must be the name of a tensor, not {tensor!r}")
    if form.cut is None or index:
        raise ValueError(f"{what} tensor goes with cut, which has {path!r} in its into, alone")
    if path not in form.cut.paths:
        raise ValueError(
            f"{what} its cut has {', '.join(map(repr, form.cut.paths))} in its into, and not this "
            "leaf"
        )
    return Match(tensor, form, part=form.cut.paths.index(path), of_tensor=True)
