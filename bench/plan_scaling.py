"""How the cost of a plan grows with devices and with leaves; the largest plan as a command.

    python -m bench.plan_scaling

Times are those of the processor, not of the clock: other programs don't count. Each is the least of
a few rounds. Writes `bench/results/plan_scaling.json` and `.png`.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from ostraka.families.catalog import MODELS
from ostraka.planner._save_plan import Plan, plan_state
from ostraka.planner.report import describe_plan
from ostraka.planner.state import PlanOptions, mesh_of_sizes, state_of_config
from ostraka.planner.time import Bandwidths

RESULTS = Path(__file__).parent / "results"
ROUNDS = 3
DEVICES = (512, 1024, 2048, 4096, 8192, 16384)
LAYERS = (16, 32, 63, 126, 252)
COMMAND = "plan llama-3.1-405b --mesh data=2048,model=8 --hosts 2048 --optimizer adamw --json"
BARS = {"seconds beyond start-up": 2.0, "peak MB": 500.0, "metadata MiB": 4.0}


def make_plan(devices: int, layers: int) -> Plan:
    mesh = mesh_of_sizes({"data": devices // 8, "model": 8})
    config = {**MODELS["llama-3.1-405b"], "num_hidden_layers": layers}
    options = PlanOptions(mesh, devices // 8, "fsdp+tp", optimizer="adamw", dtype="bfloat16")
    return plan_state(state_of_config(config, options), options)


def least_cpu_s(work: Callable[[], Any]) -> float:
    times: list[float] = []
    for _ in range(ROUNDS):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def measure(devices: int, layers: int) -> dict[str, Any]:
    planned = make_plan(devices, layers)
    return {
        "devices": devices,
        "leaves": planned.arrays,
        "plan_s": least_cpu_s(lambda: make_plan(devices, layers)),
        "report_s": least_cpu_s(lambda: describe_plan(planned, Bandwidths())),
        "metadata_bytes": planned.metadata_bytes,
        "skew": planned.process_spread.skew,
    }


def measure_command() -> dict[str, float]:
    """The whole command in a process of its own, less what starting it costs."""
    start = "import ostraka.cli, ostraka.sharding, ostraka.planner.sources"
    commands = {
        "start": [sys.executable, "-c", start],
        "whole": [sys.executable, "-c", "from ostraka.cli import main; main()", *COMMAND.split()],
    }
    used = {name: min(child_cpu_s(argv) for _ in range(ROUNDS)) for name, argv in commands.items()}
    done = subprocess.run(commands["whole"], check=True, capture_output=True, text=True)
    metadata = json.loads(done.stdout)["variants"][0]["metadata_bytes"]
    return {
        "start-up s": used["start"],
        "seconds beyond start-up": used["whole"] - used["start"],
        "peak MB": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6,
        "metadata MiB": metadata / 2**20,
    }


def child_cpu_s(argv: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def draw(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, key in zip(axes, ("devices", "leaves"), strict=True):
        rows = results[f"by_{key}"]
        counts = [row[key] for row in rows]
        times = [row["plan_s"] + row["report_s"] for row in rows]
        axis.loglog(counts, times, "o-", label="plan and report")
        axis.loglog(counts, [row["plan_s"] for row in rows], "s--", label="plan alone")
        linear = [times[-1] * count / counts[-1] for count in counts]
        axis.loglog(counts, linear, ":", color="grey", label="linear")
        axis.set(xlabel=key, ylabel="processor time, s")
        axis.legend()
    figure.suptitle("llama-3.1-405b with AdamW: by devices, and by leaves on 1,024 devices")
    figure.tight_layout()
    figure.savefig(RESULTS / "plan_scaling.png", dpi=110)


def main() -> None:
    results: dict[str, Any] = {
        "command": measure_command(),
        "bars": BARS,
        "by_devices": [measure(devices, 126) for devices in DEVICES],
        "by_leaves": [measure(1024, layers) for layers in LAYERS],
    }
    (RESULTS / "plan_scaling.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results)
    for name, bar in BARS.items():
        found = results["command"][name]
        print(f"{name}: {found:.2f} (bar {bar:g}, {'met' if found <= bar else 'not met'})")
    for key in ("devices", "leaves"):
        for row in results[f"by_{key}"]:
            print(f"{row[key]:>7,} {key}: {row['plan_s']:.2f} s + {row['report_s']:.2f} s")


if __name__ == "__main__":
    main()
