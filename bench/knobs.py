"""Which setting of Orbax is fastest here: `python -m bench.knobs [large|many] [ROUNDS] [SCALE]`.

The settings named `BEST_…` in `contenders.py` come from this. Every setting keeps what Orbax
promises of its own accord (its files are written with fsync); only compression, layout and the
files beside the data vary.
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

from bench import data
from bench.contenders import AS_IT_COMES, Orbax, Setting, hush
from bench.machine import remove
from bench.rounds import Row, interleave, timed
from bench.state import make_tree, template

SCRATCH = Path(os.environ.get("OSTRAKA_BENCH_SCRATCH", "bench/scratch")) / f"knobs-{os.getpid()}"


def main() -> None:
    """Print the median seconds of a save and a restore, for each setting."""
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    hush()
    kind, rounds, scale = (*sys.argv[1:], *("large", "5", "1")[len(sys.argv) - 1 :])
    make_size = {"large": data.few_large, "many": data.many_small}[kind]
    saves, restores = measure(make_size(float(scale)), int(rounds))
    print(f"{'save s':>14} {'restore s':>14}  setting (median, least)")
    for name in sorted(saves.values, key=lambda n: statistics.median(saves.values[n])):
        print(f"{_words(saves.values[name])} {_words(restores.values[name])}  {name}")


def measure(size: data.Size, rounds: int) -> tuple[Row, Row]:
    """Save and restore with every setting, in turns."""
    saves = Row("save", "save", size.state_bytes)
    restores = Row("restore", "restore", size.state_bytes)
    tree = make_tree(size)
    like, path = template(tree), SCRATCH.resolve()

    def turn(orbax: Orbax) -> float:
        remove(path)
        save_s, _ = timed(lambda: orbax.save(path, tree))
        restore_s, restored = timed(lambda: orbax.restore(path, like))
        orbax.check(restored, tree)
        remove(path)
        restores.values.setdefault(orbax.name, []).append(restore_s)
        return save_s

    contenders = [Orbax(setting.words, setting) for setting in _settings()]
    interleave(Row("warm_up", "", 0), contenders, 1, turn)
    restores.values.clear()
    interleave(saves, contenders, rounds, turn)
    return saves, restores


def _settings() -> list[Setting]:
    uncompressed = [
        Setting(api, use_ocdbt, use_zarr3, use_compression=False)
        for api, use_ocdbt, use_zarr3 in product(("pytree", "v1"), (True, False), (True, False))
    ]
    bare = [replace(s, bare_metadata=True) for s in uncompressed if s.api == "pytree"]
    files = [replace(s, data_file_mib=32) for s in uncompressed if s.use_ocdbt and s.use_zarr3]
    return [AS_IT_COMES, Setting(api="v1", use_zarr3=True), *uncompressed, *bare, *files]


def _words(values: list[float]) -> str:
    return f"{statistics.median(values):6.2f} {min(values):6.2f} "


if __name__ == "__main__":
    main()
