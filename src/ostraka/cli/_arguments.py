"""Arguments that several commands have, and their completion."""

from __future__ import annotations

import re
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import click
from click.shell_completion import CompletionItem

from ostraka.common import units

_MOST_OFFERS = 200
_OFFERED = re.compile(r"[\w./:=@%+-]+")
"""Leaves whose paths a shell reads unchanged. It might run others as code."""


def path_argument(name: str, **options: Any) -> Callable[[Any], Any]:
    """A path or URL. A shell completes it as the name of a directory."""
    complete = click.Path(file_okay=False).shell_complete
    return click.argument(name, callback=_not_empty, shell_complete=complete, **options)


def flag(names: str, help_text: str) -> Callable[[Any], Any]:
    """An option without value. `names` are those of the option, and perhaps of the parameter."""
    return click.option(*names.split(), is_flag=True, help=help_text)


def option(names: str, kind: Any, help_text: str, **more: Any) -> Callable[[Any], Any]:
    """An option of some type. Text as its `kind` is the name of the value in the help."""
    about = {"metavar": kind} if isinstance(kind, str) else {"type": kind}
    return click.option(*names.split(), help=help_text, **about, **more)


def repeated(names: str, kind: Any, help_text: str) -> Callable[[Any], Any]:
    """An option that can be repeated. The parameter is a tuple."""
    return option(names, kind, f"{help_text} Can be repeated.", multiple=True)


def json_option(help_text: str = "Print the same as JSON, sizes in bytes.") -> Callable[[Any], Any]:
    """The option `--json`, the parameter `as_json`."""
    return flag("--json as_json", help_text)


def names_option(help_text: str) -> Callable[[Any], Any]:
    """The option `--names`: how the names of tensors and the paths of leaves correspond."""
    return option(
        "--names",
        "NAMES",
        f"{help_text}: a family, such as llama, hf for that of config.json, or a JSON file of "
        "rules. Can be repeated: files first, then a family for all that they don't name.",
        multiple=True,
        callback=lambda ctx, param, value: (
            list(value) if len(value) > 1 else next(iter(value), None)
        ),
    )


def _not_empty(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    if "" in (value if isinstance(value, tuple) else (value,)):
        raise click.BadParameter("the path is empty; give that of a checkpoint", ctx, param)
    return value


def complete_words(table: str, *, files: bool = True) -> Callable[..., list[Any]]:
    """Complete the words of a table, such as `ostraka.planner.rules:RULES`, and files."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        words = [word for word in resolve_name(table) if word.startswith(incomplete)]
        beside = click.Path().shell_complete(ctx, param, incomplete) if files else []
        return [*map(CompletionItem, words), *beside]

    return complete


def complete_leaves(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The leaves of the checkpoint in the words before, and the names above them."""
    from ostraka.reading.locate import open_at

    try:
        leaves = open_at(ctx.params["path"], ctx.params.get("names")).saved.leaves
    except (KeyError, OSError, ValueError):
        return []
    paths = (leaf.path for leaf in leaves if leaf.path.startswith(incomplete))
    # One name further: a large tree is offered level by level.
    ends = ((path, path.find("/", len(incomplete)) + 1) for path in paths)
    offers = dict.fromkeys(path[: end or None] for path, end in ends)
    return list(filter(_OFFERED.fullmatch, offers))[:_MOST_OFFERS]


def complete_steps(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The steps of the directory in the words before."""
    from ostraka.manager.steps import Root

    try:
        steps = Root(ctx.params["root"]).scan()
    except (KeyError, OSError, ValueError):
        return []
    return [str(step.step) for step in steps if str(step.step).startswith(incomplete)]


# Sizes, rates, durations and meshes on the command line


_LONGEST_S = 1e12
_DURATIONS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def parse_duration(text: str) -> float:
    """The seconds of `4h`, `30min` or `86400s`. A number needs a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?", text.strip().lower())
    if found is not None and found[2] is None:
        raise ValueError(
            f"{text!r} has no unit; write {found[1]}h for hours, or {found[1]}s, {found[1]}min, "
            f"{found[1]}d"
        )
    seconds = 0.0 if found is None else float(found[1]) * _DURATIONS[found[2]]
    if not 0 < seconds < _LONGEST_S:
        raise ValueError(f"{text!r} is no duration; write it as 4h, 30min, 2d or 3600s")
    return seconds


def parse_mesh(text: str) -> dict[str, int]:
    """The axis sizes of `data=64,model=8`."""
    sizes: dict[str, int] = {}
    for axis in text.split(","):
        name, equals, size = (part.strip() for part in axis.partition("="))
        is_size = size.isdecimal() and int(size) > 0
        if not (name and equals and is_size) or name in sizes:
            raise ValueError(text)
        sizes[name] = int(size)
    return sizes


def parsed(
    name: str, parse: Callable[[str], Any], problem: str | None = None
) -> Callable[[str], Any]:
    """A click type that help shows as `name`, from a parser that raises ValueError.

    The message for a wrong word is that of the ValueError, or the word and its `problem`.
    """

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            message = str(error) if problem is None else f"{text!r} {problem}"
            raise click.BadParameter(message) from error

    convert.__name__ = name
    return convert


AXES = parsed("AXES", parse_mesh, "is no mesh; write it as data=64,model=8")
RATE = parsed("RATE", units.parse_rate)
SIZE = parsed("SIZE", units.parse_size)
TIME = parsed("TIME", parse_duration)
