"""Write what tests/data/orbax-VERSION holds: steps of an old Orbax, which the tests read.

    python -m venv v && v/bin/pip install orbax-checkpoint==0.6.4 jax==0.4.34 jaxlib==0.4.34
    v/bin/python tests/support/record_orbax.py tests/data

`contents` is what is in them, for the tests, too.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np


def contents() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "state": {
            "params": {
                "kernel": rng.normal(size=(4, 6)).astype(np.float32),
                "layers": [rng.normal(size=3).astype(ml_dtypes.bfloat16), np.arange(5)],
            },
            "step": 7,
        },
        "averages": {
            "mean": rng.normal(size=(2, 3)).astype(np.float16),
            "count": np.array([3], np.int32),
        },
        "table": np.arange(24, dtype=np.float32).reshape(4, 6),
        "counts": np.arange(5),
        "about": {"name": "a run", "rates": [0.5, 1]},
    }


def main() -> None:
    import jax
    import orbax.checkpoint as ocp

    root = (Path(sys.argv[1]) / f"orbax-{ocp.__version__}").resolve()
    shutil.rmtree(root, ignore_errors=True)
    wanted: dict[str, Any] = contents()
    state = jax.tree.map(
        lambda x: jax.numpy.asarray(x) if isinstance(x, np.ndarray) and x.ndim > 1 else x,
        wanted["state"],
    )
    with ocp.CheckpointManager(root, item_names=tuple(wanted)) as manager:
        manager.save(
            7,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                averages=ocp.args.PyTreeSave(wanted["averages"]),
                table=ocp.args.ArraySave(jax.numpy.asarray(wanted["table"])),
                counts=ocp.args.ArraySave(wanted["counts"]),
                about=ocp.args.JsonSave(wanted["about"]),
            ),
        )
        manager.wait_until_finished()


if __name__ == "__main__":
    main()
