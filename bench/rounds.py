"""What a case is given, what it gives back, and how its contenders take turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bench.machine import settle


class Named(Protocol):
    """Anything that has a column in the table."""

    @property
    def name(self) -> str:
        """The column."""
        ...


C = TypeVar("C", bound=Named)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """How large, how often, where, and with which Python the PyTorch ranks run (if any)."""

    scale: float
    rounds: int
    scratch: Path
    torch_python: str | None

    @property
    def few_rounds(self) -> int:
        """Rounds of the cases in which Orbax takes most of a minute a round."""
        return max(1, round(self.rounds * 0.6))


@dataclass(slots=True)
class Row:
    """One line of the table: the raw values of every contender that could be measured.

    `unit` is "s" for times, "bytes" for memory.
    """

    id: str
    title: str
    state_bytes: int
    unit: str = "s"
    values: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a remark for the report, and say it now."""
        self.notes.append(text)
        say(text)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def say(text: str) -> None:
    """Tell the person who watches."""
    print(f"    {text}", file=sys.stderr, flush=True)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds that `work` took after the machine came to rest, and what it returned."""
    settle()
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def interleave(row: Row, contenders: Sequence[C], rounds: int, turn: Callable[[C], float]) -> None:
    """Give every contender one turn a round; one that fails is left out from then on, aloud."""
    alive = list(contenders)
    for _ in range(rounds):
        for contender in list(alive):
            try:
                value = turn(contender)
            except Exception as error:
                alive.remove(contender)
                row.values.pop(contender.name, None)
                row.note(f"{row.id}: {contender.name} failed: {type(error).__name__}: {error}")
            else:
                row.values.setdefault(contender.name, []).append(value)
