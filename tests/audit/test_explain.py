"""Which part of a state a difference is blamed on, told by fingerprints of a few steps."""

import re
from typing import Any

import numpy as np
import pytest

from ostraka.audit.explain import find_divergence
from ostraka.audit.journal import Line, make_line
from ostraka.audit.marks import Mark
from ostraka.live.fingerprint import numbers_of, value_of

RNG = np.random.default_rng(0)
LAYERS = ("key", "out", "up", "down")
State = dict[str, Any]


def line_of(step: int, state: State) -> Line:
    def mark(value: Any) -> Mark:
        array = np.asarray(value)
        bits = array.tobytes().hex()[:200]
        return Mark(array.dtype.name, array.shape, bits, numbers_of(array), value_of(array))

    return make_line(step, "one", {path: mark(value) for path, value in state.items()}, {})


def values(scale: float = 1.0) -> Any:
    return (RNG.standard_normal((16, 16)) * scale).astype(np.float32)


def begin() -> State:
    state: State = {f"state/params/{name}/kernel": values() for name in LAYERS}
    state |= {f"state/opt_state/trace/{name}/kernel": values(0.1) for name in LAYERS}
    state |= {"state/target_params/out": values(), "env/obs": values()}
    return {**state, "env/timestep": np.full(4, 100), "key": np.array([1, 2], np.uint32)}


def advance(state: State, gradient: float = 0.1, seed: int = 1) -> State:
    """A step of gradient descent with momentum."""
    rng, new = np.random.default_rng(seed), dict(state)
    for name in LAYERS:
        params, trace = f"state/params/{name}/kernel", f"state/opt_state/trace/{name}/kernel"
        found = (rng.standard_normal((16, 16)) * gradient).astype(np.float32)
        new[trace] = np.float32(0.9) * state[trace] + found
        new[params] = state[params] - np.float32(0.1) * new[trace]
    new["env/obs"] = state["env/obs"] + rng.standard_normal((16, 16)).astype(np.float32) * 0.1
    return new | {"env/timestep": state["env/timestep"] + 1}


def without(state: State, part: str) -> State:
    return {path: np.zeros_like(one) if part in path else one for path, one in state.items()}


RESUMED = begin()
CASES: dict[str, tuple[State, str]] = {
    "momentum": (advance(without(RESUMED, "trace")), "moments were not restored.*lack their old"),
    "target": (
        advance(RESUMED | {"state/target_params/out": values()}),
        "average was not restored",
    ),
    "environment": (
        advance(RESUMED | {"env/obs": values(9)}),
        "'env/obs' were not restored: they are much farther from step 6",
    ),
    "timestep": (
        advance(RESUMED | {"env/timestep": np.zeros(4, int)}),
        "started over: 'env/timestep' is 1 and was 101",
    ),
    "words of a key": (
        advance(RESUMED | {"key": np.array([3, 4], np.uint32)}),
        "only 'key' differs: the RNG",
    ),
    "another batch": (
        advance(RESUMED, seed=2),
        "differ, and went as far as in the first run: a random value or a batch",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_part_is_named(name: str):
    now, expected = CASES[name]
    then, base = line_of(7, advance(RESUMED)), line_of(6, RESUMED)
    found = find_divergence(then, line_of(7, now), history=None, rtol=None, base=base)
    assert found is not None
    assert re.search(expected, found.cause), found.cause


def test_noise_is_measured_by_its_slot():
    """A bias before a batch norm has no gradient but the rounding errors of others."""
    noisy = {"opt_state/mu/kernel": values(), "opt_state/mu/bias": values(1e-7)}
    other = noisy | {"opt_state/mu/bias": values(1e-7)}
    then, now = line_of(7, noisy), line_of(7, other)
    assert find_divergence(then, now, history=None, rtol=1e-3) is None
    broken = line_of(7, noisy | {"opt_state/mu/bias": values(1e-2)})
    assert find_divergence(then, broken, history=None, rtol=1e-3) is not None
