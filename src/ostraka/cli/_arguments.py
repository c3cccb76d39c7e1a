"""Arguments that several commands have, and their completion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

_MOST_OFFERS = 200


def path_argument(name: str, **options: Any) -> Callable[[Any], Any]:
    """A path or URL; a shell completes it as the name of a directory."""
    return click.argument(
        name, callback=_not_empty, shell_complete=_complete_directories, **options
    )


def names_option(help_text: str) -> Callable[[Any], Any]:
    """What a command takes as names of leaves and tensors."""
    return click.option(
        "--names",
        metavar="NAMES",
        multiple=True,
        callback=lambda ctx, param, value: (
            list(value) if len(value) > 1 else next(iter(value), None)
        ),
        help=f"{help_text}: a family, such as llama, hf for that of config.json, or a JSON file of "
        "rules. Can be repeated: files first, then a family for all that they don't name.",
    )


def _not_empty(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    if "" in (value if isinstance(value, tuple) else (value,)):
        raise click.BadParameter("the path is empty; give that of a checkpoint", ctx, param)
    return value


def _complete_directories(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    return click.Path(file_okay=False).shell_complete(ctx, param, incomplete)


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Built-in models, and files."""
    from ostraka.planner._names import MODELS

    return _words_or_files(ctx, param, incomplete, MODELS)


def complete_rules(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Sets of rules, and files."""
    from ostraka.planner._rules import RULES

    return _words_or_files(ctx, param, incomplete, RULES)


def complete_optimizers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Optimizers whose state can be planned."""
    from ostraka.planner._optimizers import OPTIMIZERS

    return [name for name in OPTIMIZERS if name.startswith(incomplete)]


def _words_or_files(
    ctx: click.Context, param: click.Parameter, incomplete: str, words: Iterable[str]
) -> list[Any]:
    found: list[Any] = [CompletionItem(word) for word in words if word.startswith(incomplete)]
    # A shell that is offered both shows them together.
    return found + click.Path().shell_complete(ctx, param, incomplete)


def complete_leaves(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The leaves of the checkpoint that was named before, and the names above them."""
    from ostraka._checkpoint import open_at

    try:
        leaves = open_at(ctx.params["path"], ctx.params.get("names")).saved.leaves
    except (KeyError, OSError, ValueError):
        return []
    offers: dict[str, None] = {}
    for leaf in leaves:
        path = leaf.path
        if path.startswith(incomplete):
            # One name further: a large tree is offered level by level.
            end = path.find("/", len(incomplete))
            offers[path if end < 0 else path[: end + 1]] = None
    return list(offers)[:_MOST_OFFERS]


def complete_steps(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The steps of the directory that was named before."""
    from ostraka.manager._steps import Root

    try:
        steps = Root(ctx.params["root"]).scan()
    except (KeyError, OSError, ValueError):
        return []
    return [str(step.step) for step in steps if str(step.step).startswith(incomplete)]
