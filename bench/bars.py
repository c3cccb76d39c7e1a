"""The bars that Ostraka has set itself, and whether a run met them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from bench.rounds import Row

NAMES = {
    "ostraka": "Ostraka",
    "plain": "Ostraka, plain dicts",
    "orbax": "Orbax",
    "orbax_best": "Orbax, best setting",
    "dcp": "PyTorch DCP",
    "dcp_best": "PyTorch DCP, tuned",
    "bare": "bare read/write",
    "in_turn": "bare read, one thread",
}
MEMORY_SHARE = 0.05
MEMORY_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio to reach against one contender in one row.

    `faster` bars want the other's time over ours to be at least `factor`; the others want our
    time over the other's to be at most `factor`.
    """

    row: str
    against: str
    factor: float
    faster: bool = True

    @property
    def words(self) -> str:
        """The bar as the table shows it."""
        if self.faster:
            return f"≥ {self.factor:g}× as fast as {NAMES[self.against]}"
        return f"≤ {self.factor:g}× the time of {NAMES[self.against]}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a bar; `met` is None where it could not be measured."""

    row: str
    bar: str
    ratio: str
    met: bool | None


BARS = (
    Bar("save_large", "orbax", 3.0),
    Bar("save_large", "orbax_best", 1.0),
    Bar("save_large", "bare", 1.15, faster=False),
    Bar("save_many", "orbax", 20.0),
    Bar("restore_warm", "orbax", 3.0),
    Bar("restore_warm", "orbax_best", 1.5),
    Bar("restore_warm", "bare", 1.2, faster=False),
    Bar("restore_cold", "orbax", 1.8),
    Bar("restore_many", "orbax", 25.0),
    Bar("restore_grid", "orbax", 2.0),
    Bar("restore_transposed", "orbax", 2.0),
    Bar("nnx_many", "plain", 1.3, faster=False),
    Bar("processes_save", "orbax", 1.0),
    Bar("processes_save", "dcp", 1.0),
    Bar("processes_save", "dcp_best", 1.0),
    Bar("processes_restore", "orbax", 1.0),
    Bar("processes_restore", "dcp", 1.0),
    Bar("processes_restore", "dcp_best", 1.0),
    Bar("stall_large", "orbax", 1.0, faster=False),
    Bar("stall_large", "orbax_best", 1.0, faster=False),
    Bar("lost", "orbax_best", 0.5, faster=False),
    Bar("stall_many", "orbax", 1.0, faster=False),
    Bar("stall_many", "orbax_best", 1.0, faster=False),
    Bar("verify_warm", "in_turn", 1.2, faster=False),
    Bar("verify_cold", "in_turn", 1.2, faster=False),
)
SHOW_S = 0.6


def judge(rows: list[Row]) -> list[Verdict]:
    """A verdict for each bar whose row was run."""
    verdicts: list[Verdict] = []
    for row in rows:
        if row.id == "memory":
            verdicts.append(_judge_memory(row))
        if row.id == "show":
            verdicts.append(_judge_show(row))
        verdicts += [_judge_ratio(bar, row) for bar in BARS if bar.row == row.id]
    return verdicts


def median(row: Row, name: str) -> float | None:
    """The middle of a contender's values, if it has any."""
    values = row.values.get(name)
    return statistics.median(values) if values else None


def _judge_ratio(bar: Bar, row: Row) -> Verdict:
    ours, other = median(row, "ostraka"), median(row, bar.against)
    if not ours or not other:
        return Verdict(row.id, bar.words, "not measured", None)
    ratio = other / ours if bar.faster else ours / other
    met = ratio >= bar.factor if bar.faster else ratio <= bar.factor
    return Verdict(row.id, bar.words, f"{ratio:.2f}×", met)


def _judge_show(row: Row) -> Verdict:
    ours = median(row, "ostraka")
    bar = f"≤ {SHOW_S:g} s in all"
    if ours is None:
        return Verdict(row.id, bar, "not measured", None)
    return Verdict(row.id, bar, f"{ours:.2f} s", ours <= SHOW_S)


def _judge_memory(row: Row) -> Verdict:
    ours = median(row, "ostraka")
    limit = MEMORY_SHARE * row.state_bytes + MEMORY_BYTES
    bar = f"≤ {limit / 2**20:.0f} MiB (5 % of the state + 256 MiB)"
    if ours is None:
        return Verdict(row.id, bar, "not measured", None)
    return Verdict(row.id, bar, f"{ours / 2**20:.0f} MiB", ours <= limit)
