"""The memory of this process: what it has now, and the most that it had meanwhile."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def resident_bytes(name: str = "VmRSS") -> int:
    """`VmRSS`: now. `VmHWM`: the most since it was reset; `ru_maxrss` begins with the parent's."""
    found = re.search(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that is in memory meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return resident_bytes("VmHWM")


def extra_bytes(run: Callable[[], Any]) -> int:
    """The most that is in memory meanwhile, beyond what was before."""
    before = resident_bytes()
    return peak_bytes(run) - before
