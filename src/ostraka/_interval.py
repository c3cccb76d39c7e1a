"""How often to save, by Daly's formula. Pure."""

from __future__ import annotations

import math


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The time to work between two saves (Daly 2006, which refines Young 1974).

    It loses the least time to saving and to repeating lost work, for failures that come at random
    with the mean time `mtbf_s` between them. `cost_s` is what one save costs the loop.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s
