"""Treat JAX arrays as those of an accelerator: none of their memory can be viewed."""

# pyright: reportPrivateUsage=false

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from ostraka.live import values
from ostraka.saving import capture


@contextmanager
def copies_forced() -> Generator[None]:
    """Copy every shard, or part of one, that a save reads. Donation ends what is not copied."""

    def placement(*args: object, gives_views: bool) -> values.Placement:
        del gives_views
        return values.Placement(*args, gives_views=False)  # pyright: ignore[reportArgumentType]

    host_copy = values._host_copy  # which lets JAX keep no copy

    def copy(array: Any) -> Any:
        made = host_copy(array)
        # JAX has copied what it had packed.
        return made if made.flags.owndata else np.array(made, order="C")

    with (
        patch.object(capture, "Placement", placement),
        patch.object(values, "_host_copy", copy),
    ):
        yield
