"""How often to save: the formula against a simulation."""

import math
import random

import pytest

from ostraka.common.record import best_interval_s


def lost_part(interval_s: float, cost_s: float, mtbf_s: float, seed: int) -> float:
    """Of a long simulated run: the part of the time that went into saving and repeating."""
    rng = random.Random(seed)
    clock = done = 0.0
    failure = rng.expovariate(1 / mtbf_s)
    for _ in range(20_000):
        end = clock + interval_s + cost_s
        if end <= failure:
            clock, done = end, done + interval_s
        else:
            clock = failure
            failure = clock + rng.expovariate(1 / mtbf_s)
    return 1 - done / clock


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(1, 1_000), (10, 1_000), (60, 600)], ids=str)
def test_no_other_interval_loses_less(cost_s: float, mtbf_s: float):
    best = best_interval_s(cost_s, mtbf_s)
    lost = {factor: lost_part(best * factor, cost_s, mtbf_s, 1) for factor in (0.4, 1, 2.5)}
    assert min(lost, key=lambda factor: lost[factor]) == 1


def test_the_interval():
    assert best_interval_s(1e-6, 1e6) == pytest.approx(math.sqrt(2.0), rel=1e-3)  # Young's
    assert best_interval_s(100.0, 10.0) == 10.0
    assert best_interval_s(0.0, 100.0) == 0.0
