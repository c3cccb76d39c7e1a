"""How much memory what a checkpoint describes may take: in proportion to what its files hold. Pure.

Runs, grids and shared variables describe a great deal in few bytes. A digest is no signature, so a
stranger's few bytes could ask for any amount.
"""

from __future__ import annotations

from collections.abc import Callable

FREE_BYTES = 32 << 20
"""What any checkpoint may ask for, however small it is."""
BYTES_FOR_EACH = 8
"""What it may ask for, beyond that, for each byte that it really holds."""


class Allowance:
    """The memory that is left for what a checkpoint describes.

    `held_bytes` is how much its files hold, or tells it, which is asked only if there is need.
    """

    def __init__(self, held_bytes: int | Callable[[], int]):
        self._taken = 0
        self._limit = FREE_BYTES
        self._held: int | Callable[[], int] | None = held_bytes

    def take(self, nbytes: int) -> None:
        """Count memory that is about to be taken. Raises ValueError if there is less left."""
        self._taken += nbytes
        if self._taken > self._limit and self._held is not None:
            held = self._held if isinstance(self._held, int) else self._held()
            self._limit += BYTES_FOR_EACH * held
            self._held = None
        if self._taken > self._limit:
            raise ValueError(
                "it describes lists that are longer than any checkpoint needs whose files hold as "
                "little as these"
            )
