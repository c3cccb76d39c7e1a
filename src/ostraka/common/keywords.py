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
