"""Keywords that people type because another library has them, answered with the right ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def answering(remedies: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function raise a TypeError with the remedy for each of these keywords.

    A remedy is the end of the sentence, such as "Ostraka calls it keep=".
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        # `Manager`, not `Manager.__init__`.
        name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for wrong in kwargs:
                if wrong in remedies:
                    raise TypeError(
                        f"{name}() got an unexpected argument {wrong!r}; {remedies[wrong]}"
                    )
            return function(*args, **kwargs)

        return call

    return decorate


# Keywords of Orbax, and the end of the sentence that says what to do instead.

_WHEN = "say when to save with every=, every_s=, at= or when="
_KEEP = "say which steps to keep with keep=, keep_every=, keep_every_s=, keep_best= or keep_if="
_ONE_TREE = "pass one tree with everything in it to save, it needs no handlers"
_ALWAYS = "leave it out, Ostraka always does this"
_LIKE = "pass the template as like=, or into= to restore in place"

MANAGER = {
    "async_options": "leave it out, or pass asynchronous=False to save in the foreground",
    "best_fn": 'name the metric: keep_best=ostraka.Best("loss", "min")',
    "best_mode": 'it belongs to the metric: keep_best=ostraka.Best("loss", "min")',
    "checkpointers": _ONE_TREE,
    "cleanup_tmp_directories": _ALWAYS,
    "create": _ALWAYS,
    "enable_async_checkpointing": "Ostraka calls it asynchronous=",
    "item_handlers": _ONE_TREE,
    "item_names": _ONE_TREE,
    "keep_period": "Ostraka calls it keep_every=",
    "keep_time_interval": "Ostraka calls it keep_every_s=, in seconds",
    "max_to_keep": "Ostraka calls it keep=",
    "options": f"pass its fields as arguments: {_WHEN}; {_KEEP}",
    "preservation_policy": _KEEP,
    "save_decision_policy": _WHEN,
    "save_interval_steps": "Ostraka calls it every=",
    "save_on_steps": "Ostraka calls it at=",
    "should_save_fn": "Ostraka calls it when=",
    "step_prefix": "leave it out: steps are named step_00000100, and other names are read as well",
}
MANAGER_SAVE = {
    "args": "pass the tree: save(step, tree)",
    "custom_metadata": "Ostraka calls it metadata=",
    "items": "pass the tree: save(step, tree)",
    "save_kwargs": "pass the options of save themselves, such as dtype= and compress=",
}
MANAGER_RESTORE = {
    "args": _LIKE,
    "directory": "open a Manager of that directory, or call ostraka.restore(path)",
    "items": _LIKE,
    "restore_kwargs": _LIKE,
}
SAVE = {
    "args": "pass the tree: save(path, tree)",
    "custom_metadata": "Ostraka calls it metadata=",
    "force": "leave it out, a save replaces the checkpoint at its path",
    "item": "pass the tree: save(path, tree)",
    "overwrite": "leave it out, a save replaces the checkpoint at its path",
    "save_args": "pass dtype= to cast leaves, by path if you like",
}
RESTORE = {
    "abstract_pytree": _LIKE,
    "args": _LIKE,
    "item": _LIKE,
    "partial_restore": "pass only= with the leaves to restore, or strict=False",
    "restore_args": "pass like= with shardings and dtypes, or mesh=, specs= and dtype=",
    "target": _LIKE,
    "transforms": "pass rename= for leaves that have moved, only= and strict=False for the others",
}
