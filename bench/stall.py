"""What saving in the background costs the training loop: a stall, slower steps, time in all."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bench.cases import WARM_UP
from bench.contenders import BEST_LARGE, BEST_MANY, Orbax, Ostraka, Setting
from bench.data import few_large, many_small
from bench.machine import remove
from bench.rounds import Options, Row, interleave, timed
from bench.state import Tree, make_tree, row_sharding, template

Finish = Callable[[], object]
Begin = Callable[[Path, Tree], Finish]

STEP_SIZE = 640
QUIET_S = 1.0
"""How long the steps are timed without a save, before each turn."""


@dataclass(frozen=True, slots=True)
class Background:
    """One way of saving in the background: `begin` returns what waits for the end."""

    name: str
    begin: Begin
    blocking: Ostraka | Orbax
    """The same contender, to read and compare what it has written."""


def async_stall(options: Options) -> list[Row]:
    """The stall with few large leaves, the steps beside their save, and the time lost to it."""
    size = few_large(options.scale)
    amount = f"{size.state_bytes / 2**30:.3g} GiB in {size.leaves} leaves"
    stall = Row("stall_large", f"until save_async of {amount} returns", size.state_bytes)
    title = f"a training step beside a save of {amount}, over one without"
    steps = Row("steps", title, size.state_bytes, unit="ratio")
    lost = Row("lost", f"training time lost to a save of {amount}", size.state_bytes)
    contenders, tree = _ready(BEST_LARGE, options.scratch), make_tree(size)
    _measure_stalls(stall, contenders, tree, options.scratch, options.rounds)
    _measure_steps(steps, lost, contenders, tree, options.scratch, options.rounds)
    return [stall, steps, lost]


def async_stall_many(options: Options) -> list[Row]:
    """The stall with many small leaves."""
    size = many_small(options.scale)
    title = f"until save_async of {size.leaves:,} leaves returns"
    row = Row("stall_many", title, size.state_bytes)
    contenders = _ready(BEST_MANY, options.scratch)
    _measure_stalls(row, contenders, make_tree(size), options.scratch, options.few_rounds)
    return [row]


def _ready(best: Setting, scratch: Path) -> list[Background]:
    """The contenders, with their imports and first calls behind them."""
    contenders = [
        Background("ostraka", _begin_ostraka, Ostraka()),
        Background("orbax", _bind_standard(), Orbax("orbax", Setting(api="standard"))),
        Background("orbax_best", _bind_v1(best), Orbax("orbax_best", best)),
    ]
    small, path = make_tree(WARM_UP), scratch / "warm_up"
    for contender in contenders:
        contender.begin(path, small)()
        _check(contender, path, small)
        remove(path)
    return contenders


def _begin_ostraka(path: Path, tree: Tree) -> Finish:
    import ostraka

    return ostraka.save_async(path, tree).wait


def _bind_standard() -> Begin:
    """As Orbax's documentation writes it."""
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()

    def begin(path: Path, tree: Tree) -> Finish:
        checkpointer.save(path, tree)
        return checkpointer.wait_until_finished

    return begin


def _bind_v1(setting: Setting) -> Begin:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_ocdbt = setting.use_ocdbt
    context.array.saving.use_zarr3 = setting.use_zarr3
    context.array.saving.use_compression = setting.use_compression

    def begin(path: Path, tree: Tree) -> Finish:
        with context:
            return ocp.save_async(str(path), tree).result

    return begin


def _check(contender: Background, path: Path, tree: Tree) -> None:
    restored = contender.blocking.restore(path, template(tree))
    contender.blocking.check(restored, tree)


def _measure_stalls(
    row: Row, contenders: Sequence[Background], tree: Tree, scratch: Path, rounds: int
) -> None:
    checked: set[str] = set()

    def turn(contender: Background) -> float:
        path = scratch / contender.name
        remove(path)
        try:
            elapsed_s, finish = timed(lambda: contender.begin(path, tree))
            finish()
            if contender.name not in checked:
                _check(contender, path, tree)
                checked.add(contender.name)
        finally:
            remove(path)
        return elapsed_s

    interleave(row, contenders, rounds, turn)


class Training:
    """A fixed step: a few products of matrices on all devices."""

    def __init__(self) -> None:
        sharding = row_sharding()
        shape = (len(sharding.device_set), STEP_SIZE, STEP_SIZE)
        noise = np.random.default_rng(0).standard_normal(shape, np.float32)
        self._batch = jax.device_put(noise, NamedSharding(sharding.mesh, PartitionSpec("x")))
        self._weights = jax.device_put(
            noise[0] / STEP_SIZE, NamedSharding(sharding.mesh, PartitionSpec())
        )
        self._step = jax.jit(lambda batch, weights: jax.numpy.tanh(batch @ weights @ weights))
        self.run(lambda steps: len(steps) >= 5)

    def run(self, is_over: Callable[[list[float]], bool]) -> list[float]:
        """The seconds of each step, of those that it takes until `is_over`."""
        steps: list[float] = []
        while not is_over(steps):
            start = time.perf_counter()
            jax.block_until_ready(self._step(self._batch, self._weights))
            steps.append(time.perf_counter() - start)
        return steps


def _measure_steps(
    row: Row, lost: Row, contenders: Sequence[Background], tree: Tree, scratch: Path, rounds: int
) -> None:
    """Train from the call of each save to its end, and fill both rows.

    The time lost is what this takes longer than the same steps without a save.
    """
    training = Training()
    took_s: dict[str, list[float]] = {}

    def turn(contender: Background) -> float:
        path = scratch / contender.name
        remove(path)
        _, alone = timed(lambda: training.run(lambda steps: sum(steps) >= QUIET_S))
        usual = statistics.median(alone)
        try:
            start = time.perf_counter()
            saving = threading.Thread(target=contender.begin(path, tree))
            saving.start()
            beside = training.run(lambda steps: bool(steps) and not saving.is_alive())
            took = time.perf_counter() - start
            saving.join()
        finally:
            remove(path)
        took_s.setdefault(contender.name, []).append(took)
        lost.values.setdefault(contender.name, []).append(took - len(beside) * usual)
        return statistics.median(beside) / usual

    interleave(row, contenders, rounds, turn)
    for name, seconds in took_s.items():
        lost.note(
            f"lost: beside training, {name}'s save takes {statistics.median(seconds):.2f} s from "
            "its call to its end"
        )
