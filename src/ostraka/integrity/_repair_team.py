"""Who repairs together, and what each of them holds: as a repair sees it, without JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ostraka._format import Entry, FileDigests, FileEntry
from ostraka.integrity._origins import Origin, Shard


class Team(Protocol):
    """The processes that repair together, as one of them sees it."""

    process: int
    count: int

    def exchange(
        self,
        stage: str,
        payload: Any,
        decide: Callable[[list[Any]], Any],
        *,
        is_last: bool = False,
    ) -> Any: ...

    def check(self) -> None: ...


class Live(Origin, Protocol):
    """The live tree, as far as this process holds it."""

    def covered_bytes(self, shard: Shard, numbers: Sequence[int]) -> int: ...

    def digest_file(
        self, file: FileEntry, contents: Sequence[Entry], *, with_e_tag: bool
    ) -> FileDigests | None: ...


class Alone:
    """The only process."""

    process = 0
    count = 1

    def exchange(
        self,
        stage: str,
        payload: Any,
        decide: Callable[[list[Any]], Any],
        *,
        is_last: bool = False,
    ) -> Any:
        return decide([payload])

    def check(self) -> None:
        pass
